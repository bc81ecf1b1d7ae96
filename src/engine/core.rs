//! State that the engine's components share: the executor, the scheduler, the ledger, the policy, the lifecycle's state
//! and the accepted requests. Each component gets it as an argument, and owns its other state.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::command::{LifecycleStatus, Reply, RunningPolicy};
use super::lifecycle::State;
use super::policy::{Policy, TowerChange};
use super::request_state::RequestState;
use super::requests::Requests;
use super::telemetry::Telemetry;
use crate::clock::Clock;
use crate::error::{Error, Result, panic_message};
use crate::executor::{Executor, MemoryKind, Released, WeightOrder};
use crate::memory::{MemoryBudget, MemoryUse, Traffic};
use crate::observe::{Metrics, Observer, Recorder};
use crate::scheduler::{RunningKv, Scheduler};
use crate::types::{EngineStats, RequestKey, WeightVersion};
use crate::weights::{Parameters, ShadowWeights, StoredVersion};

/// Facts and limits that an engine starts with, besides the components it drives.
pub struct Setup {
    pub parameters: Arc<Parameters>,
    /// The ledger, with all reservations that do not come from pushes.
    pub budget: MemoryBudget,
    /// Counts the bytes of requests and replies in flight, for which the ledger has an entry.
    pub traffic: Traffic,
    /// Most adapters that may be resident at the same time; retired ones count until their last lease has ended.
    pub max_adapters: usize,
    pub max_lora_rank: usize,
    /// Most resident adapters of one tenant.
    pub max_tenant_adapters: Option<usize>,
    /// The clock by which the engine measures and waits.
    pub clock: Clock,
    /// Receives the engine's numbers.
    pub observer: Observer,
    /// Receives the engine's phases.
    pub recorder: Recorder,
}

/// The shared part of an [`Engine`](super::Engine).
pub(super) struct EngineCore<X: Executor> {
    pub executor: X,
    pub scheduler: Scheduler,
    pub clock: Clock,
    pub parameters: Arc<Parameters>,
    /// The ledger.
    pub budget: MemoryBudget,
    pub traffic: Traffic,
    pub state: State,
    /// Time at which the running requests are aborted; set by `Shutdown`.
    pub deadline: Option<Instant>,
    pub policy: Policy,
    /// The weights that the last FULL push replaced. The next FULL push is packed into their storage.
    pub spare: Option<ShadowWeights>,
    /// The accepted requests, whose groups the scheduler has.
    pub requests: Requests,
    /// The numbers that the scheduler does not count.
    pub stats: EngineStats,
    pub telemetry: Telemetry,
}

/// Ledger entries of the memory that a sleep releases, as they were at the start.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwakeBytes {
    pub weights: u64,
    pub kept_base: u64,
    /// Bytes of each entry of [`MemoryUse::WITH_KV_CACHE`], in its order.
    pub cache: [u64; MemoryUse::WITH_KV_CACHE.len()],
}

impl AwakeBytes {
    pub fn of(budget: &MemoryBudget) -> Self {
        let reserved = |used_for| budget.reserved(used_for);
        Self {
            weights: reserved(MemoryUse::Weights),
            kept_base: reserved(MemoryUse::KeptBase),
            cache: MemoryUse::WITH_KV_CACHE.map(reserved),
        }
    }

    /// Reserves all of it, including parts that are already reserved.
    ///
    /// # Errors
    /// `ResourceExhausted` if it exceeds the ceiling.
    pub fn reserve(self, ledger: &mut MemoryBudget) -> Result<()> {
        self.reserve_parts(ledger, true, true)
    }

    /// Reserves the parts that wake.
    ///
    /// # Errors
    /// `ResourceExhausted` if they exceed the ceiling.
    pub fn reserve_parts(self, ledger: &mut MemoryBudget, weights: bool, kv_cache: bool) -> Result<()> {
        if weights {
            ledger.free(MemoryUse::Offloaded);
            ledger.set(MemoryUse::Weights, self.weights)?;
            ledger.set(MemoryUse::KeptBase, self.kept_base)?;
        }
        if kv_cache {
            for (used_for, bytes) in MemoryUse::WITH_KV_CACHE.into_iter().zip(self.cache) {
                ledger.set(used_for, bytes)?;
            }
        }
        Ok(())
    }
}

/// Why a command failed.
pub(super) enum Failure {
    /// The command was rejected and the engine keeps running: nothing has changed, or the state says what is missing.
    /// There is no conversion from [`Error`]: each check must say `map_err(Failure::Refused)` itself, so that a `?`
    /// after an effect cannot pass for a rejection.
    Refused(Error),
    /// The executor failed while it ran the command; the engine ends.
    Fatal(Error),
}

impl Failure {
    /// Makes a rejection fatal where it leaves weights half changed, which nothing can undo.
    pub fn or_fatal(self) -> Self {
        match self {
            Self::Refused(error @ Error::ResourceExhausted(_)) => Self::Fatal(error),
            failure => failure,
        }
    }
}

/// Result of running a command.
pub(super) type Attempt<T> = std::result::Result<T, Failure>;

/// Replies with the result of a command, and returns the error if it ends the engine.
pub(super) fn answer<T>(reply: Reply<Result<T>>, attempt: Attempt<T>) -> Result<()> {
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

/// How an accepted request ends.
pub(super) enum Ending {
    Finished,
    Aborted,
}

pub(super) fn shutting_down() -> Error {
    Error::Unavailable("the server is shutting down".into())
}

impl<X: Executor> EngineCore<X> {
    pub fn new(executor: X, scheduler: Scheduler, setup: Setup) -> Self {
        let Setup { parameters, budget, traffic, clock, observer, recorder, .. } = setup;
        Self {
            executor,
            scheduler,
            clock: clock.clone(),
            parameters,
            budget,
            traffic,
            state: State::default(),
            deadline: None,
            policy: Policy::checkpoint(),
            spare: None,
            requests: Requests::default(),
            stats: EngineStats::default(),
            telemetry: Telemetry::new(clock, observer, recorder),
        }
    }
}

/// The lifecycle.
impl<X: Executor> EngineCore<X> {
    /// Checks that the server is not shutting down.
    ///
    /// # Errors
    /// `Unavailable` after `Shutdown`.
    pub fn check_serving(&self) -> Result<()> {
        if self.deadline.is_some() { Err(shutting_down()) } else { Ok(()) }
    }

    pub fn lifecycle(&self) -> LifecycleStatus {
        if self.deadline.is_some() { LifecycleStatus::ShuttingDown } else { self.state.status() }
    }

    pub fn can_step(&self) -> bool {
        self.state == State::Running && self.scheduler.has_work()
    }

    /// Whether accepted requests are running, so that a command can wait for them to end.
    pub fn must_drain(&self) -> bool {
        self.state == State::Running && !self.requests.is_empty()
    }

    /// Whether there are accepted requests that cannot end, because nothing steps.
    pub fn is_frozen(&self) -> bool {
        self.state != State::Running && !self.requests.is_empty()
    }
}

/// Integrity, for simulations and tests.
impl<X: Executor> EngineCore<X> {
    /// Asserts the invariants of the scheduler and its cache, of the accepted requests, and of the ledger's entries
    /// that updates leave.
    pub fn check_integrity(&self) {
        self.scheduler.check_integrity();
        self.requests.check_integrity();
        let spare = self.budget.reserved(MemoryUse::SpareWeights);
        assert_eq!(spare > 0, self.spare.is_some(), "{spare} bytes are reserved for spare weights");
        let merged = self.budget.reserved(MemoryUse::MergedAdapter);
        assert_eq!(merged, self.policy.merged().bytes(), "the merged adapter's entry");
    }
}

/// The end of accepted requests.
impl<X: Executor> EngineCore<X> {
    /// Ends an accepted request and its samples that still run. Its blocks are free when this returns.
    pub fn end(&mut self, key: RequestKey, ending: Ending) {
        if let Some(request) = self.take(key) {
            self.close(key, request, ending);
        }
    }

    /// Sends the terminal event of a request that was taken out.
    pub fn close(&mut self, key: RequestKey, mut request: RequestState, ending: Ending) {
        match ending {
            Ending::Aborted => self.stats.aborted_requests += 1,
            Ending::Finished => self.stats.finished_requests += 1,
        }
        let now = self.clock.now();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| request.end(now))) {
            self.report_panic(key, &mut request, &panic_message(&*panic));
        }
    }

    /// Ends an accepted request with an error.
    pub fn reject(&mut self, key: RequestKey, error: Error) {
        if let Some(mut request) = self.take(key) {
            self.stats.aborted_requests += 1;
            request.fail(error);
        }
    }

    /// Ends a request whose answer panicked. Some of its events may be lost. Other requests are unaffected, since that
    /// code changes nothing that they use.
    pub fn fail(&mut self, key: RequestKey, panic: &str) {
        if let Some(mut request) = self.take(key) {
            self.stats.aborted_requests += 1;
            self.report_panic(key, &mut request, panic);
        }
    }

    /// Ends the accepted requests for which `which` is true. Held requests stay.
    pub fn abort_accepted(&mut self, which: impl Fn(RequestKey, &RequestState) -> bool) {
        for key in self.requests.keys(which) {
            self.end(key, Ending::Aborted);
        }
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.telemetry.observer.metrics
    }

    /// Number of accepted requests that use the resident adapter of this generation.
    pub fn leases(&self, generation: u64) -> usize {
        self.requests.keys(|_, request| request.uses(generation)).len()
    }

    /// Takes an accepted request out and frees its blocks and its places in queues.
    fn take(&mut self, key: RequestKey) -> Option<RequestState> {
        let request = self.requests.remove(key)?;
        self.scheduler.abort(key);
        Some(request)
    }

    /// Tells the client of a request that was taken out that its answer panicked.
    fn report_panic(&mut self, key: RequestKey, request: &mut RequestState, panic: &str) {
        tracing::error!(request = key.0, "a request ends because its answer panicked: {panic}");
        self.stats.internal_errors += 1;
        let error =
            Error::Internal(format!("the answer to this request panicked: {panic}; other requests are unaffected"));
        if catch_unwind(AssertUnwindSafe(|| request.fail(error))).is_err() {
            tracing::error!(request = key.0, "its client could not be notified");
        }
    }
}

/// The weights, the policy in them, and their memory.
impl<X: Executor> EngineCore<X> {
    /// Gives the ranks an order that changes the weights. If a rank lacks the memory, the order is refused, and some
    /// weights may have changed.
    pub fn order(&mut self, order: WeightOrder) -> Attempt<()> {
        match self.executor.write(order) {
            Err(Error::DataLoss(damage)) => Err(self.lose_policy(&damage)),
            Err(error @ Error::ResourceExhausted(_)) => Err(Failure::Refused(error)),
            done => done.map_err(Failure::Fatal),
        }
    }

    /// Checks that the executor can carry out an order that reads the checkpoint, or adds an adapter.
    ///
    /// # Errors
    /// Refused with `DataLoss` if the checkpoint's files have changed since they were loaded, with `InvalidArgument` if
    /// the model has no place for an adapter's factors, and with `ResourceExhausted` if the device lacks the memory
    /// that the order needs.
    pub fn check_order(&mut self, order: &WeightOrder) -> Attempt<()> {
        self.executor.check(order).map_err(|error| match error {
            Error::DataLoss(damage) => {
                let instead = match self.state {
                    State::Asleep(_) => "sleep at level 2, wake and push a complete policy (FULL)",
                    _ => "push a complete policy (FULL)",
                };
                let why = format!("{damage}; nothing has changed: put it back as it was and call again, or {instead}");
                Failure::Refused(Error::DataLoss(why))
            }
            error @ (Error::ResourceExhausted(_) | Error::InvalidArgument { .. }) => Failure::Refused(error),
            error => Failure::Fatal(error),
        })
    }

    /// Drops the policy because the checkpoint changed while an order read it: the weights are missing now. All
    /// accepted requests end. Returns the failure of the order.
    fn lose_policy(&mut self, damage: &str) -> Failure {
        tracing::error!("the weights are lost: {damage}");
        self.abort_accepted(|_, _| true);
        self.state = self.state.lost();
        if let Err(failure) = self.reset_base() {
            return failure;
        }
        Failure::Refused(Error::DataLoss(format!(
            "{damage}, while it was read: the weights are missing now; push a complete policy (FULL), or put it back \
             as it was and call Wake with reload"
        )))
    }

    /// Drops the content of the weights, and makes the checkpoint the base that the next load reads.
    pub fn reset_base(&mut self) -> Attempt<()> {
        self.release_memory(MemoryKind::WeightsAndBase)?;
        self.executor.restore(MemoryKind::Weights).map_err(Failure::Fatal)?;
        self.budget.free(MemoryUse::Offloaded);
        self.forget_policy();
        Ok(())
    }

    /// Releases memory. The device may move some of it to the host's memory, so the ledger reserves all free host
    /// memory first, and then lowers the reservation to the moved bytes.
    pub fn release_memory(&mut self, memory: MemoryKind) -> Attempt<Released> {
        let held = self.budget.reserved(MemoryUse::Offloaded);
        let most = held + self.budget.remaining_for(MemoryUse::Offloaded);
        self.budget.set(MemoryUse::Offloaded, most).expect("it is what is left");
        let released = self.executor.release(memory, most).map_err(Failure::Fatal)?;
        self.budget.lower(MemoryUse::Offloaded, released.offloaded);
        Ok(released)
    }

    /// Makes the checkpoint the policy's base again, with nothing merged into it.
    pub fn forget_policy(&mut self) {
        self.policy.reset();
        self.free_merged();
    }

    /// Frees the ledger's entries for a merged adapter.
    pub fn free_merged(&mut self) {
        self.budget.free(MemoryUse::MergedAdapter);
        self.budget.free(MemoryUse::BaseCopies);
    }

    /// Takes the storage of the weights that a FULL push has replaced, and frees its entry in the ledger.
    pub fn take_spare(&mut self) -> Option<ShadowWeights> {
        self.budget.free(MemoryUse::SpareWeights);
        self.spare.take()
    }

    /// Changes the policy to `version`, from the next step on or from when the weights wake. `running` says what
    /// happens to requests that have begun, `tower` what happened to the vision tower. Requests that have not begun and
    /// require exactly another version end.
    pub fn change_policy(&mut self, version: WeightVersion, running: RunningPolicy, tower: TowerChange) {
        self.policy.advance(version);
        self.reject_queued_for_others(version);
        if running == RunningPolicy::Abort {
            let computing = self.scheduler.started_requests();
            let is_queued = |key, request: &RequestState| !request.has_begun() && !computing.contains(&key);
            self.abort_accepted(|key, request| !is_queued(key, request));
        }
        let kv = if running == RunningPolicy::Recompute { RunningKv::Recompute } else { RunningKv::Keep };
        let is_tower_new = self.policy.change_tower(tower);
        self.scheduler.change_policy(self.policy.epoch(), kv, is_tower_new);
    }

    /// The delta store version that is serving; `None` if the policy did not come from a store or is missing.
    pub fn stored(&self) -> Option<StoredVersion> {
        self.policy.stored().filter(|_| self.state.has_policy())
    }

    /// Ends requests that have not begun and require exactly another version than `version`.
    pub fn reject_queued_for_others(&mut self, version: WeightVersion) {
        let computing = self.scheduler.started_requests();
        let insists = |key, request: &RequestState| {
            !request.has_begun() && !computing.contains(&key) && request.insists_on_other_than(version)
        };
        for key in self.requests.keys(insists) {
            let why = format!("if_weight_version: the policy became version {version} before the request could start");
            self.reject(key, Error::VersionConflict(why));
        }
    }
}
