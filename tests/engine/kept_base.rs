//! With `--keep-base`, finished samples are scored under the base below the merged adapter, with the bits of a server
//! that serves the base.

use rollout_server::engine::{Completion, DrainMode, LifecycleStatus, OtherPolicies, RunningPolicy, SleepLevel};
use rollout_server::memory::MemoryUse;
use rollout_server::types::{SamplingParams, TokenId};

use crate::common::{Engine, FAMILIES, Push, Request, orders, random_prompts, random_weights};
use crate::rescoring::{bits, scored as scored_under};

const VOCAB: u32 = 512;
const TEMPERATURE: f32 = 0.7;

/// A server that keeps the base, and one with the same pushes but for adapters.
struct Pair {
    engine: Engine,
    base: Engine,
    seed: u64,
}

impl Pair {
    fn start(model: &str, flags: &[&str]) -> Self {
        println!("{model} {flags:?}");
        let engine = Engine::start(model, &[flags, &["--keep-base"]].concat());
        Self { engine, base: Engine::start(model, flags), seed: 0 }
    }

    fn push(&self, push: &Push) {
        for engine in [&self.engine, &self.base] {
            engine.push(push.clone()).expect("pushed");
        }
    }

    /// Samples with scores under the base, and compares the scores with those of the server of the base. Returns
    /// whether the samples' own log-probabilities are the base's too.
    fn check(&mut self, step: &str) -> bool {
        self.seed += 1;
        println!("{step}, seed {}", self.seed);
        let sums = self.engine.checksums();
        let prompts = random_prompts(self.seed, 3, 2..60, VOCAB);
        let params = SamplingParams { temperature: TEMPERATURE, top_p: 0.9, max_tokens: 9, ..Default::default() };
        let request = Request::generate(prompts.clone(), 2, self.seed, 0).params(params);
        let plain = self.engine.generate(request.clone()).bits();
        let reply = self.engine.generate(Request {
            policies: OtherPolicies { base: true, references: vec![None], ..OtherPolicies::default() },
            ..request
        });
        assert!(reply.error.is_none(), "{step}: {:?}", reply.error);
        assert_eq!(reply.bits(), plain, "{step}: scores change no sample");
        let mut is_base = true;
        for completion in reply.completions {
            let score = completion.scores.base.as_ref().expect("it was asked for");
            let prompt = &prompts[completion.prompt_index as usize];
            assert_eq!(bits(score), scored(&self.base, prompt, &completion), "{step}");
            assert_eq!(
                bits(&completion.scores.references[0]),
                scored(&self.engine, prompt, &completion),
                "{step}: the policy"
            );
            is_base &= completion.tokens.iter().zip(&score.logprobs).all(|(token, (raw, _))| token.raw == *raw);
        }
        assert!(self.engine.checksums() == sums, "{step}: scores change no weight");
        self.engine.assert_all_free();
        is_base
    }
}

/// The log-probabilities that Score returns for a completion's tokens at the temperature of the requests.
fn scored(engine: &Engine, prompt: &[TokenId], completion: &Completion) -> Vec<(u32, u32)> {
    scored_under(engine, prompt, completion, None, SamplingParams { temperature: TEMPERATURE, ..Default::default() })
}

#[test]
fn the_base_has_the_bits_of_a_server_that_serves_it() {
    let float32_on_two = ["--dtype", "float32", "--tp", "2"];
    for flags in [&["--kernel", orders()[0]][..], &float32_on_two, &["--tp", "4", "--max-batch-tokens", "24"]] {
        let mut pair = Pair::start("qwen2", flags);
        let loras = ["peft/rslora_patterns", "peft/bfloat16"].map(Push::lora);
        assert!(pair.check("as loaded"), "the base serves");
        pair.engine.push(loras[0].clone()).expect("merged");
        assert!(!pair.check("an adapter"));
        pair.engine.push(loras[1].clone()).expect("merged");
        assert!(!pair.check("another adapter"));
        let refused = Push { expected_version: Some(99), ..loras[0].clone() };
        pair.engine.push(refused).expect_err("not the version");
        assert!(!pair.check("a push that was refused"));
        pair.engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        assert_eq!(pair.engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
        assert!(!pair.check("after level 1"));
        pair.engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
        assert!(pair.engine.push(loras[0].clone()).expect("pending").pending);
        assert_eq!(pair.engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
        assert!(!pair.check("merged while it woke from level 2"));
        pair.engine.push(Push::base()).expect("merged");
        assert!(pair.check("no adapter"));

        let weights = [21, 22].map(|seed| random_weights(pair.engine.parameters(), seed));
        pair.push(&Push::full(&weights[0]));
        assert!(pair.check("a FULL push"));
        pair.engine.push(loras[1].clone()).expect("merged");
        assert!(!pair.check("an adapter on it"));
        // The policy that a delta changes becomes the base, with its adapter.
        pair.base.push(loras[1].clone()).expect("merged");
        let delta = |engine: &Engine| Push::delta(&weights[0], &weights[1], engine.status().stats.weight_version);
        pair.engine.push(delta(&pair.engine)).expect("pushed");
        pair.base.push(delta(&pair.base)).expect("pushed");
        assert!(pair.check("a delta"));
        pair.engine.push(Push::lora_of_all(pair.engine.parameters())).expect("merged");
        assert!(!pair.check("an adapter on the delta"));
        pair.engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        assert_eq!(pair.engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
        assert!(!pair.check("after level 1 of pushed weights"));
    }
}

#[test]
fn the_base_of_experts_has_the_bits_of_a_server_that_serves_it() {
    for (model, adapter) in FAMILIES {
        let Some(adapter) = adapter else { continue };
        let mut pair = Pair::start(model, &["--tp", "2", "--return-routing"]);
        pair.engine.push(Push::lora(adapter)).expect("merged");
        assert!(!pair.check("an adapter"));
    }
}

/// Samples of two policies and a push in the middle.
#[test]
fn samples_that_a_push_meets_are_scored_under_the_base() {
    for running in [RunningPolicy::Keep, RunningPolicy::Recompute] {
        let pair = Pair::start("qwen2", &[]);
        pair.engine.push(Push::lora("peft/rslora_patterns")).expect("merged");
        let prompts = random_prompts(5, 4, 2..60, VOCAB);
        let params = SamplingParams { temperature: TEMPERATURE, max_tokens: 60, ..Default::default() };
        let request = Request {
            policies: OtherPolicies { base: true, ..OtherPolicies::default() },
            ..Request::generate(prompts.clone(), 3, 5, 0).params(params)
        };
        let sampling = pair.engine.send(request.named("sampling"));
        while pair.engine.status().stats.generated_tokens < 60 {
            std::thread::yield_now();
        }
        pair.engine.push(Push { running, ..Push::lora("peft/bfloat16") }).expect("merged");
        let reply = sampling.wait();
        assert!(
            reply.completions.iter().any(|completion| completion.weight_versions.len() > 1),
            "no push came between"
        );
        for completion in &reply.completions {
            let expected = scored(&pair.base, &prompts[completion.prompt_index as usize], completion);
            assert_eq!(bits(completion.scores.base.as_ref().expect("it was asked for")), expected, "{running:?}");
        }
    }
}

#[test]
fn the_base_is_in_the_memory_plan_and_given_back_asleep() {
    let pair = Pair::start("qwen2", &[]);
    let reserved = |engine: &Engine, of| {
        let entries = engine.status().memory.entries;
        entries.iter().find(|entry| entry.0 == of).map_or(0, |entry| entry.1)
    };
    let entry = |engine| reserved(engine, MemoryUse::KeptBase);
    let weights = reserved(&pair.engine, MemoryUse::Weights);
    assert_eq!((entry(&pair.engine), entry(&pair.base)), (weights, 0));
    pair.engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    assert_eq!(entry(&pair.engine), 0);
    pair.engine.wake(true, true).expect("wakes");
    assert_eq!(entry(&pair.engine), weights);
}
