//! The engine: one thread that owns every piece of mutable serving state.
//!
//! It takes [`Command`]s from a bounded queue and sends [`Event`]s through each request's responder. While there is
//! work it steps, `schedule → launch → collect → update → emit`, and takes waiting commands between two steps; when
//! idle it blocks on the queue.

mod command;
mod request;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

pub use command::*;

use crate::cache::CacheSalt;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::scheduler::{Outcome, Scheduler};
use crate::text::Tokenizer;
use crate::types::{RequestKey, StepPlan, WeightVersion};
use request::Request;
use stats::Throughput;

/// Commands that may wait for the engine: it takes them between two steps, so this many arrive within one step at
/// most; beyond that clients are told to come back.
pub const COMMAND_QUEUE: usize = 1024;

/// All serving state.
pub struct Engine<X: Executor> {
    executor: X,
    scheduler: Scheduler,
    /// For stop strings.
    tokenizer: Option<Arc<Tokenizer>>,
    commands: Receiver<Command>,
    requests: HashMap<RequestKey, Request>,
    /// Requests that wait for a newer policy, in the order of their arrival.
    held: Vec<GenerateCommand>,
    next_key: u64,
    weight_version: WeightVersion,
    /// Set by `Shutdown`: when the running requests are aborted.
    deadline: Option<Instant>,
    throughput: Throughput,
    steps: u64,
    finished_requests: u64,
    aborted_requests: u64,
}

impl<X: Executor> Engine<X> {
    pub fn new(
        executor: X,
        scheduler: Scheduler,
        tokenizer: Option<Arc<Tokenizer>>,
        commands: Receiver<Command>,
    ) -> Self {
        Self {
            executor,
            scheduler,
            tokenizer,
            commands,
            requests: HashMap::new(),
            held: Vec::new(),
            next_key: 0,
            weight_version: 0,
            deadline: None,
            throughput: Throughput::default(),
            steps: 0,
            finished_requests: 0,
            aborted_requests: 0,
        }
    }

    /// Serves until `Shutdown`, or until every handle is gone.
    ///
    /// # Errors
    /// If the executor fails; every request has got its terminal event then.
    pub fn run(mut self) -> Result<()> {
        let result = self.serve();
        if let Err(error) = &result {
            tracing::error!("the engine ends: {error}");
        }
        self.abort_all();
        result
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            if !self.scheduler.has_work() {
                if self.deadline.is_some() {
                    return Ok(());
                }
                self.scheduler.check_integrity();
                match self.commands.recv() {
                    Ok(command) => self.handle(command),
                    Err(_) => return Ok(()),
                }
            }
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
            }
            self.drop_cancelled();
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.abort_all();
            }
            self.step()?;
        }
    }

    /// `schedule → launch → collect → update → emit`.
    fn step(&mut self) -> Result<()> {
        let plan = Arc::new(self.scheduler.schedule());
        if plan.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        self.executor.launch(plan.clone())?;
        let output = self.executor.collect()?;
        let outcomes = self.scheduler.update(&plan, output);
        self.steps += 1;
        self.throughput.record(started, sampled_tokens(&plan));
        for outcome in outcomes {
            self.emit(outcome);
        }
        Ok(())
    }

    fn emit(&mut self, outcome: Outcome) {
        let key = match &outcome {
            Outcome::PromptDone { group, .. } => group.request,
            Outcome::Token { sample, .. } => sample.group.request,
        };
        let Some(request) = self.requests.get_mut(&key) else { return };
        match outcome {
            Outcome::PromptDone { group, cached_tokens, logprobs } => {
                request.prompt_done(group, cached_tokens, logprobs);
            }
            Outcome::Token { sample, logprobs, finish } => {
                let stopped = request.token(sample, logprobs, finish);
                if stopped && finish.is_none() {
                    // The scheduler knows nothing of text: a stop string is news to it.
                    self.scheduler.finish(sample);
                }
            }
        }
        if request.is_done() {
            self.end(key, Ending::Finished);
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Generate(generate) => self.admit(*generate),
            Command::Abort { target, reply } => reply(self.abort(target)),
            Command::Status { reply } => reply(self.status()),
            Command::ResetPrefixCache { reply } => reply(Ok(self.scheduler.reset_prefix_cache())),
            Command::Cancelled => self.drop_cancelled(),
            _ => todo!(),
            Command::Shutdown { grace } => {
                self.deadline = Some(Instant::now() + grace);
                for held in std::mem::take(&mut self.held) {
                    refuse(held, shutting_down());
                }
            }
        }
    }

    /// Starts a request, holds it until its policy is there, or refuses it.
    fn admit(&mut self, command: GenerateCommand) {
        if self.deadline.is_some() {
            return refuse(command, shutting_down());
        }
        if let Some(wanted) = command.if_weight_version.filter(|&v| v != self.weight_version) {
            let have = self.weight_version;
            return refuse(
                command,
                Error::VersionConflict(format!(
                    "if_weight_version: {wanted} is not the policy that serves; that is version {have}"
                )),
            );
        }
        if self.is_known(&command.request_id) {
            let error = Error::AlreadyExists(format!("request_id: {:?} is running already", command.request_id));
            return refuse(command, error);
        }
        if command.min_weight_version.is_some_and(|v| v > self.weight_version) {
            return self.held.push(command);
        }
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        let salt = CacheSalt { weight_version: self.weight_version, adapter: None };
        let (request, groups) = Request::new(key, command, salt, self.tokenizer.as_ref());
        match self.scheduler.add(groups) {
            Ok(()) => {
                self.requests.insert(key, request);
            }
            Err(error) => request.fail(error),
        }
    }

    fn is_known(&self, id: &str) -> bool {
        self.requests.values().any(|r| r.id() == id) || self.held.iter().any(|h| h.request_id == id)
    }

    /// Ends requests whose clients are gone.
    fn drop_cancelled(&mut self) {
        let gone: Vec<_> = self.requests.iter().filter(|(_, r)| r.is_cancelled()).map(|(key, _)| *key).collect();
        for key in gone {
            self.end(key, Ending::Aborted);
        }
        for held in self.held.extract_if(.., |h| h.cancel.is_cancelled()) {
            refuse(held, Error::Unavailable("the client is gone".into()));
        }
    }

    fn abort(&mut self, target: AbortTarget) -> AbortReply {
        let ids = match target {
            AbortTarget::Requests(ids) => ids,
            AbortTarget::All => {
                let running = self.requests.values().map(|r| r.id().to_string());
                running.chain(self.held.iter().map(|h| h.request_id.clone())).collect()
            }
        };
        let mut reply = AbortReply::default();
        for id in ids {
            let running = self.requests.iter().find(|(_, r)| r.id() == id).map(|(key, _)| *key);
            let held = self.held.iter().position(|h| h.request_id == id);
            if let Some(key) = running {
                self.end(key, Ending::Aborted);
            } else if let Some(index) = held {
                let held = self.held.remove(index);
                refuse(held, Error::Aborted("aborted while it waited for min_weight_version".into()));
            } else {
                reply.unknown.push(id);
                continue;
            }
            reply.aborted.push(id);
        }
        reply
    }

    fn abort_all(&mut self) {
        self.abort(AbortTarget::All);
    }

    /// Takes a request out; samples that still run are cut short. Its blocks are free when this returns.
    fn end(&mut self, key: RequestKey, ending: Ending) {
        let Some(request) = self.requests.remove(&key) else { return };
        self.scheduler.abort(key);
        match ending {
            Ending::Aborted => self.aborted_requests += 1,
            Ending::Finished => self.finished_requests += 1,
        }
        request.end();
    }

    fn status(&self) -> Status {
        let s = self.scheduler.stats();
        Status {
            lifecycle: if self.deadline.is_some() { LifecycleStatus::ShuttingDown } else { LifecycleStatus::Running },
            weight_version: self.weight_version,
            total_blocks: s.total_blocks,
            free_blocks: s.free_blocks,
            cached_blocks: s.cached_blocks,
            running_requests: self.requests.len(),
            running_samples: s.running_samples,
            waiting_samples: s.waiting_samples,
            steps: self.steps,
            prompt_tokens: s.prompt_tokens,
            generated_tokens: s.generated_tokens,
            cached_tokens: s.cached_tokens,
            preemptions: s.preemptions,
            finished_requests: self.finished_requests,
            aborted_requests: self.aborted_requests,
            tokens_per_second: self.throughput.tokens_per_second(),
            ..Status::default()
        }
    }
}

/// How a request ends.
enum Ending {
    Finished,
    Aborted,
}

fn refuse(mut command: GenerateCommand, error: Error) {
    (command.responder)(Event::Failed(error));
}

fn shutting_down() -> Error {
    Error::Unavailable("the server is shutting down".into())
}

fn sampled_tokens(plan: &StepPlan) -> usize {
    plan.tasks().filter(|task| task.target.is_none()).count()
}
