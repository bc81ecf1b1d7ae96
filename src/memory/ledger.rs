//! One ledger: a ceiling in bytes, and reservations below it by use.

use std::fmt;

use crate::error::{Error, Result};

/// The use of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// Code, threads, tokenizer, and whatever no other entry counts.
    Process,
    /// The driver's own memory on a device with memory of its own: the context, the kernels, and the library by which
    /// ranks exchange values.
    Context,
    /// The serving weights of all ranks.
    Weights,
    /// The base below the merged adapter, kept for steps that run it.
    KeptBase,
    /// Activations of one step.
    Workspace,
    /// Activations of a vision tower for one picture.
    TowerWorkspace,
    /// Embeddings of images.
    Embeddings,
    /// Requests and replies under way.
    Requests,
    /// Images that requests may name by their hashes.
    Images,
    /// The blocks of the KV cache.
    KvCache,
    /// The experts that tokens took, beside their KV.
    Routing,
    /// The slots of all resident adapters, used or not.
    Adapters,
    /// The adapter that is merged into the weights, kept so that it can be merged again after a sleep.
    MergedAdapter,
    /// Base parameters that FULL and DELTA pushes have replaced, kept as copies where an adapter is merged into them.
    BaseCopies,
    /// The push that is being received.
    UpdateStaging,
    /// The weights that the last FULL push has replaced, kept as storage for the next one.
    SpareWeights,
    /// Memory lost to rounding on a device with memory of its own, which allocates whole pages.
    PageRounding,
    /// Page-locked memory through which the host and the device exchange values.
    CopyBuffers,
    /// Page-locked memory with contents that a sleep has moved from the device.
    Offloaded,
}

/// Which memory something takes where the device has memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Device,
    Host,
}

impl MemoryUse {
    pub const ALL: [Self; 19] = [
        Self::Process,
        Self::Context,
        Self::Weights,
        Self::KeptBase,
        Self::Workspace,
        Self::TowerWorkspace,
        Self::Embeddings,
        Self::Requests,
        Self::Images,
        Self::KvCache,
        Self::Routing,
        Self::Adapters,
        Self::MergedAdapter,
        Self::BaseCopies,
        Self::UpdateStaging,
        Self::SpareWeights,
        Self::PageRounding,
        Self::CopyBuffers,
        Self::Offloaded,
    ];

    /// Memory that sleeps and wakes with the KV cache.
    pub const WITH_KV_CACHE: [Self; 5] =
        [Self::Workspace, Self::TowerWorkspace, Self::Embeddings, Self::KvCache, Self::Routing];

    /// Name of the entry in `GetStatus` and in the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Context => "context",
            Self::Weights => "weights",
            Self::KeptBase => "kept_base",
            Self::Workspace => "workspace",
            Self::TowerWorkspace => "tower_workspace",
            Self::Embeddings => "embeddings",
            Self::Requests => "requests",
            Self::Images => "images",
            Self::KvCache => "kv_cache",
            Self::Routing => "routing",
            Self::Adapters => "adapters",
            Self::MergedAdapter => "merged_adapter",
            Self::BaseCopies => "base_copies",
            Self::UpdateStaging => "update_staging",
            Self::SpareWeights => "spare_weights",
            Self::PageRounding => "page_rounding",
            Self::CopyBuffers => "copy_buffers",
            Self::Offloaded => "offloaded",
        }
    }

    /// Where it lies. A push lies in the host's memory but for its shadow weights, which
    /// [`MemoryBudget::set_parts`](super::MemoryBudget::set_parts) reserves beside it.
    pub(super) fn home(self) -> Home {
        match self {
            Self::Process
            | Self::Requests
            | Self::Images
            | Self::Routing
            | Self::MergedAdapter
            | Self::UpdateStaging
            | Self::CopyBuffers
            | Self::Offloaded => Home::Host,
            Self::Context
            | Self::Weights
            | Self::KeptBase
            | Self::Workspace
            | Self::TowerWorkspace
            | Self::Embeddings
            | Self::KvCache
            | Self::Adapters
            | Self::BaseCopies
            | Self::SpareWeights
            | Self::PageRounding => Home::Device,
        }
    }
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Snapshot of a ledger, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryReport {
    /// The memory that there is.
    pub total: u64,
    /// The part of it that may be reserved.
    pub ceiling: u64,
    pub entries: Vec<(MemoryUse, u64)>,
}

/// Reservations of one memory.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    /// The name of its ceiling in messages.
    name: &'static str,
    report: MemoryReport,
}

impl Ledger {
    pub fn new(name: &'static str, total: u64, ceiling: u64) -> Self {
        Self { name, report: MemoryReport { total, ceiling, entries: Vec::new() } }
    }

    pub fn report(&self) -> &MemoryReport {
        &self.report
    }

    pub fn reserve(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        if bytes > self.remaining() {
            return Err(Error::ResourceExhausted(format!(
                "{used_for} needs {} but only {} of {} of {} is left ({})",
                human_bytes(bytes),
                human_bytes(self.remaining()),
                self.name,
                human_bytes(self.report.ceiling),
                self.describe_entries(),
            )));
        }
        self.report.entries.push((used_for, bytes));
        Ok(())
    }

    pub fn set(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        let before = self.report.entries.clone();
        let entries = &mut self.report.entries;
        let place = entries.iter().position(|e| e.0 == used_for);
        if let Some(place) = place {
            entries.remove(place);
        }
        if bytes == 0 {
            return Ok(());
        }
        if let Err(error) = self.reserve(used_for, bytes) {
            self.report.entries = before;
            return Err(error);
        }
        let entries = &mut self.report.entries;
        let entry = entries.pop().expect("it was reserved");
        entries.insert(place.unwrap_or(entries.len()), entry);
        Ok(())
    }

    pub fn lower(&mut self, used_for: MemoryUse, bytes: u64) {
        let reserved = self.reserved(used_for);
        assert!(bytes <= reserved, "{used_for}: {bytes} are more than the {reserved} that are set aside");
        self.set(used_for, bytes).expect("less always fits");
    }

    pub fn reserved(&self, used_for: MemoryUse) -> u64 {
        self.report.entries.iter().find(|e| e.0 == used_for).map_or(0, |e| e.1)
    }

    pub fn remaining(&self) -> u64 {
        self.report.ceiling - self.report.entries.iter().map(|e| e.1).sum::<u64>()
    }

    fn describe_entries(&self) -> String {
        if self.report.entries.is_empty() {
            return "nothing is reserved yet".into();
        }
        let entry = |(used_for, bytes): &(MemoryUse, u64)| format!("{used_for} {}", human_bytes(*bytes));
        let parts: Vec<_> = self.report.entries.iter().map(entry).collect();
        format!("reserved: {}", parts.join(", "))
    }
}

/// `bytes` for people to read: "1.5 GiB", "300 MiB".
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 10.0 { format!("{value:.2} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        for (bytes, text) in [(5, "5 B"), (1024, "1.00 KiB"), (300 << 20, "300.0 MiB"), (3 << 29, "1.50 GiB")] {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
