//! Requests that wait: for Resume, for a drain, for a newer policy.

use super::rig::*;
use crate::engine::*;
use crate::types::{FinishReason, Owner, Prompt, SamplingParams};
use crate::weights::{UpdateHeader, UpdateKind};

#[test]
fn held_requests_start_in_the_order_in_which_they_came() {
    let mut rig = Rig::new();
    told(&rig.pause(DrainMode::Wait)).reply().unwrap();
    let asked: Vec<_> = (0..4).map(|i| rig.submit(ask(&i.to_string(), 8, 1))).collect();
    assert_eq!(rig.status().stats.held_requests, 4);
    assert!(!rig.engine.core.can_step());
    rig.resume().unwrap();
    for (i, first) in asked.iter().enumerate() {
        // A step takes one prompt of eight tokens, if nothing of it is cached.
        told(&rig.call(|reply| Command::ResetPrefixCache { reply })).reply().unwrap();
        rig.step();
        rig.status();
        first.completion();
        assert!(asked[i + 1..].iter().all(|later| later.events().is_empty()), "{i}");
    }
    rig.assert_clean();
}

#[test]
fn what_a_step_has_brought_is_told_while_the_next_one_runs_or_before_a_command() {
    let mut rig = Rig::new();
    let (mut command, asked) = ask("a", 3, 5);
    command.request.kind =
        RequestKind::Generate { n: 1, seed: 1, prompt_logprobs: false, stream_tokens: true, return_text: false };
    let asked = rig.submit((command, asked));
    let told = || asked.events().iter().filter(|event| matches!(event, Event::Token { .. })).count();
    rig.step();
    assert_eq!(told(), 0, "the next step may begin first");
    rig.step();
    assert_eq!(told(), 1, "of the first step");
    rig.status();
    assert_eq!(told(), 1, "of the second step");
    rig.status();
    assert_eq!(told(), 0);
    rig.finish();
    assert_eq!(told(), 3, "of all others: nothing is left to step");
    rig.assert_clean();
}

#[test]
fn held_requests_count_against_the_queue() {
    let mut rig = Rig::new();
    told(&rig.pause(DrainMode::Wait)).reply().unwrap();
    let samples = |id: &str, n| {
        let (mut command, asked) = ask(id, 2, 1);
        command.request.kind =
            RequestKind::Generate { n, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false };
        (command, asked)
    };
    let first = rig.submit(samples("first", MAX_QUEUED as u32 - 1));
    assert!(
        matches!(rig.submit(samples("two", 2)).error(), Error::ResourceExhausted(why) if why.contains("15 samples"))
    );
    let last = rig.submit(samples("one", 1));
    assert!(matches!(rig.submit(samples("one", 1)).error(), Error::AlreadyExists(_)));
    rig.resume().unwrap();
    rig.finish();
    assert_eq!((first.events().len(), last.events().len()), (MAX_QUEUED, 2));
    rig.assert_clean();
}

#[test]
fn held_requests_are_cancelled_aborted_and_checked_when_they_start() {
    let mut rig = Rig::new();
    told(&rig.pause(DrainMode::Wait)).reply().unwrap();
    let cancelled = rig.submit(ask("cancelled", 3, 1));
    let aborted = rig.submit(ask("aborted", 3, 1));
    let at_version = |id: &str, exact, least| {
        let (mut command, asked) = ask(id, 3, 1);
        (command.request.if_weight_version, command.request.min_weight_version) = (exact, least);
        (command, asked)
    };
    let old = rig.submit(at_version("old", Some(0), None));
    let new = rig.submit(at_version("new", Some(1), None));
    let newer = rig.submit(at_version("newer", None, Some(2)));
    cancelled.cancel.cancel();
    rig.command(Command::Look);
    assert!(matches!(cancelled.error(), Error::Aborted(_)));
    let target = AbortTarget::Requests(vec!["aborted".into()]);
    told(&rig.call(|reply| Command::Abort { target, owner: None, reply })).reply();
    assert!(matches!(aborted.error(), Error::Aborted(_)));
    rig.push_lora(RunningPolicy::Keep);
    assert!(old.events().is_empty(), "nobody looks before Resume");
    rig.resume().unwrap();
    assert!(matches!(old.error(), Error::VersionConflict(_)));
    rig.finish();
    assert_eq!(sampled(&new.completion()), [1]);
    assert_eq!(rig.status().stats.held_requests, 1);
    rig.push_lora(RunningPolicy::Keep);
    rig.finish();
    assert_eq!(sampled(&newer.completion()), [2]);
    rig.assert_clean();
}

#[test]
fn a_pause_waits_aborts_or_keeps() {
    for (mode, tokens) in [(DrainMode::Wait, 4), (DrainMode::Abort, 2), (DrainMode::Keep, 4)] {
        let mut rig = Rig::new();
        let asked = rig.submit(ask("a", 3, 4));
        rig.steps(2);
        let reply = rig.pause(mode);
        if mode == DrainMode::Wait {
            assert!(told(&reply).is_waiting());
            let late = rig.submit(ask("late", 3, 1));
            rig.finish();
            assert!(late.events().is_empty() && rig.status().lifecycle == LifecycleStatus::Paused);
            rig.abort_held();
        }
        told(&reply).reply().unwrap();
        assert!(!rig.engine.core.can_step());
        rig.resume().unwrap();
        rig.finish();
        assert_eq!(asked.completion().tokens.len(), tokens, "{mode:?}");
        rig.assert_clean();
    }
}

#[test]
fn resume_calls_a_waiting_pause_off() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    let reply = rig.pause(DrainMode::Wait);
    let late = rig.submit(ask("late", 3, 1));
    rig.resume().unwrap();
    assert!(matches!(told(&reply).reply(), Err(Error::Aborted(_))));
    rig.finish();
    [asked, late].iter().for_each(|asked| drop(asked.completion()));
    assert_eq!(rig.status().lifecycle, LifecycleStatus::Running);
    rig.assert_clean();
}

#[test]
fn what_waits_for_requests_that_are_made_to_stand_still_is_called_off() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    rig.step();
    let pause = rig.pause(DrainMode::Wait);
    let update =
        rig.push(UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Lora) }).unwrap();
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    assert!(matches!(told(&pause).reply(), Err(Error::Aborted(_))));
    assert!(matches!(told(&update).reply(), Err(Error::Aborted(_))));
    assert_eq!((rig.status().update.is_some(), rig.status().stats.weight_version), (false, 0));
    rig.resume().unwrap();
    rig.finish();
    assert_eq!(asked.completion().tokens.len(), 4);
    rig.assert_clean();
}

#[test]
fn drains_take_effect_in_the_order_in_which_they_came() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    let update =
        rig.push(UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Lora) }).unwrap();
    let pause = rig.pause(DrainMode::Wait);
    let early = told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply();
    assert!(matches!(early, Err(Error::FailedPrecondition(why)) if why.contains("update is under way")));
    rig.finish();
    assert_eq!(told(&update).reply().unwrap().weight_version, 1);
    told(&pause).reply().unwrap();
    assert_eq!(asked.completion().weight_versions, [(0, 0, 4)]);
    rig.resume().unwrap();
    let asked = rig.submit(ask("b", 3, 4));
    let sleep = rig.sleep(SleepLevel::One, DrainMode::Wait);
    let late = rig.submit(ask("late", 3, 1));
    let refused = rig.begin(begin(UpdateKind::Lora)).unwrap_err();
    assert!(matches!(refused, Error::FailedPrecondition(why) if why.contains("about to sleep")));
    rig.finish();
    told(&sleep).reply().unwrap();
    asked.completion();
    rig.wake(true, true, false).unwrap();
    rig.finish();
    assert_eq!(sampled(&late.completion()), [2], "held through the sleep, served by the policy as loaded");
    rig.assert_clean();
}

#[test]
fn a_sleep_keeps_requests_or_ends_them() {
    for mode in [DrainMode::Keep, DrainMode::Abort] {
        let mut rig = Rig::new();
        let asked = rig.submit(ask("a", 6, 4));
        rig.steps(2);
        let slept = told(&rig.sleep(SleepLevel::One, mode)).reply().unwrap();
        assert!(slept.resident_bytes > 0);
        let (free, total) = (rig.status().stats.free_blocks, rig.status().stats.total_blocks);
        assert_eq!(free, total, "kept requests hold no blocks");
        rig.wake(true, true, false).unwrap();
        rig.finish();
        let completion = asked.completion();
        match mode {
            DrainMode::Keep => assert_eq!(sampled(&completion), [0, 0, 1, 1]),
            _ => assert_eq!((completion.tokens.len(), completion.finish_reason), (2, FinishReason::Aborted)),
        }
        rig.assert_clean();
    }
}

impl Rig {
    fn abort_held(&mut self) {
        let target = AbortTarget::All;
        told(&self.call(|reply| Command::Abort { target, owner: None, reply })).reply();
    }
}

#[test]
fn an_owner_ends_its_own_requests_and_learns_of_no_others() {
    let mut rig = Rig::new();
    let owned = |id: &str, owner: Option<u64>| {
        let (mut command, asked) = ask(id, 3, 50);
        command.client.owner = owner.map(Owner);
        (command, asked)
    };
    let mut asked: Vec<Asked> = Vec::new();
    for (id, owner) in [("mine", Some(1)), ("mine too", Some(1)), ("theirs", Some(2)), ("nobody's", None)] {
        asked.push(rig.submit(owned(id, owner)));
    }
    let held = rig.submit({
        let (mut command, asked) = owned("theirs, held", Some(2));
        command.request.min_weight_version = Some(9);
        (command, asked)
    });
    rig.step();
    let mut abort = |target: AbortTarget, owner: Option<u64>| {
        told(&rig.call(|reply| Command::Abort { target, owner: owner.map(Owner), reply })).reply()
    };
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    let all = ["mine", "theirs", "nobody's", "ghost", "theirs, held"];
    let reply = abort(AbortTarget::Requests(ids(&all)), Some(1));
    assert_eq!((reply.aborted, reply.unknown), (ids(&["mine"]), ids(&all[1..])));
    let reply = abort(AbortTarget::All, Some(1));
    assert_eq!((reply.aborted, reply.unknown), (ids(&["mine too"]), ids(&[])));
    let mut reply = abort(AbortTarget::All, None);
    reply.aborted.sort();
    assert_eq!(reply.aborted, ids(&["nobody's", "theirs", "theirs, held"]));
    assert!(asked.iter().all(|each| each.completion().finish_reason == FinishReason::Aborted));
    assert!(matches!(held.error(), Error::Aborted(_)));
    rig.assert_clean();
}

#[test]
fn a_request_whose_time_is_up_ends_with_what_it_has() {
    let mut rig = Rig::new();
    let (mut command, asked) = ask("a", 8, 50);
    command.request.kind =
        RequestKind::Generate { n: 2, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false };
    // The first prompt's samples have ended, those of the second run, and the third prompt waits behind both.
    command.request.prompts = [8, 8, 40].map(|len: u32| Prompt::from_tokens((0..len).collect::<Vec<_>>())).to_vec();
    let short = PromptSampling {
        params: Arc::new(SamplingParams { max_tokens: 1, ..SamplingParams::default() }),
        grammar: None,
        seed: None,
    };
    command.request.prompt_sampling = [(0, short)].into();
    let asked = rig.submit((command, asked));
    rig.steps(4);
    let before = asked.events();
    assert!(
        matches!(&before[..], [Event::Completion(a), Event::Completion(b)] if (a.prompt_index, b.prompt_index) == (0, 0))
    );
    asked.cancel.expire();
    rig.command(Command::Look);
    let events = asked.events();
    let [Event::Completion(a), Event::Completion(b), Event::Completion(c), Event::Completion(d), Event::Done(summary)] =
        &events[..]
    else {
        panic!("{events:?}")
    };
    let places: Vec<_> = [a, b, c, d].iter().map(|c| (c.prompt_index, c.sample_index)).collect();
    assert_eq!(places, [(1, 0), (1, 1), (2, 0), (2, 1)]);
    assert!([a, b, c, d].iter().all(|c| c.finish_reason == FinishReason::Aborted));
    let made = [a, b, c, d].map(|c| c.tokens.len());
    assert!(made[0] > 0 && made[1] > 0 && made[2..] == [0, 0], "{made:?}");
    assert_eq!(summary.completion_tokens, 2 + made.iter().sum::<usize>() as u64);
    assert_eq!(rig.status().stats.aborted_requests, 1);
    rig.assert_clean();
}

#[test]
fn a_request_whose_time_is_up_before_it_begins_has_samples_without_tokens() {
    for wait in ["newer policy", "pause", "none"] {
        let mut rig = Rig::new();
        let (mut command, asked) = ask("a", 3, 4);
        command.request.min_weight_version = (wait == "newer policy").then_some(9);
        if wait == "pause" {
            told(&rig.pause(DrainMode::Wait)).reply().unwrap();
        }
        if wait == "none" {
            asked.cancel.expire();
        }
        let asked = rig.submit((command, asked));
        if wait != "none" {
            assert_eq!(rig.status().stats.held_requests, 1);
            asked.cancel.expire();
            rig.command(Command::Look);
        }
        let ended = asked.completion();
        assert_eq!((ended.tokens.len(), ended.finish_reason, ended.seed), (0, FinishReason::Aborted, 1), "{wait}");
        assert_eq!((rig.status().stats.held_requests, rig.status().stats.steps), (0, 0));
        // Whoever is gone gets nothing, also if the time is up as well.
        asked.cancel.cancel();
        asked.cancel.expire();
        assert!(asked.cancel.is_cancelled() && !asked.cancel.is_expired());
    }
}
