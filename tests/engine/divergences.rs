//! The divergences of a policy from its references are those of whole distributions in float64, and have the same bits
//! sampled or scored, in chunks, on one rank or on two, and after pushes in the middle of batches.

use std::collections::BTreeMap;

use rollout_server::engine::{OtherPolicies, PolicyScore, RunningPolicy};
use rollout_server::types::{SamplingParams, TokenId};

use crate::common::{Engine, Push, Request, kernels, random_prompts, random_weights};
use crate::rescoring::{engine_with_adapters, has_begun};

pub const VOCAB: u32 = 512;

fn prompts(seed: u64) -> Vec<Vec<TokenId>> {
    random_prompts(seed, 4, 2..60, VOCAB)
}

/// Divergences from these references.
fn from(references: &[Option<&str>]) -> OtherPolicies {
    let references = references.iter().map(|name| name.map(String::from)).collect();
    OtherPolicies { references, divergences: true, ..OtherPolicies::default() }
}

pub fn divergence_bits(score: &PolicyScore) -> Vec<(u32, u32)> {
    score.divergences.iter().map(|d| (d.kl.to_bits(), d.reverse_kl.to_bits())).collect()
}

/// The logarithms of all tokens' probabilities where each token of the sequence after its first was predicted.
pub fn distributions(
    engine: &Engine,
    sequence: &[TokenId],
    adapter: Option<&str>,
    temperature: f32,
) -> Vec<BTreeMap<TokenId, f64>> {
    let params = SamplingParams { top_logprobs: VOCAB, ..SamplingParams::default() };
    let request = Request { adapter: adapter.map(String::from), ..Request::score(vec![sequence.to_vec()]) };
    let reply = engine.generate(request.params(params));
    let (_, tokens) = &reply.prompt_logprobs[0];
    let at_temperature = |top: &[(TokenId, f32)]| {
        let scaled = || top.iter().map(|(token, logprob)| (*token, f64::from(*logprob) / f64::from(temperature)));
        let total = scaled().map(|(_, logprob)| logprob.exp()).sum::<f64>().ln();
        scaled().map(|(token, logprob)| (token, logprob - total)).collect()
    };
    tokens.iter().map(|token| at_temperature(&token.top)).collect()
}

/// Asserts that the divergences are those of two sequences of distributions.
#[track_caller]
pub fn assert_close(score: &PolicyScore, policy: &[BTreeMap<TokenId, f64>], reference: &[BTreeMap<TokenId, f64>]) {
    assert_eq!(score.divergences.len(), policy.len());
    for ((found, p), q) in score.divergences.iter().zip(policy).zip(reference) {
        assert_eq!((p.len(), q.len()), (VOCAB as usize, VOCAB as usize));
        let kl = |p: &BTreeMap<TokenId, f64>, q: &BTreeMap<TokenId, f64>| -> f64 {
            p.iter().map(|(token, logprob)| logprob.exp() * (logprob - q[token])).sum()
        };
        for (found, exact) in [(found.kl, kl(p, q)), (found.reverse_kl, kl(q, p))] {
            // The log-probabilities that `exact` is made of are rounded to float32.
            assert!((f64::from(found) - exact).abs() < 1e-5 * exact.max(1.0), "{found}, exact {exact}");
        }
    }
}

#[test]
fn divergences_are_those_of_whole_distributions() {
    let references = [None, Some("two"), Some("one")];
    let params =
        SamplingParams { temperature: 0.7, top_p: 0.9, presence_penalty: 0.3, max_tokens: 9, ..Default::default() };
    for kernel in kernels() {
        let mut expected = None;
        for flags in [&[][..], &["--max-batch-tokens", "16"], &["--tp", "2"], &["--speculation", "off"]] {
            let engine = engine_with_adapters(&[&["--kernel", kernel], flags].concat());
            let request = Request { adapter: Some("one".into()), ..Request::generate(prompts(3), 3, 8, 0) };
            let request = request.params(params.clone());
            let plain = engine.generate(request.clone()).bits();
            let keeping = SamplingParams { keeps_hidden: true, ..params.clone() };
            let reply = engine.generate(Request { policies: from(&references), ..request.params(keeping) });
            assert!(reply.error.is_none(), "{:?}", reply.error);
            assert_eq!(reply.bits(), plain, "divergences change no sample");
            let found: Vec<_> =
                reply.completions.iter().map(|c| c.scores.references.iter().map(divergence_bits).collect()).collect();
            let expected: &mut Option<Vec<Vec<_>>> = &mut expected;
            assert_eq!(expected.get_or_insert(found.clone()), &found, "{kernel} {flags:?}");
            for completion in reply.completions.iter().take(if flags.is_empty() { 12 } else { 2 }) {
                let prompt = &prompts(3)[completion.prompt_index as usize];
                let sampled = completion.tokens.iter().map(|token| token.token);
                let sequence: Vec<TokenId> = prompt.iter().copied().chain(sampled).collect();
                let policy = &distributions(&engine, &sequence, Some("one"), 0.7)[prompt.len() - 1..];
                for (score, name) in completion.scores.references.iter().zip(references) {
                    let reference = distributions(&engine, &sequence, name, 0.7);
                    assert_close(score, policy, &reference[prompt.len() - 1..]);
                }
                let own = &completion.scores.references[2];
                assert!(own.divergences.iter().all(|d| (d.kl, d.reverse_kl) == (0.0, 0.0)), "from itself: {own:?}");
                assert!(completion.scores.references[0].divergences.iter().all(|d| d.kl > 0.0));
                let scored = scored(&engine, sequence, Some("one"), &references, 0.7);
                for (score, sampled) in scored.iter().zip(&completion.scores.references) {
                    assert_eq!(divergence_bits(score)[prompt.len() - 1..], divergence_bits(sampled)[..]);
                }
            }
            engine.assert_all_free();
        }
    }
}

/// The scores of a sequence under references, with their divergences.
fn scored(
    engine: &Engine,
    sequence: Vec<TokenId>,
    adapter: Option<&str>,
    references: &[Option<&str>],
    temperature: f32,
) -> Vec<PolicyScore> {
    let params = SamplingParams { temperature, keeps_hidden: true, ..SamplingParams::default() };
    let request =
        Request { policies: from(references), adapter: adapter.map(String::from), ..Request::score(vec![sequence]) };
    let mut reply = engine.generate(request.params(params));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.scores.remove(0).1.references
}

#[test]
fn scored_sequences_have_references_as_scores_of_their_own() {
    let engine = engine_with_adapters(&[]);
    let mut sequences = prompts(9);
    sequences.push(vec![5]);
    let references = [None, Some("one")];
    let request = Request {
        policies: OtherPolicies { divergences: false, ..from(&references) },
        adapter: Some("two".into()),
        ..Request::score(sequences.clone())
    };
    let reply = engine.generate(request.params(SamplingParams { temperature: 0.6, ..Default::default() }));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    assert_eq!(reply.scores.len(), sequences.len());
    for (index, scores) in &reply.scores {
        assert_eq!(scores.references.len(), references.len());
        for (score, name) in scores.references.iter().zip(references) {
            assert!(score.divergences.is_empty());
            let alone =
                Request { adapter: name.map(String::from), ..Request::score(vec![sequences[*index as usize].clone()]) };
            let alone = engine.generate(alone.params(SamplingParams { temperature: 0.6, ..Default::default() }));
            let expected: Vec<_> =
                alone.prompt_logprobs[0].1.iter().map(|t| (t.raw.to_bits(), t.processed.to_bits())).collect();
            assert_eq!(crate::rescoring::bits(score), expected, "{name:?}");
        }
    }
    engine.assert_all_free();
}

#[test]
fn divergences_after_pushes_are_those_of_the_policy_that_serves() {
    let params = SamplingParams { temperature: 0.8, max_tokens: 40, keeps_hidden: true, ..Default::default() };
    for (running, flags) in [
        (RunningPolicy::Keep, &["--dtype", "float32"][..]),
        (RunningPolicy::Recompute, &["--dtype", "bfloat16"]),
        (RunningPolicy::Keep, &["--tp", "2", "--max-batch-tokens", "24"]),
        (RunningPolicy::Recompute, &["--max-batch-tokens", "24"]),
    ] {
        println!("{running:?} {flags:?}");
        let engine = engine_with_adapters(flags);
        let mut mixed = 0;
        for round in 0..6u64 {
            let request = Request::generate(prompts(20 + round), 3, round, 0).params(params.clone());
            let request = Request { policies: from(&[Some("two")]), ..request };
            let before = engine.status().stats.generated_tokens;
            let pushes: Vec<_> =
                (0..1 + round % 3).map(|push| random_weights(engine.parameters(), 100 * round + push)).collect();
            let sampling = engine.send(request.named("sampling"));
            for (push, weights) in (1..).zip(&pushes) {
                has_begun(&engine, before + 40 * push);
                engine.push(Push { running, ..Push::full(weights) }).expect("pushed");
            }
            let version = engine.status().stats.weight_version;
            let reply = sampling.wait();
            assert!(reply.error.is_none(), "{:?}", reply.error);
            for completion in reply.completions {
                let [score] = &completion.scores.references[..] else { panic!("{:?}", completion.scores) };
                assert_eq!(score.divergences.len(), completion.tokens.len());
                if score.weight_version < version {
                    continue; // it was sent before the last push
                }
                mixed += u32::from(completion.weight_versions.iter().any(|(made_by, ..)| *made_by != version));
                let prompt = &prompts(20 + round)[completion.prompt_index as usize];
                let sampled = completion.tokens.iter().map(|token| token.token);
                let sequence = prompt.iter().copied().chain(sampled).collect();
                let expected = scored(&engine, sequence, None, &[Some("two")], 0.8);
                assert_eq!(divergence_bits(&expected[0])[prompt.len() - 1..], divergence_bits(score)[..], "{round}");
            }
            engine.assert_all_free();
        }
        assert!(mixed > 0, "no sample was under way at a push");
    }
}
