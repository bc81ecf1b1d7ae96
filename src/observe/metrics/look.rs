//! The numbers that the engine has published, for readers other than Prometheus.

use super::labels::Label;
use super::{EngineSnapshot, Lifecycle, Metrics};
use crate::memory::MemoryReport;

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

    /// The ledger as it was published last, and the host's where that is another, with the entries that have any bytes.
    pub fn ledgers(&self) -> (MemoryReport, Option<MemoryReport>) {
        let [device, host] = [0, 1].map(|i| {
            let mut report = self.ledgers[i].report();
            report.entries.retain(|entry| entry.1 > 0);
            report
        });
        (device, (host.total > 0).then_some(host))
    }

    /// Name of the state of the lifecycle.
    pub fn lifecycle(&self) -> &'static str {
        Lifecycle::ALL[self.lifecycle.get()].name()
    }
}
