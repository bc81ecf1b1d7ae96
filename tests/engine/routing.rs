//! The experts that tokens took are returned as they are computed, and tokens can be forced to given ones.

use rollout_server::engine::{Completion, DrainMode, SleepLevel};
use rollout_server::types::{ForcedRouting, SamplingParams, TokenId, sample_seed};

use crate::common::{Engine, Push, Reply, Request, orders, random_prompts, random_weights, recorded_routing};

/// Models with experts, and bytes of a token's experts.
const MODELS: [(&str, usize); 4] = [("qwen3_moe", 4), ("qwen2_moe", 6), ("mixtral", 4), ("glm4_moe", 4)];
const VOCAB: u32 = 512;
const SEED: u64 = 42;
const NEW_TOKENS: u32 = 20;
const FLAGS: [&str; 1] = ["--return-routing"];

/// Prompts of which some share a prefix of several blocks.
fn prompts() -> Vec<Vec<TokenId>> {
    let mut prompts = random_prompts(31, 4, 1..70, VOCAB);
    let stem = random_prompts(32, 1, 40..41, VOCAB).remove(0);
    let tails = random_prompts(33, 4, 1..20, VOCAB);
    prompts.extend(tails.into_iter().map(|tail| [&stem[..], &tail].concat()));
    prompts
}

fn generate(engine: &Engine, request: Request) -> Reply {
    let reply = engine.generate(Request { return_routing: true, ..request });
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

fn request(prompts: Vec<Vec<TokenId>>, n: u32) -> Request {
    Request::generate(prompts, n, SEED, NEW_TOKENS)
}

/// The tokens of a sample with its prompt, and the experts of all that were run.
fn whole(reply: &Reply, prompts: &[Vec<TokenId>], completion: &Completion) -> (Vec<TokenId>, Vec<u8>) {
    let sampled = completion.tokens.iter().map(|token| token.token);
    let tokens = prompts[completion.prompt_index as usize].iter().copied().chain(sampled).collect();
    (tokens, [&reply.prompt_routing[&completion.prompt_index], &completion.routing[..]].concat())
}

/// Everything that equalities compare.
fn all(reply: &Reply) -> impl PartialEq + std::fmt::Debug + use<> {
    let of_samples: Vec<_> = reply.completions.iter().map(|completion| completion.routing.clone()).collect();
    (reply.bits(), of_samples, reply.prompt_routing.clone())
}

#[test]
fn scored_tokens_took_the_experts_that_transformers_chooses() {
    for (model, _) in MODELS {
        let (sequences, expected) = recorded_routing(model);
        let engine = Engine::start(model, &["--return-routing", "--dtype", "float32"]);
        let reply = generate(&engine, Request::score(sequences));
        for (index, rows) in (0..).zip(expected) {
            // The last token is not run.
            assert_eq!(reply.prompt_routing[&index], rows[..rows.len() - 1].concat(), "{model}: sequence {index}");
        }
    }
}

#[test]
fn experts_are_the_same_alone_in_a_batch_in_chunks_cached_scored_and_on_ranks() {
    for (model, row) in MODELS {
        for kernel in orders() {
            let level = ["--kernel", kernel, "--dtype", "bfloat16"];
            let engine = Engine::start(model, &[&level[..], &FLAGS].concat());
            let batch = generate(&engine, request(prompts(), 3));
            for completion in &batch.completions {
                assert_eq!(completion.routing.len(), (completion.tokens.len() - 1) * row);
                let prompt = &prompts()[completion.prompt_index as usize];
                assert_eq!(batch.prompt_routing[&completion.prompt_index].len(), prompt.len() * row);
            }
            let cached = generate(&engine, request(prompts(), 3));
            assert!(cached.completions.iter().any(|completion| completion.cached_tokens > 0));
            assert_eq!(all(&cached), all(&batch), "{model} {kernel}: cached");
            for (index, prompt) in prompts().into_iter().enumerate() {
                engine.reset_prefix_cache();
                let seed = sample_seed(SEED, index as u32, 0);
                let alone = generate(&engine, Request::generate(vec![prompt], 1, seed, NEW_TOKENS));
                assert_eq!(alone.completions[0].routing, batch.completions[3 * index].routing, "{model} {kernel}");
                assert_eq!(alone.prompt_routing[&0], batch.prompt_routing[&(index as u32)], "{model} {kernel}");
            }
            let scored: Vec<_> = batch.completions.iter().map(|c| whole(&batch, &prompts(), c)).collect();
            let score = Request::score(scored.iter().map(|(tokens, _)| tokens.clone()).collect());
            let scores = generate(&engine, score);
            for (index, (_, routing)) in (0..).zip(&scored) {
                assert_eq!(&scores.prompt_routing[&index], routing, "{model} {kernel}: scored");
            }
            for flags in [&["--max-batch-tokens", "9", "--max-num-seqs", "8"][..], &["--tp", "2"], &["--tp", "4"]] {
                let engine = Engine::start(model, &[&level[..], &FLAGS, flags].concat());
                assert_eq!(all(&generate(&engine, request(prompts(), 3))), all(&batch), "{model} {kernel} {flags:?}");
            }
            // Blocks for one long sample: others are preempted and computed again.
            let few = ["--kv-cache-bytes", "128KiB", "--max-model-len", "96"];
            let engine = Engine::start(model, &[&level[..], &FLAGS, &few].concat());
            assert_eq!(all(&generate(&engine, request(prompts(), 3))), all(&batch), "{model} {kernel}: few blocks");
            assert!(engine.status().stats.preemptions > 0, "{model} {kernel}: nothing was preempted");
        }
    }
}

#[test]
fn wrong_drafts_leave_no_experts() {
    for (model, _) in MODELS {
        let prompts: Vec<Vec<TokenId>> =
            random_prompts(35, 3, 4..20, VOCAB).iter().map(|prompt| prompt.repeat(2)).collect();
        let greedy = SamplingParams { max_tokens: 60, temperature: 0.0, ..Default::default() };
        let run = |speculation| {
            let engine = Engine::start(model, &["--return-routing", "--speculation", speculation]);
            let reply = generate(&engine, request(prompts.clone(), 2).params(greedy.clone()));
            (all(&reply), engine.status().stats)
        };
        let ((drafted, stats), (plain, _)) = (run("auto"), run("off"));
        assert_eq!(drafted, plain, "{model}");
        assert!(stats.drafted_tokens > stats.accepted_tokens && stats.accepted_tokens > 0, "{model}: {stats:?}");
    }
}

#[test]
fn replayed_experts_give_the_bits_of_chosen_ones() {
    for (model, row) in MODELS {
        for dtype in ["float32", "bfloat16"] {
            let engine = Engine::start(model, &["--return-routing", "--dtype", dtype]);
            let free = generate(&engine, request(prompts(), 1));
            let forced = |first: usize, rows: &[u8]| Some(ForcedRouting::new(first, row, rows));
            let routing = (0..prompts().len() as u32).map(|prompt| forced(0, &free.prompt_routing[&prompt]));
            let replayed = generate(&engine, Request { routing: routing.collect(), ..request(prompts(), 1) });
            assert_eq!(all(&replayed), all(&free), "{model} {dtype}");
            // Whole samples scored under their own experts, and half of each under them.
            let samples: Vec<_> = free.completions.iter().map(|c| whole(&free, &prompts(), c)).collect();
            let score = || Request::score(samples.iter().map(|(tokens, _)| tokens.clone()).collect());
            let scored = generate(&engine, score());
            let all_rows = samples.iter().map(|(_, rows)| forced(0, rows));
            let half = |rows: &[u8]| rows.len() / row / 2 * row;
            let half_rows = samples.iter().map(|(_, rows)| forced(half(rows) / row, &rows[half(rows)..]));
            for routing in [all_rows.collect(), half_rows.collect::<Vec<_>>()] {
                let replayed = generate(&engine, Request { routing, ..score() });
                assert_eq!(replayed.prompt_logprobs, scored.prompt_logprobs, "{model} {dtype}");
                assert_eq!(replayed.prompt_routing, scored.prompt_routing, "{model} {dtype}");
            }
        }
    }
}

#[test]
fn forced_experts_change_what_is_computed_and_what_is_cached() {
    for (model, row) in MODELS {
        let engine = Engine::start(model, &FLAGS);
        let prompt = random_prompts(34, 1, 60..61, VOCAB);
        let free = generate(&engine, request(prompt.clone(), 2));
        // Experts 0 and 1, or 0, 1 and 2, of both layers.
        let layer: Vec<u8> = (0..row as u8 / 2).collect();
        let rows = layer.repeat(2 * 30);
        let run = |first| {
            let routing = vec![Some(ForcedRouting::new(first, row, rows.clone()))];
            generate(&engine, Request { routing, ..request(prompt.clone(), 2) })
        };
        let forced = run(20);
        assert!(forced.bits() != free.bits(), "{model}: the bits are those of other experts");
        assert_eq!(forced.completions[0].cached_tokens, 16, "{model}: the block before the first forced token");
        let mut sorted = forced.prompt_routing[&0][20 * row..50 * row].to_vec();
        sorted.chunks_exact_mut(layer.len()).for_each(<[u8]>::sort_unstable);
        assert_eq!(sorted, rows, "{model}");
        let again = run(20);
        assert_eq!(all(&again), all(&forced), "{model}");
        assert_eq!(again.completions[0].cached_tokens, 48, "{model}: all full blocks");
        engine.reset_prefix_cache();
        assert_eq!(all(&run(20)), all(&forced), "{model}: not cached");
        assert_eq!(all(&generate(&engine, request(prompt.clone(), 2))), all(&free), "{model}: free again");
    }
}

#[test]
fn experts_are_those_of_the_policy_that_computed_them() {
    for (model, _) in MODELS {
        let engine = Engine::start(model, &FLAGS);
        let free = generate(&engine, request(prompts(), 2));
        let weights = random_weights(engine.parameters(), 9);
        engine.push(Push::full(&weights)).expect("a valid push");
        let pushed = generate(&engine, request(prompts(), 2));
        assert!(pushed.prompt_routing != free.prompt_routing, "{model}");
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("it sleeps");
        engine.wake(true, true).expect("it wakes");
        assert_eq!(all(&generate(&engine, request(prompts(), 2))), all(&pushed), "{model}: after a sleep");
    }
}
