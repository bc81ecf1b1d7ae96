//! The numbers that the engine has published, for readers other than Prometheus.

use super::labels::Label;
use super::{Gauge, Histogram, Lifecycle, Metrics};
use crate::memory::MemoryReport;
use crate::types::EngineStats;

impl Metrics {
    /// The engine's numbers as it last published them.
    pub fn engine(&self) -> EngineStats {
        EngineStats::from_values(self.engine.each_ref().map(Gauge::get))
    }

    /// The histograms of the time to the first token and between tokens.
    pub fn token_times(&self) -> [&Histogram; 2] {
        [&self.first_token, &self.next_token]
    }

    /// Number of requests that have ended, by outcome, without outcomes that have not occurred.
    pub fn outcomes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.outcomes.iter().map(|(outcome, count)| (*outcome, count.get())).filter(|(_, count)| *count > 0)
    }

    /// The ledger as the engine last published it, and the host's if the device has memory of its own; without empty
    /// entries.
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
