//! The numbers of a ledger.

use std::array::from_fn;

use super::Gauge;
use crate::memory::{MemoryReport, MemoryUse};

/// A ledger as the engine last published it; all zeros before that.
#[derive(Debug)]
pub(super) struct LedgerGauges {
    total: Gauge,
    ceiling: Gauge,
    entries: [Gauge; MemoryUse::ALL.len()],
}

impl LedgerGauges {
    pub fn new() -> Self {
        Self { total: Gauge::default(), ceiling: Gauge::default(), entries: from_fn(|_| Gauge::default()) }
    }

    pub fn publish(&self, report: &MemoryReport) {
        self.total.set(report.total);
        self.ceiling.set(report.ceiling);
        for (used_for, gauge) in MemoryUse::ALL.iter().zip(&self.entries) {
            let entry = report.entries.iter().find(|entry| entry.0 == *used_for);
            gauge.set(entry.map_or(0, |entry| entry.1));
        }
    }

    /// The ledger with all its entries, empty ones too.
    pub fn report(&self) -> MemoryReport {
        let entries = MemoryUse::ALL.into_iter().zip(&self.entries).map(|(used_for, gauge)| (used_for, gauge.get()));
        MemoryReport { total: self.total.get(), ceiling: self.ceiling.get(), entries: entries.collect() }
    }
}
