//! Pause, sleep, wake and resume.

use super::command::{CancelFlag, DrainMode, LifecycleStatus, Reply, SleepLevel, SleepReply, WakeTags};
use super::drain::AfterDrain;
use super::lifecycle::State;
use super::{Attempt, Engine, Failure, RunningPolicy, answer};
use crate::error::{Error, Result};
use crate::executor::{Executor, Memory, Released, WeightOrder};
use crate::memory::{MemoryBudget, MemoryUse};
use crate::observe::Phase;

/// Ledger entries of everything that can sleep, as they were at the start.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwakeBytes {
    weights: u64,
    workspace: u64,
    kv_cache: u64,
}

impl AwakeBytes {
    pub fn of(budget: &MemoryBudget) -> Self {
        let [weights, workspace, kv_cache] =
            [MemoryUse::Weights, MemoryUse::Workspace, MemoryUse::KvCache].map(|used_for| budget.reserved(used_for));
        Self { weights, workspace, kv_cache }
    }

    /// Reserves all of it, whatever is reserved of it already.
    pub fn reserve(self, ledger: &mut MemoryBudget) -> Result<()> {
        ledger.free(MemoryUse::Offloaded);
        ledger.set(MemoryUse::Weights, self.weights)?;
        ledger.set(MemoryUse::Workspace, self.workspace)?;
        ledger.set(MemoryUse::KvCache, self.kv_cache)
    }

    pub fn weights(self) -> u64 {
        self.weights
    }

    /// Of the workspace and of the KV cache.
    pub fn cache(self) -> [u64; 2] {
        [self.workspace, self.kv_cache]
    }
}

impl<X: Executor> Engine<X> {
    /// Stops stepping: at once, or with `Wait` when the accepted requests have ended.
    pub(super) fn pause(&mut self, mode: DrainMode, cancel: CancelFlag, reply: Reply<Result<()>>) {
        match self.check_serving().and_then(|()| self.state.pause()) {
            Err(error) => reply(Err(error)),
            Ok(_) if mode == DrainMode::Wait && self.must_drain() => {
                self.drains.push(cancel, AfterDrain::Pause(reply));
            }
            Ok(next) => {
                if mode == DrainMode::Abort {
                    self.abort_accepted(|_, _| true);
                }
                self.state = next;
                reply(Ok(()));
            }
        }
    }

    /// Lets the engine step again. A pause that still waits is called off.
    pub(super) fn resume(&mut self) -> Result<()> {
        self.check_serving()?;
        self.state = self.state.resume()?;
        let error = Error::Aborted("Resume came before the running requests had ended".into());
        self.drains.refuse(&error, |then| matches!(then, AfterDrain::Pause(_)));
        Ok(())
    }

    /// Gives memory back: at once, or with `Wait` when the accepted requests have ended. Requests that are kept compute
    /// their tokens again after `Wake`. At level 2 the resident adapters are dropped, so requests that use one end.
    pub(super) fn sleep(
        &mut self,
        level: SleepLevel,
        mode: DrainMode,
        cancel: CancelFlag,
        reply: Reply<Result<SleepReply>>,
    ) -> Result<()> {
        if let Err(error) = self.check_sleep(level, mode) {
            reply(Err(error));
            return Ok(());
        }
        if mode == DrainMode::Wait && self.must_drain() {
            self.drains.push(cancel, AfterDrain::Sleep(level, reply));
            return Ok(());
        }
        if mode == DrainMode::Abort {
            self.abort_accepted(|_, _| true);
        }
        let attempt = self.release(level);
        answer(reply, attempt)
    }

    fn check_sleep(&self, level: SleepLevel, mode: DrainMode) -> Result<()> {
        self.check_serving()?;
        self.state.sleep(level)?;
        if self.updates.open().is_some() {
            return Err(Error::FailedPrecondition("an update is under way; sleep when it has ended".into()));
        }
        if mode == DrainMode::Wait && self.is_frozen() {
            return Err(Error::FailedPrecondition(format!(
                "{} requests stand still and cannot end: call Resume first, or sleep with mode ABORT or KEEP",
                self.requests.num_accepted()
            )));
        }
        Ok(())
    }

    /// Gives back the memory of everything that is awake, and measures it. No accepted request may be running.
    fn release(&mut self, level: SleepLevel) -> Attempt<SleepReply> {
        let next = self.state.sleep(level).map_err(Failure::Refused)?;
        let started = self.clock.now();
        self.watch.enter(Phase::Sleep);
        if level == SleepLevel::Two {
            self.abort_accepted(|_, request| request.adapter().is_some());
            self.drop_all_adapters()?;
        }
        self.scheduler.release_all();
        let mut kv_cache_bytes = 0;
        if self.state.kv_awake() {
            for (memory, used_for) in [(Memory::KvCache, MemoryUse::KvCache), (Memory::Workspace, MemoryUse::Workspace)]
            {
                kv_cache_bytes += self.release_memory(memory)?.freed;
                self.budget.free(used_for);
            }
        }
        let spare = match self.take_spare() {
            Some(shadow) => self.executor.discard(shadow).map_err(Failure::Fatal)?,
            None => 0,
        };
        let weights = self.release_weights(level)?;
        self.budget.lower(MemoryUse::Weights, weights.kept);
        self.state = next;
        let reply = SleepReply {
            weights_bytes: spare + weights.freed,
            kv_cache_bytes,
            resident_bytes: self.executor.used_bytes(),
            took: self.clock.since(started),
        };
        self.watch.note_sleep(level, &reply);
        Ok(reply)
    }

    fn release_weights(&mut self, level: SleepLevel) -> Attempt<Released> {
        let awake = self.state.weights_awake();
        let released = match level {
            SleepLevel::One if awake => self.release_memory(Memory::Weights)?,
            SleepLevel::One => Released { kept: self.budget.reserved(MemoryUse::Weights), ..Released::default() },
            SleepLevel::Two
                if awake || self.policy.has_replaced() || self.budget.reserved(MemoryUse::Offloaded) > 0 =>
            {
                self.release_memory(Memory::WeightsAndBase)?
            }
            SleepLevel::Two => Released::default(),
        };
        if level == SleepLevel::Two {
            self.forget_policy();
        }
        Ok(released)
    }

    /// Gives memory back. What the device moves to the host's memory meanwhile is reserved there first: all that is
    /// left of it, and then what it has taken.
    fn release_memory(&mut self, memory: Memory) -> Attempt<Released> {
        let held = self.budget.reserved(MemoryUse::Offloaded);
        let most = held + self.budget.remaining_for(MemoryUse::Offloaded);
        self.budget.set(MemoryUse::Offloaded, most).expect("it is what is left");
        let released = self.executor.release(memory, most).map_err(Failure::Fatal)?;
        self.budget.lower(MemoryUse::Offloaded, released.offloaded);
        Ok(released)
    }

    /// Notes that the base is the checkpoint again, with nothing merged into it.
    fn forget_policy(&mut self) {
        self.policy.reset();
        self.free_merged();
    }

    /// Drops the content of the weights, and makes the checkpoint the base that the next load reads.
    pub(super) fn reset_base(&mut self) -> Attempt<()> {
        self.release_memory(Memory::WeightsAndBase)?;
        self.executor.restore(Memory::Weights).map_err(Failure::Fatal)?;
        self.budget.free(MemoryUse::Offloaded);
        self.forget_policy();
        Ok(())
    }

    /// Checks, before an order that reads the checkpoint, that its files are what was loaded.
    ///
    /// # Errors
    /// Refused with `DataLoss` if they are not, and with `ResourceExhausted` if the device has not the memory that the
    /// order needs.
    pub(super) fn check_checkpoint(&mut self, order: &WeightOrder) -> Attempt<()> {
        self.executor.check(order).map_err(|error| match error {
            Error::DataLoss(damage) => {
                let instead = match self.state {
                    State::Asleep(_) => "sleep at level 2, wake and push a complete policy (FULL)",
                    _ => "push a complete policy (FULL)",
                };
                let why = format!("{damage}; nothing has changed: put it back as it was and call again, or {instead}");
                Failure::Refused(Error::DataLoss(why))
            }
            error @ Error::ResourceExhausted(_) => Failure::Refused(error),
            error => Failure::Fatal(error),
        })
    }

    /// Gives the policy up because the checkpoint changed while an order read it: the weights are of no policy now. All
    /// accepted requests end. Returns what the caller of the order is told.
    pub(super) fn lose_policy(&mut self, damage: &str) -> Failure {
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

    /// Takes the memory of all of `memories`, or of none.
    fn restore(&mut self, memories: &[Memory]) -> Attempt<()> {
        for (i, memory) in memories.iter().enumerate() {
            match self.executor.restore(*memory) {
                Err(error @ Error::ResourceExhausted(_)) => {
                    // The one that has failed may have taken a part.
                    self.give_back(&memories[..=i])?;
                    return Err(Failure::Refused(error));
                }
                restored => restored.map_err(Failure::Fatal)?,
            }
        }
        Ok(())
    }

    /// The ledger once the weights, the KV cache or both are awake.
    ///
    /// # Errors
    /// `ResourceExhausted` if they exceed the ceiling.
    fn ledger_awake(&self, weights: bool, kv_cache: bool) -> Result<MemoryBudget> {
        let mut ledger = self.budget.clone();
        if weights {
            ledger.free(MemoryUse::Offloaded);
            ledger.set(MemoryUse::Weights, self.awake_bytes.weights)?;
        }
        if kv_cache {
            ledger.set(MemoryUse::Workspace, self.awake_bytes.workspace)?;
            ledger.set(MemoryUse::KvCache, self.awake_bytes.kv_cache)?;
        }
        Ok(ledger)
    }

    fn give_back(&mut self, memories: &[Memory]) -> Attempt<()> {
        memories.iter().try_for_each(|memory| self.release_memory(*memory).map(drop))
    }

    /// Takes memory back. The weights are loaded with the policy that was kept, or that was pushed while they were
    /// asleep; where there is no policy, `reload` loads the checkpoint. When everything is awake, serving goes on.
    pub(super) fn wake(&mut self, tags: WakeTags, reload: bool) -> Attempt<LifecycleStatus> {
        self.check_serving().map_err(Failure::Refused)?;
        let reload = reload && tags.weights && !self.state.has_policy();
        if reload && self.updates.open().is_some() {
            let why = "an update is under way, and will bring the policy; wake without reload";
            return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
        }
        let started = self.clock.now();
        self.watch.enter(if reload { Phase::Reload } else { Phase::Wake });
        let wake_weights = tags.weights && !self.state.weights_awake();
        let wake_kv = tags.kv_cache && !self.state.kv_awake();
        if wake_kv {
            // A FULL push beside the sleeping cache has left it, in memory that is the cache's.
            drop(self.take_spare());
        }
        let mut ledger = self.ledger_awake(wake_weights, wake_kv).map_err(Failure::Refused)?;
        let taken = self.budget.remaining() - ledger.remaining();
        let load = WeightOrder::Load { adapter: self.policy.merged() };
        let loads = reload || wake_weights && self.state.has_policy();
        if loads {
            self.check_checkpoint(&load)?;
        }
        let weights = wake_weights.then_some(Memory::Weights);
        let cache = if wake_kv { &[Memory::Workspace, Memory::KvCache][..] } else { &[] };
        let woken: Vec<Memory> = weights.into_iter().chain(cache.iter().copied()).collect();
        self.restore(&woken)?;
        if reload && !wake_weights {
            // Both ledgers, the one of a load that fails too, are without what the base has forgotten.
            self.reset_base()?;
            ledger = self.ledger_awake(wake_weights, wake_kv).map_err(Failure::Refused)?;
        }
        let asleep = std::mem::replace(&mut self.budget, ledger);
        if loads {
            // Resetting the base has forgotten what was merged, so this order may differ from the one that was checked.
            let loaded = self.order(WeightOrder::Load { adapter: self.policy.merged() });
            if let Err(Failure::Refused(Error::ResourceExhausted(_))) = loaded {
                self.budget = asleep;
                self.give_back(&woken)?;
            } else if loaded.is_err() {
                self.give_back(cache)?;
                if wake_kv {
                    self.budget.free(MemoryUse::Workspace);
                    self.budget.free(MemoryUse::KvCache);
                }
            }
            loaded?;
        }
        if reload {
            self.change_policy(0, RunningPolicy::Keep);
        }
        self.state = self.state.wake(tags, reload);
        self.watch.note_wake(reload, self.clock.since(started), taken);
        Ok(self.state.status())
    }
}
