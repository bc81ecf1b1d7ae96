//! Gives an engine every command in every state.

use super::rig::*;
use crate::engine::*;
use crate::executor::MemoryKind;
use crate::memory::MemoryUse;
use crate::weights::{ReceiveMode, UpdateHeader, UpdateKind, WeightUpdate};

type Reach = fn(&mut Rig);

/// A state, and how to reach it.
const STATES: [(&str, Reach); 16] = [
    ("run", |_| ()),
    ("pause", |rig| told(&rig.pause(DrainMode::Wait)).reply().unwrap()),
    ("1", |rig| sleep(rig, SleepLevel::One)),
    ("1w", |rig| sleep_and_wake(rig, SleepLevel::One, true)),
    ("1w broken", |rig| {
        sleep_and_wake(rig, SleepLevel::One, true);
        break_in_place(rig);
    }),
    ("1k", |rig| sleep_and_wake(rig, SleepLevel::One, false)),
    ("1+", |rig| {
        sleep(rig, SleepLevel::One);
        rig.push_lora(RunningPolicy::Keep);
    }),
    ("1k+", |rig| {
        sleep_and_wake(rig, SleepLevel::One, false);
        rig.push_lora(RunningPolicy::Keep);
    }),
    ("2", |rig| sleep(rig, SleepLevel::Two)),
    ("2w", |rig| sleep_and_wake(rig, SleepLevel::Two, true)),
    ("2w pushed", |rig| {
        sleep_and_wake(rig, SleepLevel::Two, true);
        rig.push_now(begin(UpdateKind::Full)).unwrap();
    }),
    ("2k", |rig| sleep_and_wake(rig, SleepLevel::Two, false)),
    ("2+", |rig| {
        sleep(rig, SleepLevel::Two);
        rig.push_lora(RunningPolicy::Keep);
    }),
    ("2k+", |rig| {
        sleep_and_wake(rig, SleepLevel::Two, false);
        rig.push_lora(RunningPolicy::Keep);
    }),
    ("miss", |rig| {
        sleep(rig, SleepLevel::Two);
        rig.wake(true, true, false).unwrap();
    }),
    ("miss paused", |rig| {
        told(&rig.pause(DrainMode::Wait)).reply().unwrap();
        break_in_place(rig);
    }),
];

fn sleep(rig: &mut Rig, level: SleepLevel) {
    told(&rig.sleep(level, DrainMode::Wait)).reply().unwrap();
}

fn sleep_and_wake(rig: &mut Rig, level: SleepLevel, weights: bool) {
    sleep(rig, level);
    rig.wake(weights, !weights, false).unwrap();
}

/// Sends a part of a FULL push in place, and disconnects.
fn break_in_place(rig: &mut Rig) {
    let begin = large_in_place();
    let cancel = begin.sender.cancel.clone();
    let ticket = rig.begin(begin).unwrap();
    assert!(matches!(ticket.mode, ReceiveMode::InPlace));
    rig.write_part(ticket.id).unwrap();
    cancel.cancel();
    rig.command(Command::Look);
}

fn done<T>(result: Result<T>) -> Result<()> {
    result.map(drop)
}

fn resident(name: &str) -> UpdateHeader {
    let adapter = AdapterTarget { name: name.into(), expected_generation: None, evicts: false };
    UpdateHeader { adapter: Some(adapter), ..UpdateHeader::new(UpdateKind::Lora) }
}

type Order = fn(&mut Rig) -> Result<()>;

const ORDERS: [(&str, Order); 17] = [
    ("generate", |rig| {
        let asked = rig.submit(ask("new", 3, 2));
        asked.events.try_recv().map_or(Ok(()), |_| Err(Error::FailedPrecondition(String::new())))
    }),
    ("pause", |rig| told(&rig.pause(DrainMode::Abort)).reply()),
    ("resume", Rig::resume),
    ("sleep 1", |rig| done(told(&rig.sleep(SleepLevel::One, DrainMode::Abort)).reply())),
    ("sleep 2", |rig| done(told(&rig.sleep(SleepLevel::Two, DrainMode::Abort)).reply())),
    ("wake", |rig| done(rig.wake(true, true, false))),
    ("wake w", |rig| done(rig.wake(true, false, false))),
    ("wake k", |rig| done(rig.wake(false, true, false))),
    ("reload", |rig| done(rig.wake(true, false, true))),
    ("reset", |rig| done(told(&rig.call(|reply| Command::ResetPrefixCache { reply })).reply())),
    ("lora", |rig| done(rig.push_now(begin(UpdateKind::Lora)))),
    ("full", |rig| done(rig.push_now(begin(UpdateKind::Full)))),
    ("delta", |rig| {
        let begin = UpdateHeader {
            expected_version: Some(rig.engine.core.policy.version()),
            ..UpdateHeader::new(UpdateKind::Delta)
        };
        done(rig.push_now(begin))
    }),
    ("resident", |rig| done(rig.push_now(resident("x")))),
    ("checksum", |rig| done(rig.checksum(&[]))),
    ("abort", |rig| {
        let target = AbortTarget::All;
        told(&rig.call(|reply| Command::Abort { target, owner: None, reply }));
        Ok(())
    }),
    ("version", |rig| told(&rig.call(|reply| Command::SetVersion { version: 9, force: false, reply })).reply()),
];

/// For each state, the state that each command of [`ORDERS`] leads to. "!" stands for FAILED_PRECONDITION, which
/// changes nothing.
const TABLE: [(&str, &str); 16] = [
    // gen pause resume | sleep 1, 2 | wake, w, k, reload | reset | lora full delta resident | checksum abort version
    ("run", "run pause run | 1 2 | run run run run | run | run run run run | run run run"),
    ("pause", "pause pause run | 1 2 | pause pause pause pause | pause | pause pause pause pause | pause pause pause"),
    ("1", "! ! ! | 1 2 | run 1w 1k 1w | 1 | 1+ ! ! ! | ! 1 1"),
    ("1w", "! ! ! | 1 2 | run 1w run 1w | 1w | 1w 1w 1w ! | 1w 1w 1w"),
    ("1w broken", "! ! ! | ! 2 | miss 1w miss 1w | 1w | 1w 1w ! ! | ! 1w !"),
    ("1k", "! ! ! | 1 2 | run run 1k run | 1k | 1k+ ! ! ! | ! 1k 1k"),
    ("1+", "! ! ! | 1+ 2 | run 1w 1k+ 1w | 1+ | 1+ ! ! ! | ! 1+ 1+"),
    ("1k+", "! ! ! | 1+ 2 | run run 1k+ run | 1k+ | 1k+ ! ! ! | ! 1k+ 1k+"),
    ("2", "! ! ! | ! 2 | miss 2w 2k 2w | 2 | 2+ ! ! ! | ! 2 !"),
    ("2w", "! ! ! | ! 2 | miss 2w miss 2w | 2w | 2w 2w ! ! | ! 2w !"),
    ("2w pushed", "! ! ! | 1 2 | run 2w run 2w | 2w | 2w 2w 2w ! | 2w 2w 2w"),
    ("2k", "! ! ! | ! 2 | miss miss 2k run | 2k | 2k+ ! ! ! | ! 2k !"),
    ("2+", "! ! ! | 1+ 2 | run 2w 2k+ 2w | 2+ | 2+ ! ! ! | ! 2+ 2+"),
    ("2k+", "! ! ! | 1+ 2 | run run 2k+ run | 2k+ | 2k+ ! ! ! | ! 2k+ 2k+"),
    ("miss", "! ! ! | ! 2 | miss miss miss run | miss | run run ! ! | ! miss !"),
    ("miss paused", "! ! ! | ! 2 | miss miss miss pause | miss | pause pause ! ! | ! miss !"),
];

fn label(status: LifecycleStatus) -> String {
    match status {
        LifecycleStatus::Running => "run".into(),
        LifecycleStatus::Paused => "pause".into(),
        LifecycleStatus::WeightsMissing => "miss".into(),
        LifecycleStatus::ShuttingDown => "end".into(),
        LifecycleStatus::Asleep { level, resident, pending_update } => {
            let level = if level == SleepLevel::One { "1" } else { "2" };
            let flags = [(resident.weights, "w"), (resident.kv_cache, "k"), (pending_update, "+")];
            flags.iter().filter(|flag| flag.0).fold(level.into(), |label, flag| label + flag.1)
        }
    }
}

#[test]
fn every_order_in_every_state_leads_where_the_table_says() {
    for ((name, reach), (row, expected)) in STATES.iter().zip(TABLE) {
        assert_eq!(*name, row);
        let expected: Vec<&str> = expected.split_whitespace().filter(|&cell| cell != "|").collect();
        assert_eq!(expected.len(), ORDERS.len());
        for ((order, give), expected) in ORDERS.iter().zip(expected) {
            let mut rig = Rig::new();
            reach(&mut rig);
            let before = rig.status();
            assert_eq!(label(before.lifecycle), name.split(' ').next().unwrap());
            let result = give(&mut rig);
            let after = rig.status();
            if expected == "!" {
                assert!(matches!(result, Err(Error::FailedPrecondition(_))), "{order} in {name}: {result:?}");
                let what = |s: &EngineStatus| (s.lifecycle, s.memory.clone(), s.stats.weight_version, s.stats.updates);
                assert_eq!(what(&after), what(&before), "{order} in {name}");
            } else {
                assert!(result.is_ok(), "{order} in {name}: {result:?}");
                assert_eq!(label(after.lifecycle), expected, "{order} in {name}");
            }
            back_to_running(&mut rig);
        }
    }
}

/// Brings an engine from any state back to serving, with all its memory in the ledger, and lets all requests finish.
fn back_to_running(rig: &mut Rig) {
    rig.wake(true, true, false).unwrap();
    if rig.status().lifecycle == LifecycleStatus::WeightsMissing {
        rig.push_lora(RunningPolicy::Keep);
    }
    if rig.status().lifecycle == LifecycleStatus::Paused {
        rig.resume().unwrap();
    }
    assert_eq!(rig.status().lifecycle, LifecycleStatus::Running);
    for (used_for, bytes) in
        [(MemoryUse::Process, 100), (MemoryUse::Weights, 120), (MemoryUse::Workspace, 30), (MemoryUse::KvCache, 450)]
    {
        assert_eq!(rig.reserved(used_for), bytes, "{used_for}");
    }
    let asked = rig.submit(ask("last", 5, 3));
    rig.finish();
    assert_eq!(sampled(&asked.completion()), [rig.engine.core.executor.policy; 3]);
    rig.assert_clean();
}

#[test]
fn a_server_that_ends_refuses_every_order_of_a_new_thing() {
    for (order, give) in ORDERS {
        let mut rig = Rig::new();
        rig.submit(ask("running", 3, 9));
        rig.command(Command::Shutdown { grace: std::time::Duration::from_secs(60) });
        if order == "generate" {
            assert!(matches!(rig.submit(ask("new", 3, 2)).error(), Error::Unavailable(_)));
        } else if !["reset", "checksum", "abort"].contains(&order) {
            let result = give(&mut rig);
            assert!(matches!(result, Err(Error::Unavailable(_))), "{order}: {result:?}");
        } else {
            give(&mut rig).unwrap();
        }
        assert_eq!(rig.status().lifecycle, LifecycleStatus::ShuttingDown);
    }
}

#[test]
fn sleep_gives_back_in_order_and_wake_loads_once() {
    let mut rig = Rig::new();
    use Did::{Load, Release, Restore};
    use MemoryKind::{KvCache, Weights, WeightsAndBase, Workspace};
    sleep(&mut rig, SleepLevel::One);
    assert_eq!(rig.did(), [Release(KvCache), Release(Workspace), Release(Weights)]);
    assert_eq!(
        [MemoryUse::Weights, MemoryUse::Workspace, MemoryUse::KvCache].map(|used_for| rig.reserved(used_for)),
        [0; 3]
    );
    rig.push_lora(RunningPolicy::Keep);
    rig.push_lora(RunningPolicy::Keep);
    assert_eq!((rig.did(), rig.status().stats.weight_version), (vec![], 2));
    rig.wake(true, false, false).unwrap();
    assert_eq!(rig.did(), [Restore(Weights), Load]);
    assert_eq!(
        [MemoryUse::Weights, MemoryUse::Workspace, MemoryUse::KvCache].map(|used_for| rig.reserved(used_for)),
        [120, 0, 0]
    );
    rig.push_lora(RunningPolicy::Keep);
    rig.wake(false, true, false).unwrap();
    assert_eq!(rig.did(), [Did::Merge, Restore(Workspace), Restore(KvCache)]);
    sleep(&mut rig, SleepLevel::One);
    sleep(&mut rig, SleepLevel::Two);
    let released = [KvCache, Workspace, Weights].map(Release);
    // No parameter was replaced, so the second sleep had nothing to give back.
    assert_eq!(rig.did(), released);
    rig.wake(true, true, true).unwrap();
    assert_eq!(rig.did(), [Restore(Weights), Restore(Workspace), Restore(KvCache), Load]);
    assert_eq!((rig.status().stats.weight_version, rig.status().stats.updates), (0, 3));
    sleep(&mut rig, SleepLevel::Two);
    assert_eq!(rig.did(), [Release(KvCache), Release(Workspace), Release(WeightsAndBase)]);
}

#[test]
fn what_full_pushes_brought_stays_in_the_ledger_at_level_1_only() {
    let mut rig = Rig::new();
    rig.push_now(begin(UpdateKind::Full)).unwrap();
    rig.engine.core.executor.kept = 120;
    sleep(&mut rig, SleepLevel::One);
    assert_eq!(rig.reserved(MemoryUse::Weights), 120, "what the executor could not give back");
    rig.did();
    sleep(&mut rig, SleepLevel::Two);
    assert_eq!(rig.did(), [Did::Release(MemoryKind::WeightsAndBase)]);
    assert_eq!(rig.reserved(MemoryUse::Weights), 0);
    rig.wake(true, true, false).unwrap();
    assert_eq!(rig.did().len(), 3, "there was nothing to load");
    back_to_running(&mut rig);
}

#[test]
fn a_wake_that_does_not_fit_changes_nothing() {
    let mut rig = Rig::new();
    sleep(&mut rig, SleepLevel::One);
    let ticket = rig.begin(begin(UpdateKind::Lora).staging(500)).unwrap();
    rig.did();
    let before = rig.status();
    let error = rig.wake(true, true, false).unwrap_err();
    assert!(matches!(&error, Error::ResourceExhausted(why) if why.contains("update_staging 500 B")), "{error}");
    let after = rig.status();
    assert_eq!((after.lifecycle, after.memory), (before.lifecycle, before.memory));
    assert_eq!(rig.did(), []);
    told(&rig.commit(ticket.id, lora())).reply().unwrap();
    rig.wake(true, true, false).unwrap();
    back_to_running(&mut rig);
}

#[test]
fn a_lora_after_a_broken_push_starts_from_the_checkpoint() {
    let mut rig = Rig::new();
    told(&rig.pause(DrainMode::Wait)).reply().unwrap();
    rig.push_now(begin(UpdateKind::Full)).unwrap();
    break_in_place(&mut rig);
    rig.did();
    rig.push_lora(RunningPolicy::Keep);
    let base = [Did::Release(MemoryKind::WeightsAndBase), Did::Restore(MemoryKind::Weights), Did::Load];
    assert_eq!(rig.did(), base);
    assert!(!rig.engine.core.policy.has_replaced());
    back_to_running(&mut rig);
}

#[test]
fn a_checksum_is_of_the_bytes_that_serve() {
    use sha2::{Digest, Sha256};
    let mut rig = Rig::new();
    rig.push_lora(RunningPolicy::Keep);
    let bytes: Vec<u8> = (0..5).flat_map(|row| [row ^ 1; 12]).collect();
    let sha: [u8; 32] = Sha256::digest(&bytes).into();
    let all = rig.checksum(&[]).unwrap();
    assert_eq!((all.weight_version, all.parameters), (1, PARAMETERS.map(|name| (name.into(), sha)).to_vec()));
    assert_eq!(rig.checksum(&PARAMETERS[1..]).unwrap().parameters, [(PARAMETERS[1].into(), sha)]);
    let error = rig.checksum(&[PARAMETERS[1], "x"]).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument { message, .. } if message.contains("\"x\"")), "{error}");
}

#[test]
fn what_a_packed_push_replaced_while_the_cache_slept_goes_as_that_wakes() {
    let mut rig = Rig::new();
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, false, false).unwrap();
    let ticket = rig.begin(begin(UpdateKind::Full)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Packed(shadow(ticket.mode).unwrap()))).reply().unwrap();
    assert!(rig.engine.core.spare.is_some());
    rig.wake(false, true, false).unwrap();
    assert_eq!((rig.reserved(MemoryUse::SpareWeights), rig.engine.core.spare.is_some()), (0, false));
    rig.assert_clean();
}
