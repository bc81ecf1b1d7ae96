//! What an engine holds of a CUDA device, as its driver reports it: asleep, awake, and where a neighbour has taken the
//! memory meanwhile.

use rollout_kernels::{Backend, Device, DeviceOptions};
use rollout_server::engine::{DrainMode, LifecycleStatus, SleepLevel};
use rollout_server::error::Error;
use rollout_server::types::{SamplingParams, TokenId};

use crate::common::{Engine, Push, Request, random_prompts, random_weights};
use crate::emulator::{emulated, neighbour};
use crate::large;
use crate::own_driver;
use crate::require::require;

const FLAGS: [&str; 6] = ["--device", "cuda", "--dtype", "bfloat16", "--kv-cache-bytes", "32MiB"];
const SEED: u64 = 7;

/// Why a test is left out on a card.
const TAKEN: &str = "a neighbour takes the memory";

/// The device without an engine: its context stays open, and nothing else of it is held.
fn device() -> Device {
    let backend = Backend::ALL.iter().find(|backend| backend.name() == "cuda").expect("it is built with it");
    backend.open(&DeviceOptions::default()).expect("there is a device")
}

fn free(device: &Device) -> u64 {
    device.free_bytes().expect("the driver answers")
}

fn start(model: &str) -> Engine {
    Engine::start(model, &FLAGS)
}

fn samples(engine: &Engine) -> Vec<Vec<(TokenId, u32, u32)>> {
    engine.reset_prefix_cache();
    let params = SamplingParams { max_tokens: 3, ..Default::default() };
    let reply = engine.generate(Request::generate(random_prompts(5, 2, 3..20, 250), 1, SEED, 0).params(params));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

/// A neighbour who leaves at the end of a test, however it ends.
struct Neighbour;

impl Neighbour {
    /// Leaves `bytes` of what is free.
    fn leaves(device: &Device, bytes: u64) -> Self {
        neighbour(free(device).saturating_sub(bytes));
        assert_eq!(free(device), bytes);
        Self
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        neighbour(0);
    }
}

#[test]
fn asleep_at_either_level_the_device_has_everything_back_but_the_context() {
    let (_own, device) = (own_driver(), device());
    let bare = free(&device);
    let engine = start("qwen2");
    assert!(free(&device) + (32 << 20) < bare, "an engine that is awake holds its cache");
    let weights = random_weights(engine.parameters(), 31);
    let pushes = [("the checkpoint", None), ("an adapter", Some(Push::lora("peft/bfloat16")))];
    let pushes = pushes.into_iter().chain([
        ("pushed weights", Some(Push::full(&weights))),
        ("an adapter on pushed weights", Some(Push::lora("peft/bfloat16"))),
    ]);
    for (what, push) in pushes {
        if let Some(push) = push {
            engine.push(push).expect("pushed");
        }
        let (sums, expected) = (engine.checksums(), samples(&engine));
        let awake = free(&device);
        for _ in 0..2 {
            engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
            assert_eq!(free(&device), bare, "{what}, at level 1");
            assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running, "{what}");
            assert!(engine.checksums() == sums, "{what}, after level 1");
            assert_eq!(samples(&engine), expected, "{what}, after level 1");
        }
        assert!(free(&device) >= awake, "{what}: sleeping costs {} bytes", awake - free(&device));
    }
    // A push between the wake of the weights and that of the cache.
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    engine.wake(true, false).expect("wakes");
    engine.push(Push::lora("peft/rslora_patterns")).expect("pushed");
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    assert_eq!(free(&device), bare, "after a push while the cache slept");
    engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
    assert_eq!(free(&device), bare, "at level 2");
    assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
    let sums = engine.push(Push::full(&weights)).map(|_| engine.checksums()).expect("pushed");
    let fresh = start("qwen2");
    fresh.push(Push::full(&weights)).expect("pushed");
    assert!(fresh.checksums() == sums, "after level 2");
    drop((engine, fresh));
    assert_eq!(free(&device), bare, "after the end");
}

#[test]
fn a_wake_without_memory_is_refused_and_succeeds_when_the_neighbour_has_gone() {
    require!(emulated(TAKEN));
    let (_own, device) = (own_driver(), device());
    let engine = start("qwen2");
    let weights = random_weights(engine.parameters(), 32);
    engine.push(Push::full(&weights)).expect("pushed");
    engine.push(Push::lora("peft/bfloat16")).expect("pushed");
    let (sums, expected) = (engine.checksums(), samples(&engine));
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    let bare = free(&device);
    // Nothing, a part of the weights, the weights without the cache, the cache in part.
    for left in [0, 4 << 20, 16 << 20, 40 << 20] {
        let neighbour = Neighbour::leaves(&device, left);
        let error = engine.wake(true, true).expect_err("there is no memory");
        assert!(matches!(error, Error::ResourceExhausted(_)), "{left}: {error}");
        assert_eq!(free(&device), left, "a wake that was refused holds nothing");
        drop(neighbour);
        assert_eq!(free(&device), bare);
    }
    assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
    assert!(engine.checksums() == sums, "after the wake");
    assert_eq!(samples(&engine), expected, "after the wake");
}

#[test]
fn a_push_without_memory_is_refused_and_the_old_policy_serves_on() {
    require!(emulated(TAKEN));
    let (_own, device) = (own_driver(), device());
    // Pages that are mapped already would do for the weights of a small model: two of them, at the ends of what serves,
    // have up to 16 MiB to spare, and this embedding has 20 MiB.
    let checkpoint = large::checkpoint(81_920);
    let engine = Engine::try_start_at(checkpoint.path(), &FLAGS).expect("it starts");
    let [weights, others] = [33, 34].map(|seed| random_weights(engine.parameters(), seed));
    engine.push(Push::full(&weights)).expect("pushed");
    let (sums, expected) = (engine.checksums(), samples(&engine));
    // The storage of the weights that were replaced would serve the next push.
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    engine.wake(true, true).expect("wakes");
    assert_eq!(samples(&engine), expected);
    let neighbour = Neighbour::leaves(&device, 0);
    for _ in 0..3 {
        let refused = engine.push(Push::full(&others)).expect_err("there is no memory");
        assert!(matches!(refused, Error::ResourceExhausted(_)), "{refused}");
        assert!(engine.checksums() == sums, "after the refusal");
        assert_eq!(samples(&engine), expected, "after the refusal");
    }
    drop(neighbour);
    engine.push(Push::full(&others)).expect("pushed");
    assert!(engine.checksums() != sums);
    engine.push(Push::full(&weights)).expect("pushed");
    assert!(engine.checksums() == sums);
    assert_eq!(samples(&engine), expected);
}

#[test]
fn a_start_without_memory_ends_with_a_message() {
    require!(emulated(TAKEN));
    let (_own, device) = (own_driver(), device());
    let bare = free(&device);
    for left in [0, 9 << 20, 30 << 20] {
        let _neighbour = Neighbour::leaves(&device, left);
        let error = Engine::try_start("qwen2", &FLAGS).err().expect("there is no memory");
        assert!(matches!(error, Error::ResourceExhausted(_)), "{left}: {error}");
    }
    assert_eq!(free(&device), bare);
}
