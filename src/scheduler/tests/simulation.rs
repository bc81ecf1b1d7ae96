//! Random arrivals, aborts and exhausted caches: each sample must be what it is when it runs alone.

use std::sync::Arc;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::harness::*;
use crate::cache::CacheSalt;
use crate::scheduler::*;
use crate::types::*;

const SEEDS: u64 = 400;
const MAX_MODEL_LEN: usize = 40;
const MAX_IMAGE_TOKENS: usize = 12;
const REQUESTS: u64 = 16;

pub(super) fn stop_string(logprobs: &TokenLogprobs) -> bool {
    logprobs.raw.to_bits().is_multiple_of(61)
}

/// Random limits of speculation; often such that every draft is tried, however unlikely, so that most are wrong.
fn random_speculation(rng: &mut ChaCha8Rng) -> Speculation {
    match rng.random_range(0..4) {
        0 => Speculation::OFF,
        1 => Speculation::AUTO,
        _ => Speculation { max_rows: rng.random_range(1..=40), row_cost: 0.0 },
    }
}

pub(super) fn random_config(rng: &mut ChaCha8Rng) -> (SchedulerConfig, usize, usize) {
    let config = SchedulerConfig {
        max_num_seqs: rng.random_range(1..=12),
        max_batch_tokens: *[1, 3, 8, 20, 64].choose(rng).expect("not empty"),
        max_model_len: MAX_MODEL_LEN,
        max_queued_samples: rng.random_range(8..=100),
        speculation: random_speculation(rng),
        images: ImageScheduling {
            embedding_rows: MAX_IMAGE_TOKENS + rng.random_range(0..=MAX_IMAGE_TOKENS),
            tower_blocks: rng.random_range(1..=4),
            token_blocks: rng.random_range(0..=3 * MAX_IMAGE_TOKENS),
        },
        routing_row_bytes: ROUTING_ROW_BYTES,
    };
    let block_size = rng.random_range(1..=7);
    let smallest = MAX_MODEL_LEN.div_ceil(block_size);
    (config, smallest + rng.random_range(0..=smallest), block_size)
}

fn random_prompt(rng: &mut ChaCha8Rng, max_len: usize) -> Prompt {
    let len = rng.random_range(1..=max_len);
    // Prompts are 2-periodic but for one token, so that they share prefixes of every length.
    let odd = if rng.random_bool(0.5) { rng.random_range(0..len) } else { len };
    let tokens: Vec<TokenId> = (0..len).map(|i| if i == odd { 3 } else { i as TokenId % 2 }).collect();
    let mut prompt = Prompt::from_tokens(tokens);
    if rng.random_bool(0.3) {
        let (mut images, mut at) = (Vec::new(), 0);
        while at < len && images.len() < 3 {
            let start = rng.random_range(at..len);
            let end = rng.random_range(start + 1..=len.min(start + MAX_IMAGE_TOKENS));
            // Equal pixels are one picture, of one size.
            let tokens = (end - start) as u8;
            let rgb = [rng.random_range(1..=2), tokens, 0];
            let picture = Picture::new("image", 1, 1, 1, rgb).expect("a picture of one pixel");
            images.push((picture, start..end, [1, end - start]));
            at = end + rng.random_range(0..=2);
        }
        prompt = Prompt::with_images(prompt.tokens, images);
    }
    if rng.random_bool(0.3) {
        let first = rng.random_range(0..len);
        let rows: Vec<u8> = (first..rng.random_range(first..len) + 1).map(|_| rng.random_range(0..2)).collect();
        prompt.routing = Some(ForcedRouting::new(first, 1, rows));
    }
    if rng.random_bool(0.2) {
        prompt.logprob_token_ids = vec![vec![1]; rng.random_range(0..len)].into();
    }
    prompt
}

fn random_params(rng: &mut ChaCha8Rng) -> SamplingParams {
    let max_tokens = rng.random_range(1..=36);
    SamplingParams {
        max_tokens,
        min_tokens: rng.random_range(0..=max_tokens.min(6)),
        repetition_penalty: if rng.random_bool(0.3) { 1.5 } else { 1.0 },
        eos_token_ids: if rng.random_bool(0.3) { vec![4] } else { Vec::new() },
        stop_token_ids: if rng.random_bool(0.1) { vec![0, 4] } else { Vec::new() },
        thinking: rng.random_bool(0.3).then(|| ThinkingBudget { tokens: rng.random_range(0..4), open: 1, close: 2 }),
        ..SamplingParams::default()
    }
}

pub(super) fn random_request(rng: &mut ChaCha8Rng, request: u64) -> Vec<Group> {
    let params = Arc::new(random_params(rng));
    let weights = *[PolicyWeights::Adapter(1), PolicyWeights::Base].choose(rng).expect("not empty");
    let weights = if rng.random_bool(0.2) { weights } else { PolicyWeights::Serving };
    let salt = CacheSalt { epoch: rng.random_range(0..2), weights };
    let score = rng.random_bool(0.2);
    let (returns_routing, scores_current) = (rng.random_bool(0.5), rng.random_bool(0.3));
    (0..rng.random_range(1..=4))
        .map(|prompt_index| {
            let prompt = random_prompt(rng, if score { MAX_MODEL_LEN } else { MAX_MODEL_LEN - 1 });
            let kind = if score {
                let scored_from = if rng.random() { 0 } else { rng.random_range(0..prompt.tokens.len()) };
                GroupKind::Score { scored_from }
            } else {
                let (n, seed) = (rng.random_range(1..=8), rng.random());
                let seeds = (0..n).map(|i| sample_seed(seed, prompt_index, i)).collect();
                GroupKind::Sample { seeds, prompt_logprobs: rng.random_bool(0.25) }
            };
            let (key, params) = (key(request, prompt_index), Arc::clone(&params));
            let current = scores_current.then(|| Arc::new(SamplingParams::default()));
            Group { key, prompt, params, salt, grammar: None, returns_routing, kind, current, policy: None }
        })
        .collect()
}

/// An event beside the steps, possibly during a step.
pub(super) fn disturb(harness: &mut Harness, rng: &mut ChaCha8Rng, num_requests: u64) {
    if num_requests > 0 && rng.random_bool(0.02) {
        harness.abort(RequestKey(rng.random_range(0..num_requests)));
    }
    if rng.random_bool(0.01) {
        harness.scheduler.reset_prefix_cache();
    }
    if rng.random_bool(0.01) {
        harness.reset_encoder_cache();
    }
}

/// Suspends some requests for some steps.
fn suspend(harness: &mut Harness, rng: &mut ChaCha8Rng, held: &mut Vec<RequestKey>, num_requests: u64) {
    if num_requests > 0 && rng.random_bool(0.1) {
        let request = RequestKey(rng.random_range(0..num_requests));
        harness.scheduler.suspend(request);
        held.push(request);
    }
    let all = !harness.scheduler.has_work() && num_requests == REQUESTS;
    for request in held.extract_if(.., |_| all || rng.random_bool(0.1)) {
        harness.scheduler.resume(request);
    }
    harness.scheduler.check_integrity();
}

/// Changes the policy or gives all blocks back between two steps, sometimes.
fn change(harness: &mut Harness, rng: &mut ChaCha8Rng, epoch: &mut u64) {
    if rng.random_bool(0.03) {
        *epoch += 1;
        let running = *[RunningKv::Keep, RunningKv::Recompute].choose(rng).expect("not empty");
        harness.change_policy_and_tower(*epoch, running, rng.random_bool(0.5));
        assert_eq!(harness.scheduler.stats().cached_blocks, 0, "a prefix of another policy is cached");
    }
    if rng.random_bool(0.01) {
        harness.release_all();
    }
}

/// Runs a random simulation. With `changes`, each request has the policy that serves when it arrives.
fn simulate(seed: u64, changes: bool) -> Harness {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut epoch = 2;
    let (config, num_blocks, block_size) = random_config(&mut rng);
    let mut harness = Harness::new(config, num_blocks, block_size);
    harness.stop_string = stop_string;
    harness.executor.repeats = seed.is_multiple_of(2);
    let arrival = rng.random_range(0.05..1.0);
    let (mut num_requests, mut held) = (0, Vec::new());
    for step in 0.. {
        assert!(step < 100_000, "no end in sight");
        while num_requests < REQUESTS && rng.random_bool(arrival) {
            // A full queue refuses the request, which must have no outcomes then.
            let mut groups = random_request(&mut rng, num_requests);
            if changes {
                groups.iter_mut().for_each(|group| group.salt.epoch = epoch);
            }
            let _ = harness.add(groups);
            num_requests += 1;
        }
        suspend(&mut harness, &mut rng, &mut held, num_requests);
        if num_requests == REQUESTS && !harness.scheduler.has_work() {
            break;
        }
        disturb(&mut harness, &mut rng, num_requests);
        if changes {
            change(&mut harness, &mut rng, &mut epoch);
        }
        harness.step_with(|harness| disturb(harness, &mut rng, num_requests));
    }
    harness
}

/// Runs a sample alone, in a cache that has room for everything.
fn alone(group: &Group, sample_index: usize, repeats: bool) -> GroupResult {
    let config = SchedulerConfig {
        max_num_seqs: 1,
        max_batch_tokens: MAX_MODEL_LEN,
        max_model_len: MAX_MODEL_LEN,
        max_queued_samples: 1,
        speculation: Speculation::OFF,
        images: ImageScheduling { embedding_rows: 3 * MAX_IMAGE_TOKENS, tower_blocks: 1, token_blocks: 0 },
        routing_row_bytes: ROUTING_ROW_BYTES,
    };
    let mut harness = Harness::new(config, 10, 16);
    harness.stop_string = stop_string;
    harness.executor.repeats = repeats;
    let mut group = group.clone();
    if let GroupKind::Sample { seeds, .. } = &mut group.kind {
        *seeds = vec![seeds[sample_index]];
    }
    let key = group.key;
    harness.add(vec![group]).expect("it fits");
    harness.run();
    harness.results.remove(&key).expect("it was added")
}

pub(super) fn compare_with_alone(group: &Group, result: &GroupResult, repeats: bool) {
    assert!(result.done != result.aborted, "{:?} has ended once", group.key);
    if matches!(group.kind, GroupKind::Score { .. }) && result.done {
        assert_eq!(result.prompt_logprobs, alone(group, 0, repeats).prompt_logprobs);
    }
    for (i, sample) in result.samples.iter().enumerate() {
        let expected = alone(group, i, repeats);
        if result.cached_tokens.is_some() {
            assert_eq!(result.prompt_logprobs, expected.prompt_logprobs, "{:?}", group.key);
        }
        let expected = &expected.samples[0];
        if sample.finish.is_some() {
            assert_eq!(sample, expected, "sample {i} of {:?}", group.key);
        } else {
            let n = sample.tokens.len();
            assert!(result.aborted && n < expected.tokens.len(), "sample {i} of {:?}", group.key);
            assert_eq!(sample.tokens, expected.tokens[..n], "sample {i} of {:?}", group.key);
        }
    }
}

#[test]
fn samples_are_the_same_alone_and_in_any_turmoil() {
    let base = rand::random::<u32>();
    let mut total = EngineStats::default();
    for seed in (u64::from(base)..).take(SEEDS as usize) {
        println!("seed {seed}");
        let harness = simulate(seed, false);
        let stats = harness.scheduler.stats();
        assert_eq!((stats.running_samples, stats.waiting_samples), (0, 0));
        assert_eq!(stats.free_blocks, stats.total_blocks);
        for (key, result) in &harness.results {
            compare_with_alone(&harness.groups[key], result, harness.executor.repeats);
        }
        total = total + stats;
    }
    println!("{total:?}");
    assert!(total.preemptions > 5 * SEEDS && total.cached_tokens > 15 * SEEDS, "too little turmoil: {total:?}");
    assert!(total.encoded_images > SEEDS, "too few images: {total:?}");
    let wrong = total.drafted_tokens - total.accepted_tokens;
    assert!(total.accepted_tokens > 10 * SEEDS && wrong > 10 * SEEDS, "too few drafts: {total:?}");
}

/// The harness asserts that no sequence reads KV of a policy older than its own block table, and that a prompt and its
/// log-probabilities are of one policy.
#[test]
fn policies_change_under_running_sequences() {
    let base = rand::random::<u32>();
    let (mut mixed, mut rescored, mut total) = (0, 0, EngineStats::default());
    for seed in (u64::from(base)..).take(SEEDS as usize) {
        println!("seed {seed}");
        let harness = simulate(seed, true);
        let stats = harness.scheduler.stats();
        assert_eq!((stats.running_samples, stats.waiting_samples), (0, 0));
        assert_eq!(stats.free_blocks, stats.total_blocks);
        for (key, result) in &harness.results {
            assert!(result.done != result.aborted, "{key:?} has ended once");
        }
        mixed += harness.executor.mixed;
        rescored += harness.rescored;
        total = total + stats;
    }
    println!("{mixed} sequences with KV of several policies, {rescored} tokens scored again, {total:?}");
    assert!(rescored > SEEDS, "too few tokens are scored again");
    assert!(mixed > SEEDS && total.cached_tokens > 5 * SEEDS && total.preemptions > SEEDS, "too little turmoil");
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let seed = rand::random();
    println!("seed {seed}");
    let [first, second] = [seed, seed].map(|seed| simulate(seed, true));
    assert_eq!(first.results, second.results);
    assert_eq!(first.scheduler.stats(), second.scheduler.stats());
}
