//! Checkpoints that another process overwrites while the server runs.

use super::rig::*;
use crate::engine::*;
use crate::memory::MemoryUse;
use crate::types::FinishReason;
use crate::weights::{UpdateHeader, UpdateKind};

type Reach = fn(&mut Rig);
type Act = fn(&mut Rig) -> Result<()>;

fn push_lora(rig: &mut Rig) -> Result<()> {
    rig.push_now(begin(UpdateKind::Lora)).map(drop)
}

fn sleep(rig: &mut Rig, level: SleepLevel) {
    told(&rig.sleep(level, DrainMode::Keep)).reply().unwrap();
}

/// A state, how to reach it, and a command that reads the checkpoint in it.
const READS: [(&str, Reach, Act); 8] = [
    ("a push that runs", |_| (), push_lora),
    ("a push while paused", |rig| told(&rig.pause(DrainMode::Keep)).reply().unwrap(), push_lora),
    ("wake 1", |rig| sleep(rig, SleepLevel::One), |rig| rig.wake(true, true, false).map(drop)),
    ("wake the weights of 1", |rig| sleep(rig, SleepLevel::One), |rig| rig.wake(true, false, false).map(drop)),
    ("reload", |rig| sleep(rig, SleepLevel::Two), |rig| rig.wake(true, true, true).map(drop)),
    (
        "reload below a cache",
        |rig| {
            sleep(rig, SleepLevel::Two);
            rig.wake(false, true, false).unwrap();
        },
        |rig| rig.wake(true, false, true).map(drop),
    ),
    ("reload what is missing", lose, |rig| rig.wake(true, true, true).map(drop)),
    ("a push where a policy is missing", lose, push_lora),
];

fn lose(rig: &mut Rig) {
    sleep(rig, SleepLevel::Two);
    assert_eq!(rig.wake(true, true, false).unwrap(), LifecycleStatus::WeightsMissing);
}

/// A rig in a state, with a request that has some tokens.
fn reach(reach: Reach) -> (Rig, Asked) {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("r", 5, 9));
    rig.steps(3);
    reach(&mut rig);
    (rig, asked)
}

/// Runs a request to its end with the current policy.
fn goes_on(rig: &mut Rig, what: &str) {
    rig.wake(true, true, false).unwrap_or_else(|e| panic!("{what}: {e}"));
    rig.resume().unwrap_or_else(|e| panic!("{what}: {e}"));
    rig.finish();
    let again = rig.submit(ask("again", 3, 2));
    rig.finish();
    assert_eq!(sampled(&again.completion()), [rig.engine.core.executor.policy; 2], "{what}");
    rig.assert_clean();
}

#[test]
fn damage_that_is_found_before_leaves_everything_as_it_was() {
    for (what, state, act) in READS {
        let (mut rig, asked) = reach(state);
        let (before, policy) = (rig.status(), rig.engine.core.executor.policy);
        rig.did();
        rig.engine.core.executor.damage = Some(Damage::Check);
        for _ in 0..2 {
            match act(&mut rig) {
                Err(Error::DataLoss(why)) => assert!(why.contains("nothing has changed"), "{what}: {why}"),
                other => panic!("{what}: {other:?}"),
            }
        }
        let after = rig.status();
        assert_eq!((rig.did(), rig.engine.core.executor.policy), (vec![], policy), "{what}");
        assert_eq!((after.lifecycle, after.memory), (before.lifecycle, before.memory), "{what}");
        assert_eq!(
            (after.stats.accepted_requests, after.stats.weight_version),
            (1, before.stats.weight_version),
            "{what}"
        );
        rig.engine.core.executor.damage = None;
        act(&mut rig).unwrap_or_else(|e| panic!("{what}, healed: {e}"));
        goes_on(&mut rig, what);
        assert_eq!(asked.completion().finish_reason, FinishReason::Length, "{what}");
    }
}

#[test]
fn damage_that_is_found_while_it_is_read_leaves_no_policy_and_a_server_that_lives() {
    for (what, state, act) in READS {
        for heal in ["a complete push", "a reload"] {
            let (mut rig, asked) = reach(state);
            rig.engine.core.executor.damage = Some(Damage::Write);
            match act(&mut rig) {
                Err(Error::DataLoss(why)) => assert!(why.contains("missing"), "{what}: {why}"),
                other => panic!("{what}: {other:?}"),
            }
            assert_eq!(asked.completion().finish_reason, FinishReason::Aborted, "{what}");
            assert!(!rig.engine.core.state.has_policy() && rig.engine.core.state.weights_awake(), "{what}");
            let expected: u64 =
                [(MemoryUse::Process, 100), (MemoryUse::Weights, 120)].iter().map(|entry| entry.1).sum();
            let kv_cache = if rig.engine.core.state.kv_awake() { 480 } else { 0 };
            let held: u64 = rig.status().memory.entries.iter().map(|entry| entry.1).sum();
            assert_eq!(held, expected + kv_cache, "{what}");
            // The lost policy can be neither kept in a sleep nor changed.
            assert!(told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().is_err(), "{what}");
            let delta = UpdateHeader {
                expected_version: Some(rig.status().stats.weight_version),
                ..UpdateHeader::new(UpdateKind::Delta)
            };
            assert!(matches!(rig.push_now(delta), Err(Error::FailedPrecondition(_))), "{what}");
            rig.engine.core.executor.damage = None;
            match heal {
                "a reload" => drop(rig.wake(true, true, true).unwrap_or_else(|e| panic!("{what}: {e}"))),
                _ => drop(rig.push_now(begin(UpdateKind::Full)).unwrap_or_else(|e| panic!("{what}: {e}"))),
            }
            goes_on(&mut rig, what);
        }
    }
}
