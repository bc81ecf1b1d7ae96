//! Adapters that requests name before they are resident: loads, waits for slots, failures.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::rig::*;
use crate::engine::*;
use crate::memory::Traffic;
use crate::types::FinishReason;
use crate::weights::{UpdateHeader, UpdateKind};

/// The names that the engine has asked a reader for, in order.
struct Reader(Sender<String>, Receiver<String>);

impl Default for Reader {
    fn default() -> Self {
        let (names, asked) = channel();
        Self(names, asked)
    }
}

impl Reader {
    /// A request for `max_tokens` tokens with this adapter, of a server that reads adapters.
    fn ask(&self, id: &str, adapter: &str, max_tokens: u32) -> (GenerateCommand, Asked) {
        let (mut command, asked) = ask(id, 3, max_tokens);
        command.request.adapter = Some(adapter.into());
        let names = self.0.clone();
        command.client.adapter_reader = Some(Box::new(move |name| names.send(name.into()).unwrap()));
        (command, asked)
    }

    /// The names since the last call.
    fn asked(&self) -> Vec<String> {
        self.1.try_iter().collect()
    }
}

fn read(rig: &mut Rig, name: &str) {
    let adapter = adapter(&rig.engine.core.parameters, 1, 8);
    let charge = Traffic::new(TRAFFIC_BYTES).charge_always(0);
    let read = ReadAdapter { adapter, directory: format!("/adapters/{name}"), charge };
    rig.command(Command::AdapterRead { name: name.into(), read: Ok(read) });
}

fn fail(rig: &mut Rig, name: &str, error: Error) {
    rig.command(Command::AdapterRead { name: name.into(), read: Err(error) });
}

fn push(rig: &mut Rig, name: &str) -> Result<UpdateReply> {
    let adapter = AdapterTarget { name: name.into(), expected_generation: None, evicts: false };
    rig.push_now(UpdateHeader { adapter: Some(adapter), ..UpdateHeader::new(UpdateKind::Lora) })
}

/// `name`, with `!` behind it if it is retired, of each resident adapter.
fn resident(rig: &mut Rig) -> Vec<String> {
    let adapters = told(&rig.call(|reply| Command::ListAdapters { reply })).reply();
    adapters.into_iter().map(|a| if a.retired { a.name + "!" } else { a.name }).collect()
}

/// Loads, evictions and failures so far.
fn counts(rig: &mut Rig) -> (u64, u64, u64) {
    let stats = rig.status().stats;
    (stats.adapter_loads, stats.adapter_evictions, stats.adapter_load_failures)
}

/// Loads adapters, and lets a request of one token finish with each.
fn load(rig: &mut Rig, reader: &Reader, names: &[&str]) {
    for name in names {
        let asked = rig.submit(reader.ask(name, name, 1));
        assert_eq!(reader.asked(), [*name]);
        read(rig, name);
        rig.finish();
        asked.completion();
    }
}

#[test]
fn many_requests_for_one_adapter_load_it_once_and_hold_nobody_else() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let held: Vec<_> = (0..5).map(|i| rig.submit(reader.ask(&format!("x{i}"), "x", 2))).collect();
    assert_eq!((reader.asked(), rig.status().stats.held_requests), (vec!["x".to_owned()], 5));
    let policy = rig.submit(ask("policy", 3, 2));
    rig.finish();
    assert_eq!(policy.completion().finish_reason, FinishReason::Length);
    read(&mut rig, "x");
    assert_eq!((rig.did(), rig.status().stats.accepted_requests), (vec![Did::Add(1)], 5));
    rig.finish();
    held.iter().for_each(|asked| drop(asked.completion()));
    let again = rig.submit(reader.ask("again", "x", 1));
    rig.finish();
    again.completion();
    assert_eq!((reader.asked(), counts(&mut rig)), (vec![], (1, 0, 0)));
    rig.assert_clean();
}

#[test]
fn a_load_that_fails_ends_the_requests_that_wait_for_it() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let [x, also, y] = [("x", "x"), ("also", "x"), ("y", "y")].map(|(id, name)| rig.submit(reader.ask(id, name, 1)));
    fail(&mut rig, "x", Error::NotFound("x/adapter_config.json does not exist below --adapters-dir".into()));
    for asked in [x, also] {
        let error = asked.error();
        assert!(
            matches!(&error, Error::NotFound(why) if why.starts_with("adapter: \"x\" is not resident (no adapter is \
                resident); x/adapter_config.json does not exist below --adapters-dir")),
            "{error}"
        );
    }
    assert_eq!(reader.asked(), ["x", "y"]);
    read(&mut rig, "y");
    rig.finish();
    y.completion();
    // Nothing of the failure is kept.
    load(&mut rig, &reader, &["x"]);
    assert_eq!((resident(&mut rig), counts(&mut rig)), (vec!["y".into(), "x".into()], (2, 0, 1)));
    rig.assert_clean();
}

#[test]
fn an_adapter_that_the_model_has_no_place_for_is_refused_by_the_name_of_the_field() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let (mut command, asked) = reader.ask("a", "x", 1);
    command.request.policies.references = vec![None, command.request.adapter.take()];
    let asked = rig.submit((command, asked));
    rig.engine.core.executor.no_place = true;
    read(&mut rig, "x");
    let error = asked.error();
    assert!(
        matches!(&error, Error::InvalidArgument { field, message } if field == "returns.references[1]"
            && message.contains("\"x\" cannot be loaded: lm_head.weight: no resident adapter")),
        "{error}"
    );
    assert_eq!((resident(&mut rig), counts(&mut rig)), (vec![], (0, 0, 1)));
}

#[test]
fn the_least_recently_used_loaded_adapter_leaves_for_another_and_a_pushed_one_stays() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    push(&mut rig, "pushed").unwrap();
    load(&mut rig, &reader, &["x", "y", "x", "z"]);
    assert_eq!((resident(&mut rig), counts(&mut rig)), (vec!["pushed".into(), "z".into()], (4, 3, 0)));
    // A push without `evicts` takes the slot of an adapter that can be read again.
    push(&mut rig, "other").unwrap();
    assert_eq!(resident(&mut rig), ["pushed", "other"]);
    let error = rig.submit(reader.ask("x", "x", 1)).error();
    assert!(matches!(&error, Error::ResourceExhausted(why) if why.contains("--max-adapters 2")), "{error}");
    assert_eq!(reader.asked(), [""; 0]);
    rig.assert_clean();
}

#[test]
fn a_push_of_the_name_that_is_being_read_wins() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let asked = rig.submit(reader.ask("a", "x", 1));
    push(&mut rig, "x").unwrap();
    rig.finish();
    asked.completion();
    read(&mut rig, "x");
    assert_eq!((resident(&mut rig), rig.did(), counts(&mut rig)), (vec!["x".into()], vec![Did::Add(1)], (0, 0, 0)));
    let asked = rig.submit(reader.ask("b", "y", 1));
    push(&mut rig, "y").unwrap();
    fail(&mut rig, "y", Error::NotFound("gone".into()));
    rig.finish();
    asked.completion();
    rig.assert_clean();
}

#[test]
fn a_request_waits_for_a_slot_and_is_served_although_others_keep_coming() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let running = RefCell::new(Vec::new());
    let number = RefCell::new(0);
    let submit = |rig: &mut Rig, name: &str| {
        *number.borrow_mut() += 1;
        let asked = rig.submit(reader.ask(&number.borrow().to_string(), name, 4));
        running.borrow_mut().push(asked);
    };
    submit(&mut rig, "x");
    read(&mut rig, "x");
    submit(&mut rig, "y");
    read(&mut rig, "y");
    assert_eq!(reader.asked(), ["x", "y"]);
    let waiting = rig.submit(reader.ask("waiting", "z", 1));
    assert_eq!(reader.asked(), ["z"]);
    read(&mut rig, "z");
    assert_eq!((resident(&mut rig), rig.status().stats.held_requests), (vec!["x!".into(), "y".into()], 1));
    let mut served = Vec::new();
    for turn in 0.. {
        assert!(turn < 100, "the request for z waits without end");
        // Both adapters always have a request that has not ended.
        ["x", "y"].iter().for_each(|name| submit(&mut rig, name));
        rig.step();
        reader.asked().iter().for_each(|name| read(&mut rig, name));
        served.extend(waiting.events());
        if matches!(&served[..], [Event::Completion(_), Event::Done(_)]) {
            break;
        }
        assert!(served.is_empty(), "{served:?}");
    }
    for _ in 0..1000 {
        rig.finish();
        reader.asked().iter().for_each(|name| read(&mut rig, name));
    }
    running.borrow().iter().for_each(|asked| drop(asked.completion()));
    rig.assert_clean();
}

#[test]
fn an_idle_slot_that_comes_first_serves_a_waiting_request() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let [long, short] = [("x", 9), ("y", 3)].map(|(name, tokens)| {
        let asked = rig.submit(reader.ask(name, name, tokens));
        read(&mut rig, name);
        asked
    });
    let waiting = rig.submit(reader.ask("z", "z", 1));
    read(&mut rig, "z");
    let mut served = Vec::new();
    while served.len() < 2 {
        assert!(rig.engine.core.can_step(), "the request for z waits although y is idle");
        rig.step();
        served.extend(waiting.events());
    }
    short.completion();
    assert!(long.events().is_empty(), "x is still in use");
    assert_eq!(resident(&mut rig), ["x!", "z"], "x leaves with its request, because its slot was asked for");
    rig.finish();
    long.completion();
    assert_eq!((resident(&mut rig), counts(&mut rig)), (vec!["z".into()], (3, 2, 0)));
    rig.assert_clean();
}

#[test]
fn a_request_that_ends_while_it_waits_leaves_the_adapter_to_the_next() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let [expired, gone] = ["x", "also"].map(|id| rig.submit(reader.ask(id, "x", 1)));
    expired.cancel.expire();
    gone.cancel.cancel();
    rig.command(Command::Look);
    let completion = expired.completion();
    assert_eq!((completion.finish_reason, completion.tokens.len()), (FinishReason::Aborted, 0));
    assert!(matches!(gone.error(), Error::Aborted(_)));
    read(&mut rig, "x");
    let asked = rig.submit(reader.ask("b", "x", 1));
    rig.finish();
    asked.completion();
    assert_eq!((reader.asked(), counts(&mut rig)), (vec!["x".to_owned()], (1, 0, 0)));
    // If no slot is free and no request waits for the adapter, it is dropped.
    let users: Vec<_> = ["x", "y"].iter().map(|name| rig.submit(reader.ask(name, name, 9))).collect();
    read(&mut rig, "y");
    let gone = rig.submit(reader.ask("z", "z", 1));
    gone.cancel.cancel();
    read(&mut rig, "z");
    assert!(matches!(gone.error(), Error::Aborted(_)));
    assert!(!rig.engine.adapters.is_loading());
    assert_eq!(resident(&mut rig), ["x", "y"]);
    rig.finish();
    users.iter().for_each(|asked| drop(asked.completion()));
    rig.assert_clean();
}

#[test]
fn a_request_with_two_adapters_gets_both_slots() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let both = |id: &str, names: [&str; 2]| {
        let (mut command, asked) = reader.ask(id, names[0], 1);
        command.request.policies.references = vec![Some(names[1].into())];
        (command, asked)
    };
    let [first, second] = [("a", ["v", "w"]), ("b", ["x", "y"])].map(|(id, names)| rig.submit(both(id, names)));
    for expected in ["v", "w", "x", "y"] {
        assert_eq!(reader.asked(), [expected]);
        read(&mut rig, expected);
        rig.finish();
    }
    [first, second].iter().for_each(|asked| drop(asked.completion()));
    assert_eq!((resident(&mut rig), counts(&mut rig)), (vec!["x".into(), "y".into()], (4, 2, 0)));
    let (mut three, asked) = both("c", ["v", "w"]);
    three.request.policies.references.push(Some("x".into()));
    let error = rig.submit((three, asked)).error();
    assert!(matches!(&error, Error::ResourceExhausted(why) if why.contains("needs 3 of the slots")), "{error}");
    rig.assert_clean();
}

#[test]
fn an_adapter_that_is_read_while_the_server_sleeps_is_there_after_the_wake() {
    for level in [SleepLevel::One, SleepLevel::Two] {
        let (mut rig, reader) = (Rig::new(), Reader::default());
        let asked = rig.submit(reader.ask("a", "x", 1));
        told(&rig.sleep(level, DrainMode::Wait)).reply().unwrap();
        read(&mut rig, "x");
        assert_eq!((resident(&mut rig), asked.events().len()), (vec![], 0));
        let error = rig.submit(reader.ask("b", "x", 1)).error();
        assert!(matches!(&error, Error::FailedPrecondition(why) if why.contains("asleep")), "{error}");
        rig.wake(true, true, level == SleepLevel::Two).unwrap();
        rig.finish();
        asked.completion();
        assert_eq!(resident(&mut rig), ["x"]);
        // It is resident as any other adapter is.
        told(&rig.sleep(level, DrainMode::Wait)).reply().unwrap();
        assert_eq!(resident(&mut rig), [&["x"][..], &[]][usize::from(level == SleepLevel::Two)]);
        rig.wake(true, true, level == SleepLevel::Two).unwrap();
        rig.push_now(begin(UpdateKind::Full)).unwrap();
        let expected = if level == SleepLevel::Two { vec![] } else { vec!["x".to_owned()] };
        assert_eq!(resident(&mut rig), expected, "a new base leaves adapters as they are");
        rig.assert_clean();
    }
}

#[test]
fn a_version_is_compared_before_anything_is_read() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let (mut command, asked) = reader.ask("a", "x", 1);
    command.request.if_weight_version = Some(7);
    assert!(matches!(rig.submit((command, asked)).error(), Error::VersionConflict(_)));
    let (mut command, asked) = reader.ask("b", "x", 1);
    command.request.min_weight_version = Some(1);
    let asked = rig.submit((command, asked));
    assert_eq!(reader.asked(), [""; 0]);
    rig.push_lora(RunningPolicy::Keep);
    assert_eq!(reader.asked(), ["x"]);
    read(&mut rig, "x");
    rig.finish();
    assert_eq!(asked.completion().weight_versions, [(1, 0, 1)]);
    rig.assert_clean();
}

#[test]
fn a_shutdown_ends_requests_that_wait_for_an_adapter() {
    let (mut rig, reader) = (Rig::new(), Reader::default());
    let asked = rig.submit(reader.ask("a", "x", 1));
    rig.command(Command::Shutdown { grace: std::time::Duration::from_secs(60) });
    assert!(matches!(asked.error(), Error::Unavailable(_)));
    read(&mut rig, "x");
    assert_eq!(resident(&mut rig), [""; 0]);
}
