//! Resident adapters: leases, generations, slots.

use super::rig::*;
use crate::engine::*;
use crate::memory::MemoryUse;
use crate::types::FinishReason;
use crate::weights::{UpdateHeader, UpdateKind, WeightUpdate};

fn resident(name: &str, expected_generation: Option<u64>) -> UpdateHeader {
    let adapter = AdapterTarget { name: name.into(), expected_generation, evicts: false };
    UpdateHeader { adapter: Some(adapter), ..UpdateHeader::new(UpdateKind::Lora) }
}

/// A push that removes the least recently used adapter if no slot is free.
fn evicting(name: &str) -> UpdateHeader {
    let adapter = AdapterTarget { name: name.into(), expected_generation: Some(0), evicts: true };
    UpdateHeader { adapter: Some(adapter), ..UpdateHeader::new(UpdateKind::Lora) }
}

fn add(rig: &mut Rig, name: &str) -> u64 {
    rig.push_now(resident(name, None)).unwrap().adapter_generation.unwrap()
}

fn ask_with(name: &str, adapter: &str, max_tokens: u32) -> (GenerateCommand, Asked) {
    let (mut command, asked) = ask(name, 9, max_tokens);
    command.request.adapter = Some(adapter.into());
    (command, asked)
}

fn remove(rig: &mut Rig, name: &str, expected_generation: Option<u64>) -> std::sync::mpsc::Receiver<Result<u64>> {
    let (name, cancel) = (name.into(), CancelFlag::default());
    rig.call(|reply| Command::RemoveAdapter { name, expected_generation, cancel, reply })
}

/// `(name, generation, leases, retired)` of each resident adapter.
fn list(rig: &mut Rig) -> Vec<(String, u64, usize, bool)> {
    let adapters = told(&rig.call(|reply| Command::ListAdapters { reply })).reply();
    adapters.into_iter().map(|a| (a.name, a.generation, a.leases, a.retired)).collect()
}

#[test]
fn requests_of_several_adapters_run_in_one_step_and_share_no_kv() {
    let mut rig = Rig::new();
    let generations = [add(&mut rig, "x"), add(&mut rig, "y")];
    assert_eq!(generations, [1, 2]);
    assert_eq!((rig.did(), rig.status().stats.weight_version), (vec![Did::Add(1), Did::Add(2)], 0));
    for i in 0..2 {
        let cached = ["x", "y"].map(|name| {
            let asked = rig.submit(ask_with(name, name, 1));
            rig.finish();
            asked.completion().cached_tokens
        });
        assert_eq!(cached, [8 * i, 8 * i]);
    }
    let [x, y] = ["x", "y"].map(|name| rig.submit(ask_with(name, name, 4)));
    let base = rig.submit(ask("base", 9, 4));
    let mut planned =
        rig.engine.core.scheduler.schedule().sequences.into_iter().map(|s| s.weights.adapter()).collect::<Vec<_>>();
    planned.sort();
    assert_eq!(planned[1..], [Some(1), Some(2)], "of the base's prompt eight of nine tokens have to wait");
    drop((x, y, base));
}

#[test]
fn an_adapter_without_a_place_leaves_the_one_of_its_name() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    rig.engine.core.executor.no_place = true;
    let error = rig.push_now(resident("x", Some(1))).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument { field, .. } if field == "lm_head.weight"), "{error}");
    assert_eq!(list(&mut rig), [("x".into(), 1, 0, false)]);
}

#[test]
fn a_replaced_adapter_stays_until_its_last_request_ends() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    let old = rig.submit(ask_with("old", "x", 6));
    rig.steps(2);
    let reply = rig.push_now(resident("x", Some(1))).unwrap();
    assert_eq!(reply.adapter_generation, Some(2));
    assert_eq!(list(&mut rig), [("x".into(), 1, 1, true), ("x".into(), 2, 0, false)]);
    let new = rig.submit(ask_with("new", "x", 2));
    let full = rig.push_now(resident("z", None)).unwrap_err();
    assert!(
        matches!(&full, Error::ResourceExhausted(why) if why.contains("--max-adapters 2") && why.contains("\"x\""))
    );
    assert_eq!(rig.did(), [Did::Add(1), Did::Add(2)]);
    rig.finish();
    [old, new].iter().for_each(|asked| drop(asked.completion()));
    assert_eq!(rig.did(), [Did::Remove(1)]);
    assert_eq!(add(&mut rig, "z"), 3);
    assert_eq!(add(&mut rig, "x"), 4, "a full house, but the old one makes room");
    assert_eq!(rig.did(), [Did::Add(3), Did::Remove(2), Did::Add(4)]);
    rig.assert_clean();
}

#[test]
fn a_push_may_take_the_slot_of_the_least_recently_used_adapter() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    add(&mut rig, "y");
    rig.submit(ask_with("a", "x", 1));
    rig.finish();
    assert_eq!(rig.push_now(evicting("z")).unwrap().adapter_generation, Some(3));
    assert_eq!(rig.did(), [Did::Add(1), Did::Add(2), Did::Remove(2), Did::Add(3)]);
    let asked = rig.submit(ask_with("b", "x", 6));
    rig.steps(2);
    assert_eq!(rig.push_now(evicting("v")).unwrap().adapter_generation, Some(4), "z goes, x is in use");
    let other = rig.submit(ask_with("c", "v", 6));
    rig.steps(2);
    let full = rig.push_now(evicting("w")).unwrap_err();
    assert!(matches!(&full, Error::ResourceExhausted(why) if why.contains("--max-adapters 2")), "{full}");
    assert_eq!(list(&mut rig), [("x".into(), 1, 1, false), ("v".into(), 4, 1, false)]);
    rig.finish();
    [asked, other].iter().for_each(|asked| drop(asked.completion()));
    rig.assert_clean();
}

#[test]
fn a_push_that_fails_takes_no_slot() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    add(&mut rig, "y");
    rig.engine.core.executor.no_place = true;
    rig.push_now(evicting("z")).unwrap_err();
    assert_eq!(list(&mut rig), [("x".into(), 1, 0, false), ("y".into(), 2, 0, false)]);
}

#[test]
fn a_removal_is_answered_when_the_last_lease_has_ended() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    let asked = rig.submit(ask_with("a", "x", 3));
    let reply = remove(&mut rig, "x", Some(1));
    let again = told(&remove(&mut rig, "x", None)).reply();
    assert!(matches!(again, Err(Error::NotFound(why)) if why.contains("\"x\"")));
    let refused = rig.submit(ask_with("late", "x", 1)).error();
    assert!(matches!(&refused, Error::NotFound(why) if why.contains("retired")), "{refused}");
    assert!(told(&reply).is_waiting());
    rig.finish();
    asked.completion();
    assert_eq!(told(&reply).reply().unwrap(), 1);
    assert_eq!((list(&mut rig), rig.did()), (vec![], vec![Did::Add(1), Did::Remove(1)]));
    rig.assert_clean();
}

#[test]
fn a_caller_that_vanishes_takes_its_reply_with_it_but_not_the_removal() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    let asked = rig.submit(ask_with("a", "x", 3));
    let flag = CancelFlag::default();
    let (name, expected_generation, cancel) = ("x".into(), None, flag.clone());
    let reply = rig.call(|reply| Command::RemoveAdapter { name, expected_generation, cancel, reply });
    flag.cancel();
    rig.command(Command::Look);
    assert!(matches!(told(&reply), Told::Dropped));
    asked.cancel.cancel();
    rig.command(Command::Look);
    assert_eq!(list(&mut rig), []);
    rig.assert_clean();
}

#[test]
fn generations_are_compared_before_they_are_swapped() {
    let mut rig = Rig::new();
    let conflict = |rig: &mut Rig, begin| matches!(rig.push_now(begin), Err(Error::VersionConflict(_)));
    assert!(conflict(&mut rig, resident("x", Some(1))), "the name is free");
    assert_eq!(rig.push_now(resident("x", Some(0))).unwrap().adapter_generation, Some(1));
    assert!(conflict(&mut rig, resident("x", Some(0))), "the name is taken");
    assert!(conflict(&mut rig, resident("x", Some(2))));
    assert_eq!(rig.push_now(resident("x", Some(1))).unwrap().adapter_generation, Some(2));
    let reply = told(&remove(&mut rig, "x", Some(1))).reply();
    assert!(matches!(reply, Err(Error::VersionConflict(why)) if why.contains("that is 2")));
    assert!(matches!(told(&remove(&mut rig, "y", None)).reply(), Err(Error::NotFound(_))));
    assert_eq!(told(&remove(&mut rig, "x", Some(2))).reply().unwrap(), 2);
    // Two senders replace the same generation; the second one begins after the first has committed.
    assert_eq!(rig.push_now(resident("x", Some(0))).unwrap().adapter_generation, Some(3));
    assert!(conflict(&mut rig, resident("x", Some(0))));
    rig.assert_clean();
}

#[test]
fn a_held_request_takes_the_adapter_that_is_there_when_it_starts() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    told(&rig.pause(DrainMode::Wait)).reply().unwrap();
    let [x, y] = ["x", "y"].map(|name| rig.submit(ask_with(name, name, 1)));
    assert_eq!(list(&mut rig)[0].2, 0, "no lease yet");
    assert_eq!(add(&mut rig, "x"), 2);
    add(&mut rig, "y");
    rig.resume().unwrap();
    assert_eq!(list(&mut rig), [("x".into(), 2, 1, false), ("y".into(), 3, 1, false)]);
    rig.finish();
    [x, y].iter().for_each(|asked| drop(asked.completion()));
    rig.assert_clean();
}

#[test]
fn level_2_takes_adapters_and_the_requests_that_use_them() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    let [with, without] = [rig.submit(ask_with("with", "x", 4)), rig.submit(ask("without", 3, 4))];
    rig.steps(3);
    told(&rig.sleep(SleepLevel::One, DrainMode::Keep)).reply().unwrap();
    assert_eq!(list(&mut rig), [("x".into(), 1, 1, false)]);
    told(&rig.sleep(SleepLevel::Two, DrainMode::Keep)).reply().unwrap();
    assert_eq!((list(&mut rig), with.completion().finish_reason), (vec![], FinishReason::Aborted));
    rig.wake(true, true, true).unwrap();
    rig.finish();
    assert_eq!(without.completion().finish_reason, FinishReason::Length);
    rig.assert_clean();
}

#[test]
fn shutdown_tells_who_waits_for_a_removal() {
    let mut rig = Rig::new();
    add(&mut rig, "x");
    rig.submit(ask_with("a", "x", 3));
    let reply = remove(&mut rig, "x", None);
    rig.command(Command::Shutdown { grace: std::time::Duration::from_secs(60) });
    assert!(matches!(told(&reply).reply(), Err(Error::Unavailable(_))));
    rig.finish();
    assert_eq!(list(&mut rig), []);
}

#[test]
fn an_adapter_above_the_rank_is_refused() {
    let mut rig = Rig::new();
    let parameters = rig.engine.core.parameters.clone();
    for (rank, fits) in [(8, true), (9, false)] {
        let ticket = rig.begin(resident("x", None)).unwrap();
        let reply = told(&rig.commit(ticket.id, WeightUpdate::Lora(adapter(&parameters, 1, rank)))).reply();
        assert_eq!(reply.is_ok(), fits, "{reply:?}");
    }
    assert_eq!(list(&mut rig), [("x".into(), 1, 0, false)]);
    rig.assert_clean();
}

#[test]
fn an_adapter_beside_which_the_server_could_not_wake_is_refused_when_it_is_pushed() {
    let mut rig = Rig::new();
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    let large = adapter(&rig.engine.core.parameters, 2, 8);
    assert!(large.bytes() > STAGING);
    let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
    let error = told(&rig.commit(ticket.id, WeightUpdate::Lora(large))).reply().unwrap_err();
    assert!(matches!(&error, Error::ResourceExhausted(why) if why.contains("could not wake")), "{error}");
    assert_eq!(rig.wake(true, true, false).unwrap(), LifecycleStatus::Running);
    rig.assert_clean();
}

#[test]
fn a_wake_frees_offloaded_bytes_before_it_takes_those_of_the_weights() {
    let mut rig = Rig::new();
    rig.engine.core.executor.moved = 100;
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    assert_eq!(rig.reserved(MemoryUse::Offloaded), 100);
    let fits = adapter(&rig.engine.core.parameters, 1, 8);
    assert!(fits.bytes() > STAGING - 100 && fits.bytes() <= STAGING, "{}", fits.bytes());
    let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Lora(fits))).reply().unwrap();
    assert_eq!(rig.wake(true, true, false).unwrap(), LifecycleStatus::Running);
    rig.assert_clean();
}
