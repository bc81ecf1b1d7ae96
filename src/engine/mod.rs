//! The engine: one thread that owns every piece of mutable serving state.
//!
//! It takes [`Command`]s from a bounded queue and sends [`Event`]s through each request's responder. While there is
//! work it steps, `schedule → launch → collect → update`, and takes waiting commands between two steps. It emits the
//! outcomes of a step to the requests while the ranks compute the next step, or before anything else happens. While
//! nothing can step, it blocks on the queue.
//!
//! # Components
//!
//! [`Engine`] is the loop and the wiring. `core` is the state that its components share, and each component owns its
//! other state with its methods: `step` runs steps and emits their outcomes, `admission` holds and accepts requests,
//! `sleep` releases memory and takes it back, `update` applies pushes, `adapters` keeps the resident adapters, `drain`
//! the commands that wait for requests to end, and `checksum` the checksums under way. `lifecycle` says which command
//! is allowed in which state.
//!
//! # Requests
//!
//! A request is *accepted* once the scheduler has it. Until then it may be *held*: while the server is paused, while a
//! *drain* (a pause, a sleep or an update) waits for the accepted requests to end, while the policy is older than the
//! request asks for, and while an adapter that it names is loaded. Held requests keep the order of their arrival and
//! count against the queue's limit. Their versions and adapters are checked when they are accepted. While the server is
//! asleep or its weights are missing, new requests are rejected.
//!
//! # Changes of the weights
//!
//! The weights change only between two steps. Everything that can be rejected, damaged checkpoint files included, is
//! checked before anything is touched. If the executor then fails to carry out an order, the content of the weights is
//! unknown, and the engine ends. The one exception is a checkpoint that changes while an order reads it: the policy is
//! lost and the weights are missing, but the engine keeps running.
//!
//! # Panics
//!
//! A panic while one request is answered (its row of logits, its text, its events) ends that request alone, since that
//! code changes nothing that others use. A panic in the model, in an order or in the scheduler ends the process: it
//! leaves a step half done, in collectives, caches or weights that every request uses.

mod adapters;
mod admission;
mod checksum;
mod client;
mod command;
mod core;
mod drain;
mod lifecycle;
mod open_update;
mod policy;
mod replace;
mod request;
mod request_state;
mod requests;
mod rescoring;
mod sample;
mod sleep;
mod status;
mod step;
mod telemetry;
#[cfg(test)]
mod tests;
mod text;
mod update;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

pub use client::{Activity, BusyGuard, CancelFlag};
pub use command::*;
pub use request::{
    AdapterReader, Completion, Event, GenerateCommand, OtherPolicies, PolicyScore, PolicyScores, PromptSampling,
    RequestClient, RequestKind, RequestList, RequestProgress, RequestStatus, Responder, SampleTimes, Summary,
    TopArrays, ValidRequest,
};

pub use self::core::Setup;
use self::core::{AwakeBytes, Ending, EngineCore, answer, shutting_down};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::scheduler::Scheduler;
use crate::text::Tokenizer;
use adapters::Adapters;
use admission::{Admission, suspend_laggards};
use checksum::{Checksums, read_rows};
use drain::{Commit, Drain, Drains};
use lifecycle::State;
use open_update::{OpenUpdate, Updates};
use request_state::RequestState;
use sleep::Sleep;
use step::Steps;
use update::set_version;

/// Most commands that wait for the engine. It takes them between two steps, so the queue is full only if this many come
/// within one step; further callers get an error that asks them to retry.
pub const COMMAND_QUEUE: usize = 1024;

/// Longest time that the engine waits for a mask, while nothing else can run, before it checks for commands.
const MASK_WAIT: Duration = Duration::from_millis(5);

/// All serving state. The module's documentation explains its use.
pub struct Engine<X: Executor> {
    commands: Receiver<Command>,
    core: EngineCore<X>,
    steps: Steps,
    admission: Admission,
    sleep: Sleep,
    adapters: Adapters,
    updates: Updates,
    drains: Drains,
    /// The mode of the last pause.
    pause_mode: DrainMode,
    checksums: Checksums,
}

/// The event that the engine waits for after a turn of its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing: there is more work.
    Again,
    /// A mask that another thread is computing and without which nothing can run.
    WaitForMasks,
    /// A command.
    Wait,
    /// A command, until this time at most: the server shuts down, and requests whose readers lag may catch up.
    WaitUntil(Instant),
    /// The engine has ended.
    Ended,
}

impl<X: Executor> Engine<X> {
    pub fn new(
        executor: X,
        scheduler: Scheduler,
        tokenizer: Option<Arc<Tokenizer>>,
        commands: Receiver<Command>,
        setup: Setup,
    ) -> Self {
        let adapters = Adapters::new(setup.max_adapters, setup.max_tenant_adapters, setup.max_lora_rank);
        let core = EngineCore::new(executor, scheduler, setup);
        let awake = AwakeBytes::of(&core.budget);
        Self {
            commands,
            core,
            steps: Steps::default(),
            admission: Admission::new(tokenizer),
            sleep: Sleep::new(awake),
            adapters,
            updates: Updates::new(awake),
            drains: Drains::default(),
            pause_mode: DrainMode::default(),
            checksums: Checksums::default(),
        }
    }

    /// Serves until `Shutdown`, or until every [`EngineHandle`] is gone.
    ///
    /// # Errors
    /// The executor's error, if it fails. Every request gets its terminal event nevertheless.
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
                    self.steps.take_masks(&mut self.core, MASK_WAIT);
                    continue;
                }
                Turn::Ended => return Ok(()),
                Turn::Wait => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Turn::WaitUntil(deadline) => {
                    self.commands.recv_timeout(deadline.saturating_duration_since(self.core.clock.now()))
                }
            };
            match waiting {
                Ok(command) => received = Some(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// One turn of the loop, which never blocks: carries out `received` and the commands in the queue, steps if it can,
    /// and returns the event to wait for before the next turn.
    ///
    /// [`Engine::run`] repeats it; a simulation calls it directly, and [`Engine::end_all`] after the last turn.
    ///
    /// # Errors
    /// If the executor fails. There must be no further turn then.
    pub fn turn(&mut self, received: Option<Command>) -> Result<Turn> {
        // The number is limited, because callers that send commands faster than the engine answers would keep the queue
        // full.
        let waiting = self.commands.try_iter().take(COMMAND_QUEUE).collect::<Vec<_>>();
        for command in received.into_iter().chain(waiting) {
            self.handle(command)?;
        }
        self.steps.take_masks(&mut self.core, Duration::ZERO);
        self.settle()?;
        if self.core.can_step() {
            self.steps.run(&mut self.core)?;
        }
        self.checksums.compute_piece(&mut self.core)?;
        self.settle()?;
        self.core.telemetry.publish(&self.stats(), &self.core.budget, self.core.lifecycle());
        self.core.telemetry.observer.metrics.tenants.publish(self.core.scheduler.tenant_stats());
        if self.core.deadline.is_some() && self.core.requests.is_empty() {
            return Ok(Turn::Ended);
        }
        if self.core.can_step() || !self.checksums.is_empty() {
            return Ok(Turn::Again);
        }
        if self.steps.awaits_masks() {
            return Ok(Turn::WaitForMasks);
        }
        self.core.scheduler.check_integrity();
        self.core.telemetry.enter(self.waiting_phase());
        Ok(self.core.deadline.map_or(Turn::Wait, Turn::WaitUntil))
    }

    /// Ends everything after the last turn, which returned `result`: each request gets its terminal event, and each
    /// waiting command its reply.
    pub fn end_all(&mut self, result: &Result<()>) {
        self.steps.emit(&mut self.core);
        if let Err(error) = result {
            tracing::error!("the engine ends: {error}");
        }
        self.reject_waiting();
        self.checksums.refuse(&shutting_down());
        self.abort_all();
    }

    /// Does all work that commands, a step or the clock have made due.
    fn settle(&mut self) -> Result<()> {
        if !self.core.can_step() || !self.drains.is_empty() || self.core.deadline.is_some() {
            self.steps.emit(&mut self.core);
        }
        self.drop_cancelled();
        if self
            .core
            .deadline
            .is_some_and(|deadline| self.core.state != State::Running || self.core.clock.now() >= deadline)
        {
            self.abort_all();
        }
        self.settle_drains()?;
        // A held request may wait for a slot.
        self.adapters.drop_unused(&mut self.core)?;
        match self.is_holding() {
            true => self.adapters.drop_unwanted(self.admission.num_held()),
            false => self.admission.accept_held(&mut self.core, &mut self.adapters)?,
        }
        let accepted = self.core.requests.len();
        suspend_laggards(&mut self.core);
        let has_ended = self.core.requests.len() < accepted;
        let is_late = self.steps.has_pending() && !self.core.can_step();
        let may_drain = !self.drains.is_empty() && !self.core.must_drain();
        if is_late || may_drain || has_ended {
            // The last request that could step, or that used an adapter, has just been suspended or ended, and the next
            // turn may wait for a command.
            return self.settle();
        }
        Ok(())
    }

    /// Carries out a command, or begins it.
    ///
    /// # Errors
    /// If the executor fails.
    fn handle(&mut self, command: Command) -> Result<()> {
        self.steps.emit(&mut self.core);
        match command {
            Command::Generate(command) => {
                let (holds_all, is_closed) = (self.is_holding(), self.is_closed());
                self.admission.receive(&mut self.core, &mut self.adapters, holds_all, is_closed, *command);
            }
            Command::Abort { target, owner, reply } => reply(self.admission.abort(&mut self.core, target, owner)),
            Command::Status { reply } => reply(self.status()),
            Command::ResetPrefixCache { reply } => reply(Ok(self.core.scheduler.reset_prefix_cache())),
            Command::ResetEncoderCache { reply } => reply(self.core.scheduler.reset_encoder_cache()),
            Command::BeginUpdate { header, staging, sender, reply } => {
                self.drop_cancelled();
                let (core, adapters) = (&mut self.core, &self.adapters);
                reply(self.updates.begin(core, adapters, &self.drains, header, staging, sender));
            }
            Command::WritePart { update, tensors, reply } => {
                self.drop_cancelled();
                let attempt = self.updates.write_part(&mut self.core, update, tensors);
                return answer(reply, attempt);
            }
            Command::CommitUpdate { update, content, tower, new_version, reply } => {
                self.drop_cancelled();
                match self.updates.commit(&self.core, update, new_version) {
                    Err(error) => reply(Err(error)),
                    Ok(true) => self.drains.push(Drain::Commit(Commit { content, tower, reply })),
                    Ok(false) => return self.finish(Drain::Commit(Commit { content, tower, reply })),
                }
            }
            Command::CancelUpdate { update, reply } => {
                self.drop_cancelled();
                reply(self.updates.cancel(&mut self.core, &mut self.drains, update));
            }
            Command::SetVersion { version, force, reply } => reply(set_version(&mut self.core, version, force)),
            Command::Sleep { level, mode, cancel, reply } => {
                return self.drain(mode, Drain::Sleep { level, cancel, reply });
            }
            Command::Wake { tags, reload, reply } => {
                let attempt = self.sleep.wake(&mut self.core, &self.updates, tags, reload);
                return answer(reply, attempt);
            }
            Command::Pause { mode, cancel, reply } => return self.drain(mode, Drain::Pause { cancel, reply }),
            Command::Resume { reply } => reply(self.resume()),
            Command::Checksum { names, cancel, reply } => {
                self.drop_cancelled();
                self.checksums.begin(&self.core, &names, cancel, reply);
            }
            Command::ReadRows { parameter, rows, reply } => {
                let read = read_rows(&mut self.core, &parameter, rows);
                let failure = read.as_ref().err().filter(|error| matches!(error, Error::Internal(_))).cloned();
                reply(read);
                return failure.map_or(Ok(()), Err);
            }
            Command::ListRequests { most, reply } => reply(self.admission.list(&self.core, most)),
            Command::ListAdapters { reply } => reply(self.adapters.list(&self.core)),
            Command::RemoveAdapter { name, expected_generation, cancel, reply } => {
                self.adapters.remove(&self.core, &name, expected_generation, cancel, reply);
            }
            Command::AdapterRead { name, read } => {
                if let Some(error) = self.adapters.take_read(&name, read) {
                    self.admission.reject_lacking(&self.core, &self.adapters, &name, &error);
                }
            }
            Command::Look => self.drop_cancelled(),
            Command::Shutdown { grace } => {
                self.core.deadline = Some(self.core.clock.now() + grace);
                self.reject_waiting();
            }
        }
        Ok(())
    }

    /// Whether new requests are held, because nothing steps or a drain waits for the accepted requests to end.
    fn is_holding(&self) -> bool {
        self.core.state != State::Running || !self.drains.is_empty()
    }

    /// Whether a pause, which may still wait for running requests, rejects new requests that do not wait for Resume.
    fn is_closed(&self) -> bool {
        let is_paused = self.core.state == State::Paused || self.drains.has_pause();
        is_paused && self.pause_mode != DrainMode::Keep
    }

    /// Ends requests, drains, checksums and the open update if their clients are gone, and requests whose time is up.
    fn drop_cancelled(&mut self) {
        let ended = |request: &RequestState| request.cancel().is_cancelled() || request.cancel().is_expired();
        let ended = self.core.requests.keys(|_, request| ended(request));
        if !ended.is_empty() {
            // The last step may have outcomes for them that end them.
            self.steps.emit(&mut self.core);
        }
        for key in ended {
            self.core.end(key, Ending::Aborted);
        }
        self.admission.drop_cancelled(&mut self.core);
        // A client may disconnect at any time. The update's flag is read once, so that the update and its commit, which
        // may be among the drains, are dropped together.
        let update_is_gone = self.updates.opened().is_some_and(OpenUpdate::is_cancelled);
        self.drains.drop_cancelled(update_is_gone);
        if update_is_gone {
            self.updates.roll_back(&mut self.core);
        }
        self.adapters.drop_cancelled();
        self.checksums.drop_cancelled();
    }

    fn abort_all(&mut self) {
        self.admission.abort(&mut self.core, AbortTarget::All, None);
    }

    /// Rejects all waiting callers, because the server is shutting down. Accepted requests keep running.
    fn reject_waiting(&mut self) {
        self.admission.reject_held();
        self.drains.refuse(&shutting_down(), |_| true);
        self.adapters.refuse_removals(&shutting_down());
        self.updates.roll_back(&mut self.core);
    }

    /// Begins a pause or a sleep: at once, or with `Wait` when the accepted requests have ended.
    fn drain(&mut self, mode: DrainMode, drain: Drain) -> Result<()> {
        if let Err(error) = self.check_drain(mode, &drain) {
            drain.refuse(error);
            return Ok(());
        }
        if let Drain::Pause { .. } = &drain {
            self.pause_mode = mode;
        }
        match mode {
            DrainMode::Wait if self.core.must_drain() => {
                self.drains.push(drain);
                return Ok(());
            }
            DrainMode::Abort => self.core.abort_accepted(|_, _| true),
            DrainMode::Wait | DrainMode::Keep => {}
        }
        self.finish(drain)
    }

    /// Lets the engine step again. A pause that still waits is cancelled.
    fn resume(&mut self) -> Result<()> {
        self.core.check_serving()?;
        self.core.state = self.core.state.resume()?;
        let error = Error::Aborted("Resume came before the running requests had ended".into());
        self.drains.refuse(&error, |drain| matches!(drain, Drain::Pause { .. }));
        Ok(())
    }

    fn check_drain(&self, mode: DrainMode, drain: &Drain) -> Result<()> {
        match drain {
            Drain::Pause { .. } => self.core.check_serving().and_then(|()| self.core.state.pause()).map(drop),
            Drain::Sleep { level, .. } => self.sleep.check(&self.core, &self.updates, *level, mode),
            Drain::Commit(_) => Ok(()),
        }
    }

    /// Runs a command whose drain has ended, or that needs no drain.
    fn finish(&mut self, drain: Drain) -> Result<()> {
        match drain {
            Drain::Pause { reply, .. } => reply(self.core.state.pause().map(|next| self.core.state = next)),
            Drain::Sleep { level, reply, .. } => {
                let attempt = self.sleep.sleep(&mut self.core, &mut self.adapters, level);
                return answer(reply, attempt);
            }
            Drain::Commit(commit) => return self.updates.finish_commit(&mut self.core, &mut self.adapters, commit),
        }
        Ok(())
    }

    /// Runs, in order, the commands that waited for the accepted requests to end. If a pause or a sleep that keeps them
    /// has stopped the requests instead, the commands could wait without end and are cancelled.
    fn settle_drains(&mut self) -> Result<()> {
        while !self.core.must_drain() {
            let Some(drain) = self.drains.next() else { break };
            if self.core.is_frozen() {
                if drain.is_commit() {
                    self.updates.roll_back(&mut self.core);
                }
                let why = "the requests it waited for were made to stand still meanwhile; call again";
                drain.refuse(Error::Aborted(why.into()));
            } else {
                self.drain(DrainMode::Wait, drain)?;
            }
        }
        Ok(())
    }

    /// Asserts every invariant that must hold between two turns. It walks all requests and blocks.
    pub fn check_integrity(&self) {
        let core = &self.core;
        core.check_integrity();
        self.adapters.check_integrity(core);
        self.admission.check_integrity(core, &self.adapters, self.is_holding());
        self.sleep.check_integrity(core, &self.updates);
        self.updates.check_integrity(core, &self.drains);
        assert!(!self.steps.has_pending() || core.can_step(), "events are kept back, and no step follows");
        assert!(self.drains.is_empty() || core.must_drain(), "a drain waits for no request");
        if core.deadline.is_some() {
            assert_eq!(self.admission.num_held(), 0, "held requests during the shutdown");
            assert!(self.drains.is_empty() && self.updates.opened().is_none(), "drains or an update in the shutdown");
        }
    }
}
