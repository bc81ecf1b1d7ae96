//! Prompts with images: log-probabilities against transformers, and the same bits alone, in a batch, in chunks, from
//! the cache, after a preemption, scored, and on several ranks.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_server::types::{Picture, SamplingParams, TokenId, sample_seed};

use crate::common::images::{Case, Reference, SIDE, config, image_token, tile_side, with_images};
use crate::common::{Engine, Reply, Request};

const MODELS: [&str; 4] = ["qwen2_5_vl", "qwen2_5_vl-tied", "internvl3", "internvl3-chat"];
/// One model of each tower.
const TOWERS: [&str; 2] = ["qwen2_5_vl", "internvl3"];
/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;
const SEED: u64 = 21;
const NEW_TOKENS: u32 = 12;

/// Raw log-probabilities of all tokens of each case but its first.
fn score(engine: &Engine, cases: &[Case]) -> Vec<Vec<f32>> {
    let reply = engine.generate(with_images(Request::score, cases));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.prompt_logprobs.iter().map(|(_, tokens)| tokens.iter().map(|token| token.raw).collect()).collect()
}

fn generate(engine: &Engine, cases: &[Case], n: u32, params: &SamplingParams) -> Reply {
    let request = |prompts| Request::generate(prompts, n, SEED, 0).params(params.clone());
    let reply = engine.generate(with_images(request, cases));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

fn params() -> SamplingParams {
    SamplingParams { max_tokens: NEW_TOKENS, top_p: 0.9, ..Default::default() }
}

#[test]
fn float32_is_transformers_float32() {
    for model in MODELS {
        let reference = Reference::read(model);
        let cases: Vec<Case> = reference.cases.iter().map(|scored| scored.case.clone()).collect();
        assert!(cases.len() >= 5 && cases.iter().any(|case| case.images.len() > 1), "{model}: too few cases");
        for (device, tp) in [("cpu", "1"), ("cpu", "2"), ("cpu", "4"), ("reference", "1")] {
            if !is_divided_by(model, tp) {
                continue;
            }
            let engine = Engine::start(model, &["--dtype", "float32", "--tp", tp, "--device", device]);
            for (index, (ours, scored)) in score(&engine, &cases).iter().zip(&reference.cases).enumerate() {
                assert_eq!(ours.len(), scored.float32.len());
                let apart = ours.iter().zip(&scored.float32).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < TOLERANCE, "{model} on {device}, tp {tp}, case {index}: {apart:e}");
            }
            let params = SamplingParams { temperature: 0.0, max_tokens: 32, ..Default::default() };
            let greedy = generate(&engine, std::slice::from_ref(&reference.greedy_prompt), 1, &params);
            let tokens: Vec<_> = greedy.completions[0].tokens.iter().map(|token| token.token).collect();
            assert_eq!(tokens, reference.greedy_tokens, "{model} on {device}, tp {tp}: greedy continuation");
        }
    }
}

#[test]
fn bfloat16_is_no_farther_from_float32_than_transformers_bfloat16() {
    for model in MODELS {
        let reference = Reference::read(model);
        let cases: Vec<Case> = reference.cases.iter().map(|scored| scored.case.clone()).collect();
        let engine = Engine::start(model, &["--dtype", "bfloat16"]);
        let float32: Vec<f32> = reference.cases.iter().flat_map(|scored| scored.float32.clone()).collect();
        let mean = |values: Vec<f32>| {
            let apart = values.iter().zip(&float32).map(|(a, b)| f64::from((a - b).abs()));
            apart.sum::<f64>() / float32.len() as f64
        };
        let ours = mean(score(&engine, &cases).concat());
        let theirs = mean(reference.cases.iter().flat_map(|scored| scored.bfloat16.clone()).collect());
        println!("{model}: {ours:.5}, transformers' {theirs:.5}");
        assert!(ours > 0.0 && ours <= theirs, "{model}: {ours:e} > {theirs:e}");
    }
}

/// Whether so many ranks can share the heads of the vision tower.
fn is_divided_by(model: &str, ranks: &str) -> bool {
    let tower = &config(model)["vision_config"];
    let heads = ["num_heads", "num_attention_heads"].into_iter().find_map(|name| tower[name].as_u64());
    heads.unwrap().is_multiple_of(ranks.parse().unwrap())
}

/// Prompts with one to three random pictures at random places, some of them adjacent or at an end; two prompts have the
/// same tokens with other pictures of the same size, and one has no picture.
fn random_cases(model: &str, seed: u64) -> Vec<Case> {
    println!("prompts from seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let image_token = image_token(model);
    let size = |rng: &mut ChaCha8Rng| match tile_side(model) {
        Some(side) => [side, side, rng.random_range(1..=4)],
        None => [SIDE * rng.random_range(1..=5), SIDE * rng.random_range(1..=7), 1],
    };
    let picture = |rng: &mut ChaCha8Rng, [height, width, tiles]: [usize; 3]| {
        let rgb: Vec<u8> = (0..3 * height * width * tiles).map(|_| rng.random()).collect();
        Picture::new("image", width as u32, height as u32, tiles as u32, rgb).unwrap()
    };
    let mut cases = Vec::new();
    for _ in 0..8 {
        let (mut tokens, mut pictures): (Vec<TokenId>, _) = (Vec::new(), Vec::new());
        for _ in 0..rng.random_range(1..=3) {
            tokens.extend((0..rng.random_range(0..9)).map(|_| rng.random_range(10..400)));
            let size = size(&mut rng);
            tokens.extend(vec![image_token; size.iter().product::<usize>() / (SIDE * SIDE)]);
            pictures.push(picture(&mut rng, size));
        }
        tokens.extend((0..rng.random_range(0..9)).map(|_| rng.random_range(10..400)));
        let size_of = |p: &Picture| [p.height(), p.width(), p.tiles()].map(|size| size as usize);
        let others = pictures.iter().map(|p| picture(&mut rng, size_of(p))).collect();
        cases.push(Case::new(tokens.clone(), pictures, image_token));
        if cases.len() == 1 {
            cases.push(Case::new(tokens, others, image_token));
        }
    }
    cases.push(Case { tokens: (10..40).collect(), images: Vec::new() });
    cases
}

/// The results of each prompt alone, with an empty cache.
fn alone(engine: &Engine, cases: &[Case]) -> Vec<Vec<(TokenId, u32, u32)>> {
    let one = |(index, case): (usize, &Case)| {
        engine.reset_prefix_cache();
        let seed = sample_seed(SEED, index as u32, 0);
        let request = |prompts| Request::generate(prompts, 1, seed, 0).params(params());
        let reply = engine.generate(with_images(request, std::slice::from_ref(case)));
        assert_eq!(reply.completions[0].cached_tokens, 0);
        reply.bits().remove(0)
    };
    cases.iter().enumerate().map(one).collect()
}

#[test]
fn alone_is_in_a_batch_chunked_cached_preempted_and_on_several_ranks() {
    for model in MODELS {
        for dtype in ["float32", "bfloat16"] {
            let cases = random_cases(model, 31);
            let engine = Engine::start(model, &["--dtype", dtype]);
            let expected = alone(&engine, &cases);
            assert_ne!(expected[0], expected[1], "other pictures of the same size give other samples");
            engine.reset_prefix_cache();
            assert!(generate(&engine, &cases, 1, &params()).bits() == expected, "{model} {dtype}: one batch");
            let warm = generate(&engine, &cases, 1, &params());
            assert!(warm.completions.iter().map(|c| c.cached_tokens).sum::<u32>() > 50, "{model}: cached tokens");
            assert!(warm.bits() == expected, "{model} {dtype}: cached");
            engine.assert_all_free();
            let ranks = [["--tp", "2"], ["--tp", "4"]];
            let ranks = ranks.iter().filter(|[_, ranks]| is_divided_by(model, ranks)).map(|flags| &flags[..]);
            let others: [&[&str]; 3] = [
                &["--max-batch-tokens", "1"],
                &["--max-batch-tokens", "5"],
                &["--kv-cache-bytes", "80KiB", "--max-model-len", "160"],
            ];
            for flags in others.into_iter().chain(ranks) {
                let engine = Engine::start(model, &[&["--dtype", dtype], flags].concat());
                assert!(generate(&engine, &cases, 1, &params()).bits() == expected, "{model} {dtype}: {flags:?}");
            }
        }
    }
}

#[test]
fn sampled_is_scored_and_a_group_is_its_samples() {
    for model in TOWERS {
        let cases = random_cases(model, 32);
        let engine = Engine::start(model, &["--dtype", "bfloat16"]);
        let groups = generate(&engine, &cases, 3, &SamplingParams { top_p: 1.0, ..params() });
        let whole: Vec<Case> = groups
            .completions
            .iter()
            .map(|completion| {
                let case = &cases[completion.prompt_index as usize];
                let sampled = completion.tokens.iter().map(|token| token.token);
                Case { tokens: case.tokens.iter().copied().chain(sampled).collect(), images: case.images.clone() }
            })
            .collect();
        for (completion, scored) in groups.completions.iter().zip(score(&engine, &whole)) {
            let sampled: Vec<u32> = completion.tokens.iter().map(|token| token.raw.to_bits()).collect();
            let scored: Vec<u32> = scored.iter().map(|logprob| logprob.to_bits()).collect();
            let (prompt, sample) = (completion.prompt_index, completion.sample_index);
            assert!(scored.ends_with(&sampled), "{model}: prompt {prompt}, sample {sample}");
        }
    }
}

#[test]
fn with_drafts_is_without() {
    for model in TOWERS {
        let cases = random_cases(model, 34);
        // Drafts are found in the samples of the group that came before, which are alike at low temperatures.
        let flags = ["--dtype", "bfloat16", "--max-batch-tokens", "48", "--max-num-seqs", "2", "--speculation"];
        let [with, without] =
            ["auto", "off"].map(|speculation| Engine::start(model, &[&flags[..], &[speculation]].concat()));
        for temperature in [0.0, 0.1] {
            let params = SamplingParams { temperature, max_tokens: 96, ..Default::default() };
            let [found, expected] = [&with, &without].map(|engine| generate(engine, &cases, 3, &params).bits());
            assert!(found == expected, "{model}, temperature {temperature}");
        }
        let (stats, off) = (with.status().stats, without.status().stats);
        println!("{model}: {} of {} drafts were right", stats.accepted_tokens, stats.drafted_tokens);
        assert!(stats.accepted_tokens > 50 && off.drafted_tokens == 0, "{model}: {stats:?}");
    }
}

#[test]
fn no_sample_has_a_placeholder() {
    for model in TOWERS {
        let (config, cases) = (config(model), random_cases(model, 33));
        let of_config = ["image_token_id", "video_token_id"].into_iter().filter_map(|name| config[name].as_u64());
        let placeholders: Vec<TokenId> = of_config.map(|token| token as TokenId).collect();
        let engine = Engine::start(model, &["--dtype", "float32"]);
        for temperature in [0.0, 1.0] {
            let logit_bias = placeholders.iter().map(|token| (*token, 100.0)).collect();
            let params = SamplingParams { temperature, logit_bias, ..params() };
            let reply = generate(&engine, &cases, 2, &params);
            let sampled = reply.completions.iter().flat_map(|completion| &completion.tokens);
            assert!(sampled.map(|token| token.token).all(|token| !placeholders.contains(&token)), "{model}");
        }
    }
}
