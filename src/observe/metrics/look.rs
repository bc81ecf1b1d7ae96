//! The numbers that the engine has published, for readers other than Prometheus.

use super::labels::Label;
use super::{EngineSnapshot, Lifecycle, Metrics};
use crate::memory::{MemoryReport, MemoryUse};

impl Metrics {
    /// What the engine has published last.
    pub fn engine(&self) -> EngineSnapshot {
        let [running_samples, waiting_samples, accepted_requests, held_requests, total_blocks, free_blocks] = [
            &self.running_samples,
            &self.waiting_samples,
            &self.accepted_requests,
            &self.held_requests,
            &self.total_blocks,
            &self.free_blocks,
        ]
        .map(|gauge| gauge.get() as usize);
        EngineSnapshot {
            running_samples,
            waiting_samples,
            accepted_requests,
            held_requests,
            total_blocks,
            free_blocks,
            cached_blocks: self.cached_blocks.get() as usize,
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            generated_tokens: self.generated_tokens.get(),
            preemptions: self.preemptions.get(),
            drafted_tokens: self.drafted_tokens.get(),
            accepted_tokens: self.accepted_tokens.get(),
            weight_version: self.weight_version.get(),
            updates: self.updates.get(),
            resident_adapters: self.resident_adapters.get() as usize,
            internal_errors: self.internal_errors.get(),
        }
    }

    /// The ledger as it was published last, with the entries that have any bytes.
    pub fn ledger(&self) -> MemoryReport {
        let entries = MemoryUse::ALL.into_iter().zip(&self.memory).map(|(used_for, gauge)| (used_for, gauge.get()));
        MemoryReport {
            total: self.memory_total.get(),
            ceiling: self.memory_ceiling.get(),
            entries: entries.filter(|entry| entry.1 > 0).collect(),
        }
    }

    /// Name of the state of the lifecycle.
    pub fn lifecycle(&self) -> &'static str {
        Lifecycle::ALL[self.lifecycle.get()].name()
    }
}
