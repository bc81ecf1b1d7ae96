//! Pause, sleep, wake and resume.

use super::command::{DrainMode, LifecycleStatus, SleepLevel, SleepReply, WakeTags};
use super::core::{Attempt, Failure};
use super::drain::Drain;
use super::{Engine, RunningPolicy};
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
    /// Lets the engine step again. A pause that still waits is cancelled.
    pub(super) fn resume(&mut self) -> Result<()> {
        self.core.check_serving()?;
        self.core.state = self.core.state.resume()?;
        let error = Error::Aborted("Resume came before the running requests had ended".into());
        self.drains.refuse(&error, |drain| matches!(drain, Drain::Pause { .. }));
        Ok(())
    }

    pub(super) fn check_sleep(&self, level: SleepLevel, mode: DrainMode) -> Result<()> {
        self.core.check_serving()?;
        self.core.state.sleep(level)?;
        if self.updates.opened().is_some() {
            return Err(Error::FailedPrecondition("an update is under way; sleep when it has ended".into()));
        }
        if mode == DrainMode::Wait && self.core.is_frozen() {
            return Err(Error::FailedPrecondition(format!(
                "{} requests stand still and cannot end: call Resume first, or sleep with mode ABORT or KEEP",
                self.core.requests.num_accepted()
            )));
        }
        Ok(())
    }

    /// Gives back the memory of everything that is awake, and measures it. No accepted request may be running.
    pub(super) fn release(&mut self, level: SleepLevel) -> Attempt<SleepReply> {
        let next = self.core.state.sleep(level).map_err(Failure::Refused)?;
        let started = self.core.clock.now();
        self.core.watch.enter(Phase::Sleep);
        if level == SleepLevel::Two {
            self.core.abort_accepted(|_, request| request.adapter().is_some());
            self.adapters.drop_all(&mut self.core)?;
        }
        self.core.scheduler.release_all();
        let mut kv_cache_bytes = 0;
        if self.core.state.kv_awake() {
            for (memory, used_for) in [(Memory::KvCache, MemoryUse::KvCache), (Memory::Workspace, MemoryUse::Workspace)]
            {
                kv_cache_bytes += self.core.release_memory(memory)?.freed;
                self.core.budget.free(used_for);
            }
        }
        let spare = match self.core.take_spare() {
            Some(shadow) => self.core.executor.discard(shadow).map_err(Failure::Fatal)?,
            None => 0,
        };
        let weights = self.release_weights(level)?;
        self.core.budget.lower(MemoryUse::Weights, weights.kept);
        self.core.state = next;
        let reply = SleepReply {
            weights_bytes: spare + weights.freed,
            kv_cache_bytes,
            resident_bytes: self.core.executor.used_bytes(),
            took: self.core.clock.since(started),
        };
        self.core.watch.note_sleep(level, &reply);
        Ok(reply)
    }

    fn release_weights(&mut self, level: SleepLevel) -> Attempt<Released> {
        let awake = self.core.state.weights_awake();
        let released = match level {
            SleepLevel::One if awake => self.core.release_memory(Memory::Weights)?,
            SleepLevel::One => Released { kept: self.core.budget.reserved(MemoryUse::Weights), ..Released::default() },
            SleepLevel::Two
                if awake || self.core.policy.has_replaced() || self.core.budget.reserved(MemoryUse::Offloaded) > 0 =>
            {
                self.core.release_memory(Memory::WeightsAndBase)?
            }
            SleepLevel::Two => Released::default(),
        };
        if level == SleepLevel::Two {
            self.core.forget_policy();
        }
        Ok(released)
    }

    /// Takes the memory of all of `memories`, or of none.
    fn restore(&mut self, memories: &[Memory]) -> Attempt<()> {
        for (i, memory) in memories.iter().enumerate() {
            match self.core.executor.restore(*memory) {
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
        let mut ledger = self.core.budget.clone();
        if weights {
            ledger.free(MemoryUse::Offloaded);
            ledger.set(MemoryUse::Weights, self.awake.weights)?;
        }
        if kv_cache {
            ledger.set(MemoryUse::Workspace, self.awake.workspace)?;
            ledger.set(MemoryUse::KvCache, self.awake.kv_cache)?;
        }
        Ok(ledger)
    }

    fn give_back(&mut self, memories: &[Memory]) -> Attempt<()> {
        memories.iter().try_for_each(|memory| self.core.release_memory(*memory).map(drop))
    }

    /// Takes memory back. The weights are loaded with the policy that was kept, or that was pushed while they were
    /// asleep; where there is no policy, `reload` loads the checkpoint. When everything is awake, serving goes on.
    pub(super) fn wake(&mut self, tags: WakeTags, reload: bool) -> Attempt<LifecycleStatus> {
        self.core.check_serving().map_err(Failure::Refused)?;
        let reload = reload && tags.weights && !self.core.state.has_policy();
        if reload && self.updates.opened().is_some() {
            let why = "an update is under way, and will bring the policy; wake without reload";
            return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
        }
        let started = self.core.clock.now();
        self.core.watch.enter(if reload { Phase::Reload } else { Phase::Wake });
        let wake_weights = tags.weights && !self.core.state.weights_awake();
        let wake_kv = tags.kv_cache && !self.core.state.kv_awake();
        if wake_kv {
            // A FULL push beside the sleeping cache has left it, in memory that is the cache's.
            drop(self.core.take_spare());
        }
        let mut ledger = self.ledger_awake(wake_weights, wake_kv).map_err(Failure::Refused)?;
        let taken = self.core.budget.remaining() - ledger.remaining();
        let load = WeightOrder::Load { adapter: self.core.policy.merged() };
        let loads = reload || wake_weights && self.core.state.has_policy();
        if loads {
            self.core.check_checkpoint(&load)?;
        }
        let weights = wake_weights.then_some(Memory::Weights);
        let cache = if wake_kv { &[Memory::Workspace, Memory::KvCache][..] } else { &[] };
        let woken: Vec<Memory> = weights.into_iter().chain(cache.iter().copied()).collect();
        self.restore(&woken)?;
        if reload && !wake_weights {
            // Both ledgers, the one of a load that fails too, are without what the base has forgotten.
            self.core.reset_base()?;
            ledger = self.ledger_awake(wake_weights, wake_kv).map_err(Failure::Refused)?;
        }
        let asleep = std::mem::replace(&mut self.core.budget, ledger);
        if loads {
            // Resetting the base has forgotten what was merged, so this order may differ from the one that was checked.
            let loaded = self.core.order(WeightOrder::Load { adapter: self.core.policy.merged() });
            if let Err(Failure::Refused(Error::ResourceExhausted(_))) = loaded {
                self.core.budget = asleep;
                self.give_back(&woken)?;
            } else if loaded.is_err() {
                self.give_back(cache)?;
                if wake_kv {
                    self.core.budget.free(MemoryUse::Workspace);
                    self.core.budget.free(MemoryUse::KvCache);
                }
            }
            loaded?;
        }
        if reload {
            self.core.change_policy(0, RunningPolicy::Keep);
        }
        self.core.state = self.core.state.wake(tags, reload);
        self.core.watch.note_wake(reload, self.core.clock.since(started), taken);
        Ok(self.core.state.status())
    }
}
