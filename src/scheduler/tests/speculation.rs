//! Which drafts are added to which sequences. `simulation` tests that they change no token.

use super::harness::*;
use crate::scheduler::speculation::LONGEST;
use crate::scheduler::*;
use crate::types::*;

const BLOCK_SIZE: usize = 4;
/// Limits with which every draft that is found is tried.
const EAGER: Speculation = Speculation { max_rows: 8, row_cost: 0.0 };

fn config(speculation: Speculation) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_batch_tokens: 100,
        max_model_len: 100,
        max_queued_samples: 50,
        speculation,
        images: ImageScheduling::default(),
        routing_row_bytes: 0,
    }
}

/// A harness in which tokens mostly follow from those before them.
fn repeating(config: SchedulerConfig, num_blocks: usize) -> Harness {
    let mut harness = Harness::new(config, num_blocks, BLOCK_SIZE);
    harness.executor.repeats = true;
    harness
}

/// A group whose prompt has every pair of tokens that can follow each other.
fn cyclic(key: GroupKey, n: u32, max_tokens: u32) -> Group {
    cyclic_from(0, key, n, max_tokens)
}

/// Such a group whose prompt begins with another token, so that it shares no block.
fn cyclic_from(first: TokenId, key: GroupKey, n: u32, max_tokens: u32) -> Group {
    let prompt: Vec<TokenId> = (first..first + 11).map(|token| token % 5).collect();
    group(key, &prompt, n, max_tokens)
}

/// Number of token rows of each planned sequence.
fn rows(plan: &StepPlan) -> Vec<usize> {
    plan.sequences.iter().map(|planned| planned.tokens.len()).collect()
}

fn drafts(plan: &StepPlan) -> usize {
    plan.sequences.iter().map(|planned| planned.logits.len()).sum::<usize>() - plan.sequences.len()
}

#[test]
fn right_drafts_save_steps_and_change_nothing() {
    let results = [Speculation::OFF, Speculation::AUTO, EAGER].map(|speculation| {
        let mut harness = repeating(config(speculation), 50);
        harness.add(vec![cyclic(key(0, 0), 1, 60)]).expect("room");
        let plans = harness.run();
        let (steps, stats) = (plans.len(), harness.scheduler.stats());
        assert_eq!(steps as u64, 60 - stats.accepted_tokens);
        assert_eq!(stats.drafts, plans.iter().filter(|plan| drafts(plan) > 0).count() as u64);
        assert_eq!(stats.generated_tokens, 60);
        assert!(stats.accepted_tokens <= stats.drafted_tokens && stats.drafts <= stats.drafted_tokens);
        (steps, harness.results)
    });
    assert_eq!(results[0].0, 60);
    assert!(results[1].0 < 35 && results[2].0 < 35, "{} and {} steps", results[1].0, results[2].0);
    assert!(results.iter().all(|(_, result)| *result == results[0].1));
}

#[test]
fn each_draft_has_a_row_with_the_counter_and_history_of_its_place() {
    let mut harness = repeating(config(EAGER), 50);
    let mut group = cyclic(key(0, 0), 1, 20);
    group.params = SamplingParams { repetition_penalty: 1.5, max_tokens: 20, ..SamplingParams::default() }.into();
    harness.add(vec![group]).expect("room");
    harness.step();
    let plan = harness.step();
    let [planned] = &plan.sequences[..] else { panic!("{plan:?}") };
    assert!(planned.tokens.len() > 1, "{planned:?}");
    assert_eq!(planned.block_table.len(), (planned.start + planned.tokens.len()).div_ceil(BLOCK_SIZE));
    for (i, row) in planned.logits.iter().enumerate() {
        let [task] = &row.tasks[..] else { panic!("{row:?}") };
        assert_eq!((row.offset, task.output_index, task.target), (i, 1 + i as u32, None));
        let history = task.history.as_ref().expect("a penalty counts");
        assert_eq!((history.prompt.len(), history.output.len()), (11, 1 + i));
        assert!(history.output.ends_with(&planned.tokens[..=i]));
    }
}

#[test]
fn rows_are_never_more_than_is_allowed() {
    for (max_rows, max_batch_tokens, n, most) in
        [(8, 100, 1, 8), (3, 100, 1, 3), (8, 5, 1, 5), (8, 100, 6, 8), (4, 100, 6, 6)]
    {
        let speculation = Speculation { max_rows, row_cost: 0.0 };
        let mut harness = repeating(SchedulerConfig { max_batch_tokens, ..config(speculation) }, 100);
        harness.add(vec![cyclic(key(0, 0), n, 40)]).expect("room");
        let plans: Vec<StepPlan> = harness.run().into_iter().skip_while(|plan| plan.sequences[0].start < 11).collect();
        assert_eq!(plans.iter().map(StepPlan::num_tokens).max(), Some(most), "{max_rows}, {max_batch_tokens}, {n}");
    }
}

#[test]
fn the_likeliest_drafts_get_the_rows() {
    for likelier in 0..2 {
        let mut harness = repeating(config(Speculation { max_rows: 5, row_cost: 0.0 }), 100);
        harness.add(vec![cyclic(key(0, 0), 1, 40), cyclic_from(2, key(0, 1), 1, 40)]).expect("room");
        harness.step();
        let mut expected = [1, 1];
        expected[likelier] = 4;
        let acceptance = |harness: &mut Harness, is_right| {
            let group = harness.scheduler.groups.get_mut(&key(0, likelier as u32)).expect("it runs");
            (0..500).for_each(|i| group.acceptance.record(i % 9, is_right));
        };
        acceptance(&mut harness, true);
        assert_eq!(rows(&harness.step()), expected);
        acceptance(&mut harness, false);
        expected.reverse();
        assert_eq!(rows(&harness.step()), expected);
    }
}

#[test]
fn a_step_with_a_prompt_in_it_has_no_room_for_drafts() {
    let mut harness = repeating(config(EAGER), 100);
    harness.add(vec![cyclic(key(0, 0), 1, 40)]).expect("room");
    harness.step();
    assert!(drafts(&harness.step()) > 0);
    harness
        .add(vec![
            group(key(1, 0), &[1; 9], 3, 9),
            Group { kind: GroupKind::Score { scored_from: 0 }, ..cyclic(key(1, 1), 1, 1) },
        ])
        .expect("room");
    assert_eq!(rows(&harness.step()), [1, 9, 10]);
}

#[test]
fn a_sample_is_given_no_more_tokens_than_it_may_have() {
    for (max_tokens, max_model_len) in [(7, 100), (80, 19), (2, 100), (1, 100)] {
        let mut harness = repeating(SchedulerConfig { max_model_len, ..config(EAGER) }, 50);
        harness.add(vec![cyclic(key(0, 0), 1, max_tokens)]).expect("room");
        let most = (max_tokens as usize).min(max_model_len - 11);
        for plan in harness.run() {
            let planned = &plan.sequences[0];
            assert!(
                planned.start + planned.tokens.len() < 11 + most,
                "a row of which no answer can count: {planned:?}"
            );
        }
        assert_eq!(harness.results[&key(0, 0)].samples[0].tokens.len(), most);
    }
}

#[test]
fn drafts_take_no_blocks_from_anyone() {
    // 16 blocks: two sequences of 11 + 21 tokens fill them to the last slot.
    let mut harness = repeating(config(EAGER), 16);
    harness.add(vec![cyclic(key(0, 0), 1, 22), cyclic_from(2, key(1, 0), 1, 22)]).expect("room");
    let plans = harness.run();
    let stats = harness.scheduler.stats();
    assert!(stats.accepted_tokens > 10, "{stats:?}");
    assert_eq!(stats.preemptions, 0);
    let full = |plan: &&StepPlan| plan.sequences.iter().map(|planned| planned.block_table.len()).sum::<usize>() == 16;
    assert!(plans.iter().filter(full).count() > 0, "the blocks were never used up");
}

#[test]
fn blocks_of_wrong_drafts_go_back_and_are_not_found() {
    let mut harness = Harness::new(config(EAGER), 100, 1);
    harness.add(vec![cyclic(key(0, 0), 1, 60)]).expect("room");
    while harness.scheduler.has_work() {
        harness.step();
        let stats = harness.scheduler.stats();
        let tokens = harness.results[&key(0, 0)].samples[0].tokens.len() as u64;
        let held = if harness.scheduler.has_work() { 11 + tokens - 1 } else { 0 };
        assert_eq!(stats.total_blocks - stats.free_blocks, held);
        assert_eq!(stats.cached_blocks, if held == 0 { 11 + tokens - 1 } else { 0 });
        if tokens == 30 {
            break;
        }
    }
    let stats = harness.scheduler.stats();
    assert!(stats.drafted_tokens > stats.accepted_tokens, "{stats:?}");
}

#[test]
fn samples_learn_from_those_that_have_ended() {
    let too_few_rows = Speculation { max_rows: 1, ..EAGER };
    let mut harness = repeating(SchedulerConfig { max_num_seqs: 1, ..config(too_few_rows) }, 50);
    harness.add(vec![group(key(0, 0), &[3], 2, 30)]).expect("room");
    while harness.results[&key(0, 0)].samples[0].finish.is_none() {
        assert_eq!(drafts(&harness.step()), 0);
    }
    // No draft has been looked for until now.
    harness.scheduler.config.speculation = EAGER;
    let first_steps: usize = harness.run().iter().take(2).map(drafts).sum();
    assert!(first_steps > 4, "{first_steps} drafts of a sample that has said nothing yet");
}

#[test]
fn samples_learn_from_those_that_wait() {
    // 12 blocks are too few for two samples of 41 tokens: the younger one gives its blocks back and waits.
    let too_few_rows = Speculation { max_rows: 1, ..EAGER };
    let mut harness = Harness::new(config(too_few_rows), 12, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &[3], 2, 40)]).expect("room");
    while harness.scheduler.stats().preemptions == 0 {
        assert_eq!(drafts(&harness.step()), 0);
    }
    let said: Vec<TokenId> = harness.results[&key(0, 0)].samples[1].tokens.iter().map(|t| t.token).collect();
    harness.scheduler.config.speculation = EAGER;
    harness.step();
    assert_eq!(harness.scheduler.waiting.len(), 1);
    let index = harness.scheduler.groups[&key(0, 0)].index.as_ref().expect("the other one has looked for drafts");
    let (context, next) = said.split_at(said.len() - 3);
    let found = index.find(context, next.len()).expect("it has been said");
    assert_eq!((found.matched, &found.tokens[..]), (LONGEST, next), "{said:?}");
}

#[test]
fn drafts_that_are_wrong_become_rare() {
    let speculation = Speculation { row_cost: 0.3, ..EAGER };
    let mut harness = Harness::new(SchedulerConfig { max_model_len: 2000, ..config(speculation) }, 1000, BLOCK_SIZE);
    harness.add(vec![cyclic(key(0, 0), 2, 1000)]).expect("room");
    let drafted: Vec<usize> = harness.run().iter().skip(1).map(drafts).collect();
    let (first, last) = (&drafted[..50], &drafted[drafted.len() - 300..]);
    let rate = |drafted: &[usize]| drafted.iter().sum::<usize>() as f64 / drafted.len() as f64;
    assert!(rate(last) < 0.2 && rate(last) > 0.0, "{} at first, then {}", rate(first), rate(last));
}

#[test]
fn indexes_are_of_the_groups_that_decode_now() {
    let mut harness = repeating(config(EAGER), 200);
    harness.add(vec![cyclic(key(0, 0), 1, 60), cyclic_from(2, key(1, 0), 1, 20)]).expect("room");
    let indexed = |harness: &Harness| harness.scheduler.groups.values().filter(|group| group.index.is_some()).count();
    harness.step();
    harness.step();
    assert_eq!(indexed(&harness), 2);
    harness.add(vec![group(key(2, 0), &[1; 20], 1, 1)]).expect("room");
    harness.step();
    assert_eq!(indexed(&harness), 0, "a step too large for drafts");
    harness.step();
    assert_eq!(indexed(&harness), 2);
    while harness.scheduler.groups.len() > 1 {
        harness.step();
    }
    assert_eq!(indexed(&harness), 1);
}
