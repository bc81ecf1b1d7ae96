//! Finished samples have their log-probabilities under other policies: references, and the policy that serves when they
//! end. Each is what a Score of the sample says, bit for bit.

use rollout_server::engine::{AdapterTarget, Completion, DrainMode, OtherPolicies, PolicyScore, RunningPolicy};
use rollout_server::types::{EngineStats, FinishReason, SamplingParams, TokenId};

use crate::common::{Engine, Push, Reply, Request, orders, random_prompts, random_weights};

const VOCAB: u32 = 512;

fn prompts(seed: u64) -> Vec<Vec<TokenId>> {
    random_prompts(seed, 4, 2..60, VOCAB)
}

fn resident(name: &str) -> Option<AdapterTarget> {
    Some(AdapterTarget { name: name.into(), expected_generation: Some(0), evicts: false })
}

/// These references, and no other policy.
fn under(references: Vec<Option<String>>) -> OtherPolicies {
    OtherPolicies { references, ..OtherPolicies::default() }
}

/// An engine with two resident adapters, `one` and `two`.
pub fn engine_with_adapters(flags: &[&str]) -> Engine {
    let engine = Engine::start("qwen2", &[&["--max-adapters", "3"], flags].concat());
    let one = Push { adapter: resident("one"), ..Push::lora_of_all(engine.parameters()) };
    engine.push(one).expect("it becomes resident");
    let two = Push { adapter: resident("two"), ..Push::lora("peft/bfloat16") };
    engine.push(two).expect("it becomes resident");
    engine
}

pub fn bits(score: &PolicyScore) -> Vec<(u32, u32)> {
    score.logprobs.iter().map(|(raw, processed)| (raw.to_bits(), processed.to_bits())).collect()
}

/// The log-probabilities that Score returns for a completion's tokens.
pub fn scored(
    engine: &Engine,
    prompt: &[TokenId],
    completion: &Completion,
    adapter: Option<&str>,
    params: SamplingParams,
) -> Vec<(u32, u32)> {
    let sequence = prompt.iter().copied().chain(completion.tokens.iter().map(|token| token.token)).collect();
    let request = Request { adapter: adapter.map(String::from), ..Request::score(vec![sequence]) };
    let reply = engine.generate(request.params(params));
    let (_, logprobs) = &reply.prompt_logprobs[0];
    logprobs[prompt.len() - 1..].iter().map(|token| (token.raw.to_bits(), token.processed.to_bits())).collect()
}

fn completions(reply: Reply) -> Vec<Completion> {
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.completions
}

#[test]
fn references_are_scores_under_their_policies() {
    let params =
        SamplingParams { temperature: 0.7, top_p: 0.9, presence_penalty: 0.3, max_tokens: 9, ..Default::default() };
    let references = [None, Some("two"), Some("one")];
    for flags in [&["--kernel", orders()[0]][..], &["--dtype", "float32", "--tp", "2"], &["--max-batch-tokens", "16"]] {
        println!("{flags:?}");
        let engine = engine_with_adapters(flags);
        let request = Request {
            adapter: Some("one".into()),
            policies: under(references.iter().map(|name| name.map(String::from)).collect()),
            ..Request::generate(prompts(3), 3, 8, 0).params(params.clone())
        };
        let plain = engine.generate(Request { policies: OtherPolicies::default(), ..request.clone() }).bits();
        let reply = engine.generate(request);
        assert_eq!(reply.bits(), plain, "references change no sample");
        let at_temperature = SamplingParams { temperature: 0.7, ..Default::default() };
        for completion in completions(reply) {
            let prompt = &prompts(3)[completion.prompt_index as usize];
            assert_eq!(completion.scores.references.len(), references.len());
            for (reference, name) in completion.scores.references.iter().zip(references) {
                let expected = scored(&engine, prompt, &completion, name, at_temperature.clone());
                assert_eq!(bits(reference), expected, "{name:?}");
            }
            let own: Vec<u32> = completion.tokens.iter().map(|token| token.raw.to_bits()).collect();
            let raw = |score: &PolicyScore| bits(score).iter().map(|(raw, _)| *raw).collect::<Vec<_>>();
            assert_eq!(raw(&completion.scores.references[2]), own, "the adapter that sampled");
            assert_ne!(raw(&completion.scores.references[0]), own, "the policy without it");
        }
        engine.assert_all_free();
    }
}

#[test]
fn a_greedy_sample_has_references_at_temperature_1() {
    let engine = engine_with_adapters(&[]);
    let greedy = SamplingParams { temperature: 0.0, max_tokens: 5, ..Default::default() };
    let request = Request { policies: under(vec![Some("one".into())]), ..Request::generate(prompts(4), 1, 8, 0) };
    for completion in completions(engine.generate(request.params(greedy))) {
        let prompt = &prompts(4)[completion.prompt_index as usize];
        let expected = scored(&engine, prompt, &completion, Some("one"), SamplingParams::default());
        assert_eq!(bits(&completion.scores.references[0]), expected);
    }
}

#[test]
fn an_unknown_reference_is_rejected_by_name() {
    let engine = engine_with_adapters(&[]);
    let request =
        Request { policies: under(vec![None, Some("nobody".into())]), ..Request::generate(prompts(5), 1, 8, 3) };
    let error = engine.generate(request).error.expect("it must be rejected").to_string();
    assert!(error.contains("returns.references[1]") && error.contains("nobody"), "{error}");
    engine.assert_all_free();
}

/// Waits until a request has made some tokens.
pub fn has_begun(engine: &Engine, tokens: u64) {
    while engine.status().stats.generated_tokens < tokens {
        std::thread::yield_now();
    }
}

/// 216 random pushes in the middle of batches: each sample's current log-probabilities are those of a Score under the
/// policy that serves at the end. Where pushes have samples computed again, no further pass is made for them.
#[test]
fn current_log_probabilities_are_scores_under_the_last_policy() {
    let params = SamplingParams { temperature: 0.8, top_p: 0.95, max_tokens: 120, ..Default::default() };
    for (running, flags) in [
        (RunningPolicy::Keep, &["--dtype", "float32"][..]),
        (RunningPolicy::Recompute, &["--dtype", "bfloat16"]),
        (RunningPolicy::Keep, &["--tp", "2", "--max-batch-tokens", "24"]),
        (RunningPolicy::Recompute, &["--kv-cache-bytes", "600KiB", "--max-model-len", "256"]),
    ] {
        println!("{running:?} {flags:?}");
        let engine = Engine::start("qwen2", flags);
        let (mut mixed, mut whole) = (0, 0);
        for round in 0..6u64 {
            let request = Request {
                policies: OtherPolicies {
                    current: true,
                    ..under(if round % 2 == 0 { vec![None] } else { Vec::new() })
                },
                ..Request::generate(prompts(10 + round), 3, round, 0).params(params.clone())
            };
            let scores_again = running == RunningPolicy::Keep || !request.policies.references.is_empty();
            let prompt_tokens = prompts(10 + round).iter().map(Vec::len).sum::<usize>() as u64;
            let EngineStats { generated_tokens: before, prompt_tokens: computed, .. } = engine.status().stats;
            let pushes: Vec<_> = (0..9).map(|push| random_weights(engine.parameters(), 100 * round + push)).collect();
            let sampling = engine.send(request.named("sampling"));
            for (push, weights) in (1..).zip(&pushes) {
                has_begun(&engine, before + 40 * push);
                engine.push(Push { running, ..Push::full(weights) }).expect("pushed");
            }
            let version = engine.status().stats.weight_version;
            let completions = completions(sampling.wait());
            if !scores_again {
                assert_eq!(
                    engine.status().stats.prompt_tokens,
                    computed + prompt_tokens,
                    "no prompt but the given ones"
                );
            }
            for completion in completions {
                let prompt = &prompts(10 + round)[completion.prompt_index as usize];
                let current = completion.scores.current.as_ref().expect("it was asked for");
                if current.weight_version < version {
                    continue; // it had ended before the last push
                }
                let expected = scored(&engine, prompt, &completion, None, params.clone());
                assert_eq!(bits(current), expected, "round {round}: {:?}", completion.weight_versions);
                match completion.weight_versions.len() {
                    1 => whole += 1,
                    _ => mixed += 1,
                }
                // A reference may have been scored before a push that came while the sample waited.
                if let [reference] = &completion.scores.references[..]
                    && reference.weight_version == current.weight_version
                {
                    let raw =
                        |score: &PolicyScore| score.logprobs.iter().map(|(raw, _)| raw.to_bits()).collect::<Vec<_>>();
                    assert_eq!(raw(reference), raw(current), "the policy without an adapter is the current one");
                }
            }
            engine.assert_all_free();
        }
        println!("{mixed} samples of several policies, {whole} of one");
        assert!(mixed > 0, "no sample was under way at a push");
    }
}

#[test]
fn samples_that_wait_for_references_arrive_without_them_when_their_request_is_aborted() {
    let engine = engine_with_adapters(&[]);
    let long = Request::generate(prompts(6), 2, 3, 900).named("long");
    let sampling = engine.send(Request { policies: under(vec![Some("two".into())]), ..long });
    has_begun(&engine, 60);
    engine.sleep(rollout_server::engine::SleepLevel::One, DrainMode::Abort).expect("sleeps");
    let aborted = completions(sampling.wait());
    assert_eq!(aborted.len(), 8, "each sample arrives once");
    for completion in &aborted {
        let is_whole = completion.finish_reason != FinishReason::Aborted && !completion.scores.references.is_empty();
        assert!(is_whole || completion.scores.references.is_empty(), "{:?}", completion.finish_reason);
    }
    engine.wake(true, true).expect("wakes");
    engine.assert_all_free();
}
