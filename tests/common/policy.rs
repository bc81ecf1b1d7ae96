//! Pushes, sleep and wake as a trainer orders them, compared between engines with other ranks or on other devices.

use rollout_server::engine::{Command, DrainMode, LifecycleStatus, SleepLevel, SleepReply};
use rollout_server::error::Error;
use rollout_server::memory::MemoryUse;
use rollout_server::types::TokenId;

use super::{Engine, Push, random_weights, with_fused_experts};

/// For each sample, the tokens and the bits of both log-probabilities.
pub type Bits = Vec<Vec<(TokenId, u32, u32)>>;

/// Families that need more of ranks and pushes than Llama, Mistral and Qwen from the second on do: experts, or other
/// names and rotations. And an adapter of the fixtures for each that has one there.
pub const FAMILIES: [(&str, Option<&str>); 8] = [
    ("qwen3_moe", Some("peft_experts/all_linear")),
    ("qwen3_moe_60", Some("peft_experts/down_proj")),
    ("glm4_moe", None),
    ("qwen2_moe", Some("peft_experts/all_linear_shared")),
    ("mixtral", Some("peft_experts/experts_apart_mixtral")),
    ("qwen_v1", None),
    ("smollm3", None),
    ("phi3", None),
];

/// Serves, merges adapters, takes FULL pushes, sleeps at both levels and wakes. After each of these
/// `engine` samples what `others[0]` samples, and has the weights of all `others`. The first adapter is the directory
/// `adapter` of the fixtures, or one of all linear layers, those of experts included. Returns what the first sleep gave
/// back, which is measured for the whole process where the memory is the host's.
pub fn check_pushes_and_sleep(
    what: &str,
    engine: &Engine,
    others: &[&Engine],
    adapter: Option<&str>,
    sample: impl Fn(&Engine) -> Bits,
) -> SleepReply {
    let mut last = None;
    let mut same = |step: &str| {
        let (sums, bits) = (engine.checksums(), sample(engine));
        for (index, other) in others.iter().enumerate() {
            assert!(other.checksums() == sums, "{what}: {step}: the weights of engine {index} are others");
        }
        assert_eq!(bits, sample(others[0]), "{what}: {step}");
        assert!(last.replace(bits.clone()).as_ref() != Some(&bits), "{what}: {step}: the policy before it serves");
        (sums, bits)
    };
    let push = |engines: &[&Engine], push: &Push| {
        for engine in engines {
            engine.push(push.clone()).expect(what);
        }
    };
    let all = [&[engine], others].concat();
    let (_, bits) = same("as loaded");
    assert_eq!(sample(engine), bits, "{what}: from the prefix cache");
    let weights = [21, 22].map(|seed| random_weights(engine.parameters(), seed));
    let lora = || Push::lora_of_all(engine.parameters());
    push(&all, &adapter.map_or_else(lora, Push::lora));
    same("an adapter");
    push(&all, &Push::full(&weights[0]));
    same("a FULL push");
    push(&all, &lora());
    same("an adapter on it");
    // With fused experts, as trainers have them in memory; elsewhere each expert alone.
    push(&[engine], &Push::full(&with_fused_experts(&weights[1])));
    push(others, &Push::full(&weights[1]));
    let (sums, bits) = same("a FULL push with fused experts");

    let slept = engine.sleep(SleepLevel::One, DrainMode::Wait).expect(what);
    assert_eq!(engine.wake(true, true).expect(what), LifecycleStatus::Running);
    assert!(engine.checksums() == sums, "{what}: after level 1");
    assert_eq!(sample(engine), bits, "{what}: after level 1");
    engine.sleep(SleepLevel::Two, DrainMode::Wait).expect(what);
    assert_eq!(engine.wake(true, true).expect(what), LifecycleStatus::WeightsMissing);
    push(&all, &Push::full(&weights[0]));
    same("after level 2");
    engine.assert_all_free();
    slept
}

/// Overwrites the serving weights while the engine is paused. The engine must have no room for a second set of weights
/// ([`Engine::start_without_room`]).
pub fn push_in_place(engine: &Engine, push: Push) {
    let pause = |reply| Command::Pause { mode: DrainMode::Wait, cancel: Default::default(), reply };
    engine.ask(pause).expect("paused");
    let beside = engine.push(push.clone()).expect_err("there is no room");
    assert!(matches!(beside, Error::ResourceExhausted(_)), "{beside}");
    engine.push(Push { in_place: true, ..push }).expect("pushed in place");
    engine.ask(|reply| Command::Resume { reply }).expect("resumed");
}

impl Engine {
    /// Starts an engine whose memory has no room for a FULL push beside the weights that serve.
    pub fn start_without_room(model: &str, flags: &[&str]) -> Self {
        let flags = [flags, &["--request-bytes", "64MiB"]].concat(); // by default a share of the memory
        let memory = Self::start(model, &flags).status().memory;
        let weights = memory.entries.iter().find(|(of, _)| *of == MemoryUse::Weights).expect("an entry").1;
        let ceiling = memory.entries.iter().map(|(_, bytes)| bytes).sum::<u64>() + weights * 15 / 16;
        let share = (ceiling as f64 / memory.total as f64).to_string();
        Self::start(model, &[&flags[..], &["--mem-util", &share, "--staging-bytes", "0"]].concat())
    }
}
