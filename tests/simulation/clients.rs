//! What clients do: one random action at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rollout_server::engine::{
    AbortReply, AbortTarget, AdapterReader, AdapterStatus, CancelFlag, ChecksumReply, Command, DrainMode, EngineStatus,
    Event, GenerateCommand, LifecycleStatus, OtherPolicies, ReadAdapter, RequestClient, RequestKind, RequestList,
    SleepLevel, SleepReply, UpdateStatus, ValidRequest, WakeTags,
};
use rollout_server::error::{Error, Result};
use rollout_server::memory::Backlog;
use rollout_server::types::{Owner, Prompt, SamplingParams, Tenant, TokenId};

use super::book::Note;
use super::faults::{Fault, PLANNED_PANIC};
use super::requests::{Asked, INFLATION, Request};
use super::world::World;

type Action = fn(&mut World);

/// Each action, with its weight in the random choice.
const ACTIONS: &[(u32, Action)] = &[
    (30, World::generate),
    (14, World::advance_push),
    (6, World::begin_push),
    (5, World::recover),
    (3, World::abort),
    (2, World::look_around),
    (2, World::reset_cache),
    (3, |world| {
        let (version, force) = (world.book.lock().unwrap().known.version, world.dice.one_in(4));
        let version = world.pick_version(version).unwrap_or(version + 1);
        world.set_version(version, force);
    }),
    (2, World::sleep),
    (3, |world| {
        let tags = world.dice.pick(&[(true, true), (true, false), (false, true), (false, false)]);
        let reload = world.dice.coin();
        world.wake(tags, reload);
    }),
    (2, World::pause),
    (3, World::resume),
    (3, World::checksum),
    (3, World::remove_adapter),
    (2, World::cancel_waiting),
    (1, World::send_late),
    (3, World::arm),
    (1, World::shut_down),
];

pub const WEIGHTS: &[u32] = &{
    let mut weights = [0; ACTIONS.len()];
    let mut i = 0;
    while i < ACTIONS.len() {
        weights[i] = ACTIONS[i].0;
        i += 1;
    }
    weights
};

/// Actions without which nothing would happen in a run.
const NEEDED: [usize; 3] = [0, 1, 3];

/// Tells the book when the responder is gone.
struct Farewell(Arc<std::sync::Mutex<super::book::Book>>, usize);

impl Drop for Farewell {
    fn drop(&mut self) {
        if let Ok(mut book) = self.0.lock() {
            book.notes.push(Note::ResponderGone(self.1));
        }
    }
}

impl World {
    /// A client does something.
    pub fn act(&mut self) {
        let mut weights = self.habits.actions.clone();
        NEEDED.iter().for_each(|&i| weights[i] = WEIGHTS[i]);
        let action = self.dice.weighted(&weights).expect("some action is needed");
        ACTIONS[action].1(self);
    }

    fn name(&mut self) -> usize {
        self.dice.below(self.habits.names)
    }

    fn owner(&mut self) -> Option<Owner> {
        self.dice.maybe(2, |dice| Owner(dice.below(2) as u64))
    }

    /// A prompt whose beginning others share.
    fn prompt(&mut self) -> Prompt {
        let most = self.habits.max_model_len - 1;
        let len = self.dice.between(1, most.min(20));
        let stem = self.dice.below(3) as TokenId;
        let own = self.dice.below(len + 1);
        let tokens = (0..len).map(|i| if i < own { stem } else { self.dice.below(3) as TokenId });
        Prompt::from_tokens(tokens.collect::<Vec<_>>())
    }

    fn ask(&mut self) -> Asked {
        let prompts = (0..self.dice.pick(&[1, 1, 1, 2, 3])).map(|_| self.prompt()).collect();
        let stream_tokens = self.dice.coin();
        let kind = match self.dice.one_in(8) {
            true => RequestKind::Score,
            false => RequestKind::Generate {
                n: self.dice.pick(&[1, 1, 2, 3]),
                seed: self.dice.below(4) as u64,
                prompt_logprobs: self.dice.one_in(4),
                stream_tokens,
                return_text: false,
            },
        };
        let max_tokens = self.dice.between(1, 16) as u32;
        let params = SamplingParams {
            max_tokens,
            min_tokens: self.dice.maybe(4, |dice| dice.below(1 + max_tokens as usize) as u32).unwrap_or(0),
            eos_token_ids: self.dice.maybe(3, |_| vec![0]).unwrap_or_default(),
            stop_token_ids: self.dice.maybe(6, |_| vec![1]).unwrap_or_default(),
            ..SamplingParams::default()
        };
        let version = self.book.lock().unwrap().known.version;
        let id = self.requests.len();
        Asked {
            id: format!("r{id}"),
            kind,
            prompts,
            params: Arc::new(params),
            adapter: if self.dice.one_in(3) { Some(self.name()) } else { None },
            if_version: self.dice.maybe(8, |dice| version + dice.below(2) as u64),
            min_version: self.dice.maybe(6, |dice| version + dice.below(3) as u64),
        }
    }

    fn generate(&mut self) {
        let mut asked = self.ask();
        if self.dice.one_in(self.habits.faults) && !self.live.is_empty() {
            self.count(Fault::SameId);
            let twin = self.dice.pick(&self.live);
            asked.id.clone_from(&self.requests[twin].id);
        }
        let charged = self.dice.pick(&[100, 1000, 30_000]);
        let Ok(charge) = self.traffic.charge(charged) else { return };
        let (number, cancel, backlog) = (self.requests.len(), CancelFlag::default(), Backlog::new(&self.traffic));
        let panics_at = self.dice.maybe(self.habits.faults * 4, |dice| dice.below(6) as u32);
        let owner = self.owner();
        let spec = ValidRequest {
            request_id: asked.id.clone(),
            prompts: asked.prompts.clone(),
            kind: asked.kind.clone(),
            params: asked.params.clone(),
            grammar: None,
            prompt_sampling: BTreeMap::new(),
            policies: OtherPolicies::default(),
            top_arrays: None,
            return_routing: None,
            adapter: asked.adapter.map(|name| name.to_string()),
            if_weight_version: asked.if_version,
            min_weight_version: asked.min_version,
            time_limit: None,
        };
        let client = RequestClient {
            owner,
            tenant: Tenant::parse(&format!("t{}", number % 3), "tenant").unwrap(),
            arrived: self.now(),
            waits_for_resume: true,
            cancel: cancel.clone(),
            responder: self.responder(number, &backlog, panics_at),
            adapter_reader: self.habits.reads_adapters.then(|| self.adapter_reader()),
            backlog: backlog.clone(),
            charge,
        };
        let command = GenerateCommand { request: spec, client };
        let sent = (self.turn, self.book.lock().unwrap().known.changes);
        let mut request = Request::new(asked, self.habits.max_model_len, sent, cancel, backlog);
        request.expires = self
            .dice
            .maybe(self.habits.faults, |dice| Duration::from_millis(dice.below(40) as u64))
            .map(|d| self.now() + d);
        request.vanishes_at = self.dice.maybe(self.habits.faults, |dice| dice.below(8) as u32);
        request.is_slow = self.habits.has_slow_readers && self.dice.one_in(3);
        let is_slow = request.is_slow;
        self.requests.push(request);
        if !self.send(Command::Generate(Box::new(command))) {
            self.requests[number].has_ended = true;
            return;
        }
        self.live.push(number);
        if is_slow {
            self.count(Fault::SlowReader);
        }
    }

    fn adapter_reader(&self) -> AdapterReader {
        let book = self.book.clone();
        Box::new(move |name| book.lock().unwrap().reads.push_back(name.parse().expect("names are numbers")))
    }

    /// The server has read an adapter, or could not.
    pub fn answer_reads(&mut self) {
        let wanted = self.book.lock().unwrap().reads.front().copied();
        let Some(name) = wanted.filter(|_| self.dice.one_in(4)) else { return };
        let fails = self.dice.one_in(self.habits.faults);
        let read = match fails {
            true => Err(Error::NotFound("there are no such files".into())),
            false => Ok(ReadAdapter {
                adapter: self.catalog.read(name).clone(),
                directory: name.to_string(),
                charge: self.traffic.charge_always(100),
            }),
        };
        if self.send(Command::AdapterRead { name: name.to_string(), read }) {
            self.book.lock().unwrap().reads.pop_front();
            fails.then(|| self.count(Fault::ReadFails));
        }
    }

    /// A closure that takes a request's events.
    fn responder(&self, number: usize, backlog: &Backlog, panics_at: Option<u32>) -> rollout_server::engine::Responder {
        let (farewell, backlog) = (Farewell(self.book.clone(), number), backlog.clone());
        let mut left = panics_at;
        Box::new(move |event| {
            let is_failure = matches!(event, Event::Failed(_));
            if left == Some(0) && !is_failure {
                left = None;
                farewell.0.lock().unwrap().faults.count(Fault::ResponderPanics);
                std::panic::panic_any(PLANNED_PANIC);
            }
            left = left.map(|left| left.saturating_sub(1));
            backlog.add(event.bytes() * INFLATION);
            farewell.0.lock().unwrap().notes.push(Note::Event(farewell.1, event));
        })
    }

    fn abort(&mut self) {
        let target = match self.dice.one_in(3) || self.live.is_empty() {
            true => AbortTarget::All,
            false => {
                let ids = (0..self.dice.between(1, 3)).map(|_| self.requests[self.dice.pick(&self.live)].id.clone());
                AbortTarget::Requests(ids.collect())
            }
        };
        let times = if self.dice.one_in(self.habits.faults) { 2 } else { 1 };
        (times == 2).then(|| self.count(Fault::Twice));
        for _ in 0..times {
            let (target, owner) = (target.clone(), self.owner());
            let none = CancelFlag::default();
            self.call("Abort", &none, |reply| Command::Abort { target, owner, reply }, |_, _: AbortReply| ());
        }
    }

    fn look_around(&mut self) {
        let none = CancelFlag::default();
        match self.dice.below(3) {
            0 => self.call("GetStatus", &none, |reply| Command::Status { reply }, |_, _: EngineStatus| ()),
            1 => {
                self.call("ListAdapters", &none, |reply| Command::ListAdapters { reply }, |_, _: Vec<AdapterStatus>| ())
            }
            _ => self.call(
                "ListRequests",
                &none,
                |reply| Command::ListRequests { most: 3, reply },
                |_, list: RequestList| assert!(list.oldest.len() <= list.total.min(3)),
            ),
        };
    }

    fn reset_cache(&mut self) {
        let none = CancelFlag::default();
        self.call("ResetPrefixCache", &none, |reply| Command::ResetPrefixCache { reply }, |_, _: Result<usize>| ());
    }

    pub fn set_version(&mut self, version: u64, force: bool) {
        self.call(
            "SetVersion",
            &CancelFlag::default(),
            |reply| Command::SetVersion { version, force, reply },
            move |book, answer: Result<()>| book.note_set_version(version, force, &answer),
        );
    }

    fn mode(&mut self) -> DrainMode {
        self.dice.pick(&[DrainMode::Wait, DrainMode::Wait, DrainMode::Abort, DrainMode::Keep])
    }

    fn sleep(&mut self) {
        let (level, mode) = (self.dice.pick(&[SleepLevel::One, SleepLevel::Two]), self.mode());
        self.sleep_at(level, mode);
    }

    pub fn sleep_deeply(&mut self) {
        self.sleep_at(SleepLevel::Two, DrainMode::Abort);
    }

    fn sleep_at(&mut self, level: SleepLevel, mode: DrainMode) {
        let cancel = CancelFlag::default();
        self.call(
            "Sleep",
            &cancel.clone(),
            |reply| Command::Sleep { level, mode, cancel, reply },
            move |book, answer: Result<SleepReply>| {
                book.note_sleep(level, answer.is_ok());
                book.note_rest(mode, answer.is_ok());
            },
        );
    }

    pub fn wake(&mut self, (weights, kv_cache): (bool, bool), reload: bool) {
        let tags = WakeTags { weights, kv_cache };
        self.call(
            "Wake",
            &CancelFlag::default(),
            |reply| Command::Wake { tags, reload, reply },
            move |book, answer: Result<LifecycleStatus>| book.note_wake(tags, reload, &answer),
        );
    }

    fn pause(&mut self) {
        let (mode, cancel) = (self.mode(), CancelFlag::default());
        self.call(
            "Pause",
            &cancel.clone(),
            |reply| Command::Pause { mode, cancel, reply },
            move |book, answer: Result<()>| book.note_rest(mode, answer.is_ok()),
        );
    }

    pub fn resume(&mut self) {
        let none = CancelFlag::default();
        self.call(
            "Resume",
            &none,
            |reply| Command::Resume { reply },
            |book, answer: Result<()>| book.note_resume(answer.is_ok()),
        );
    }

    /// What brings the server back to serving, whatever its state is.
    fn recover(&mut self) {
        if self.dice.coin() {
            return self.resume();
        }
        let reload = self.dice.coin();
        self.wake((true, true), reload);
    }

    fn checksum(&mut self) {
        let cancel = CancelFlag::default();
        let names = self.dice.maybe(2, |dice| vec![dice.below(2)]).unwrap_or_default();
        let all: Vec<String> = self.catalog.parameters.iter().map(|spec| spec.name.clone()).collect();
        let names = names.into_iter().map(|i| all[i].clone()).collect();
        self.call(
            "Checksum",
            &cancel.clone(),
            |reply| Command::Checksum { names, cancel, reply },
            |book, reply: Result<ChecksumReply>| book.note_checksum(&reply),
        );
    }

    fn remove_adapter(&mut self) {
        let (name, cancel) = (self.name().to_string(), CancelFlag::default());
        self.call(
            "RemoveAdapter",
            &cancel.clone(),
            |reply| Command::RemoveAdapter { name, expected_generation: None, cancel, reply },
            |_, _: Result<u64>| (),
        );
    }

    pub fn cancel_update(&mut self, update: Option<u64>) {
        let none = CancelFlag::default();
        self.call(
            "CancelUpdate",
            &none,
            |reply| Command::CancelUpdate { update, reply },
            |_, _: Option<UpdateStatus>| (),
        );
    }

    /// The caller of a call that waits is gone, or an operator ends the open push.
    fn cancel_waiting(&mut self) {
        let waiting = self.calls.waiting();
        if waiting.is_empty() || self.dice.one_in(4) {
            return self.cancel_update(None);
        }
        let at = self.dice.below(waiting.len());
        waiting[at].cancel();
        self.count(Fault::WaiterGone);
        self.look();
    }

    /// Something in the executor will go wrong.
    fn arm(&mut self) {
        let fault = self.dice.pick(&Fault::OF_DEVICE);
        // A dead rank ends the run.
        let is_rare = matches!(fault, Fault::RankDies) && !self.dice.one_in(20);
        if !is_rare && self.habits.faults < 100 {
            self.book.lock().unwrap().device.armed = Some(fault);
        }
    }

    fn shut_down(&mut self) {
        if self.is_shutting_down || !self.dice.one_in(10) {
            return;
        }
        if self.dice.one_in(4) {
            self.count(Fault::HandlesGone);
            self.handle = None;
            return;
        }
        let grace = Duration::from_millis(self.dice.pick(&[0, 5, 1000]));
        if self.send(Command::Shutdown { grace }) {
            self.count(Fault::Shutdown);
            self.is_shutting_down = true;
        }
    }
}
