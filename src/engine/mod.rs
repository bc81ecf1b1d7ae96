//! The engine: one thread that owns every piece of mutable serving state.
//!
//! It takes [`Command`]s from a bounded queue and sends [`Event`]s through each request's responder. While there is
//! work it steps, `schedule → launch → collect → update`, and takes the commands that wait between two steps. What a
//! step has brought is emitted to its requests while the ranks compute the next one, or before anything else happens.
//! While nothing may step it blocks on the queue.
//!
//! # Requests
//!
//! A request is *accepted* once the scheduler has it. Until then it may be *held*: while the server is paused, while a
//! *drain* (a pause, a sleep or an update) waits for the accepted requests to end, and while the policy is older than
//! the request asks for. Held requests keep the order of their arrival and count against the queue's limit. Their
//! versions and adapters are checked when they are accepted. While the server is asleep or its weights are missing, new
//! requests are refused.
//!
//! # What changes the weights
//!
//! `lifecycle` says which command is taken in which state; `sleep`, `update` and `adapters` carry the commands out,
//! always between two steps. Everything that can be refused, damaged checkpoint files included, is checked before
//! anything is touched. If the executor then fails to carry out an order, the content of the weights is unknown, and
//! the engine ends. The one exception is a checkpoint that somebody writes to while an order reads it: the policy is
//! lost then and the weights are missing, but the engine goes on.
//!
//! # Panics
//!
//! A panic while one request is answered (its row of logits, its text, its events) ends that request alone, since that
//! code changes nothing that others use. A panic in the model, in an order or in the scheduler ends the process: it
//! leaves a step half done, in collectives, caches or weights that every request uses.

mod activity;
mod adapters;
mod admission;
mod backpressure;
mod checksum;
mod command;
mod drain;
mod event;
mod integrity;
mod lifecycle;
mod listing;
mod policy;
mod request;
mod requests;
mod sleep;
mod stats;
mod step;
#[cfg(test)]
mod tests;
mod text;
mod transaction;
mod update;
mod watch;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

pub use activity::{Activity, BusyGuard};
pub use command::*;
pub use event::{Completion, Event, Summary};
pub use listing::{Progress, RequestList, RequestStatus};

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::executor::{Executor, WeightOrder};
use crate::grammar::MaskQueue;
use crate::memory::{MemoryBudget, Traffic};
use crate::observe::{Observer, Recorder};
use crate::scheduler::Scheduler;
use crate::text::Tokenizer;
use crate::types::WeightVersion;
use crate::weights::Parameters;
use adapters::Adapters;
use checksum::Checksums;
use drain::Drains;
use lifecycle::State;
use policy::Policy;
use request::Request;
use requests::Requests;
use sleep::AwakeBytes;
use stats::Statistics;
use step::Untold;
use transaction::{Transaction, Updates};
use watch::Watch;

/// Most commands that wait for the engine. It takes them between two steps, so the queue is full only if this many come
/// within one step; further callers are told to try again.
pub const COMMAND_QUEUE: usize = 1024;

/// Longest time that the engine waits for a mask before it looks for commands, while nothing else can run.
const MASK_WAIT: Duration = Duration::from_millis(5);

/// Facts and limits that an engine is given, besides the components it drives.
pub struct Setup {
    pub parameters: Arc<Parameters>,
    /// The ledger, with all reservations that do not come from pushes.
    pub budget: MemoryBudget,
    /// Count of the bytes of requests and replies under way, for which the ledger has an entry.
    pub traffic: Traffic,
    /// Most adapters that are resident at the same time; retired ones count until their last lease has ended.
    pub max_adapters: usize,
    pub max_lora_rank: usize,
    /// The clock by which the engine measures and waits.
    pub clock: Clock,
    /// Takes the engine's numbers.
    pub observer: Observer,
    /// Takes the engine's phases.
    pub recorder: Recorder,
}

/// All serving state. The module's page says how it is used.
pub struct Engine<X: Executor> {
    executor: X,
    scheduler: Scheduler,
    /// Computes the masks that the scheduler has no time for.
    masks: MaskQueue,
    /// Makes the text of samples, for replies and for stop strings; `None` for a model without a tokenizer.
    tokenizer: Option<Arc<Tokenizer>>,
    commands: Receiver<Command>,
    clock: Clock,
    parameters: Arc<Parameters>,
    budget: MemoryBudget,
    traffic: Traffic,
    awake_bytes: AwakeBytes,
    state: State,
    policy: Policy,
    adapters: Adapters,
    updates: Updates,
    requests: Requests,
    /// What the last step has brought and its requests have not been given yet.
    untold: Option<Untold>,
    drains: Drains,
    checksums: Checksums,
    /// When the running requests are aborted; set by `Shutdown`.
    deadline: Option<Instant>,
    statistics: Statistics,
    watch: Watch,
}

/// What the engine waits for after a turn of its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing: there is more to do.
    Again,
    /// A mask that is being computed on another thread, without which nothing can run.
    WaitForMasks,
    /// A command.
    Wait,
    /// A command, until this time at most: the server shuts down, and requests whose readers lag may catch up.
    WaitUntil(Instant),
    /// The engine has ended.
    Ended,
}

/// Why a command was not carried out.
enum Failure {
    /// The command was refused and the engine goes on: nothing has been touched, or the state says what is missing.
    /// There is no conversion from [`Error`], so that each check says `map_err(Failure::Refused)` itself, and no `?`
    /// after an effect is taken for a refusal.
    Refused(Error),
    /// The executor failed while it carried the command out; the engine ends.
    Fatal(Error),
}

impl Failure {
    /// A refusal for want of memory that leaves weights half changed, which nothing can undo.
    fn or_fatal(self) -> Self {
        match self {
            Self::Refused(error @ Error::ResourceExhausted(_)) => Self::Fatal(error),
            failure => failure,
        }
    }
}

/// Result of carrying out a command.
type Attempt<T> = std::result::Result<T, Failure>;

/// Replies with the result of a command, and returns the error if it ends the engine.
fn answer<T>(reply: Reply<Result<T>>, attempt: Attempt<T>) -> Result<()> {
    match attempt {
        Ok(value) => reply(Ok(value)),
        Err(Failure::Refused(error)) => reply(Err(error)),
        Err(Failure::Fatal(error)) => {
            reply(Err(error.clone()));
            return Err(error);
        }
    }
    Ok(())
}

impl<X: Executor> Engine<X> {
    pub fn new(
        executor: X,
        scheduler: Scheduler,
        tokenizer: Option<Arc<Tokenizer>>,
        commands: Receiver<Command>,
        setup: Setup,
    ) -> Self {
        let Setup { parameters, budget, traffic, max_adapters, max_lora_rank, clock, observer, recorder } = setup;
        Self {
            executor,
            scheduler,
            masks: MaskQueue::default(),
            tokenizer,
            commands,
            clock: clock.clone(),
            parameters,
            awake_bytes: AwakeBytes::of(&budget),
            budget,
            traffic,
            state: State::default(),
            policy: Policy::checkpoint(),
            adapters: Adapters::new(max_adapters, max_lora_rank),
            updates: Updates::default(),
            requests: Requests::default(),
            untold: None,
            drains: Drains::default(),
            checksums: Checksums::default(),
            deadline: None,
            statistics: Statistics::default(),
            watch: Watch::new(clock, observer, recorder),
        }
    }

    /// Serves until `Shutdown`, or until every [`EngineHandle`] is gone.
    ///
    /// # Errors
    /// The executor's error, if it fails. Every request has got its terminal event nevertheless.
    pub fn run(mut self) -> Result<()> {
        let result = self.serve();
        self.end_all(&result);
        result
    }

    fn serve(&mut self) -> Result<()> {
        let mut received = None;
        loop {
            let waiting = match self.turn(received.take())? {
                Turn::Again => continue,
                Turn::WaitForMasks => {
                    self.take_masks(MASK_WAIT);
                    continue;
                }
                Turn::Ended => return Ok(()),
                Turn::Wait => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Turn::WaitUntil(deadline) => {
                    self.commands.recv_timeout(deadline.saturating_duration_since(self.clock.now()))
                }
            };
            match waiting {
                Ok(command) => received = Some(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// One turn of the loop, which never blocks: carries out `received` and the commands that wait in the queue, steps
    /// if it can, and says what to wait for before the next turn.
    ///
    /// [`Engine::run`] is made of these; a simulation calls them itself, and [`Engine::end_all`] after the last one.
    ///
    /// # Errors
    /// If the executor fails. There is no next turn then.
    pub fn turn(&mut self, received: Option<Command>) -> Result<Turn> {
        // A limited number: callers that ask faster than they are answered would keep the queue full for ever.
        let waiting = self.commands.try_iter().take(COMMAND_QUEUE).collect::<Vec<_>>();
        for command in received.into_iter().chain(waiting) {
            self.handle(command)?;
        }
        self.take_masks(Duration::ZERO);
        self.settle()?;
        if self.can_step() {
            self.step()?;
        }
        self.continue_checksum()?;
        self.settle()?;
        self.publish();
        if self.deadline.is_some() && self.requests.num_accepted() == 0 {
            return Ok(Turn::Ended);
        }
        if self.can_step() || !self.checksums.is_empty() {
            return Ok(Turn::Again);
        }
        if !self.masks.is_empty() {
            return Ok(Turn::WaitForMasks);
        }
        self.scheduler.check_integrity();
        self.watch.enter(self.waiting_phase());
        Ok(self.deadline.map_or(Turn::Wait, Turn::WaitUntil))
    }

    /// Ends whatever has not ended, after the last turn, which ended with `result`: each request gets its terminal
    /// event, and each command that waits its answer.
    pub fn end_all(&mut self, result: &Result<()>) {
        self.emit();
        if let Err(error) = result {
            tracing::error!("the engine ends: {error}");
        }
        self.refuse_waiting();
        self.checksums.refuse(&shutting_down());
        self.abort_all();
    }

    fn can_step(&self) -> bool {
        self.state == State::Running && self.scheduler.has_work()
    }

    /// Does everything that commands, a step or the passing of time have made due.
    fn settle(&mut self) -> Result<()> {
        if !self.can_step() || !self.drains.is_empty() || self.deadline.is_some() {
            self.emit();
        }
        self.drop_cancelled();
        if self.deadline.is_some_and(|deadline| self.state != State::Running || self.clock.now() >= deadline) {
            self.abort_all();
        }
        self.settle_drains()?;
        self.admit_held();
        self.suspend_laggards();
        self.drop_unused_adapters()?;
        let is_late = self.untold.is_some() && !self.can_step();
        let may_drain = !self.drains.is_empty() && !self.must_drain();
        if is_late || may_drain {
            // The last request that could step was suspended or ended just now, and the next turn may wait for a
            // command.
            return self.settle();
        }
        Ok(())
    }

    /// Carries out a command, or begins to.
    ///
    /// # Errors
    /// If the executor fails.
    fn handle(&mut self, command: Command) -> Result<()> {
        self.emit();
        match command {
            Command::Generate(generate) => self.receive(*generate),
            Command::Abort { target, owner, reply } => reply(self.abort(target, owner)),
            Command::Status { reply } => reply(self.status()),
            Command::ResetPrefixCache { reply } => reply(Ok(self.scheduler.reset_prefix_cache())),
            Command::BeginUpdate { begin, reply } => reply(self.begin_update(begin)),
            Command::WritePart { update, tensors, reply } => {
                let attempt = self.write_part(update, tensors);
                return answer(reply, attempt);
            }
            Command::CommitUpdate { update, content, new_version, reply } => {
                return self.commit_update(update, content, new_version, reply);
            }
            Command::CancelUpdate { update, reply } => reply(self.cancel_update(update)),
            Command::SetVersion { version, force, reply } => reply(self.set_version(version, force)),
            Command::Sleep { level, mode, cancel, reply } => return self.sleep(level, mode, cancel, reply),
            Command::Wake { tags, reload, reply } => {
                let attempt = self.wake(tags, reload);
                return answer(reply, attempt);
            }
            Command::Pause { mode, cancel, reply } => self.pause(mode, cancel, reply),
            Command::Resume { reply } => reply(self.resume()),
            Command::Checksum { names, cancel, reply } => self.begin_checksum(&names, cancel, reply),
            Command::ListRequests { most, reply } => reply(self.list_requests(most)),
            Command::ListAdapters { reply } => reply(self.adapters.list()),
            Command::RemoveAdapter { name, expected_generation, cancel, reply } => {
                self.remove_adapter(&name, expected_generation, cancel, reply);
            }
            Command::Look => self.drop_cancelled(),
            Command::Shutdown { grace } => {
                self.deadline = Some(self.clock.now() + grace);
                self.refuse_waiting();
            }
        }
        Ok(())
    }

    /// Gives the ranks an order that changes the weights. If one of them has not the memory for it, it is refused, and
    /// some weights may have changed.
    fn order(&mut self, order: WeightOrder) -> Attempt<()> {
        match self.executor.write(order) {
            Err(Error::DataLoss(damage)) => Err(self.lose_policy(&damage)),
            Err(error @ Error::ResourceExhausted(_)) => Err(Failure::Refused(error)),
            done => done.map_err(Failure::Fatal),
        }
    }

    /// Checks that the server is not shutting down.
    ///
    /// # Errors
    /// `Unavailable` after `Shutdown`.
    fn check_serving(&self) -> Result<()> {
        if self.deadline.is_some() { Err(shutting_down()) } else { Ok(()) }
    }

    fn lifecycle(&self) -> LifecycleStatus {
        if self.deadline.is_some() { LifecycleStatus::ShuttingDown } else { self.state.status() }
    }

    /// Version of the policy that serves.
    pub fn weight_version(&self) -> WeightVersion {
        self.policy.version()
    }

    /// Snapshot between two steps, as [`Command::Status`] is answered with.
    pub fn status(&self) -> Status {
        let s = self.scheduler.stats();
        let mut status = Status {
            lifecycle: self.lifecycle(),
            memory: self.budget.report().clone(),
            host_memory: self.budget.host_report().cloned(),
            traffic_bytes: self.traffic.used(),
            held_requests: self.requests.num_held(),
            update: self.updates.open().map(|open| open.facts(self.clock.now())),
            updates: self.updates.applied(),
            weight_version: self.policy.version(),
            total_blocks: s.total_blocks,
            free_blocks: s.free_blocks,
            cached_blocks: s.cached_blocks,
            running_requests: self.requests.num_accepted(),
            running_samples: s.running_samples,
            waiting_samples: s.waiting_samples,
            prompt_tokens: s.prompt_tokens,
            generated_tokens: s.generated_tokens,
            cached_tokens: s.cached_tokens,
            preemptions: s.preemptions,
            drafted_tokens: s.drafted_tokens,
            accepted_tokens: s.accepted_tokens,
            ..Status::default()
        };
        self.statistics.report(&mut status);
        status
    }
}

/// How a request that was accepted ends.
enum Ending {
    Finished,
    Aborted,
}

fn shutting_down() -> Error {
    Error::Unavailable("the server is shutting down".into())
}
