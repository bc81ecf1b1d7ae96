//! The base below a merged adapter, kept on the device: scores under it have the bits of an engine that serves the
//! base.

use rollout_server::engine::{DrainMode, LifecycleStatus, OtherPolicies, SleepLevel};
use rollout_server::types::{Divergences, SamplingParams, TokenId};

use crate::common::{Engine, Push, Request, random_prompts};
use crate::own_driver;

const SEED: u64 = 17;

fn prompts() -> Vec<Vec<TokenId>> {
    random_prompts(SEED, 3, 1..30, 250)
}

/// The bits of samples' raw log-probabilities under the base, and of a Score of the samples on `base`.
fn scores(engine: &Engine, base: &Engine) -> (Vec<u32>, Vec<u32>) {
    let params = SamplingParams { max_tokens: 5, ..Default::default() };
    let request = Request::generate(prompts(), 2, SEED, 0).params(params);
    let plain = engine.generate(request.clone()).bits();
    let reply =
        engine.generate(Request { policies: OtherPolicies { base: true, ..OtherPolicies::default() }, ..request });
    assert!(reply.error.is_none(), "{:?}", reply.error);
    assert_eq!(reply.bits(), plain, "scores change no sample");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for completion in &reply.completions {
        let score = completion.scores.base.as_ref().expect("it was asked for");
        ours.extend(score.logprobs.iter().map(|(raw, _)| raw.to_bits()));
        let prompt = &prompts()[completion.prompt_index as usize];
        let sequence = prompt.iter().copied().chain(completion.tokens.iter().map(|token| token.token)).collect();
        let reply = base.generate(Request::score(vec![sequence]));
        theirs.extend(reply.prompt_logprobs[0].1[prompt.len() - 1..].iter().map(|token| token.raw.to_bits()));
    }
    (ours, theirs)
}

#[test]
fn divergences_from_the_base_are_those_of_a_score() {
    let _own = own_driver();
    let divergences =
        OtherPolicies { base: true, divergences: true, references: vec![None], ..OtherPolicies::default() };
    let params = SamplingParams { max_tokens: 5, temperature: 0.7, keeps_hidden: true, ..Default::default() };
    for flags in [&["--dtype", "bfloat16"][..], &["--dtype", "float32", "--tp", "2"]] {
        let engine = Engine::start("qwen2", &[&["--device", "cuda", "--keep-base"], flags].concat());
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        let plain = engine.generate(Request::generate(prompts(), 2, SEED, 0).params(params.clone())).bits();
        let request = Request { policies: divergences.clone(), ..Request::generate(prompts(), 2, SEED, 0) };
        let reply = engine.generate(request.params(params.clone()));
        assert!(reply.error.is_none(), "{:?}", reply.error);
        assert_eq!(reply.bits(), plain, "divergences change no sample");
        for completion in &reply.completions {
            let prompt = &prompts()[completion.prompt_index as usize];
            let sampled = completion.tokens.iter().map(|token| token.token);
            let sequence: Vec<TokenId> = prompt.iter().copied().chain(sampled).collect();
            let request = Request { policies: divergences.clone(), ..Request::score(vec![sequence]) };
            let scored = engine.generate(request.params(params.clone())).scores.remove(0).1;
            let (base, expected) =
                (completion.scores.base.as_ref().expect("asked for"), scored.base.expect("asked for"));
            let bits = |d: &Divergences| (d.kl.to_bits(), d.reverse_kl.to_bits());
            let tail = &expected.divergences[prompt.len() - 1..];
            assert!(base.divergences.iter().map(bits).eq(tail.iter().map(bits)), "{flags:?}");
            assert!(base.divergences.iter().all(|d| d.kl > 0.0 && d.reverse_kl > 0.0), "{base:?}");
            let itself = &completion.scores.references[0];
            assert!(itself.divergences.iter().all(|d| (d.kl, d.reverse_kl) == (0.0, 0.0)), "{itself:?}");
        }
        engine.assert_all_free();
    }
}

#[test]
fn the_base_has_the_bits_of_an_engine_that_serves_it() {
    let _own = own_driver();
    for flags in [&["--dtype", "bfloat16"][..], &["--dtype", "float32", "--tp", "2"]] {
        let cuda = [&["--device", "cuda"], flags].concat();
        let engine = Engine::start("qwen2", &[&cuda[..], &["--keep-base"]].concat());
        let base = Engine::start("qwen2", &cuda);
        let same = |step: &str| {
            let (ours, theirs) = scores(&engine, &base);
            assert_eq!(ours, theirs, "{flags:?}: {step}");
        };
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        assert!(engine.checksums() != base.checksums(), "an adapter is merged");
        same("an adapter");
        engine.push(Push::lora_of_all(engine.parameters())).expect("merged");
        same("another adapter");
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
        same("after level 1");
        engine.assert_all_free();
    }
}
