//! Entropies, supports and most likely tokens have the same bits sampled or scored, alone or in a batch, in chunks,
//! from the cache, with drafts, on one rank or on two.

use rollout_server::engine::RequestKind;
use rollout_server::types::{Distribution, SamplingParams, TaskReturns, TokenId, TokenLogprobs};

use crate::common::{Engine, Request, kernels, orders, random_prompts};

const SEED: u64 = 77;
const VOCAB: u32 = 512;
const RETURNS: TaskReturns = TaskReturns { entropy: true, support: Some(4096) };

fn params() -> SamplingParams {
    SamplingParams {
        temperature: 0.8,
        top_k: 60,
        top_p: 0.9,
        max_tokens: 12,
        top_logprobs: 200,
        top_logprobs_of: Distribution::Processed,
        returns: RETURNS,
        ..Default::default()
    }
}

fn prompts() -> Vec<Vec<TokenId>> {
    random_prompts(31, 8, 2..70, VOCAB)
}

/// The tokens of each prompt's sample, with all that is returned.
fn sampled(engine: &Engine, prompts: Vec<Vec<TokenId>>) -> Vec<Vec<TokenLogprobs>> {
    let reply = engine.generate(Request::generate(prompts, 1, SEED, 0).params(params()));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.completions.into_iter().map(|completion| completion.tokens).collect()
}

#[test]
fn returns_are_the_same_on_every_path() {
    for kernel in kernels() {
        let level = ["--kernel", kernel];
        let engine = Engine::start("qwen2", &level);
        let expected = sampled(&engine, prompts());
        let returned = expected.iter().flatten().map(|token| token.returned.as_ref().expect("it was asked for"));
        let sizes: Vec<u32> = returned.map(|returned| returned.support.size).collect();
        assert!(sizes.iter().any(|size| *size > 5) && sizes.iter().all(|size| *size <= 60), "{sizes:?}");
        assert_eq!(sampled(&engine, prompts()), expected, "from the cache");
        for flags in [&["--max-batch-tokens", "7"][..], &["--tp", "2"], &["--speculation", "off"]] {
            let other = Engine::start("qwen2", &[&level, flags].concat());
            assert_eq!(sampled(&other, prompts()), expected, "{flags:?}");
        }
        for (prompt, tokens) in prompts().into_iter().zip(&expected) {
            let sequence: Vec<TokenId> = prompt.iter().copied().chain(tokens.iter().map(|token| token.token)).collect();
            let reply = engine.generate(Request::score(vec![sequence]).params(params()));
            let (_, scored) = &reply.prompt_logprobs[0];
            assert_eq!(scored[prompt.len() - 1..], tokens[..], "scored");
        }
        engine.assert_all_free();
    }
}

#[test]
fn the_tokens_of_a_sampled_prompt_list_the_raw_distribution() {
    let engine = Engine::start("llama", &["--kernel", orders()[0]]);
    let prompt = prompts().remove(3);
    let kind =
        RequestKind::Generate { n: 1, seed: SEED, prompt_logprobs: true, stream_tokens: false, return_text: false };
    let sampling = Request { kind, ..Request::generate(vec![prompt.clone()], 1, SEED, 0).params(params()) };
    let raw = SamplingParams { top_logprobs_of: Distribution::Raw, ..params() };
    let scoring = Request::score(vec![prompt]).params(raw);
    let [sampled, scored] = [sampling, scoring].map(|request| engine.generate(request).prompt_logprobs);
    assert_eq!(sampled, scored);
    assert!(!sampled[0].1.is_empty());
}
