//! The ceilings of a CUDA device and of the host beside it: what the emulated driver counts never passes `--mem-util`,
//! context included, whatever an engine does and whoever else uses the device; and `--host-memory` bounds what sleeps.

use std::process::{Child, Command as Process, Stdio};

use clap::Parser;
use rollout_kernels::{Backend, DeviceOptions};
use rollout_server::config::Config;
use rollout_server::engine::{AdapterTarget, DrainMode, EngineStatus, LifecycleStatus, SleepLevel};
use rollout_server::error::{Error, Result};
use rollout_server::memory::{MemoryReport, MemoryUse};
use rollout_server::observe::Observer;
use rollout_server::startup;
use rollout_server::weights::Dtype;

use crate::common::{Engine, Push, Request, random_prompts, random_weights};
use crate::emulator::{self, emulated};
use crate::large;
use crate::require::require;

/// What a child does.
const CHILD: &str = "CUDA_CEILING_CHILD";
const MIB: u64 = 1 << 20;
/// So small that the cache takes what is left.
const DEVICE: [(&str, &str); 2] = [("CUEMU_MEMORY_MIB", "1024"), ("CUEMU_CONTEXT_MIB", "70")];
const CONTEXT_BYTES: u64 = 70 * MIB;
/// Why a test is left out on a card.
const COUNTED: &str = "the device is small, and what a process holds is counted";

#[expect(clippy::disallowed_methods, reason = "a child gets its task")]
fn task() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// The test `name` as a child with a task.
fn child(name: &str, task: &str, settings: &[(&str, &str)]) -> Process {
    let mut child = crate::child(&format!("ceiling::{name}"));
    child.env(CHILD, task).envs(DEVICE).envs(settings.iter().copied());
    child
}

fn run(name: &str, task: &str, settings: &[(&str, &str)]) -> String {
    let ended = child(name, task, settings).output().unwrap();
    let [said, log] = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let passed = ended.status.success() && said.contains("test result: ok. 1 passed");
    assert!(passed, "{task} under {settings:?}:\n{said}\n{log}");
    said + &log
}

/// Starts an engine with the default size of its cache: all that is left.
fn start(flags: &[&str]) -> Result<Engine> {
    // Its embedding takes 10 MiB: more than a page.
    let checkpoint = large::checkpoint(40_960);
    let base = ["rollout-server", "--device", "cuda", "--dtype", "bfloat16", "--threads", "2", "--mem-util", "0.5"];
    let model = ["--model", checkpoint.path().to_str().unwrap()];
    let config = Config::try_parse_from(base.iter().chain(&model).chain(flags)).unwrap();
    let (observer, recorder) = Observer::new();
    Ok(Engine { started: Some(startup::start(&config, observer, recorder)?) })
}

fn entry(report: &MemoryReport, used_for: MemoryUse) -> u64 {
    report.entries.iter().find(|entry| entry.0 == used_for).map_or(0, |entry| entry.1)
}

fn host(status: &EngineStatus) -> &MemoryReport {
    status.host_memory.as_ref().expect("the device has memory of its own")
}

/// What an engine holds at most, beside what it may.
struct Watch {
    ceiling: u64,
}

impl Watch {
    fn check(&self, what: &str) {
        let peak = emulator::peak(0);
        println!("{what}: {} of {} MiB", peak / MIB, self.ceiling / MIB);
        assert!(peak <= self.ceiling, "{what}: {peak} of {}", self.ceiling);
        assert!(peak >= CONTEXT_BYTES, "{what}: {peak}");
    }
}

fn samples(engine: &Engine) -> Vec<Vec<(u32, u32, u32)>> {
    engine.reset_prefix_cache();
    let reply = engine.generate(Request::generate(random_prompts(5, 2, 3..20, 250), 1, 7, 2));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

/// Everything that takes memory of the device, each followed by a look at the most that was held.
fn work_below_the_ceiling() {
    let engine = start(&["--max-adapters", "2"]).expect("it starts");
    let status = engine.status();
    assert_eq!(entry(&status.memory, MemoryUse::Context), CONTEXT_BYTES);
    assert_eq!(status.memory.ceiling, 512 * MIB);
    assert!(entry(&status.memory, MemoryUse::KvCache) > 40 * MIB, "{:?}", status.memory);
    let watch = Watch { ceiling: status.memory.ceiling };
    watch.check("start");
    let first = samples(&engine);
    engine.generate(Request::score(random_prompts(6, 2, 10..20, 250)));
    watch.check("steps");
    let [weights, others] = [41, 42].map(|seed| random_weights(engine.parameters(), seed));
    let push = |what: &str, push: Push| {
        engine.push(push).unwrap_or_else(|e| panic!("{what}: {e}"));
        samples(&engine);
        watch.check(what);
    };
    let delta = |engine: &Engine| Push::delta(&others, &weights, engine.status().stats.weight_version);
    for round in 0..2 {
        push("an adapter", Push::lora("peft/bfloat16"));
        push("the base", Push::base());
        push("a FULL push", Push::full(&weights));
        push("another", Push::full(&others));
        push("a DELTA", delta(&engine));
        push("an adapter on pushed weights", Push::lora("peft/rslora_patterns"));
        let target = AdapterTarget { name: format!("a{round}"), expected_generation: Some(0), evicts: false };
        push("a resident adapter", Push { adapter: Some(target), ..Push::lora_of_all(engine.parameters()) });
        let (sums, expected) = (engine.checksums(), samples(&engine));
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        let asleep = engine.status();
        assert!(entry(host(&asleep), MemoryUse::Offloaded) > entry(&status.memory, MemoryUse::Weights));
        engine.wake(true, false).expect("wakes");
        watch.check("weights that wake");
        engine.push(Push::full(&weights)).expect("pushed");
        engine.push(Push::full(&others)).expect("pushed");
        engine.push(delta(&engine)).expect("pushed");
        engine.push(Push::lora("peft/rslora_patterns")).expect("pushed");
        watch.check("pushes while the cache sleeps");
        assert_eq!(engine.wake(false, true).expect("wakes"), LifecycleStatus::Running);
        assert!(engine.checksums() == sums, "round {round}");
        assert_eq!(samples(&engine), expected, "round {round}");
        assert_eq!(entry(host(&engine.status()), MemoryUse::Offloaded), 0);
        watch.check("the cache that wakes");
        engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
        assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
        push("a FULL push after level 2", Push::full(&weights));
        engine.push(Push::lora("peft/bfloat16")).expect("pushed");
    }
    drop(engine);
    let engine = start(&[]).expect("it starts again");
    assert_eq!(samples(&engine), first);
    watch.check("another start");
}

#[test]
fn what_the_driver_counts_never_passes_the_ceiling() {
    const NAME: &str = "what_the_driver_counts_never_passes_the_ceiling";
    require!(emulated(COUNTED));
    match task() {
        Some(_) => work_below_the_ceiling(),
        None => ["processes", "device"].iter().for_each(|nvml| drop(run(NAME, "work", &[("CUEMU_NVML", nvml)]))),
    }
}

/// A process that is killed in the end.
struct Neighbour(Child);

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.0.kill().expect("it can be killed");
        self.0.wait().expect("it has ended");
    }
}

/// Opens the device, takes memory of it and gives all back, until it is killed.
fn take_and_free() -> ! {
    let backend = Backend::ALL.iter().find(|backend| backend.name() == "cuda").expect("it is built with it");
    for i in 0.. {
        let device = backend.open(&DeviceOptions::default()).expect("there is a device");
        let buffers = (0..1 + i % 3).map(|_| device.buffer(3 << 20).expect("there is memory"));
        drop(buffers.collect::<Vec<_>>());
    }
    unreachable!("it is killed")
}

#[test]
fn neighbours_who_come_and_go_are_not_billed() {
    const NAME: &str = "neighbours_who_come_and_go_are_not_billed";
    require!(emulated(COUNTED));
    match task().as_deref() {
        Some("neighbour") => take_and_free(),
        Some(_) => {
            let engine = start(&[]).expect("it starts");
            assert_eq!(entry(&engine.status().memory, MemoryUse::Context), CONTEXT_BYTES);
            samples(&engine);
            Watch { ceiling: engine.status().memory.ceiling }.check("beside neighbours");
        }
        None => {
            let folder = tempfile::tempdir().unwrap();
            let ledger = [("CUEMU_LEDGER", folder.path().join("ledger"))];
            let ledger = ledger.each_ref().map(|(name, path)| (*name, path.to_str().unwrap()));
            let neighbour = || {
                let mut child = child(NAME, "neighbour", &ledger);
                Neighbour(child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
            };
            let _neighbours = [neighbour(), neighbour()];
            (0..3).for_each(|_| drop(run(NAME, "work", &ledger)));
        }
    }
}

#[test]
fn without_nvml_a_constant_is_set_aside_and_said() {
    const NAME: &str = "without_nvml_a_constant_is_set_aside_and_said";
    require!(emulated(COUNTED));
    match task() {
        Some(_) => {
            let engine = Engine::start("qwen2", &["--device", "cuda", "--kv-cache-bytes", "2MiB"]);
            assert_eq!(entry(&engine.status().memory, MemoryUse::Context), 512 * MIB);
        }
        None => drop(run(NAME, "work", &[("CUEMU_NVML", "off"), ("CUEMU_MEMORY_MIB", "6000")])),
    }
}

/// The least `--host-memory` with which an engine starts, as the message names it.
fn least_host_memory() -> u64 {
    let Err(error) = start(&["--host-memory", "1"]) else { panic!("it starts with one byte") };
    let text = error.to_string();
    assert!(matches!(error, Error::ResourceExhausted(_)) && text.contains("of the host's ceiling of 1 B"), "{text}");
    text.rsplit("--host-memory ").next().and_then(|bytes| bytes.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// A push of float32 tensors with half of their bytes.
fn in_bfloat16(mut push: Push) -> Push {
    for (entry, bytes) in &mut push.tensors {
        let values = bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().expect("four bytes")));
        *bytes = values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
        (entry.dtype, entry.digest) = (Dtype::Bf16, Some(xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes()));
    }
    push
}

#[test]
fn host_memory_bounds_what_sleeps() {
    const NAME: &str = "host_memory_bounds_what_sleeps";
    require!(emulated(COUNTED));
    match task() {
        Some(_) => {}
        None => return drop(run(NAME, "work", &[])),
    }
    let least = least_host_memory();
    assert!(start(&["--host-memory", &(least - 1).to_string()]).is_err());
    let error = start(&["--host-memory", "9000000GiB"]).err().expect("no machine has as much");
    assert!(matches!(&error, Error::Config(why) if why.contains("the memory of this machine or container")), "{error}");
    let request_bytes = ["--request-bytes", "8MiB"];
    for (beside, is_moved) in [(12 * MIB, true), (41 * MIB / 4, false)] {
        // Room for the 10 MiB of the largest tensor while it is pushed, and not always for all weights when they sleep.
        let bytes = (least + beside).to_string();
        let engine = start(&[&["--host-memory", &bytes][..], &request_bytes].concat()).expect("it starts");
        let weights = random_weights(engine.parameters(), 51);
        engine.push(in_bfloat16(Push::full(&weights))).unwrap_or_else(|e| panic!("{beside}: {e}"));
        let (sums, expected) = (engine.checksums(), samples(&engine));
        let awake = engine.status();
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        let asleep = engine.status();
        let offloaded = entry(host(&asleep), MemoryUse::Offloaded);
        let on_device = entry(&asleep.memory, MemoryUse::Weights);
        assert_eq!((offloaded > 0, on_device > 0), (is_moved, !is_moved), "{offloaded} moved, {on_device} stay");
        engine.wake(true, true).expect("wakes");
        assert!(engine.checksums() == sums);
        assert_eq!(samples(&engine), expected);
        let again = engine.status();
        assert_eq!((host(&again), &again.memory.ceiling), (host(&awake), &awake.memory.ceiling));
    }
}
