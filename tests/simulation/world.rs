//! One run: an engine, its clients and what goes wrong, in one thread, on a virtual clock, all from one seed.

use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rollout_server::cache::KvCacheManager;
use rollout_server::clock::{Clock, VirtualClock};
use rollout_server::engine::{Command, Engine, EngineHandle, EngineStatus, LifecycleStatus, Setup, Turn};
use rollout_server::error::Result;
use rollout_server::memory::{MemoryBudget, MemoryUse, Traffic};
use rollout_server::observe::Observer;
use rollout_server::scheduler::{ImageScheduling, Scheduler, SchedulerConfig, Speculation};

use super::book::{Book, Note};
use super::calls::{Call, Calls};
use super::catalog::{Catalog, PARAMETER_BYTES, PARAMETERS};
use super::dice::Dice;
use super::executor::{Device, Simulated};
use super::faults::{Fault, Tally};
use super::pushes::Push;
use super::requests::Request;

/// The least that may always wait for a reader, and the part of what bulk requests may take that may wait at most; as
/// in `memory::Backlog`.
const LEAST_BACKLOG: u64 = 64 << 10;
/// Turns after which a run that has been told to end must have ended. A run has far fewer requests and tokens.
const MOST_TURNS_TO_END: u64 = 20_000;

/// Sizes and habits of a run. Small sizes make collisions likely, and what is left out of one run leaves room for the
/// rest.
pub struct Habits {
    pub turns: u64,
    pub max_model_len: usize,
    pub vocabulary: u32,
    pub queue: usize,
    pub traffic: u64,
    /// An action of clients comes before one in so many turns.
    pub calm: usize,
    /// The weight of each kind of action.
    pub actions: Vec<u32>,
    /// One in so many actions is spoiled by a fault.
    pub faults: usize,
    pub has_slow_readers: bool,
    pub names: usize,
    /// Whether the server reads adapters that requests name.
    pub reads_adapters: bool,
}

impl Habits {
    fn of(dice: &mut Dice, kinds: &[u32]) -> Self {
        Self {
            turns: dice.pick(&[200, 1000, 4000]),
            max_model_len: dice.between(16, 48),
            vocabulary: dice.pick(&[3, 8, 50]),
            queue: dice.pick(&[2, 8, 64]),
            traffic: dice.pick(&[400 << 10, 1 << 20, 64 << 20]),
            calm: dice.pick(&[2, 6, 20]),
            actions: kinds.iter().map(|&weight| if dice.one_in(4) { 0 } else { weight }).collect(),
            faults: dice.pick(&[3, 12, 1000]),
            has_slow_readers: dice.coin(),
            names: dice.between(1, 3),
            reads_adapters: dice.coin(),
        }
    }
}

pub struct World {
    pub dice: Dice,
    pub habits: Habits,
    pub catalog: Arc<Catalog>,
    pub book: Arc<Mutex<Book>>,
    pub clock: VirtualClock,
    pub handle: Option<EngineHandle>,
    pub traffic: Traffic,
    engine: Engine<Simulated>,
    /// Ledger entries at the start.
    ledger: Vec<(MemoryUse, u64)>,
    /// Number of turns so far.
    pub turn: u64,
    /// Commands that wait in the engine's queue.
    pub queued: usize,
    state: Turn,
    pub requests: Vec<Request>,
    /// Indices of the requests that have not ended or have unread events.
    pub live: Vec<usize>,
    pub calls: Calls,
    pub pushes: Vec<Push>,
    /// Whether the server was told to shut down.
    pub is_shutting_down: bool,
    spare_notes: Vec<Note>,
}

/// What a run has done.
#[derive(Default)]
pub struct Summary {
    pub steps: u64,
    pub turns: u64,
    pub requests: u64,
    pub calls: u64,
    pub faults: Tally,
}

impl World {
    pub fn new(seed: u64, catalog: &Arc<Catalog>) -> Self {
        let mut dice = Dice::of(seed);
        let habits = Habits::of(&mut dice, super::clients::WEIGHTS);
        let clock = VirtualClock::start();
        let (blocks, block_size) = (dice.between(12, 40), dice.pick(&[1, 2, 4]));
        let shape = (blocks, block_size);
        let mut device = Device::new(catalog.clone(), clock.clone(), shape, habits.vocabulary);
        device.moves = dice.coin();
        let book = Arc::new(Mutex::new(Book::new(catalog.clone(), device)));
        let config = SchedulerConfig {
            max_num_seqs: dice.between(1, 6),
            max_batch_tokens: dice.pick(&[2, 8, 32]).max(6),
            max_model_len: habits.max_model_len,
            max_queued_samples: dice.between(4, 24),
            speculation: if dice.coin() { Speculation::AUTO } else { Speculation::OFF },
            images: ImageScheduling::default(),
            routing_row_bytes: 0,
        };
        let weights = PARAMETER_BYTES * PARAMETERS as u64;
        let free = dice.pick(&[100, 400, 5000]);
        let mut budget = MemoryBudget::new(1000 + weights + free, 1.0);
        let reserved = [
            (MemoryUse::Process, 100),
            (MemoryUse::Weights, weights),
            (MemoryUse::Workspace, 300),
            (MemoryUse::KvCache, 600),
        ];
        reserved.iter().for_each(|&(used_for, bytes)| budget.reserve(used_for, bytes).expect("it fits"));
        let ledger = budget.report().entries.clone();
        let (sender, commands) = sync_channel(habits.queue);
        let traffic = Traffic::new(habits.traffic);
        let (observer, recorder) = Observer::new();
        let setup = Setup {
            parameters: catalog.parameters.clone(),
            budget,
            traffic: traffic.clone(),
            max_adapters: dice.between(1, 3),
            max_lora_rank: dice.between(2, 3),
            max_tenant_adapters: None,
            clock: Clock::Virtual(clock.clone()),
            observer,
            recorder,
        };
        let scheduler = Scheduler::new(config, KvCacheManager::new(blocks, block_size));
        let engine = Engine::new(Simulated::new(book.clone()), scheduler, None, commands, setup);
        Self {
            dice,
            habits,
            catalog: catalog.clone(),
            book,
            clock,
            handle: Some(EngineHandle::new(sender)),
            traffic,
            engine,
            ledger,
            turn: 0,
            queued: 0,
            state: Turn::Again,
            requests: Vec::new(),
            live: Vec::new(),
            calls: Calls::default(),
            pushes: Vec::new(),
            is_shutting_down: false,
            spare_notes: Vec::new(),
        }
    }

    /// Runs it to its end, and asserts what must hold then.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn run(mut self) -> Summary {
        while self.turn < self.habits.turns && self.state != Turn::Ended {
            if self.dice.one_in(self.habits.calm) || !self.is_due() {
                // Now and then many at once, which are taken in one turn or find the queue full.
                let count = if self.dice.one_in(40) { self.dice.between(2, 12) } else { 1 };
                (0..count).for_each(|_| self.act());
            }
            if let Err(()) = self.turn() {
                return self.finish(true);
            }
        }
        let is_dead = self.state != Turn::Ended && self.end().is_err();
        self.finish(is_dead)
    }

    /// Whether the engine would take a turn now, as [`Engine::run`] does.
    fn is_due(&self) -> bool {
        match self.state {
            Turn::Again | Turn::WaitForMasks => true,
            Turn::Wait => self.queued > 0 || self.handle.is_none(),
            Turn::WaitUntil(deadline) => self.queued > 0 || self.handle.is_none() || self.clock.now() >= deadline,
            Turn::Ended => false,
        }
    }

    /// Lets time pass, lets readers read, and gives the engine a turn if it is due. An error is a dead engine.
    fn turn(&mut self) -> std::result::Result<(), ()> {
        self.clock.advance(Duration::from_micros(300));
        self.expire();
        self.read_events();
        self.answer_reads();
        if self.state != Turn::Again && self.queued == 0 && self.handle.is_none() {
            return self.bury(Ok(()));
        }
        if !self.is_due() {
            return Ok(());
        }
        self.turn += 1;
        self.queued = 0;
        let result = self.engine.turn(None);
        if result.is_err() {
            // The engine dies with the commands that it has just taken.
            self.calls.excuse(self.turn - 1);
            self.requests.iter_mut().filter(|request| request.sent + 1 >= self.turn).for_each(|r| r.is_excused = true);
        }
        self.take_notes();
        match result {
            Ok(state) => self.state = state,
            Err(error) => return self.bury(Err(error)),
        }
        self.engine.check_integrity();
        let version = self.engine.weight_version();
        assert_eq!(version, self.book.lock().unwrap().known.version, "the version that clients know");
        if std::mem::take(&mut self.book.lock().unwrap().is_drained) {
            assert_eq!(self.engine.status().stats.accepted_requests, 0, "a Sleep or Pause did not wait for them");
        }
        self.check_requests();
        if self.state == Turn::Ended { self.bury(Ok(())) } else { Ok(()) }
    }

    fn bury(&mut self, result: Result<()>) -> std::result::Result<(), ()> {
        self.engine.end_all(&result);
        self.take_notes();
        self.state = Turn::Ended;
        result.map_err(drop)
    }

    /// Calls off what hinders requests, until all have ended and the engine rests; then ends the engine.
    fn end(&mut self) -> std::result::Result<(), ()> {
        self.habits.has_slow_readers = false;
        self.book.lock().unwrap().device.armed = None;
        if self.handle.is_some() && !self.is_shutting_down {
            self.settle_all()?;
            self.check_rest()?;
            if self.handle.is_some() {
                self.send(Command::Shutdown { grace: Duration::ZERO });
            }
        }
        let until = self.turn + MOST_TURNS_TO_END;
        while self.state != Turn::Ended {
            assert!(self.turn < until, "the engine does not end");
            self.clock.advance(Duration::from_secs(60));
            self.turn()?;
        }
        Ok(())
    }

    fn settle_all(&mut self) -> std::result::Result<(), ()> {
        let mut rounds = 0;
        while !self.is_at_rest() || self.engine.status().update.is_some() {
            rounds += 1;
            assert!(rounds < MOST_TURNS_TO_END, "requests or calls never end: {:?}", self.engine.status());
            if self.state != Turn::Again && self.queued == 0 {
                self.help();
            }
            self.turn()?;
        }
        Ok(())
    }

    fn is_at_rest(&self) -> bool {
        let reads = self.book.lock().unwrap().reads.len();
        self.queued + reads == 0 && self.state == Turn::Wait && self.live.is_empty() && self.calls.num_open() == 0
    }

    /// What a patient operator does: ends the open push, wakes, resumes, and brings the version that requests wait for.
    fn help(&mut self) {
        self.clock.advance(Duration::from_secs(1));
        let status = self.engine.status();
        match status.lifecycle {
            _ if status.update.is_some() => self.cancel_update(None),
            LifecycleStatus::Asleep { .. } | LifecycleStatus::WeightsMissing => self.wake((true, true), true),
            LifecycleStatus::Paused => self.resume(),
            _ if status.stats.held_requests > 0 => self.set_version(1 << 40, true),
            _ => {}
        }
    }

    /// After everything has ended the engine is as it was at the start.
    fn check_rest(&mut self) -> std::result::Result<(), ()> {
        let status = self.engine.status();
        assert_eq!((status.stats.accepted_requests, status.stats.held_requests), (0, 0), "requests are left");
        assert!(status.update.is_none(), "an update is left");
        assert_eq!(status.stats.free_blocks, status.stats.total_blocks, "blocks are held");
        assert_eq!(self.traffic.used(), 0, "bytes of requests are counted");
        if self.dice.coin() {
            self.sleep_deeply();
            self.settle_all()?;
            self.wake((true, true), true);
            self.settle_all()?;
            let status: EngineStatus = self.engine.status();
            assert_eq!(status.memory.entries, self.ledger, "the ledger is not what it was");
        }
        Ok(())
    }

    /// After the engine has ended, each request and each call has its end, unless its command was never taken.
    fn finish(mut self, is_dead: bool) -> Summary {
        let last = self.turn;
        let taken = |sent: u64| sent < last && !(is_dead && sent + 1 >= last);
        let left = self.requests.iter().find(|request| !request.has_ended && taken(request.sent));
        assert!(left.is_none(), "{} has no terminal event", left.map_or("", |request| &request.id));
        self.calls.check_end(taken);
        self.handle = None;
        let book = self.book.lock().unwrap();
        let (steps, turns, faults) = (book.steps, self.turn, book.faults.clone());
        drop(book);
        Summary { steps, turns, requests: self.requests.len() as u64, calls: self.calls.len() as u64, faults }
    }

    /// Sends a command. Returns false if the queue is full or the engine is gone.
    pub fn send(&mut self, command: Command) -> bool {
        let Some(handle) = &self.handle else { return false };
        let is_sent = handle.send(command).is_ok();
        if is_sent {
            self.queued += 1;
        } else {
            self.count(Fault::QueueFull);
        }
        is_sent
    }

    /// Wakes the engine, as a client that vanishes or a reader that has caught up does.
    pub fn look(&mut self) {
        if let Some(handle) = &self.handle {
            handle.look();
            self.queued += 1;
        }
    }

    pub fn count(&mut self, fault: Fault) {
        self.book.lock().unwrap().faults.count(fault);
    }

    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    fn take_notes(&mut self) {
        let mut notes = std::mem::take(&mut self.spare_notes);
        {
            let book = &mut *self.book.lock().unwrap();
            std::mem::swap(&mut notes, &mut book.notes);
            assert!(book.violations.is_empty(), "{}", book.violations.join("; "));
        }
        for note in notes.drain(..) {
            match note {
                Note::Event(request, event) => {
                    let book = &self.book.lock().unwrap();
                    self.requests[request].take(event, book, self.habits.vocabulary);
                }
                Note::ResponderGone(request) => {
                    let request = &self.requests[request];
                    assert!(
                        request.has_ended || request.is_excused,
                        "{}: its responder is gone before a terminal event",
                        request.id
                    );
                }
                Note::Answered(call) => self.calls.close(call),
                Note::ReplyDropped(call) => self.calls.close_unanswered(call),
                Note::Ticket(push, ticket) => self.take_ticket(push, ticket),
                Note::PartWritten(push, is_written) => self.note_part_written(push, is_written),
                Note::PushEnded(push) => self.pushes[push].end(),
            }
        }
        self.spare_notes = notes;
    }

    /// Tells the engine of requests whose time is up, or whose client has vanished at an event.
    fn expire(&mut self) {
        let now = self.clock.now();
        for at in 0..self.live.len() {
            let request = &mut self.requests[self.live[at]];
            let flag = request.cancel.clone();
            if request.expires.take_if(|expires| *expires <= now).is_some() && !request.has_ended {
                request.must_end = true;
                flag.expire();
                self.count(Fault::DeadlinePasses);
                self.look();
            } else if request.vanishes_at.take_if(|event| *event <= request.events).is_some() {
                request.must_end = true;
                flag.cancel();
                self.count(Fault::ClientVanishes);
                self.look();
            }
        }
    }

    /// Lets readers take their events, and forgets requests that have ended and are read.
    fn read_events(&mut self) {
        for at in 0..self.live.len() {
            let request = &mut self.requests[self.live[at]];
            if request.is_slow && self.habits.has_slow_readers {
                let wakes_up = self.dice.one_in(60);
                self.requests[self.live[at]].is_slow = !wakes_up;
                continue;
            }
            let wakes = match request.unread.is_empty() {
                true => false,
                false => {
                    let bytes = request.unread.drain(..).sum();
                    request.full_turns = 0;
                    request.backlog.take(bytes)
                }
            };
            if wakes {
                self.look();
            }
        }
        let requests = &self.requests;
        self.live.retain(|&at| !requests[at].has_ended || !requests[at].unread.is_empty());
    }

    /// Checks that given up requests have ended, and notes those of which more is unread than may ever be.
    fn check_requests(&mut self) {
        let bulk = self.traffic.admission_limit() - self.traffic.admission_limit() / 4;
        let most = (bulk / 8).max(LEAST_BACKLOG);
        for &at in &self.live {
            let request = &mut self.requests[at];
            assert!(request.has_ended || !request.must_end, "{} runs on, and its client is gone", request.id);
            request.full_turns = if request.backlog.bytes() > most { request.full_turns + 1 } else { 0 };
        }
    }

    pub fn next_call(&mut self, call: Call) -> usize {
        self.calls.open(call)
    }
}

impl Summary {
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.turns += other.turns;
        self.requests += other.requests;
        self.calls += other.calls;
        self.faults.add(&other.faults);
    }
}
