//! Results have the same bits alone or in a batch, prefilled whole or in chunks, cached or not, preempted or not,
//! sampled or scored, in a group or replayed, on one rank or on several.

use rollout_server::engine::PromptSampling;
use rollout_server::types::{SamplingParams, TokenId, TokenLogprobs, sample_seed};

use crate::common::{Engine, Reply, Request, bits, kernels, orders, random_prompts, rounds_activations};

const VOCAB: u32 = 512;
const SEED: u64 = 42;
const NEW_TOKENS: u32 = 24;

/// For each prompt, the tokens and the bits of both log-probabilities.
type Bits = Vec<Vec<(TokenId, u32, u32)>>;

/// 32 prompts; some share a prefix of several blocks, and lengths lie on both sides of block ends.
fn prompts() -> Vec<Vec<TokenId>> {
    let mut prompts = random_prompts(11, 20, 1..90, VOCAB);
    let stem = random_prompts(12, 1, 48..49, VOCAB).remove(0);
    for tail in random_prompts(13, 12, 1..20, VOCAB) {
        prompts.push(stem.iter().copied().chain(tail).collect());
    }
    prompts
}

/// Plain sampling, and sampling with all that makes a distribution depend on more than its logits.
fn all_params() -> [SamplingParams; 2] {
    let plain = SamplingParams { max_tokens: NEW_TOKENS, ..Default::default() };
    let rich = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.9,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        ..plain.clone()
    };
    [plain, rich]
}

fn generate(engine: &Engine, prompts: Vec<Vec<TokenId>>, n: u32, params: &SamplingParams) -> Reply {
    let reply = engine.generate(Request::generate(prompts, n, SEED, 0).params(params.clone()));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

/// A request for one sample of one prompt, with the seed that the prompt has as number `index` of a request with
/// `SEED`.
fn request_alone(index: usize, prompt: Vec<TokenId>, params: &SamplingParams) -> Request {
    Request::generate(vec![prompt], 1, sample_seed(SEED, index as u32, 0), 0).params(params.clone())
}

/// The results of each prompt alone: one request after the other, with an empty cache.
fn alone(engine: &Engine, params: &SamplingParams) -> Bits {
    let one = |(index, prompt)| {
        engine.reset_prefix_cache();
        let reply = engine.generate(request_alone(index, prompt, params));
        assert_eq!(reply.completions[0].cached_tokens, 0);
        reply.bits().remove(0)
    };
    prompts().into_iter().enumerate().map(one).collect()
}

/// Flags for both precisions on these instruction sets; for bfloat16 alone where float32 has the bits of another set.
fn levels(kernels: Vec<&'static str>) -> Vec<[&'static str; 4]> {
    let levels = |kernel| ["float32", "bfloat16"].map(|dtype| ["--kernel", kernel, "--dtype", dtype]);
    let is_distinct = |[_, kernel, _, dtype]: &[&str; 4]| *dtype == "bfloat16" || !rounds_activations(kernel);
    kernels.into_iter().flat_map(levels).filter(is_distinct).collect()
}

/// Runs `check` with an engine, sampling parameters and the results of each prompt alone, for both precisions and every
/// order of sums.
fn on_engines(model: &str, flags: &[&str], check: impl Fn(&Engine, &SamplingParams, &Bits)) {
    on_kernels(orders(), model, flags, check);
}

fn on_kernels(
    kernels: Vec<&'static str>,
    model: &str,
    flags: &[&str],
    check: impl Fn(&Engine, &SamplingParams, &Bits),
) {
    for level in levels(kernels) {
        let reference = Engine::start(model, &level);
        let engine = Engine::start(model, &[&level, flags].concat());
        for params in all_params() {
            println!("{model} {level:?} {flags:?} {params:?}");
            check(&engine, &params, &alone(&reference, &params));
        }
    }
}

#[test]
fn alone_is_in_a_batch_in_any_order() {
    on_kernels(kernels(), "qwen2", &[], |engine, params, alone| {
        assert_eq!(&generate(engine, prompts(), 1, params).bits(), alone, "one batch");
        // As 32 requests that arrive while others run, in both orders.
        for reverse in [false, true] {
            let mut order: Vec<_> = prompts().into_iter().enumerate().collect();
            if reverse {
                order.reverse();
            }
            let send = |(i, p): (usize, _)| (i, engine.send(request_alone(i, p, params).named(i.to_string())));
            let running: Vec<_> = order.into_iter().map(send).collect();
            for (i, request) in running {
                assert_eq!(request.wait().bits()[0], alone[i], "request {i} of its own, reverse: {reverse}");
            }
        }
        engine.assert_all_free();
    });
}

#[test]
fn whole_is_chunked_prefill() {
    for model in ["mistral", "qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe"] {
        on_engines(model, &["--max-batch-tokens", "7"], |engine, params, alone| {
            assert_eq!(&generate(engine, prompts(), 1, params).bits(), alone);
        });
    }
}

#[test]
fn a_cache_hit_is_a_miss() {
    on_engines("llama", &[], |engine, params, alone| {
        engine.reset_prefix_cache();
        assert_eq!(&generate(engine, prompts(), 1, params).bits(), alone, "cold");
        let warm = generate(engine, prompts(), 1, params);
        let cached: u32 = warm.completions.iter().map(|c| c.cached_tokens).sum();
        assert!(cached > 500, "only {cached} tokens came from the cache");
        assert_eq!(&warm.bits(), alone, "warm");
    });
}

#[test]
fn preempted_is_not_preempted() {
    // All 32 sequences are admitted, and the cache has room for a few of them.
    on_engines(
        "llama-tied",
        &["--kv-cache-bytes", PREEMPTING_CACHE, "--max-model-len", "128"],
        |engine, params, alone| {
            let before = engine.status().stats.preemptions;
            assert_eq!(&generate(engine, prompts(), 1, params).bits(), alone);
            let preemptions = engine.status().stats.preemptions - before;
            assert!(preemptions > 0, "nothing was preempted: {:?}", engine.status());
            engine.assert_all_free();
        },
    );
}

/// A KV cache with room for a few of the fixture's sequences at a time, so that others are preempted.
const PREEMPTING_CACHE: &str = "600KiB";

#[test]
fn sampled_is_scored() {
    on_engines("qwen3", &[], |engine, params, _| {
        let sampled = generate(engine, prompts(), 1, params);
        let whole: Vec<Vec<TokenId>> = prompts()
            .into_iter()
            .zip(&sampled.completions)
            .map(|(prompt, c)| prompt.into_iter().chain(c.tokens.iter().map(|t| t.token)).collect())
            .collect();
        let scored = engine.generate(Request::score(whole));
        for (completion, (_, scored)) in sampled.completions.iter().zip(&scored.prompt_logprobs) {
            let tail = &scored[scored.len() - completion.tokens.len()..];
            let raw = |tokens: &[rollout_server::types::TokenLogprobs]| -> Vec<(TokenId, u32)> {
                tokens.iter().map(|t| (t.token, t.raw.to_bits())).collect()
            };
            assert_eq!(raw(&completion.tokens), raw(tail));
        }
        engine.assert_all_free();
    });
}

#[test]
fn a_prompts_logprobs_are_its_score() {
    for level in levels(orders()) {
        let engine = Engine::start("qwen2", &level);
        let scored = engine.generate(Request::score(prompts()));
        let mut request = Request::generate(prompts(), 2, SEED, 4);
        request.kind = rollout_server::engine::RequestKind::Generate {
            n: 2,
            seed: SEED,
            prompt_logprobs: true,
            stream_tokens: true,
            return_text: false,
        };
        let generated = engine.generate(request);
        assert_eq!(generated.streamed, 32 * 2 * 4);
        for ((_, a), (_, b)) in scored.prompt_logprobs.iter().zip(&generated.prompt_logprobs) {
            assert_eq!(bits(a), bits(b), "{level:?}");
        }
        assert_eq!(scored.prompt_logprobs.len(), 32);
    }
}

/// The tokens listed beside those of a prompt, with the bits of their log-probabilities.
type Listed = Vec<Vec<(TokenId, u32)>>;

/// The most likely tokens and the named ones beside each token of each prompt.
fn listed(reply: &Reply) -> Vec<Listed> {
    let list = |token: &TokenLogprobs| token.top.iter().map(|&(token, logprob)| (token, logprob.to_bits())).collect();
    reply.prompt_logprobs.iter().map(|(_, tokens)| tokens.iter().map(list).collect()).collect()
}

/// A request for the log-probabilities of random tokens beside the last tokens of each prompt.
fn naming(seed: u64, prompts: Vec<Vec<TokenId>>) -> Request {
    let rows = prompts.iter().zip(0..).map(|(prompt, i)| {
        let rows = random_prompts(seed + i, prompt.len() - 1, 0..5, VOCAB);
        rows[rows.len() / 3..].to_vec()
    });
    Request { rows: rows.collect(), prompts, ..Request::generate(Vec::new(), 1, SEED, 1) }
}

#[test]
fn named_tokens_of_a_prompt_have_the_bits_of_their_scores() {
    for (seed, level) in (100..).step_by(1000).zip(levels(orders())) {
        println!("seed {seed}, {level:?}");
        let engine = Engine::start("qwen2", &level);
        let request = naming(seed, random_prompts(seed, 4, 2..24, VOCAB));
        let all = listed(&engine.generate(request.clone()));
        for ((prompt, rows), found) in request.prompts.iter().zip(&request.rows).zip(&all) {
            let first = prompt.len() - rows.len();
            let score = |(at, &token): (usize, &TokenId)| {
                let scored = engine.generate(Request::score(vec![[&prompt[..at], &[token]].concat()]));
                (token, scored.prompt_logprobs[0].1[at - 1].raw.to_bits())
            };
            let expected: Listed =
                (first..).zip(rows).map(|(at, row)| row.iter().map(|token| score((at, token))).collect()).collect();
            assert_eq!(*found, expected, "{prompt:?}");
        }
    }
}

#[test]
fn named_tokens_of_a_prompt_are_the_same_in_a_batch_in_chunks_and_beside_the_most_likely() {
    for (seed, level) in (200..).step_by(1000).zip(levels(orders())) {
        println!("seed {seed}, {level:?}");
        let request = naming(seed, random_prompts(seed, 8, 2..60, VOCAB));
        let engine = Engine::start("llama", &level);
        let together = listed(&engine.generate(request.clone()));
        let chunked = Engine::start("llama", &[&level[..], &["--max-batch-tokens", "7"]].concat());
        assert_eq!(listed(&chunked.generate(request.clone())), together, "in chunks");
        assert_eq!(listed(&engine.generate(request.clone())), together, "after prompts that are cached");
        let scored = Request { rows: request.rows.clone(), ..Request::score(request.prompts.clone()) };
        let mut with_likely = scored.clone();
        with_likely.params.top_logprobs = 3;
        let (scored, with_likely) = (listed(&engine.generate(scored)), listed(&engine.generate(with_likely)));
        let likely = Request {
            params: SamplingParams { top_logprobs: 3, ..Default::default() },
            ..Request::score(request.prompts.clone())
        };
        let likely = listed(&engine.generate(likely));
        for (i, expected) in together.iter().enumerate() {
            let alone = Request {
                prompts: vec![request.prompts[i].clone()],
                rows: vec![request.rows[i].clone()],
                ..request.clone()
            };
            assert_eq!(listed(&engine.generate(alone))[0], *expected, "alone");
            let unnamed = scored[i].len() - expected.len();
            assert!(scored[i][..unnamed].iter().all(Vec::is_empty));
            assert_eq!(scored[i][unnamed..], expected[..], "scored");
            let joined: Listed = likely[i].iter().zip(&scored[i]).map(|(a, b)| [&a[..], b].concat()).collect();
            assert_eq!(with_likely[i], joined, "beside the most likely");
        }
        engine.assert_all_free();
    }
}

#[test]
fn a_group_is_its_samples_replayed_by_their_seeds() {
    on_engines("mistral", &[], |engine, params, alone| {
        let group = generate(engine, prompts(), 4, params);
        for (i, completion) in group.completions.iter().enumerate() {
            let (prompt, sample) = (i / 4, i % 4);
            assert_eq!(completion.seed, sample_seed(SEED, prompt as u32, sample as u32));
            if sample == 0 {
                assert_eq!(bits(&completion.tokens), alone[prompt], "sample 0 has the request's own seed");
                continue;
            }
            let mut replay = Request::generate(vec![prompts()[prompt].clone()], 1, completion.seed, 0);
            replay.params = params.clone();
            assert_eq!(engine.generate(replay).bits()[0], bits(&completion.tokens), "prompt {prompt}, sample {sample}");
        }
        engine.assert_all_free();
    });
}

#[test]
fn tensor_parallel_is_one_rank() {
    // qwen3 has 2 KV heads, so that on 4 ranks each KV head is on two ranks.
    for (model, tp) in [
        ("qwen2", "2"),
        ("llama", "2"),
        ("llama", "4"),
        ("mistral", "4"),
        ("qwen3", "4"),
        ("smollm3", "4"),
        ("phi3", "2"),
        ("qwen_v1", "4"),
        ("qwen3_moe", "2"),
        ("qwen3_moe", "8"),
        ("qwen3_moe_60", "4"),
        ("qwen2_moe", "4"),
        ("mixtral", "4"),
        ("glm4_moe", "2"),
    ] {
        on_engines(model, &["--tp", tp], |engine, params, alone| {
            assert_eq!(&generate(engine, prompts(), 1, params).bits(), alone, "tp {tp}");
        });
    }
}

#[test]
fn long_sequences_are_the_same_whole_in_chunks_and_scored() {
    for (level, model) in levels(orders())
        .into_iter()
        .flat_map(|level| ["llama", "mistral", "qwen2", "qwen3_moe"].map(|model| (level, model)))
    {
        println!("{model} {level:?}");
        let long = random_prompts(14, 4, 400..700, VOCAB);
        let whole = Engine::start(model, &level);
        let chunked = Engine::start(model, &[&level[..], &["--max-batch-tokens", "37"]].concat());
        let what = format!("{model} {level:?}");
        let sampled = generate(&whole, long.clone(), 1, &all_params()[0]);
        assert_eq!(generate(&chunked, long.clone(), 1, &all_params()[0]).bits(), sampled.bits(), "{what}");
        let sequences = long.into_iter().zip(&sampled.completions);
        let sequences = sequences.map(|(p, c)| p.into_iter().chain(c.tokens.iter().map(|t| t.token)).collect());
        let sequences: Vec<Vec<TokenId>> = sequences.collect();
        let scored = whole.generate(Request::score(sequences.clone()));
        let scored_in_chunks = chunked.generate(Request::score(sequences));
        for (i, completion) in sampled.completions.iter().enumerate() {
            let tokens = &scored.prompt_logprobs[i].1;
            assert_eq!(bits(tokens), bits(&scored_in_chunks.prompt_logprobs[i].1), "{what}, sequence {i}");
            let tail = &tokens[tokens.len() - completion.tokens.len()..];
            let raw = |t: &rollout_server::types::TokenLogprobs| (t.token, t.raw.to_bits());
            assert!(completion.tokens.iter().map(raw).eq(tail.iter().map(raw)), "{what}, sequence {i}");
        }
    }
}

#[test]
fn a_batch_with_sampling_per_prompt_is_its_prompts_alone() {
    let [plain, rich] = all_params();
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let params = |i: usize| SamplingParams {
        max_tokens: 1 + (i as u32 * 7) % NEW_TOKENS,
        stop_token_ids: (0..i as TokenId * 9).collect(),
        ..if i.is_multiple_of(2) { &plain } else { &rich }.clone()
    };
    let own =
        |i: usize| PromptSampling { params: params(i).into(), grammar: None, seed: Some(seed.wrapping_add(i as u64)) };
    let reference = Engine::start("qwen2", &[]);
    let engine = Engine::start("qwen2", &["--max-batch-tokens", "64"]);
    // Every third prompt samples as the request says.
    let has_own = |i: &usize| i % 3 != 2;
    let mut batch = Request::generate(prompts(), 3, SEED, 0).params(rich.clone());
    batch.own = (0..prompts().len()).filter(has_own).map(|i| (i as u32, own(i))).collect();
    let together = engine.generate(batch);
    let mut lengths = std::collections::BTreeSet::new();
    for (i, prompt) in prompts().into_iter().enumerate() {
        reference.reset_prefix_cache();
        let (params, seed) = if has_own(&i) {
            (params(i), own(i).seed.unwrap())
        } else {
            (rich.clone(), sample_seed(SEED, i as u32, 0))
        };
        let alone = reference.generate(Request::generate(vec![prompt], 3, seed, 0).params(params));
        let of_batch: Vec<_> = together.completions.iter().filter(|c| c.prompt_index == i as u32).collect();
        let sampled = if has_own(&i) { 3 } else { 1 };
        for (ours, alone) in of_batch.iter().zip(&alone.completions).take(sampled) {
            assert_eq!((bits(&ours.tokens), ours.finish_reason), (bits(&alone.tokens), alone.finish_reason), "{i}");
            assert_eq!(ours.seed, alone.seed);
            lengths.insert(ours.tokens.len());
        }
    }
    assert!(lengths.len() > 5, "samples of few lengths: {lengths:?}");
    engine.assert_all_free();
}

#[test]
fn equal_prompts_of_one_request_are_no_clones() {
    let engine = Engine::start("qwen2", &[]);
    let own = |seed| PromptSampling {
        params: SamplingParams { max_tokens: NEW_TOKENS, ..Default::default() }.into(),
        grammar: None,
        seed,
    };
    let prompts = vec![vec![3, 1, 4]; 6];
    let mut request = Request::generate(prompts, 4, SEED, NEW_TOKENS);
    // The last two of them sample in a way of their own, and have no seed of their own.
    request.own = (4..6).map(|i| (i, own(None))).collect();
    let reply = engine.generate(request);
    let different: std::collections::BTreeSet<_> = reply.bits().into_iter().collect();
    assert_eq!((reply.completions.len(), different.len()), (24, 24));
}
