//! Prompts that wait for a prefix which another sequence of the step computes.

use super::harness::*;
use super::rules::{BLOCK_SIZE, config, prompt, scored, shape};
use crate::cache::CacheSalt;
use crate::scheduler::*;
use crate::types::RequestKey;

#[test]
fn a_prompt_waits_for_a_prefix_that_the_step_computes() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    let reference = Group { kind: GroupKind::Score { scored_from: 9 }, ..group(key(2, 0), &prompt(12), 1, 1) };
    for group in [group(key(0, 0), &prompt(10), 1, 3), group(key(1, 0), &prompt(11), 1, 3), reference] {
        harness.add(vec![group]).expect("room");
    }
    harness.add(vec![group(key(3, 0), &[4; 3], 1, 9)]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 10), (0, 3)], "others do not wait with them");
    assert_eq!(shape(&harness.step()), [(10, 1), (3, 1), (8, 3), (8, 3)]);
    assert_eq!(harness.scheduler.stats().cached_tokens, 16);
}

#[test]
fn what_may_not_come_from_the_cache_is_not_waited_for() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    let other_policy = CacheSalt { epoch: 1, ..CacheSalt::default() };
    harness.add(vec![group(key(0, 0), &prompt(10), 1, 3)]).expect("room");
    harness.add(vec![scored(key(1, 0), 12)]).expect("room");
    harness.add(vec![group(key(2, 0), &prompt(3), 1, 3)]).expect("room");
    harness.add(vec![group(key(3, 0), &prompt(4), 1, 3)]).expect("room");
    harness.add(vec![Group { salt: other_policy, ..group(key(4, 0), &prompt(10), 1, 3) }]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 10), (0, 11), (0, 3), (0, 4), (0, 10)]);
}

#[test]
fn a_prompt_waits_through_all_chunks_of_its_prefix() {
    let mut harness = Harness::new(config(8, 8), 50, BLOCK_SIZE);
    harness.add(vec![group(key(0, 0), &prompt(18), 1, 2)]).expect("room");
    harness.add(vec![group(key(1, 0), &prompt(18), 1, 2)]).expect("room");
    let shapes: Vec<_> = harness.run().iter().map(shape).collect();
    assert_eq!(shapes, [vec![(0, 8)], vec![(8, 8)], vec![(16, 2), (16, 2)], vec![(18, 1), (18, 1)]]);
}

#[test]
fn prompts_that_wait_keep_their_places() {
    let mut harness = Harness::new(config(3, 100), 50, BLOCK_SIZE);
    for request in 0..3 {
        harness.add(vec![group(key(request, 0), &prompt(10), 1, 5)]).expect("room");
    }
    harness.add(vec![group(key(3, 0), &[4; 3], 1, 5)]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 10)]);
    assert_eq!(shape(&harness.step()), [(10, 1), (8, 2), (8, 2)]);
}

#[test]
fn a_prompt_whose_prefix_is_lost_computes_it() {
    let mut harness = Harness::new(config(8, 8), 50, BLOCK_SIZE);
    for request in 0..2 {
        harness.add(vec![group(key(request, 0), &prompt(18), 1, 2)]).expect("room");
    }
    assert_eq!(shape(&harness.step()), [(0, 8)]);
    harness.scheduler.abort(RequestKey(0));
    harness.scheduler.reset_prefix_cache();
    assert_eq!(shape(&harness.step()), [(0, 8)]);
    harness.run();
    assert!(harness.results[&key(1, 0)].samples[0].finish.is_some());
}

#[test]
fn following_groups_come_before_others_of_their_request() {
    let mut harness = Harness::new(config(1, 100), 50, BLOCK_SIZE);
    harness.add(vec![scored(key(0, 0), 5), scored(key(0, 1), 6), scored(key(0, 2), 7)]).expect("room");
    harness.add(vec![scored(key(1, 0), 4)]).expect("room");
    assert_eq!(shape(&harness.step()), [(0, 4)]);
    harness.add_following(vec![scored(key(0, 3), 30), scored(key(0, 4), 20)]);
    let lengths: Vec<usize> = harness.run().iter().map(|plan| plan.num_tokens()).collect();
    assert_eq!(lengths, [3, 29, 19, 5, 6], "requests take turns, and the last groups of one come first");
}
