//! Clients that disconnect at each point of an update or a drain, and shutdown in each state.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::time::Duration;

use super::rig::*;
use crate::engine::*;
use crate::memory::MemoryUse;
use crate::weights::{UpdateHeader, UpdateKind, WeightUpdate};

/// The header of an update, and the flag that says that its client has vanished.
fn fragile(kind: UpdateKind, running: RunningPolicy) -> (Begin, CancelFlag) {
    with_flag(Begin::from(UpdateHeader { running, ..UpdateHeader::new(kind) }))
}

fn with_flag(begin: Begin) -> (Begin, CancelFlag) {
    let cancel = begin.sender.cancel.clone();
    (begin, cancel)
}

fn serves_the_old_policy(rig: &mut Rig) {
    let asked = rig.submit(ask("after", 5, 2));
    rig.finish();
    assert_eq!(sampled(&asked.completion()), [0, 0]);
    let status = rig.status();
    assert_eq!((status.stats.weight_version, status.stats.updates), (0, 0));
    rig.assert_clean();
    rig.push_lora(RunningPolicy::Keep);
}

#[test]
fn a_client_that_vanishes_after_begin_has_changed_nothing() {
    for noticed in [true, false] {
        let mut rig = Rig::new();
        let (begin, cancel) = fragile(UpdateKind::Full, RunningPolicy::Keep);
        let ticket = rig.begin(begin).unwrap();
        assert!(rig.status().update.is_some() && rig.reserved(MemoryUse::UpdateStaging) == 10);
        cancel.cancel();
        if noticed {
            rig.command(Command::Look);
            assert_eq!(rig.reserved(MemoryUse::UpdateStaging), 0);
        }
        let late = told(&rig.commit(ticket.id, content(UpdateKind::Full))).reply();
        assert!(matches!(late, Err(Error::FailedPrecondition(_))));
        serves_the_old_policy(&mut rig);
    }
}

#[test]
fn the_next_updater_need_not_wait_for_one_that_vanished() {
    let mut rig = Rig::new();
    let (begin, cancel) = fragile(UpdateKind::Full, RunningPolicy::Keep);
    rig.begin(begin).unwrap();
    cancel.cancel();
    rig.push_lora(RunningPolicy::Keep);
    rig.assert_clean();
}

#[test]
fn a_client_that_vanishes_while_its_commit_waits_has_changed_nothing() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    rig.step();
    let (begin, cancel) = fragile(UpdateKind::Lora, RunningPolicy::Wait);
    let ticket = rig.begin(begin).unwrap();
    let reply = rig.commit(ticket.id, lora());
    let late = rig.submit(ask("late", 3, 1));
    assert!(told(&reply).is_waiting());
    let twice = told(&rig.commit(ticket.id, lora())).reply();
    assert!(matches!(twice, Err(Error::FailedPrecondition(_))), "it is committed once");
    cancel.cancel();
    rig.command(Command::Look);
    assert!(matches!(told(&reply), Told::Dropped));
    rig.finish();
    assert_eq!([asked, late].map(|a| a.completion().weight_versions), [[(0, 0, 4)], [(0, 0, 1)]]);
    serves_the_old_policy(&mut rig);
}

#[test]
fn a_client_that_vanishes_after_its_commit_has_changed_the_policy() {
    let mut rig = Rig::new();
    let (begin, cancel) = fragile(UpdateKind::Lora, RunningPolicy::Keep);
    let ticket = rig.begin(begin).unwrap();
    told(&rig.commit(ticket.id, lora())).reply().unwrap();
    cancel.cancel();
    rig.command(Command::Look);
    assert_eq!(rig.status().stats.weight_version, 1);
    rig.assert_clean();
}

#[test]
fn in_place_a_client_that_vanishes_before_the_first_write_has_changed_nothing() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    rig.step();
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    let (begin, cancel) = with_flag(large_in_place());
    let ticket = rig.begin(begin).unwrap();
    cancel.cancel();
    assert!(matches!(rig.write_part(ticket.id), Err(Error::FailedPrecondition(_))));
    rig.resume().unwrap();
    rig.finish();
    assert_eq!(asked.completion().weight_versions, [(0, 0, 4)]);
    serves_the_old_policy(&mut rig);
}

#[test]
fn in_place_after_the_first_write_only_a_complete_push_helps() {
    let mut rig = Rig::new();
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, false, false).unwrap();
    let (begin, cancel) = with_flag(large_in_place());
    let ticket = rig.begin(begin).unwrap();
    rig.write_part(ticket.id).unwrap();
    cancel.cancel();
    rig.command(Command::Look);
    assert_eq!(rig.reserved(MemoryUse::UpdateStaging), 0);
    assert!(matches!(told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply(), Err(Error::FailedPrecondition(_))));
    assert_eq!(rig.wake(false, true, false).unwrap(), LifecycleStatus::WeightsMissing);
    assert!(matches!(rig.submit(ask("a", 3, 1)).error(), Error::FailedPrecondition(why) if why.contains("reload")));
    rig.push_now(super::rig::begin(UpdateKind::Full)).unwrap();
    let asked = rig.submit(ask("a", 3, 1));
    rig.finish();
    assert_eq!(sampled(&asked.completion()), [rig.engine.core.executor.policy]);
    rig.assert_clean();
}

#[test]
fn a_reload_that_fails_leaves_no_entry_of_the_adapter_it_has_forgotten() {
    let mut rig = Rig::new();
    let ticket = rig.begin(super::rig::begin(UpdateKind::Lora)).unwrap();
    let merged = WeightUpdate::Lora(adapter(&rig.engine.core.parameters, 1, 1));
    told(&rig.commit(ticket.id, merged)).reply().unwrap();
    assert!(rig.reserved(MemoryUse::MergedAdapter) > 0);
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, false, false).unwrap();
    let (begin, cancel) = with_flag(large_in_place());
    let ticket = rig.begin(begin).unwrap();
    rig.write_part(ticket.id).unwrap();
    cancel.cancel();
    rig.command(Command::Look);
    rig.engine.core.executor.no_room = true;
    let error = rig.wake(true, true, true).unwrap_err();
    assert!(matches!(error, Error::ResourceExhausted(_)), "{error}");
    assert_eq!(rig.reserved(MemoryUse::MergedAdapter), 0);
    rig.engine.core.executor.no_room = false;
    assert_eq!(rig.wake(true, true, true).unwrap(), LifecycleStatus::Running);
    rig.assert_clean();
}

#[test]
fn a_caller_of_a_pause_or_sleep_that_vanishes_calls_it_off() {
    for sleep in [false, true] {
        let mut rig = Rig::new();
        let asked = rig.submit(ask("a", 3, 4));
        let flag = CancelFlag::default();
        let (mode, cancel) = (DrainMode::Wait, flag.clone());
        if sleep {
            rig.call(|reply| Command::Sleep { level: SleepLevel::Two, mode, cancel, reply });
        } else {
            rig.call(|reply| Command::Pause { mode, cancel, reply });
        }
        let late = rig.submit(ask("late", 3, 1));
        assert_eq!(rig.status().stats.held_requests, 1);
        flag.cancel();
        rig.command(Command::Look);
        assert_eq!((rig.status().stats.held_requests, rig.status().lifecycle), (0, LifecycleStatus::Running));
        rig.finish();
        [asked, late].iter().for_each(|asked| drop(asked.completion()));
        rig.assert_clean();
    }
}

/// Starts an engine on a thread of its own, over the rig's ranks.
fn start(prepare: impl FnOnce(&mut Rig)) -> (EngineHandle, std::thread::JoinHandle<Result<()>>) {
    let mut rig = Rig::new();
    let (sender, commands) = sync_channel(COMMAND_QUEUE);
    rig.engine.commands = commands;
    prepare(&mut rig);
    (EngineHandle::new(sender), std::thread::spawn(move || rig.engine.run()))
}

fn joined(thread: std::thread::JoinHandle<Result<()>>) {
    let (sender, ended) = channel();
    std::thread::spawn(move || drop(sender.send(thread.join().expect("the engine does not panic"))));
    ended.recv_timeout(Duration::from_secs(20)).expect("the engine ends in bounded time").unwrap();
}

#[test]
fn shutdown_ends_in_every_state_and_tells_everyone() {
    type Prepare = fn(&mut Rig) -> Vec<Asked>;
    let cases: [Prepare; 4] = [
        |rig| {
            let frozen = rig.submit(ask("frozen", 3, 9));
            rig.step();
            told(&rig.pause(DrainMode::Keep)).reply().unwrap();
            vec![frozen, rig.submit(ask("held", 3, 9))]
        },
        |rig| {
            let frozen = rig.submit(ask("frozen", 3, 9));
            rig.step();
            told(&rig.sleep(SleepLevel::One, DrainMode::Keep)).reply().unwrap();
            vec![frozen]
        },
        |rig| {
            let frozen = rig.submit(ask("frozen", 3, 9));
            told(&rig.sleep(SleepLevel::Two, DrainMode::Keep)).reply().unwrap();
            rig.wake(true, true, false).unwrap();
            vec![frozen]
        },
        |_| Vec::new(),
    ];
    for prepare in cases {
        let mut asked = Vec::new();
        let (handle, thread) = start(|rig| {
            asked = prepare(rig);
            rig.begin(begin(UpdateKind::Lora)).unwrap();
        });
        // The grace is long, but nothing steps, so the shutdown does not wait.
        handle.send(Command::Shutdown { grace: Duration::from_secs(3600) }).unwrap();
        joined(thread);
        for asked in asked {
            assert!(matches!(asked.events().last(), Some(Event::Done(_) | Event::Failed(_))));
            assert_eq!(asked.events.recv_timeout(Duration::ZERO).unwrap_err(), RecvTimeoutError::Disconnected);
        }
    }
}

#[test]
fn shutdown_tells_what_waits_at_once_and_lets_requests_finish() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    let update: Receiver<Result<UpdateReply>> =
        rig.push(UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Full) }).unwrap();
    let pause = rig.pause(DrainMode::Wait);
    let held = rig.submit(ask("held", 3, 1));
    rig.command(Command::Shutdown { grace: Duration::from_secs(3600) });
    assert!(matches!(told(&update).reply(), Err(Error::Unavailable(_))));
    assert!(matches!(told(&pause).reply(), Err(Error::Unavailable(_))));
    assert!(matches!(held.error(), Error::Unavailable(_)));
    rig.finish();
    assert_eq!(asked.completion().weight_versions, [(0, 0, 4)]);
    rig.assert_clean();
}

#[test]
fn nothing_is_stepped_while_nothing_may_step() {
    let (handle, thread) = start(|rig| {
        rig.submit(ask("frozen", 3, 90));
        told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    });
    let steps = || {
        let (sender, reply) = channel();
        handle
            .send(Command::Status { reply: Box::new(move |s: EngineStatus| sender.send(s.stats.steps).unwrap()) })
            .unwrap();
        reply.recv_timeout(Duration::from_secs(20)).unwrap()
    };
    assert_eq!((steps(), steps()), (0, 0));
    let (sender, reply) = channel();
    handle.send(Command::Resume { reply: Box::new(move |r| sender.send(r).unwrap()) }).unwrap();
    reply.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
    handle.send(Command::Shutdown { grace: Duration::from_secs(3600) }).unwrap();
    joined(thread);
}
