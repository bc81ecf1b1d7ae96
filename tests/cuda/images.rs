//! Prompts with images on a CUDA device: log-probabilities against transformers, and the same bits in chunks, from the
//! cache and in captured graphs. Those of several ranks are in `ranks`.

use rollout_server::error::Result;
use rollout_server::types::{SamplingParams, TokenId};

use crate::common::images::{Case, Reference, with_images};
use crate::common::{Engine, Request};
use crate::share_driver;

/// One model of each tower.
pub const TOWERS: [&str; 2] = ["qwen2_5_vl", "internvl3"];
/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;
const SEED: u64 = 21;
/// A small image, and two images of several windows or tiles.
const CASES: [usize; 2] = [0, 2];

pub fn start(model: &str, flags: &[&str]) -> Engine {
    Engine::start(model, &[&["--device", "cuda", "--limit-mm-per-prompt", "image=3"], flags].concat())
}

/// Prompts of the fixture with their images.
pub fn cases(model: &str) -> [Case; 2] {
    let reference = Reference::read(model);
    CASES.map(|index| reference.cases[index].case.clone())
}

pub fn score(engine: &Engine, cases: &[Case]) -> Vec<Vec<f32>> {
    let reply = engine.generate(with_images(Request::score, cases));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.prompt_logprobs.iter().map(|(_, tokens)| tokens.iter().map(|token| token.raw).collect()).collect()
}

/// For each sample, its tokens and the bits of both log-probabilities.
pub fn sample(engine: &Engine, cases: &[Case]) -> Vec<Vec<(TokenId, u32, u32)>> {
    try_sample(engine, cases).unwrap()
}

/// [`sample`], or why the request has failed.
pub fn try_sample(engine: &Engine, cases: &[Case]) -> Result<Vec<Vec<(TokenId, u32, u32)>>> {
    let params = SamplingParams { max_tokens: 5, temperature: 0.8, top_p: 0.9, ..Default::default() };
    let request = |prompts| Request::generate(prompts, 2, SEED, 0).params(params.clone());
    let reply = engine.generate(with_images(request, cases));
    let bits = reply.bits();
    reply.error.map_or(Ok(bits), Err)
}

#[test]
fn float32_is_transformers_float32() {
    let _shared = share_driver();
    for model in TOWERS {
        let reference = Reference::read(model);
        let found = score(&start(model, &["--dtype", "float32"]), &cases(model));
        for (index, ours) in CASES.into_iter().zip(&found) {
            let expected = &reference.cases[index].float32;
            assert_eq!(ours.len(), expected.len());
            let apart = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("{model}, case {index}: largest difference {apart:e}");
            assert!(apart < TOLERANCE, "{model}, case {index}: {apart:e}");
        }
    }
}

#[test]
fn a_prompt_with_images_has_the_same_bits_in_chunks_cached_and_in_graphs() {
    let _shared = share_driver();
    for model in TOWERS {
        let cases = cases(model);
        let engine = start(model, &["--dtype", "bfloat16", "--graphs", "off"]);
        let (scored, sampled) = (score(&engine, &cases), sample(&engine, &cases));
        assert_eq!(sample(&engine, &cases), sampled, "{model}: from the prefix cache");
        for flags in [&["--graphs", "on"][..], &["--graphs", "off", "--max-batch-tokens", "11"]] {
            let other = start(model, &[&["--dtype", "bfloat16"], flags].concat());
            assert_eq!(score(&other, &cases), scored, "{model} {flags:?}: scored");
            assert_eq!(sample(&other, &cases), sampled, "{model} {flags:?}: sampled");
        }
    }
}
