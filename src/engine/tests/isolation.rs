//! One caller cannot harm others: not by a panic of its answer, a flood of commands, or many ids.

use std::sync::mpsc::{Receiver, channel, sync_channel};

use super::rig::*;
use crate::engine::*;
use crate::types::RequestKey;
use crate::weights::{UpdateHeader, UpdateKind};

fn internal(asked: &Asked) -> String {
    match asked.error() {
        Error::Internal(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_panic_in_an_answer_ends_its_request_alone() {
    let mut rig = Rig::new();
    let [bad, good] = ["bad", "good"].map(|id| rig.submit(ask(id, 3, 4)));
    rig.step();
    let key = rig.engine.core.requests.find("bad").unwrap();
    rig.engine.core.executor.failing = vec![(key, "index out of bounds".into())];
    rig.step();
    assert!(internal(&bad).contains("index out of bounds"));
    rig.finish();
    assert_eq!(sampled(&good.completion()), [0; 4]);
    let status = rig.status();
    assert_eq!(
        (status.stats.internal_errors, status.stats.finished_requests, status.stats.aborted_requests),
        (1, 1, 1)
    );
    rig.assert_clean();
}

/// A request whose responder panics at event number `at`, counted from 0, and at all events after it if `always`.
fn panicking(id: &str, at: usize, always: bool) -> (GenerateCommand, Receiver<Event>) {
    let (mut command, _) = ask(id, 3, 4);
    command.request.kind =
        RequestKind::Generate { n: 2, seed: 1, prompt_logprobs: true, stream_tokens: true, return_text: false };
    let (sender, events) = channel();
    let mut seen = 0;
    command.client.responder = Box::new(move |event| {
        seen += 1;
        assert!(seen != at + 1 && !(always && seen > at), "a responder that panics");
        drop(sender.send(event));
    });
    (command, events)
}

#[test]
fn a_panic_while_events_are_made_ends_their_request_alone() {
    for (at, always) in [(0, false), (1, false), (3, false), (0, true)] {
        let mut rig = Rig::new();
        let (command, events) = panicking("bad", at, always);
        rig.command(Command::Generate(Box::new(command)));
        let good = rig.submit(ask("good", 3, 4));
        rig.finish();
        let last = events.try_iter().last();
        match always {
            false => assert!(matches!(last, Some(Event::Failed(Error::Internal(_)))), "{at}: {last:?}"),
            true => assert!(last.is_none()),
        }
        assert_eq!(sampled(&good.completion()), [0; 4]);
        assert_eq!(rig.status().stats.internal_errors, 1);
        rig.assert_clean();
    }
}

#[test]
fn a_panic_while_an_aborted_request_is_told_ends_that_one_alone() {
    let mut rig = Rig::new();
    // Events 0 to 2 are the prompt's log-probabilities and two tokens, event 3 is the first completion of the abort.
    let (command, events) = panicking("bad", 3, false);
    rig.command(Command::Generate(Box::new(command)));
    let good = rig.submit(ask("good", 3, 4));
    rig.step();
    told(&rig.call(|reply| Command::Abort { target: AbortTarget::Requests(vec!["bad".into()]), owner: None, reply }))
        .reply();
    let last = events.try_iter().last();
    assert!(matches!(last, Some(Event::Failed(Error::Internal(_)))), "{last:?}");
    rig.finish();
    assert_eq!(sampled(&good.completion()), [0; 4]);
    assert_eq!(rig.status().stats.internal_errors, 1);
    rig.assert_clean();
}

/// Sets a flag when it is dropped.
struct CancelAtDrop(CancelFlag);

impl Drop for CancelAtDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[test]
fn an_update_that_is_cancelled_while_its_commit_falls_due_keeps_its_transaction() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    rig.step();
    let header = UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Lora) };
    let begin = Begin::from(header);
    let update = begin.sender.cancel.clone();
    let ticket = rig.begin(begin).unwrap();
    let commit = rig.commit(ticket.id, lora());
    // A pause waits behind the commit. When its caller disconnects, its reply is dropped, and that disconnects the
    // sender too.
    let pause = CancelFlag::default();
    let guard = CancelAtDrop(update);
    let reply: Reply<Result<()>> = Box::new(move |_| drop(guard));
    rig.command(Command::Pause { mode: DrainMode::Wait, cancel: pause.clone(), reply });
    rig.steps(2);
    pause.cancel();
    rig.step();
    assert_eq!(asked.completion().weight_versions, [(0, 0, 4)]);
    // The update was not cancelled yet when its flag was read, so its commit took place.
    assert_eq!(told(&commit).reply().unwrap().weight_version, 1);
    rig.assert_clean();
}

/// Callers that send a command as soon as the last is answered keep the queue full, but the engine still steps.
#[test]
fn a_flood_of_commands_does_not_keep_the_engine_from_stepping() {
    let (sender, commands) = sync_channel(COMMAND_QUEUE);
    let rig = Rig::with_commands(commands);
    let (command, asked) = ask("a", 3, 20);
    sender.send(Command::Generate(Box::new(command))).unwrap();
    /// Sends the next command from the reply itself, on the engine's thread, so that there always is one.
    fn ask_for_ever(sender: std::sync::mpsc::SyncSender<Command>) {
        let again = sender.clone();
        let reply = Box::new(move |status: EngineStatus| {
            if status.stats.finished_requests == 0 {
                ask_for_ever(again);
            }
        });
        let _ = sender.try_send(Command::Status { reply });
    }
    ask_for_ever(sender.clone());
    let engine = std::thread::spawn(move || rig.engine.run());
    let last = asked.events.iter().last();
    assert!(matches!(last, Some(Event::Done(_))), "{last:?}");
    sender.send(Command::Shutdown { grace: std::time::Duration::ZERO }).unwrap();
    engine.join().unwrap().unwrap();
}

#[test]
fn an_abort_of_many_ids_looks_each_up_once() {
    let mut rig = Rig::new();
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    let held: Vec<_> = (0..MAX_QUEUED).map(|i| rig.submit(ask(&format!("r{i}"), 3, 1))).collect();
    let ids: Vec<String> = (0..200_000).map(|i| format!("r{i}")).collect();
    let target = AbortTarget::Requests(ids);
    let reply = told(&rig.call(|reply| Command::Abort { target, owner: None, reply })).reply();
    assert_eq!((reply.aborted.len(), reply.unknown.len()), (MAX_QUEUED, 200_000 - MAX_QUEUED));
    assert!(held.iter().all(|asked| matches!(asked.error(), Error::Aborted(_))));
    assert_eq!(rig.engine.core.requests.find("r0"), None::<RequestKey>);
    rig.resume().unwrap();
    rig.assert_clean();
}

#[test]
fn an_id_is_free_again_when_its_request_has_ended() {
    let mut rig = Rig::new();
    for round in 0..2 {
        let asked = rig.submit(ask("a", 3, 2));
        assert!(matches!(rig.submit(ask("a", 3, 2)).error(), Error::AlreadyExists(_)), "round {round}");
        rig.finish();
        asked.completion();
        let (mut command, held) = ask("held", 3, 1);
        command.request.min_weight_version = Some(9);
        let held = rig.submit((command, held));
        assert!(matches!(rig.submit(ask("held", 3, 1)).error(), Error::AlreadyExists(_)), "round {round}");
        held.cancel.cancel();
        rig.command(Command::Look);
        rig.assert_clean();
    }
}
