//! The effect of an update on requests, under each [`RunningPolicy`].

use super::rig::*;
use crate::engine::*;
use crate::memory::MemoryUse;
use crate::types::FinishReason;
use crate::weights::{ReceiveMode, Source, TransitBytes, UpdateHeader, UpdateKind, WeightUpdate};

/// A request whose prompt is partly computed (it has 20 tokens, and a step takes 8), one that samples, and one in the
/// queue.
fn three_stages(rig: &mut Rig) -> [Asked; 3] {
    let samples = rig.submit(ask("samples", 3, 6));
    rig.steps(2);
    let prompt = rig.submit(ask("prompt", 20, 2));
    rig.step();
    // The step has no token left for a third request.
    let queued = rig.submit(ask("queued", 3, 2));
    [samples, prompt, queued]
}

#[test]
fn kept_requests_go_on_and_each_token_has_its_version() {
    let mut rig = Rig::new();
    let [samples, prompt, queued] = three_stages(&mut rig);
    let reply = rig.push_lora(RunningPolicy::Keep);
    assert_eq!((reply.weight_version, reply.pending, reply.adapter_generation), (1, false, None));
    rig.step();
    assert_eq!(rig.engine.core.executor.oldest_kv[0], 0, "its KV is of both");
    rig.finish();
    let samples = samples.completion();
    assert_eq!(sampled(&samples), [0, 0, 0, 1, 1, 1]);
    assert_eq!(samples.weight_versions, [(0, 0, 3), (1, 3, 6)]);
    for asked in [prompt, queued] {
        let completion = asked.completion();
        assert_eq!((sampled(&completion), completion.weight_versions), (vec![1, 1], vec![(1, 0, 2)]));
    }
    assert!(rig.engine.core.executor.oldest_kv.iter().all(|&policy| policy == 1), "prompts started again");
    rig.assert_clean();
}

#[test]
fn a_prompt_that_a_kept_request_still_holds_is_computed_anew() {
    let mut rig = Rig::new();
    let kept = rig.submit(ask("kept", 8, 9));
    rig.steps(2);
    rig.push_now(UpdateHeader { new_version: Some(0), force_version: true, ..UpdateHeader::new(UpdateKind::Lora) })
        .unwrap();
    let new = rig.submit(ask("new", 8, 1));
    rig.finish();
    let new = new.completion();
    assert_eq!((sampled(&new), new.cached_tokens), (vec![1], 0));
    assert_eq!(kept.completion().weight_versions, [(0, 0, 9)], "another policy of the same version");
    let again = rig.submit(ask("again", 8, 1));
    rig.step();
    assert_eq!(rig.engine.core.executor.oldest_kv, [1]);
    assert_eq!(again.completion().cached_tokens, 4, "what the new one computed is found");
    rig.assert_clean();
}

#[test]
fn recomputed_requests_read_no_kv_of_the_old_policy() {
    let mut rig = Rig::new();
    let asked = three_stages(&mut rig);
    rig.push_lora(RunningPolicy::Recompute);
    while rig.engine.core.can_step() {
        rig.step();
        assert!(rig.engine.core.executor.oldest_kv.iter().all(|&policy| policy == 1));
    }
    let [samples, prompt, queued] = asked.map(|asked| asked.completion().weight_versions);
    assert_eq!(samples, [(0, 0, 3), (1, 3, 6)]);
    assert_eq!([prompt, queued], [[(1, 0, 2)], [(1, 0, 2)]]);
    rig.assert_clean();
}

#[test]
fn an_abort_ends_what_has_started_and_nothing_else() {
    let mut rig = Rig::new();
    let [samples, prompt, queued] = three_stages(&mut rig);
    rig.push_lora(RunningPolicy::Abort);
    let samples = samples.completion();
    assert_eq!((sampled(&samples), samples.finish_reason), (vec![0, 0, 0], FinishReason::Aborted));
    assert_eq!(samples.weight_versions, [(0, 0, 3)]);
    let prompt = prompt.completion();
    assert_eq!((prompt.tokens.len(), prompt.finish_reason, prompt.weight_versions), (0, FinishReason::Aborted, vec![]));
    rig.finish();
    assert_eq!(queued.completion().weight_versions, [(1, 0, 2)]);
    rig.assert_clean();
}

#[test]
fn a_request_of_which_one_prompt_is_done_has_started() {
    let mut rig = Rig::new();
    let (mut command, asked) = ask("two", 8, 1);
    command.request.prompts.push(command.request.prompts[0].clone());
    command.request.if_weight_version = Some(0);
    rig.command(Command::Generate(Box::new(command)));
    rig.step();
    assert!(rig.engine.core.scheduler.started_requests().is_empty(), "one is done, one is queued");
    rig.push_lora(RunningPolicy::Abort);
    let events = asked.events();
    let reasons: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Completion(completion) => Some((completion.prompt_index, completion.finish_reason)),
            _ => None,
        })
        .collect();
    assert_eq!(reasons, [(0, FinishReason::Length), (1, FinishReason::Aborted)]);
    rig.assert_clean();
}

#[test]
fn a_waiting_update_lets_the_accepted_finish_and_holds_the_new() {
    let mut rig = Rig::new();
    let asked = three_stages(&mut rig);
    let reply = rig.push(UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Full) }).unwrap();
    let late = ["late", "later"].map(|id| rig.submit(ask(id, 2, 1)));
    let status = rig.status();
    assert_eq!((status.stats.held_requests, status.stats.accepted_requests, status.update.is_some()), (2, 3, true));
    let second = rig.begin(begin(UpdateKind::Lora)).unwrap_err();
    assert!(matches!(&second, Error::VersionConflict(why) if why.contains("another update is under way")), "{second}");
    assert_eq!(rig.did(), [Did::Shadow]);
    while told(&reply).is_waiting() {
        assert_eq!(rig.did(), []);
        rig.step();
    }
    for asked in asked {
        let completion = asked.completion();
        let len = completion.tokens.len() as u32;
        assert_eq!((completion.finish_reason, completion.weight_versions), (FinishReason::Length, vec![(0, 0, len)]));
    }
    rig.finish();
    assert_eq!(late.map(|asked| sampled(&asked.completion())), [[1], [1]]);
    rig.assert_clean();
}

#[test]
fn prompt_logprobs_are_of_one_policy_under_every_policy_for_running_requests() {
    for running in [RunningPolicy::Keep, RunningPolicy::Recompute] {
        for score in [false, true] {
            let mut rig = Rig::new();
            let (mut command, asked) = ask("a", 20, 2);
            command.request.kind = match score {
                true => RequestKind::Score,
                false => RequestKind::Generate {
                    n: 2,
                    seed: 1,
                    prompt_logprobs: true,
                    stream_tokens: false,
                    return_text: false,
                },
            };
            rig.command(Command::Generate(Box::new(command)));
            rig.steps(2);
            rig.push_now(UpdateHeader { running, new_version: Some(7), ..UpdateHeader::new(UpdateKind::Lora) })
                .unwrap();
            rig.finish();
            let events = asked.events();
            let Event::PromptDone { logprobs: Some(logprobs), weight_version: 7, .. } = &events[0] else {
                panic!("{events:?}")
            };
            let raw: Vec<f32> = logprobs.iter().map(|l| l.raw).collect();
            assert_eq!(raw, [-1.0; 19]);
            rig.assert_clean();
        }
    }
}

#[test]
fn versions_are_the_trainers_and_epochs_our_own() {
    let mut rig = Rig::new();
    let push = |rig: &mut Rig, new_version, expected_version| {
        rig.push_now(UpdateHeader { new_version, expected_version, ..UpdateHeader::new(UpdateKind::Lora) })
    };
    assert_eq!(push(&mut rig, Some(100), Some(0)).unwrap().weight_version, 100);
    let prompt_of = |rig: &mut Rig| {
        let asked = rig.submit(ask("p", 9, 1));
        rig.finish();
        asked.completion().cached_tokens
    };
    assert_eq!((prompt_of(&mut rig), prompt_of(&mut rig)), (0, 8));
    assert_eq!(push(&mut rig, None, None).unwrap().weight_version, 101);
    let again = UpdateHeader { new_version: Some(100), force_version: true, ..UpdateHeader::new(UpdateKind::Lora) };
    assert_eq!(rig.push_now(again).unwrap().weight_version, 100, "a trainer starts again");
    assert_eq!(prompt_of(&mut rig), 0, "the same number, another policy");
    let conflict = push(&mut rig, None, Some(101)).unwrap_err();
    let text = conflict.to_string();
    assert!(matches!(conflict, Error::VersionConflict(_)) && text.contains("101") && text.contains("version 100"));
    push(&mut rig, Some(u64::MAX), None).unwrap();
    assert!(matches!(push(&mut rig, None, None), Err(Error::InvalidArgument { field, .. }) if field == "new_version"));
    let unnamed = rig.push_now(begin(UpdateKind::Delta)).unwrap_err();
    assert!(matches!(unnamed, Error::InvalidArgument { field, .. } if field == "expected_version"));
    rig.assert_clean();
}

#[test]
fn a_version_that_goes_back_or_repeats_must_be_meant() {
    let mut rig = Rig::new();
    let push = |rig: &mut Rig, version, force_version| {
        rig.push_now(UpdateHeader { new_version: Some(version), force_version, ..UpdateHeader::new(UpdateKind::Lora) })
    };
    let set =
        |rig: &mut Rig, version, force| told(&rig.call(|reply| Command::SetVersion { version, force, reply })).reply();
    let refused = |error: Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::FailedPrecondition(_)), "{error:?}");
        assert!(text.contains("above 7") && text.contains("force_version"), "{text}");
    };
    push(&mut rig, 7, false).unwrap();
    rig.did();
    for version in [0, 6, 7] {
        refused(push(&mut rig, version, false).unwrap_err());
        refused(set(&mut rig, version, false).unwrap_err());
    }
    assert_eq!((rig.did(), rig.status().stats.weight_version), (vec![], 7));
    // A version that was free at the beginning of a push is not at its commit.
    let ticket =
        rig.begin(UpdateHeader { new_version: Some(7), force_version: true, ..UpdateHeader::new(UpdateKind::Lora) });
    told(&rig.commit(ticket.unwrap().id, lora())).reply().unwrap();
    let ticket = rig.begin(UpdateHeader { new_version: Some(9), ..UpdateHeader::new(UpdateKind::Lora) }).unwrap();
    set(&mut rig, 9, false).unwrap();
    let late = told(&rig.commit(ticket.id, lora())).reply().unwrap_err();
    assert!(matches!(&late, Error::FailedPrecondition(why) if why.contains("9 is not above 9")), "{late}");
    set(&mut rig, 3, true).unwrap();
    assert_eq!(push(&mut rig, 3, true).unwrap().weight_version, 3);
    assert_eq!(rig.push_lora(RunningPolicy::Keep).weight_version, 4, "one without a version goes on");
    // While the weights are missing, a push may restore the version that a sleep dropped.
    told(&rig.sleep(SleepLevel::Two, DrainMode::Wait)).reply().unwrap();
    assert_eq!(push(&mut rig, 4, false).unwrap().weight_version, 4);
    rig.assert_clean();
}

#[test]
fn a_queued_request_that_insists_on_the_old_policy_is_told() {
    let mut rig = Rig::new();
    let insist = |id: &str, prompt| {
        let (mut command, asked) = ask(id, prompt, 4);
        command.request.if_weight_version = Some(0);
        (command, asked)
    };
    let running = rig.submit(insist("running", 8));
    rig.step();
    let filler = rig.submit(ask("filler", 40, 1));
    rig.step();
    let queued = rig.submit(insist("queued", 3));
    rig.push_now(UpdateHeader { new_version: Some(5), ..UpdateHeader::new(UpdateKind::Lora) }).unwrap();
    assert!(matches!(queued.error(), Error::VersionConflict(why) if why.contains("version 5")));
    assert!(matches!(rig.submit(insist("new", 3)).error(), Error::VersionConflict(_)));
    rig.finish();
    assert_eq!(running.completion().weight_versions, [(0, 0, 2), (5, 2, 4)]);
    filler.completion();
    rig.assert_clean();
}

#[test]
fn a_version_without_an_update_keeps_the_cache_and_marks_tokens_from_then_on() {
    let mut rig = Rig::new();
    let running = rig.submit(ask("running", 8, 4));
    rig.steps(2);
    let filler = rig.submit(ask("filler", 40, 1));
    rig.step();
    let (mut command, asked) = ask("queued", 3, 1);
    command.request.if_weight_version = Some(0);
    let queued = rig.submit((command, asked));
    told(&rig.call(|reply| Command::SetVersion { version: 7, force: false, reply })).reply().unwrap();
    assert!(matches!(queued.error(), Error::VersionConflict(why) if why.contains("version 7")));
    rig.finish();
    assert_eq!(running.completion().weight_versions, [(0, 0, 3), (7, 3, 4)]);
    filler.completion();
    let again = rig.submit(ask("again", 8, 1));
    rig.finish();
    let again = again.completion();
    assert_eq!((again.cached_tokens, again.weight_versions), (4, vec![(7, 0, 1)]));
    assert_eq!((rig.status().stats.weight_version, rig.status().stats.updates, rig.did()), (7, 0, vec![]));
    assert_eq!(rig.push_lora(RunningPolicy::Keep).weight_version, 8);
    rig.assert_clean();
}

#[test]
fn memory_is_set_aside_or_the_update_is_refused_before_it_starts() {
    let mut rig = Rig::new();
    let header = |in_place| UpdateHeader { in_place, ..UpdateHeader::new(UpdateKind::Full) };
    let full = |staged, in_place| Begin::from(header(in_place)).staging(staged);
    let error = rig.begin(full(STAGING + 1, false)).unwrap_err();
    let text = error.to_string();
    for part in ["update_staging needs 301 B", "300 B of the ceiling", "kv_cache 450 B", "in_place", "--staging-bytes"]
    {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
    let broadcast = UpdateHeader { source: Source::Broadcast(TransitBytes::default()), ..header(false) };
    let text = rig.begin(Begin::from(broadcast).staging(STAGING + 1)).unwrap_err().to_string();
    assert!(text.contains("packed_buffer_size_bytes") && !text.contains("in_place"), "{text}");
    assert!(matches!(rig.begin(full(STAGING + 1, true)), Err(Error::ResourceExhausted(_))), "it runs");
    assert!(rig.status().update.is_none());
    let ticket = rig.begin(full(STAGING, true)).unwrap();
    assert!(!matches!(ticket.mode, ReceiveMode::InPlace), "it fits");
    assert_eq!(rig.reserved(MemoryUse::UpdateStaging), STAGING);
    assert!(matches!(rig.write_part(ticket.id), Err(Error::FailedPrecondition(why)) if why.contains("staged")));
    told(&rig.commit(ticket.id, content(UpdateKind::Full))).reply().unwrap();
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, false, false).unwrap();
    let ticket = rig.begin(full(780, true)).unwrap();
    assert!(!matches!(ticket.mode, ReceiveMode::InPlace), "the KV cache made room");
    rig.engine.updates.roll_back(&mut rig.engine.core);
    rig.assert_clean();
}

#[test]
fn a_push_in_place_passes_through_missing_weights() {
    let mut rig = Rig::new();
    let frozen = rig.submit(ask("frozen", 3, 9));
    rig.steps(2);
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    let ticket = rig.begin(large_in_place()).unwrap();
    assert_eq!(rig.reserved(MemoryUse::UpdateStaging), 1);
    rig.resume().unwrap();
    assert!(matches!(rig.write_part(ticket.id), Err(Error::FailedPrecondition(_))), "it runs again");
    assert_eq!(rig.did(), []);
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    let held = rig.submit(ask("held", 3, 1));
    rig.write_part(ticket.id).unwrap();
    assert_eq!(rig.status().lifecycle, LifecycleStatus::WeightsMissing);
    let frozen = frozen.completion();
    assert_eq!((sampled(&frozen), frozen.finish_reason), (vec![0, 0], FinishReason::Aborted));
    assert!(matches!(rig.wake(true, true, true), Err(Error::FailedPrecondition(_))), "the push will bring them");
    rig.write_part(ticket.id).unwrap();
    told(&rig.commit(ticket.id, content(UpdateKind::Full))).reply().unwrap();
    assert_eq!(rig.status().lifecycle, LifecycleStatus::Paused);
    rig.resume().unwrap();
    rig.finish();
    assert_eq!(sampled(&held.completion()), [3]);
    rig.assert_clean();
}

#[test]
fn frozen_requests_cannot_be_waited_for() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("a", 3, 4));
    rig.step();
    told(&rig.pause(DrainMode::Keep)).reply().unwrap();
    let wait = UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Lora) };
    assert!(matches!(rig.push(wait), Err(Error::FailedPrecondition(why)) if why.contains("RECOMPUTE")));
    let sleep = told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply();
    assert!(matches!(sleep, Err(Error::FailedPrecondition(why)) if why.contains("Resume")));
    // The request is kept through a pause, a push, a sleep at level 2 and another push.
    rig.push_lora(RunningPolicy::Keep);
    told(&rig.sleep(SleepLevel::Two, DrainMode::Keep)).reply().unwrap();
    rig.wake(true, true, false).unwrap();
    rig.push_now(begin(UpdateKind::Full)).unwrap();
    rig.finish();
    let completion = asked.completion();
    assert_eq!(sampled(&completion), [0, 2, 2, 2]);
    assert_eq!(completion.weight_versions, [(0, 0, 1), (2, 1, 4)]);
    rig.assert_clean();
}

#[test]
fn the_ledger_shows_what_a_merged_adapter_costs() {
    let mut rig = Rig::new();
    let parameters = rig.engine.core.parameters.clone();
    let push = |rig: &mut Rig, layers, staging_bytes| {
        let ticket = rig.begin(begin(UpdateKind::Lora).staging(staging_bytes)).unwrap();
        told(&rig.commit(ticket.id, WeightUpdate::Lora(adapter(&parameters, layers, 1)))).reply()
    };
    let costs = |rig: &Rig| {
        [MemoryUse::MergedAdapter, MemoryUse::BaseCopies, MemoryUse::UpdateStaging]
            .map(|used_for| rig.reserved(used_for))
    };
    push(&mut rig, 2, 10).unwrap();
    // Factors of rank 1 for matrices of 5 x 3 in float32. The checkpoint can be read again, so no copy is kept.
    assert_eq!(costs(&rig), [2 * 32, 0, 0]);
    rig.push_now(begin(UpdateKind::Full)).unwrap();
    assert_eq!(costs(&rig), [0; 3]);
    push(&mut rig, 1, 10).unwrap();
    assert_eq!(costs(&rig), [32, 60, 0]);
    rig.did();
    let error = push(&mut rig, 2, 180).unwrap_err();
    assert!(matches!(&error, Error::ResourceExhausted(why) if why.contains("base_copies")), "{error}");
    assert_eq!((costs(&rig), rig.did(), rig.status().stats.weight_version), ([32, 60, 0], vec![], 3));
    push(&mut rig, 2, 100).unwrap();
    assert_eq!(costs(&rig), [64, 120, 0]);
    rig.push_lora(RunningPolicy::Keep);
    assert_eq!(costs(&rig), [0; 3]);
    push(&mut rig, 2, 10).unwrap();
    told(&rig.sleep(SleepLevel::Two, DrainMode::Wait)).reply().unwrap();
    assert_eq!(costs(&rig), [0; 3]);
}

#[test]
fn a_delta_makes_what_serves_the_base() {
    let mut rig = Rig::new();
    let parameters = rig.engine.core.parameters.clone();
    let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Lora(adapter(&parameters, 1, 1)))).reply().unwrap();
    rig.push_now(UpdateHeader { expected_version: Some(1), ..UpdateHeader::new(UpdateKind::Delta) }).unwrap();
    assert_eq!(rig.reserved(MemoryUse::MergedAdapter), 0);
    let replaced = PARAMETERS.map(|name| rig.engine.core.policy.is_replaced(name));
    assert_eq!(replaced, [true, false], "the adapter is part of it now");
    rig.engine.core.executor.kept = 77;
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    assert_eq!(rig.reserved(MemoryUse::Weights), 77, "what the executor could not give back");
}

#[test]
fn who_holds_the_update_is_known_and_can_be_ended_by_anybody() {
    let mut rig = Rig::new();
    let (sender, ended) = std::sync::mpsc::channel();
    let cancel = |rig: &mut Rig, update| told(&rig.call(|reply| Command::CancelUpdate { update, reply })).reply();
    assert_eq!(cancel(&mut rig, None), None);
    let (new_version, expected_version) = (Some(9), Some(0));
    let header = UpdateHeader { new_version, expected_version, ..UpdateHeader::new(UpdateKind::Delta) };
    let mut update = Begin::from(header);
    update.sender.ended = Box::new(move |error| sender.send(error).unwrap());
    let ticket = rig.begin(update).unwrap();
    let open = rig.status().update.expect("it is open");
    assert_eq!((open.id, open.header.kind, open.header.new_version), (ticket.id, UpdateKind::Delta, Some(9)));
    assert_eq!((open.peer.as_str(), &open.header.adapter, open.committed), ("10.0.0.7:4711", &None, false));
    let second = rig.begin(begin(UpdateKind::Lora)).unwrap_err();
    assert!(second.to_string().contains("10.0.0.7:4711") && second.to_string().contains("CancelUpdate"), "{second}");
    assert_eq!(cancel(&mut rig, Some(ticket.id + 1)), None, "another one");
    assert!(rig.status().update.is_some() && told(&ended).is_waiting());
    assert_eq!(cancel(&mut rig, Some(ticket.id)).expect("that one").id, ticket.id);
    assert!(matches!(told(&ended).reply(), Error::Aborted(why) if why.contains("nothing has changed")));
    let late = told(&rig.commit(ticket.id, content(UpdateKind::Delta))).reply().unwrap_err();
    assert!(matches!(late, Error::FailedPrecondition(_)), "{late}");
    rig.assert_clean();
    rig.push_lora(RunningPolicy::Keep);
}

#[test]
fn a_commit_that_waits_can_be_cancelled() {
    let mut rig = Rig::new();
    let asked = rig.submit(ask("r", 3, 9));
    rig.steps(2);
    let reply = rig.push(UpdateHeader { running: RunningPolicy::Wait, ..UpdateHeader::new(UpdateKind::Full) }).unwrap();
    let held = rig.submit(ask("held", 3, 1));
    assert!(rig.status().update.expect("it waits").committed);
    let cancelled = told(&rig.call(|reply| Command::CancelUpdate { update: None, reply })).reply();
    assert!(cancelled.expect("it was there").committed);
    assert!(matches!(told(&reply).reply(), Err(Error::Aborted(_))));
    assert!(rig.status().update.is_none() && rig.status().stats.held_requests == 0, "what waited for it goes on");
    rig.finish();
    assert_eq!((asked.completion().tokens.len(), held.completion().tokens.len()), (9, 1));
    assert_eq!(rig.did(), [Did::Shadow]);
    rig.assert_clean();
}
