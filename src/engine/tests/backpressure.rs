//! Readers that lag, and a shortage of memory for requests.

use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::rig::*;
use crate::engine::*;
use crate::memory::{Backlog, Traffic};

/// More bytes than any backlog may have.
const UNREAD: u64 = 32 << 20;

/// A request with a backlog that the test fills and drains.
fn ask_with_backlog(id: &str, traffic: &Traffic, max_tokens: u32) -> (GenerateCommand, Asked, Backlog) {
    let (mut command, asked) = ask(id, 3, max_tokens);
    command.client.backlog = Backlog::new(traffic);
    command.client.charge = traffic.charge_always(0);
    let backlog = command.client.backlog.clone();
    (command, asked, backlog)
}

#[test]
fn a_request_whose_reader_lags_is_held_back_without_blocks_until_it_has_caught_up() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let (command, slow, backlog) = ask_with_backlog("slow", &traffic, 6);
    let slow = rig.submit((command, slow));
    let quick = rig.submit(ask("quick", 3, 6));
    rig.steps(2);
    backlog.add(UNREAD);
    rig.command(Command::Look);
    rig.finish();
    assert_eq!(sampled(&quick.completion()), [0; 6]);
    assert!(slow.events().is_empty());
    let status = rig.status();
    assert_eq!((status.stats.accepted_requests, status.stats.free_blocks), (1, status.stats.total_blocks));
    assert!(!backlog.take(UNREAD / 16), "it lags as before");
    rig.command(Command::Look);
    assert!(!rig.engine.core.can_step());
    assert!(backlog.take(UNREAD / 16 * 15), "the engine is to look again");
    rig.command(Command::Look);
    rig.finish();
    assert_eq!(sampled(&slow.completion()), [0; 6]);
    rig.assert_clean();
}

#[test]
fn a_request_that_ends_in_the_step_after_which_the_others_are_held_back_is_told() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let (command, slow, backlog) = ask_with_backlog("slow", &traffic, 6);
    let slow = rig.submit((command, slow));
    let quick = rig.submit(ask("quick", 3, 2));
    rig.step();
    backlog.add(UNREAD);
    rig.step();
    assert!(!rig.engine.core.can_step());
    assert_eq!(sampled(&quick.completion()), [0; 2]);
    assert!(backlog.take(UNREAD));
    rig.command(Command::Look);
    rig.finish();
    assert_eq!(sampled(&slow.completion()), [0; 6]);
    rig.assert_clean();
}

#[test]
fn a_request_that_is_given_up_gets_what_the_last_step_has_brought() {
    let mut rig = Rig::new();
    let [ended, cut, other] =
        [("ended", 2), ("cut", 3), ("other", 4)].map(|(id, tokens)| rig.submit(ask(id, 2, tokens)));
    rig.step();
    ended.cancel.expire();
    cut.cancel.expire();
    rig.step();
    let completion = ended.completion();
    assert_eq!((sampled(&completion).len(), completion.finish_reason), (2, crate::types::FinishReason::Length));
    let completion = cut.completion();
    assert_eq!((sampled(&completion).len(), completion.finish_reason), (2, crate::types::FinishReason::Aborted));
    rig.finish();
    assert_eq!(sampled(&other.completion()).len(), 4);
    rig.assert_clean();
}

#[test]
fn a_request_that_is_held_back_can_end_and_change_its_policy() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let [a, b] = ["a", "b"].map(|id| {
        let (command, asked, backlog) = ask_with_backlog(id, &traffic, 3);
        backlog.add(UNREAD);
        (rig.submit((command, asked)), backlog)
    });
    assert!(!rig.engine.core.can_step());
    rig.push_lora(RunningPolicy::Keep);
    a.0.cancel.cancel();
    rig.command(Command::Look);
    assert!(!b.1.take(0) && b.1.take(UNREAD));
    rig.command(Command::Look);
    rig.finish();
    let completion = b.0.completion();
    assert_eq!((sampled(&completion), completion.weight_versions), (vec![1; 3], vec![(1, 0, 3)]));
    assert_eq!(a.0.completion().finish_reason, crate::types::FinishReason::Aborted);
    rig.assert_clean();
}

#[test]
fn where_memory_is_tight_requests_go_on_one_by_one() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let asked = ["a", "b", "c"].map(|id| rig.submit(ask(id, 3, 4)));
    rig.step();
    let others = traffic.charge_always(TRAFFIC_BYTES / 16 * 15);
    let mut ended = Vec::new();
    rig.command(Command::Look);
    while rig.engine.core.can_step() {
        rig.step();
        assert!(rig.status().stats.running_samples <= 1);
        let done = |asked: &Asked| asked.events().iter().any(|event| matches!(event, Event::Done(_)));
        ended.extend(asked.iter().enumerate().filter(|(_, asked)| done(asked)).map(|(i, _)| i));
    }
    assert_eq!(ended, [0, 1, 2], "the oldest first");
    drop(others);
    rig.assert_clean();
}

#[test]
fn where_no_memory_is_left_the_request_that_holds_most_ends() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let small = rig.submit(ask("small", 3, 4));
    let (mut command, large, _) = ask_with_backlog("large", &traffic, 4);
    command.client.charge = traffic.charge_always(TRAFFIC_BYTES);
    let large = rig.submit((command, large));
    assert!(matches!(large.error(), Error::ResourceExhausted(why) if why.contains("--request-bytes")));
    rig.finish();
    assert_eq!(sampled(&small.completion()), [0; 4]);
    assert_eq!(traffic.used(), 0);
    rig.assert_clean();
}

#[test]
fn tokens_count_until_their_sample_is_given_away() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let (command, asked, _) = ask_with_backlog("a", &traffic, 5);
    let asked = rig.submit((command, asked));
    let mut used = vec![traffic.used()];
    while rig.engine.core.can_step() {
        rig.step();
        used.push(traffic.used());
    }
    let token = size_of::<crate::types::TokenLogprobs>() as u64;
    // The outcomes of a step are counted while the next one runs.
    assert_eq!(used, [0, 0, token, 2 * token, 3 * token, 0]);
    asked.completion();
}

#[test]
fn an_end_does_not_wait_for_readers_longer_than_its_grace() {
    let (sender, commands) = sync_channel(2);
    let rig = Rig::with_commands(commands);
    let (command, asked, backlog) = ask_with_backlog("slow", &rig.engine.core.traffic, 4);
    backlog.add(UNREAD);
    sender.send(Command::Generate(Box::new(command))).unwrap();
    sender.send(Command::Shutdown { grace: Duration::from_millis(20) }).unwrap();
    rig.engine.run().unwrap();
    assert_eq!(asked.completion().finish_reason, crate::types::FinishReason::Aborted);
}

#[test]
fn a_pause_that_waits_for_a_request_which_ends_for_want_of_memory_takes_effect() {
    let mut rig = Rig::new();
    let traffic = rig.engine.core.traffic.clone();
    let asked = rig.submit(ask("a", 3, 6));
    rig.step();
    let pause = rig.pause(DrainMode::Wait);
    assert!(told(&pause).is_waiting());
    let rest = traffic.charge_always(TRAFFIC_BYTES);
    rig.command(Command::Look);
    assert!(matches!(asked.error(), Error::ResourceExhausted(_)));
    told(&pause).reply().unwrap();
    drop(rest);
    rig.assert_clean();
}
