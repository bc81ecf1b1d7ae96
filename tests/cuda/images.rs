//! Prompts with images on a CUDA device: log-probabilities against transformers, and the same bits in chunks, from the
//! cache, in captured graphs and on two ranks.

use rollout_server::types::{SamplingParams, TokenId};

use crate::common::images::{Case, Reference, with_images};
use crate::common::{Engine, Request};
use crate::own_driver;

const MODEL: &str = "qwen2_5_vl";
/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;
const SEED: u64 = 21;
/// One token, and two images of several windows.
const CASES: [usize; 2] = [0, 2];

fn start(flags: &[&str]) -> Engine {
    Engine::start(MODEL, &[&["--device", "cuda", "--limit-mm-per-prompt", "image=3"], flags].concat())
}

fn score(engine: &Engine, cases: &[Case]) -> Vec<Vec<f32>> {
    let reply = engine.generate(with_images(Request::score, cases));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.prompt_logprobs.iter().map(|(_, tokens)| tokens.iter().map(|token| token.raw).collect()).collect()
}

/// For each sample, its tokens and the bits of both log-probabilities.
fn sample(engine: &Engine, cases: &[Case]) -> Vec<Vec<(TokenId, u32, u32)>> {
    let params = SamplingParams { max_tokens: 5, temperature: 0.8, top_p: 0.9, ..Default::default() };
    let request = |prompts| Request::generate(prompts, 2, SEED, 0).params(params.clone());
    let reply = engine.generate(with_images(request, cases));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

#[test]
fn float32_is_transformers_float32_on_one_rank_and_two() {
    let _own = own_driver();
    let reference = Reference::read(MODEL);
    let cases = CASES.map(|index| reference.cases[index].case.clone());
    for tp in ["1", "2"] {
        let found = score(&start(&["--dtype", "float32", "--tp", tp]), &cases);
        for (index, ours) in CASES.into_iter().zip(&found) {
            let expected = &reference.cases[index].float32;
            assert_eq!(ours.len(), expected.len());
            let apart = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("case {index}, tp {tp}: largest difference {apart:e}");
            assert!(apart < TOLERANCE, "case {index}, tp {tp}: {apart:e}");
        }
    }
}

#[test]
fn a_prompt_with_images_has_the_same_bits_in_chunks_cached_in_graphs_and_on_two_ranks() {
    let _own = own_driver();
    let reference = Reference::read(MODEL);
    let cases = CASES.map(|index| reference.cases[index].case.clone());
    let engine = start(&["--dtype", "bfloat16", "--graphs", "off"]);
    let (scored, sampled) = (score(&engine, &cases), sample(&engine, &cases));
    assert_eq!(sample(&engine, &cases), sampled, "from the prefix cache");
    for flags in [&["--graphs", "on"][..], &["--graphs", "off", "--max-batch-tokens", "11"], &["--tp", "2"]] {
        let other = start(&[&["--dtype", "bfloat16"], flags].concat());
        assert_eq!(score(&other, &cases), scored, "{flags:?}: scored");
        assert_eq!(sample(&other, &cases), sampled, "{flags:?}: sampled");
    }
}
