//! The engine's state as clients and observers see it.

use super::Engine;
use super::command::EngineStatus;
use super::lifecycle::State;
use crate::executor::Executor;
use crate::observe::Phase;
use crate::types::{EngineStats, WeightVersion};

impl<X: Executor> Engine<X> {
    /// Version of the serving policy.
    pub fn weight_version(&self) -> WeightVersion {
        self.core.policy.version()
    }

    /// Status between two steps, the reply to [`Command::Status`](super::Command::Status).
    pub fn status(&self) -> EngineStatus {
        let core = &self.core;
        EngineStatus {
            lifecycle: core.lifecycle(),
            memory: core.budget.report().clone(),
            host_memory: core.budget.host_report().cloned(),
            traffic_bytes: core.traffic.used(),
            update: self.updates.opened().map(|open| open.status(core.clock.now())),
            stats: self.stats(),
            tokens_per_second: self.steps.tokens_per_second(),
            stored: core.stored(),
        }
    }

    pub(super) fn stats(&self) -> EngineStats {
        let stats = self.core.stats + self.core.scheduler.stats();
        EngineStats {
            accepted_requests: self.core.requests.len() as u64,
            held_requests: self.admission.num_held() as u64,
            generated_tokens: stats.generated_tokens - stats.dropped_tokens,
            weight_version: self.core.policy.version(),
            updates: self.updates.applied(),
            adapters: self.adapters.num_resident() as u64,
            adapter_loads: self.adapters.load_counts().loaded,
            adapter_load_failures: self.adapters.load_counts().failed,
            adapter_evictions: self.adapters.load_counts().evicted,
            ..stats
        }
    }

    /// The phase that says why nothing steps.
    pub(super) fn waiting_phase(&self) -> Phase {
        match self.core.state {
            State::Paused => Phase::Paused,
            State::Asleep(_) => Phase::Asleep,
            State::WeightsMissing { .. } => Phase::WeightsMissing,
            State::Running if !self.core.requests.is_empty() => Phase::WaitReaders,
            State::Running if self.adapters.is_loading() => Phase::WaitAdapter,
            State::Running if self.admission.num_held() > 0 => Phase::WaitVersion,
            State::Running => Phase::Idle,
        }
    }
}
