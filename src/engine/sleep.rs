//! Sleep and wake: releases memory in a fixed order, and takes it back with the policy in it.

use super::adapters::Adapters;
use super::command::{DrainMode, LifecycleStatus, RunningPolicy, SleepLevel, SleepReply, WakeTags};
use super::core::{Attempt, AwakeBytes, EngineCore, Failure};
use super::open_update::Updates;
use super::policy::TowerChange;
use crate::error::{Error, Result};
use crate::executor::{Executor, MemoryKind, Released, WeightOrder};
use crate::memory::{MemoryBudget, MemoryUse};
use crate::observe::Phase;

/// Sleep and wake.
pub(super) struct Sleep {
    awake: AwakeBytes,
}

impl Sleep {
    pub fn new(awake: AwakeBytes) -> Self {
        Self { awake }
    }

    /// Checks that a sleep may begin, or may wait for the accepted requests to end.
    pub fn check<X: Executor>(
        &self,
        core: &EngineCore<X>,
        updates: &Updates,
        level: SleepLevel,
        mode: DrainMode,
    ) -> Result<()> {
        core.check_serving()?;
        core.state.sleep(level)?;
        if updates.opened().is_some() {
            return Err(Error::FailedPrecondition("an update is under way; sleep when it has ended".into()));
        }
        if mode == DrainMode::Wait && core.is_frozen() {
            return Err(Error::FailedPrecondition(format!(
                "{} requests stand still and cannot end: call Resume first, or sleep with mode ABORT or KEEP",
                core.requests.len()
            )));
        }
        Ok(())
    }

    /// Releases all memory that is awake, and measures it. No accepted request may be running. The tokens of kept
    /// requests are computed again after the wake. At level 2 the resident adapters are dropped, so requests that use
    /// one end.
    pub fn sleep<X: Executor>(
        &self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        level: SleepLevel,
    ) -> Attempt<SleepReply> {
        let next = core.state.sleep(level).map_err(Failure::Refused)?;
        let started = core.clock.now();
        core.telemetry.enter(Phase::Sleep);
        if level == SleepLevel::Two {
            core.abort_accepted(|_, request| !request.adapters().is_empty());
            adapters.drop_all(core)?;
        }
        core.scheduler.release_all();
        let mut kv_cache_bytes = 0;
        if core.state.kv_awake() {
            for memory in [MemoryKind::KvCache, MemoryKind::Workspace] {
                kv_cache_bytes += core.release_memory(memory)?.freed;
            }
            MemoryUse::WITH_KV_CACHE.into_iter().for_each(|used_for| core.budget.free(used_for));
        }
        let spare = match core.take_spare() {
            Some(shadow) => core.executor.discard(shadow).map_err(Failure::Fatal)?,
            None => 0,
        };
        let weights = release_weights(core, level)?;
        core.budget.lower(MemoryUse::Weights, weights.kept);
        core.budget.free(MemoryUse::KeptBase);
        core.state = next;
        let reply = SleepReply {
            weights_bytes: spare + weights.freed,
            kv_cache_bytes,
            resident_bytes: core.executor.used_bytes(),
            took: core.clock.since(started),
        };
        core.telemetry.note_sleep(level, &reply);
        Ok(reply)
    }

    /// The ledger once the weights, the KV cache or both are awake.
    ///
    /// # Errors
    /// Refused with `ResourceExhausted` if it exceeds the ceiling.
    fn ledger<X: Executor>(&self, core: &EngineCore<X>, weights: bool, kv_cache: bool) -> Attempt<MemoryBudget> {
        let mut ledger = core.budget.clone();
        self.awake.reserve_parts(&mut ledger, weights, kv_cache).map_err(Failure::Refused)?;
        Ok(ledger)
    }

    /// Asserts that the ledger has the entries of the memory that is awake, and room for what sleeps. Only an open
    /// update may take that room, and a wake then waits for its end.
    pub fn check_integrity<X: Executor>(&self, core: &EngineCore<X>, updates: &Updates) {
        let reserved = |used_for| core.budget.reserved(used_for);
        let AwakeBytes { weights, kept_base, cache } = self.awake;
        if core.state.weights_awake() {
            assert_eq!(reserved(MemoryUse::Weights), weights, "the entry of weights that are awake");
            assert_eq!(reserved(MemoryUse::KeptBase), kept_base, "the entry of the base below a merged adapter");
            assert_eq!(reserved(MemoryUse::Offloaded), 0, "bytes are offloaded of weights that are awake");
        }
        let expected = if core.state.kv_awake() { cache } else { [0; MemoryUse::WITH_KV_CACHE.len()] };
        assert_eq!(MemoryUse::WITH_KV_CACHE.map(reserved), expected, "the entries of KV cache and workspaces");
        if updates.opened().is_none() {
            let mut ledger = core.budget.clone();
            ledger.free(MemoryUse::SpareWeights);
            assert!(
                self.awake.reserve(&mut ledger).is_ok(),
                "the server cannot wake beside {:?}",
                core.budget.report()
            );
        }
    }

    /// Takes memory back. The weights are loaded with the policy that was kept, or that was pushed while they were
    /// asleep. If there is no policy, `reload` loads the checkpoint. When everything is awake, the engine steps again.
    pub fn wake<X: Executor>(
        &self,
        core: &mut EngineCore<X>,
        updates: &Updates,
        tags: WakeTags,
        reload: bool,
    ) -> Attempt<LifecycleStatus> {
        core.check_serving().map_err(Failure::Refused)?;
        let reload = reload && tags.weights && !core.state.has_policy();
        if reload && updates.opened().is_some() {
            let why = "an update is under way, and will bring the policy; wake without reload";
            return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
        }
        let started = core.clock.now();
        core.telemetry.enter(if reload { Phase::Reload } else { Phase::Wake });
        let wake_weights = tags.weights && !core.state.weights_awake();
        let wake_kv = tags.kv_cache && !core.state.kv_awake();
        if wake_kv {
            // A FULL push left it while the cache was asleep, in memory that the cache needs now.
            drop(core.take_spare());
        }
        let mut ledger = self.ledger(core, wake_weights, wake_kv)?;
        let taken = core.budget.remaining() - ledger.remaining();
        let load = WeightOrder::Load { adapter: core.policy.merged() };
        let loads = reload || wake_weights && core.state.has_policy();
        if loads {
            core.check_order(&load)?;
        }
        let weights = wake_weights.then_some(MemoryKind::Weights);
        let cache = if wake_kv { &[MemoryKind::Workspace, MemoryKind::KvCache][..] } else { &[] };
        let woken: Vec<MemoryKind> = weights.into_iter().chain(cache.iter().copied()).collect();
        restore(core, &woken)?;
        if reload && !wake_weights {
            // Either ledger, even that of a failing load, must not count the copies that the base drops here.
            core.reset_base()?;
            ledger = self.ledger(core, wake_weights, wake_kv)?;
        }
        let asleep = std::mem::replace(&mut core.budget, ledger);
        if loads {
            // Resetting the base dropped the merged adapter, so this order may differ from the checked one.
            let loaded = core.order(WeightOrder::Load { adapter: core.policy.merged() });
            if let Err(Failure::Refused(Error::ResourceExhausted(_))) = loaded {
                core.budget = asleep;
                give_back(core, &woken)?;
            } else if loaded.is_err() {
                give_back(core, cache)?;
                if wake_kv {
                    MemoryUse::WITH_KV_CACHE.into_iter().for_each(|used_for| core.budget.free(used_for));
                }
            }
            loaded?;
        }
        if reload {
            core.change_policy(0, RunningPolicy::Keep, TowerChange::Unknown);
        }
        core.state = core.state.wake(tags, reload);
        core.telemetry.note_wake(reload, core.clock.since(started), taken);
        Ok(core.state.status())
    }
}

fn release_weights<X: Executor>(core: &mut EngineCore<X>, level: SleepLevel) -> Attempt<Released> {
    let awake = core.state.weights_awake();
    let released = match level {
        SleepLevel::One if awake => core.release_memory(MemoryKind::Weights)?,
        SleepLevel::One => Released { kept: core.budget.reserved(MemoryUse::Weights), ..Released::default() },
        SleepLevel::Two if awake || core.policy.has_replaced() || core.budget.reserved(MemoryUse::Offloaded) > 0 => {
            core.release_memory(MemoryKind::WeightsAndBase)?
        }
        SleepLevel::Two => Released::default(),
    };
    if level == SleepLevel::Two {
        core.forget_policy();
    }
    Ok(released)
}

/// Takes all of `memories`, or none.
fn restore<X: Executor>(core: &mut EngineCore<X>, memories: &[MemoryKind]) -> Attempt<()> {
    for (i, memory) in memories.iter().enumerate() {
        match core.executor.restore(*memory) {
            Err(error @ Error::ResourceExhausted(_)) => {
                // The failed one may have taken a part.
                give_back(core, &memories[..=i])?;
                return Err(Failure::Refused(error));
            }
            restored => restored.map_err(Failure::Fatal)?,
        }
    }
    Ok(())
}

fn give_back<X: Executor>(core: &mut EngineCore<X>, memories: &[MemoryKind]) -> Attempt<()> {
    memories.iter().try_for_each(|memory| core.release_memory(*memory).map(drop))
}
