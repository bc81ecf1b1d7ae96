//! The rules one by one, each in the smallest setting that shows it.

use std::sync::Arc;

use super::harness::*;
use crate::cache::CacheSalt;
use crate::error::Error;
use crate::scheduler::*;
use crate::types::*;

pub(super) const BLOCK_SIZE: usize = 4;

pub(super) fn config(max_num_seqs: usize, max_batch_tokens: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_batch_tokens,
        max_model_len: 100,
        max_queued_samples: 50,
        speculation: Speculation::OFF,
        images: ImageScheduling::default(),
        routing_row_bytes: 0,
    }
}

pub(super) fn prompt(len: usize) -> Vec<TokenId> {
    (0..len as TokenId).collect()
}

pub(super) fn scored(key: GroupKey, len: usize) -> Group {
    Group { kind: GroupKind::Score { scored_from: 0 }, ..group(key, &prompt(len), 1, 1) }
}

fn with_prompt_logprobs(mut group: Group) -> Group {
    if let GroupKind::Sample { prompt_logprobs, .. } = &mut group.kind {
        *prompt_logprobs = true;
    }
    group
}

/// `(start, number of tokens)` of each sequence of a plan.
pub(super) fn shape(plan: &StepPlan) -> Vec<(usize, usize)> {
    plan.sequences.iter().map(|planned| (planned.start, planned.tokens.len())).collect()
}

fn num_copies(plans: &[StepPlan]) -> usize {
    plans.iter().map(|plan| plan.copies.len()).sum()
}

#[test]
fn running_sequences_come_first_and_prompts_take_what_is_left() {
    let mut harness = Harness::new(config(8, 10), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(3), 1, 9), group(key(0, 1), &[4; 20], 1, 9)]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 3), (0, 7)]);
    assert_eq!(shape(&harness.step()), [(3, 1), (7, 9)]);
    harness.add(vec![group(key(1, 0), &[3; 20], 1, 9)]).expect("room");
    assert_eq!(shape(&harness.step()), [(4, 1), (16, 4), (0, 5)]);
    assert_eq!(shape(&harness.step()), [(5, 1), (20, 1), (5, 8)]);
}

#[test]
fn only_the_last_chunk_of_a_prompt_asks_for_logits() {
    let mut harness = Harness::new(config(8, 8), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(20), 1, 1)]).expect("room");
    let rows: Vec<usize> = harness.run().iter().map(|plan| plan.sequences[0].logits.len()).collect();
    assert_eq!(rows, [0, 0, 1]);
}

#[test]
fn a_group_computes_its_prompt_once_and_forks() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(10), 5, 3)]).expect("room");
    let plan = harness.step();
    assert_eq!(shape(&plan), [(0, 10)]);
    assert_eq!(plan.sequences[0].logits.len(), 1, "one row of logits");
    let tasks: Vec<(u32, u64)> = plan.tasks().map(|task| (task.sample.sample_index, task.seed)).collect();
    assert_eq!(tasks, (0..5).map(|i| (i, sample_seed(7, 0, i))).collect::<Vec<_>>());
    assert_eq!(shape(&harness.step()), [(10, 1); 5]);
    assert_eq!(shape(&harness.step()), [(11, 1); 5]);
    assert!(!harness.scheduler.has_work());
}

#[test]
fn a_partial_block_is_copied_by_all_who_write_but_the_last() {
    for (len, n, max_tokens, copies) in [(10, 4, 3, 3), (8, 4, 3, 0), (10, 1, 3, 0), (10, 4, 1, 0), (2, 2, 2, 1)] {
        let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
        harness.add(vec![group(key(0, 0), &prompt(len), n, max_tokens)]).expect("room");
        let plans = harness.run();
        assert_eq!(num_copies(&plans), copies, "prompt of {len}, {n} samples of {max_tokens}");
        for copy in plans.iter().flat_map(|plan| &plan.copies) {
            assert_eq!(copy.tokens, len % BLOCK_SIZE);
        }
    }
}

#[test]
fn samples_without_a_place_hold_only_the_blocks_of_the_prompt() {
    let mut harness = Harness::new(config(2, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(10), 5, 6)]).expect("room");
    harness.step();
    harness.step();
    let stats = harness.scheduler.stats();
    assert_eq!((stats.running_samples, stats.waiting_samples), (2, 3));
    assert_eq!(stats.total_blocks - stats.free_blocks, 3 + 2, "3 of the prompt, 2 copies of its last");
    let rest = harness.run();
    assert_eq!(num_copies(&rest), 2, "two more copy, the last keeps the original");
    assert!(rest.iter().all(|plan| plan.sequences.iter().all(|planned| planned.tokens.len() == 1)));
}

#[test]
fn cached_tokens_are_whole_blocks_and_never_the_last_token() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    let mut cached = |request: u64, len: usize, salt: CacheSalt| {
        harness.add(vec![Group { salt, ..group(key(request, 0), &prompt(len), 2, 2) }]).expect("room");
        let first = harness.step().sequences[0].start;
        harness.run();
        assert_eq!(harness.results[&key(request, 0)].cached_tokens, Some(first as u32));
        first
    };
    let salt = CacheSalt { epoch: 3, weights: PolicyWeights::Serving };
    assert_eq!(cached(0, 8, salt), 0);
    assert_eq!(cached(1, 8, salt), 4, "the last token must run for its logits");
    assert_eq!(cached(2, 9, salt), 8);
    assert_eq!(cached(3, 9, CacheSalt { epoch: 4, ..salt }), 0, "KV of another version");
    assert_eq!(cached(4, 9, CacheSalt { weights: PolicyWeights::Adapter(0), ..salt }), 0, "KV of an adapter");
    assert_eq!(cached(5, 9, CacheSalt { weights: PolicyWeights::Base, ..salt }), 0, "KV of the base");
    let stats = harness.scheduler.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (8 + 8 + 9 * 4, 12));
    assert!(harness.scheduler.reset_prefix_cache() > 0);
    assert_eq!(harness.scheduler.stats().cached_blocks, 0);
}

#[test]
fn output_is_cached_too() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(6), 1, 7)]).expect("room");
    harness.run();
    let mut next = prompt(6);
    next.extend(harness.results[&key(0, 0)].samples[0].tokens.iter().map(|token| token.token));
    harness.add(vec![group(key(1, 0), &next, 1, 1)]).expect("room");
    assert_eq!(harness.step().sequences[0].start, 12);
}

#[test]
fn scoring_asks_for_every_token_but_runs_not_the_last() {
    let mut harness = Harness::new(config(8, 6), 50, BLOCK_SIZE);
    for request in 0..2 {
        harness.add(vec![scored(key(request, 0), 11)]).expect("room");
        let plans = harness.run();
        assert_eq!(plans.iter().map(shape).collect::<Vec<_>>(), [[(0, 6)], [(6, 4)]], "nothing is read from the cache");
        let targets: Vec<TokenId> = plans.iter().flat_map(StepPlan::tasks).filter_map(|task| task.target).collect();
        assert_eq!(targets, prompt(11)[1..]);
        let result = &harness.results[&key(request, 0)];
        assert!(result.done);
        assert_eq!(result.prompt_logprobs.as_ref().map(Vec::len), Some(10));
    }
}

#[test]
fn a_single_token_is_scored_with_nothing() {
    let mut harness = Harness::new(config(8, 6), 50, BLOCK_SIZE);
    harness.add(vec![scored(key(0, 0), 1)]).expect("room");
    assert_eq!(harness.run().iter().flat_map(StepPlan::tasks).count(), 0);
    let result = &harness.results[&key(0, 0)];
    assert!(result.done);
    assert_eq!(result.prompt_logprobs, Some(Vec::new()));
}

#[test]
fn prompt_logprobs_equal_the_score() {
    let mut harness = Harness::new(config(8, 4), 50, BLOCK_SIZE);
    harness.add(vec![with_prompt_logprobs(group(key(0, 0), &prompt(10), 2, 2))]).expect("room");
    harness.add(vec![scored(key(1, 0), 10)]).expect("room");
    harness.run();
    assert_eq!(harness.results[&key(0, 0)].prompt_logprobs, harness.results[&key(1, 0)].prompt_logprobs);
}

#[test]
fn preempted_prompt_logprobs_continue_where_they_were() {
    let mut harness = Harness::new(config(10, 10), 22, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(3), 8, 16)]).expect("room");
    harness.step();
    harness.add(vec![with_prompt_logprobs(group(key(1, 0), &[1; 20], 1, 4))]).expect("room");
    let (mut targets, mut preempted_at) = (0, 0);
    while harness.scheduler.has_work() {
        targets += harness.step().tasks().filter(|task| task.target.is_some()).count();
        let sequences = harness.scheduler.waiting.values().filter(|sequence| sequence.table.is_empty());
        let collected = sequences.filter_map(|sequence| sequence.prompt_logprobs.as_ref());
        preempted_at = collected.map(Vec::len).max().unwrap_or(0).max(preempted_at);
    }
    assert!((1..19).contains(&preempted_at), "preempted in the middle of its prompt, after {preempted_at}");
    assert_eq!(targets, 19, "no position is asked twice");
    assert_eq!(harness.results[&key(1, 0)].prompt_logprobs.as_ref().map(Vec::len), Some(19));
}

#[test]
fn a_group_is_admitted_only_if_the_running_keep_a_block_each() {
    for (blocks, admitted) in [(3 + 4 + 1, true), (3 + 4, false)] {
        let mut harness = Harness::new(config(4, 100), blocks, BLOCK_SIZE);
        harness.add(vec![group(key(0, 0), &[0; 10], 1, 4), group(key(1, 0), &[1; 16], 1, 4)]).expect("room");
        assert_eq!(harness.step().sequences.len() == 2, admitted, "{blocks} blocks");
    }
}

#[test]
fn the_youngest_gives_way_and_the_oldest_is_never_stopped() {
    let mut harness = Harness::new(config(4, 100), 10, BLOCK_SIZE);
    let groups = (0..3).map(|i| group(key(0, i), &[i; 5], 1, 30)).collect();
    harness.add(groups).expect("room");
    let mut finished = Vec::new();
    while harness.scheduler.has_work() {
        let plan = harness.step();
        let oldest = (0..3).find(|i| !finished.contains(i)).expect("one is left");
        assert_eq!(plan.tasks().next().map(|task| task.sample.group.prompt_index), Some(oldest));
        finished = (0..3).filter(|&i| harness.results[&key(0, i)].done).collect();
    }
    assert!(harness.scheduler.stats().preemptions > 0);
}

#[test]
fn a_preempted_sample_computes_prompt_and_output_again() {
    let mut harness = Harness::new(config(4, 100), 8, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &[0; 6], 1, 20), group(key(0, 1), &[1; 6], 1, 20)]).expect("room");
    while harness.scheduler.stats().preemptions == 0 {
        harness.step();
    }
    let made = harness.results[&key(0, 1)].samples[0].tokens.len();
    harness.scheduler.reset_prefix_cache();
    while harness.scheduler.stats().running_samples > 0 {
        harness.step();
    }
    let plan = harness.step();
    assert_eq!(shape(&plan), [(0, 6 + made)]);
    assert_eq!(plan.tasks().map(|task| task.output_index as usize).collect::<Vec<_>>(), [made]);
    let stats = harness.scheduler.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (12, 0), "a prompt is counted once");
}

#[test]
fn a_request_of_one_prompt_does_not_wait_for_a_request_of_many() {
    let mut harness = Harness::new(config(1, 100), 50, BLOCK_SIZE);
    harness.add((0..20).map(|i| group(key(0, i), &prompt(5), 1, 2)).collect()).expect("room");
    harness.step();
    harness.add(vec![group(key(1, 0), &prompt(5), 1, 2), group(key(1, 1), &prompt(5), 1, 2)]).expect("room");
    let mut order: Vec<GroupKey> = harness.run().iter().flat_map(StepPlan::tasks).map(|t| t.sample.group).collect();
    order.dedup();
    assert_eq!(order[..6], [key(0, 0), key(0, 1), key(1, 0), key(0, 2), key(1, 1), key(0, 3)]);
}

#[test]
fn a_later_prompt_of_a_request_does_not_hold_up_those_that_run() {
    let mut harness = Harness::new(config(2, 8), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &[0; 6], 1, 1), group(key(0, 1), &[1; 40], 1, 1)]).expect("room");
    harness.add(vec![group(key(1, 0), &[2; 2], 1, 20)]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 6), (0, 2)]);
    assert_eq!(harness.results[&key(0, 0)].cached_tokens, Some(0));
    while !harness.results[&key(0, 1)].done {
        assert!(harness.step().tasks().any(|task| task.sample.group == key(1, 0)), "one token in every step");
    }
}

#[test]
fn a_long_sequence_that_waits_for_blocks_is_not_overtaken() {
    let mut harness = Harness::new(config(4, 100), 12, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &[0; 20], 1, 4)]).expect("room");
    harness.step();
    harness.add(vec![group(key(1, 0), &[1; 40], 1, 4)]).expect("room");
    harness.add(vec![group(key(2, 0), &[2; 4], 1, 4)]).expect("room");
    let mut order: Vec<u64> =
        harness.run().iter().flat_map(StepPlan::tasks).map(|t| t.sample.group.request.0).collect();
    order.dedup();
    assert_eq!(order[..2], [0, 1]);
}

#[test]
fn a_full_queue_refuses_the_whole_request_with_numbers() {
    let mut harness = Harness::new(SchedulerConfig { max_queued_samples: 9, ..config(4, 100) }, 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(4), 8, 2)]).expect("room");
    let error = harness.add(vec![group(key(1, 0), &prompt(4), 1, 2), scored(key(1, 1), 4)]).expect_err("one too many");
    let Error::ResourceExhausted(message) = error else { panic!("{error:?}") };
    assert!(message.contains("8 samples wait, 2 more") && message.contains("9 may wait"), "{message}");
    assert_eq!(harness.scheduler.stats().waiting_samples, 8);
    harness.add(vec![scored(key(2, 0), 4)]).expect("room for one");
    harness.run();
    assert!(harness.results[&key(0, 0)].done && harness.results[&key(2, 0)].done);
}

#[test]
fn what_could_never_run_is_refused() {
    let mut harness = Harness::new(config(4, 100), 10, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(20), 8, 20)]).expect("one sample fills the cache");
    let error = harness.add(vec![group(key(1, 7), &prompt(20), 1, 21)]).expect_err("one token too many");
    let Error::ResourceExhausted(message) = error else { panic!("{error:?}") };
    assert!(message.contains("prompts[7]") && message.contains("11 KV blocks"), "{message}");
    for (len, score) in [(0, false), (0, true), (100, false), (101, true)] {
        let bad = if score { scored(key(1, 7), len) } else { group(key(1, 7), &prompt(len), 1, 1) };
        let error = harness.add(vec![bad]).expect_err("a prompt of a bad length");
        assert!(matches!(&error, Error::InvalidArgument { field, .. } if field == "prompts[7]"), "{error:?}");
    }
    harness.run();
    assert!(harness.results[&key(0, 0)].samples.iter().all(|sample| sample.tokens.len() == 20));
}

#[test]
fn max_tokens_beyond_the_context_are_cut_by_it() {
    let mut harness = Harness::new(SchedulerConfig { max_model_len: 40, ..config(4, 100) }, 10, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(30), 2, u32::MAX)]).expect("the context fits");
    harness.run();
    for sample in &harness.results[&key(0, 0)].samples {
        assert_eq!((sample.tokens.len(), sample.finish), (10, Some(FinishReason::Length)));
    }
}

#[test]
fn an_abort_gives_everything_back_wherever_it_is() {
    let mut harness = Harness::new(config(2, 12), 50, BLOCK_SIZE);
    harness.add((0..3).map(|i| group(key(0, i), &[i; 10], 3, 8)).collect()).expect("room");
    harness.add(vec![group(key(1, 0), &prompt(4), 1, 3)]).expect("room");
    harness.step();
    harness.step();
    assert_eq!(harness.abort(RequestKey(0)).len(), 9);
    assert_eq!(harness.scheduler.stats().waiting_samples + harness.scheduler.stats().running_samples, 1);
    harness.run();
    assert!(harness.results[&key(1, 0)].done);
    assert_eq!(harness.scheduler.stats().free_blocks, 50);
    assert!(harness.abort(RequestKey(0)).is_empty() && harness.scheduler.abort(RequestKey(77)).is_empty());
}

#[test]
fn an_abort_while_a_step_is_under_way_drops_its_answers() {
    let mut harness = Harness::new(config(4, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(10), 3, 8)]).expect("room");
    harness.add(vec![group(key(1, 0), &prompt(4), 1, 3)]).expect("room");
    harness.step_with(|harness| assert_eq!(harness.abort(RequestKey(0)).len(), 3));
    harness.run();
    assert!(harness.results[&key(0, 0)].samples.iter().all(|sample| sample.tokens.is_empty()));
    assert_eq!(harness.results[&key(1, 0)].samples[0].tokens.len(), 3);
}

#[test]
fn a_finished_sample_leaves_at_once() {
    let mut harness = Harness::new(config(4, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(10), 2, 8)]).expect("room");
    harness.step();
    let sample = |sample_index| SampleKey { group: key(0, 0), sample_index };
    harness.scheduler.finish(sample(1));
    harness.scheduler.finish(sample(1));
    harness.scheduler.check_integrity();
    assert_eq!(shape(&harness.step()), [(10, 1)]);
    harness.scheduler.finish(sample(0));
    assert!(!harness.scheduler.has_work());
    assert_eq!(harness.scheduler.stats().free_blocks, 50);
}

#[test]
fn history_is_carried_only_when_a_penalty_needs_it() {
    let mut harness = Harness::new(config(4, 100), 50, BLOCK_SIZE);
    let mut penalised = with_prompt_logprobs(group(key(0, 0), &prompt(3), 2, 3));
    penalised.params = SamplingParams { presence_penalty: 1.0, ..(*penalised.params).clone() }.into();
    harness.add(vec![penalised, group(key(0, 1), &prompt(3), 1, 3)]).expect("room");
    for step in 0..3 {
        let plan = harness.step();
        for task in plan.tasks() {
            let penalised = task.sample.group.prompt_index == 0 && task.target.is_none();
            let lengths = task.history.as_ref().map(|history| (history.prompt.len(), history.output.len()));
            assert_eq!(lengths, penalised.then_some((3, step)));
            assert_eq!(task.output_index as usize, step);
        }
    }
}

#[test]
#[should_panic(expected = "has not been answered")]
fn a_plan_is_answered_before_the_next() {
    let mut harness = Harness::new(config(4, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(3), 2, 3)]).expect("room");
    harness.scheduler.schedule();
    harness.scheduler.schedule();
}

#[test]
fn a_kept_sequence_goes_on_and_shares_nothing() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(9), 2, 20)]).expect("room");
    (0..3).for_each(|_| drop(harness.step()));
    harness.change_policy(1, RunningKv::Keep);
    assert_eq!(shape(&harness.step()), [(11, 1), (11, 1)], "nothing is computed again");
    // The same prompt under the new policy finds no cached block, whether computed before the change or after it.
    let salt = CacheSalt { epoch: 1, weights: PolicyWeights::Serving };
    harness.add(vec![Group { salt, ..group(key(1, 0), &prompt(9), 1, 20) }]).expect("room");
    assert_eq!(shape(&harness.step())[2], (0, 9));
    harness.run();
    assert_eq!(harness.results[&key(1, 0)].cached_tokens, Some(0));
    assert_eq!(harness.scheduler.stats().preemptions, 0);
}

#[test]
fn a_recomputed_sequence_starts_again_and_is_shared() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(9), 1, 20)]).expect("room");
    (0..3).for_each(|_| drop(harness.step()));
    harness.change_policy(1, RunningKv::Recompute);
    assert_eq!(shape(&harness.step()), [(0, 12)]);
    let salt = CacheSalt { epoch: 1, weights: PolicyWeights::Serving };
    harness.add(vec![Group { salt, ..group(key(1, 0), &prompt(9), 1, 20) }]).expect("room");
    assert_eq!(shape(&harness.step())[1], (8, 1), "two blocks of the new policy are found");
    assert_eq!(harness.scheduler.stats().preemptions, 0, "a change of the policy is no preemption");
    harness.run();
}

#[test]
fn a_prompt_is_of_one_policy_even_if_its_sequence_is_kept() {
    let mut harness = Harness::new(config(8, 8), 50, BLOCK_SIZE);
    harness.add(vec![scored(key(0, 0), 20), with_prompt_logprobs(group(key(1, 0), &prompt(20), 1, 3))]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 8)]);
    harness.change_policy(1, RunningKv::Keep);
    assert_eq!(shape(&harness.step()), [(0, 8)], "the prompt starts again");
    assert_eq!(harness.scheduler.started_requests(), [RequestKey(0)].into(), "the other waits in the queue");
    // The harness checks the log-probabilities as they come.
    harness.run();
    assert_eq!(harness.results[&key(0, 0)].prompt_logprobs.as_ref().map(Vec::len), Some(19));
}

#[test]
fn giving_up_all_blocks_loses_no_token() {
    let requests = || vec![group(key(0, 0), &prompt(9), 3, 12), scored(key(0, 1), 30)];
    let [expected, found] = [false, true].map(|release| {
        let mut harness = Harness::new(config(8, 16), 50, BLOCK_SIZE);
        harness.add(requests()).expect("room");
        for _ in 0..3 {
            harness.step();
            if release {
                harness.release_all();
            }
        }
        harness.run();
        assert_eq!(harness.scheduler.stats().preemptions, 0);
        harness.results
    });
    assert_eq!(found, expected);
}

#[test]
fn reasoning_is_closed_when_its_budget_is_used_up() {
    for tokens in [0, 1, 3] {
        let thinking = Some(ThinkingBudget { tokens, open: 3, close: 4 });
        let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
        let params = Arc::new(SamplingParams { max_tokens: 40, thinking, ..SamplingParams::default() });
        harness.add(vec![Group { params, ..group(key(0, 0), &[1, 3], 3, 40) }]).expect("room");
        harness.run();
        let results = &harness.results[&key(0, 0)];
        for sample in &results.samples {
            let mut spent = Some(0);
            for logprobs in &sample.tokens {
                let is_forced = spent.is_some_and(|spent| spent >= tokens);
                assert!(!is_forced || logprobs.token == 4, "{tokens}: {:?}", sample.tokens);
                spent = match (logprobs.token, spent) {
                    (4, _) => None,
                    (3, None) => Some(0),
                    (_, spent) => spent.map(|spent| spent + 1),
                };
            }
        }
    }
}
