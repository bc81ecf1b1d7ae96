//! The memory ledger: a ceiling in bytes, and reservations below it by use.

use std::fmt;

use crate::error::{Error, Result};

/// What memory is reserved for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// Code, threads, tokenizer, and whatever no other entry counts.
    Process,
    /// The serving weights of all ranks.
    Weights,
    /// Activations of one step.
    Workspace,
    /// Requests and replies under way.
    Requests,
    /// The blocks of the KV cache.
    KvCache,
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
}

impl MemoryUse {
    pub const ALL: [Self; 10] = [
        Self::Process,
        Self::Weights,
        Self::Workspace,
        Self::Requests,
        Self::KvCache,
        Self::Adapters,
        Self::MergedAdapter,
        Self::BaseCopies,
        Self::UpdateStaging,
        Self::SpareWeights,
    ];

    /// Name of the entry in `GetStatus` and in the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Weights => "weights",
            Self::Workspace => "workspace",
            Self::Requests => "requests",
            Self::KvCache => "kv_cache",
            Self::Adapters => "adapters",
            Self::MergedAdapter => "merged_adapter",
            Self::BaseCopies => "base_copies",
            Self::UpdateStaging => "update_staging",
            Self::SpareWeights => "spare_weights",
        }
    }
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Divides `--mem-util` of the device's memory among named uses. Every large allocation is reserved here before it is
/// made.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    total: u64,
    ceiling: u64,
    entries: Vec<(MemoryUse, u64)>,
}

/// Snapshot of the ledger, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryReport {
    pub total: u64,
    pub ceiling: u64,
    pub entries: Vec<(MemoryUse, u64)>,
}

impl MemoryBudget {
    /// A budget of `total * utilization` bytes, with `utilization` in `(0, 1]`.
    pub fn new(total: u64, utilization: f64) -> Self {
        assert!(utilization > 0.0 && utilization <= 1.0, "--mem-util {utilization} was not checked");
        Self { total, ceiling: (total as f64 * utilization) as u64, entries: Vec::new() }
    }

    /// Reserves `bytes` for `used_for`.
    ///
    /// # Errors
    /// `ResourceExhausted` with the whole ledger if they do not fit; nothing is reserved then.
    pub fn reserve(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        if bytes > self.remaining() {
            return Err(Error::ResourceExhausted(format!(
                "{used_for} needs {} but only {} of the ceiling of {} is left ({})",
                human_bytes(bytes),
                human_bytes(self.remaining()),
                human_bytes(self.ceiling),
                self.describe_entries(),
            )));
        }
        self.entries.push((used_for, bytes));
        Ok(())
    }

    /// Changes the reservation for `used_for`, which may be new, to `bytes`; 0 takes it out of the ledger. To reduce
    /// one, [`MemoryBudget::lower`] cannot fail.
    ///
    /// # Errors
    /// As for [`MemoryBudget::reserve`]; nothing changes then.
    pub fn set(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        let before = self.entries.clone();
        let place = self.entries.iter().position(|e| e.0 == used_for);
        if let Some(place) = place {
            self.entries.remove(place);
        }
        if bytes == 0 {
            return Ok(());
        }
        if let Err(error) = self.reserve(used_for, bytes) {
            self.entries = before;
            return Err(error);
        }
        let entry = self.entries.pop().expect("it was reserved");
        self.entries.insert(place.unwrap_or(self.entries.len()), entry);
        Ok(())
    }

    /// Reduces the reservation for `used_for` to `bytes`, which cannot fail; 0 takes it out of the ledger.
    ///
    /// # Panics
    /// If fewer bytes are reserved.
    pub fn lower(&mut self, used_for: MemoryUse, bytes: u64) {
        let reserved = self.reserved(used_for);
        assert!(bytes <= reserved, "{used_for}: {bytes} are more than the {reserved} that are set aside");
        self.set(used_for, bytes).expect("less always fits");
    }

    /// Gives back everything that is reserved for `used_for`.
    pub fn free(&mut self, used_for: MemoryUse) {
        self.lower(used_for, 0);
    }

    /// Bytes reserved for `used_for`.
    pub fn reserved(&self, used_for: MemoryUse) -> u64 {
        self.entries.iter().find(|e| e.0 == used_for).map_or(0, |e| e.1)
    }

    /// Bytes below the ceiling that are not reserved.
    pub fn remaining(&self) -> u64 {
        self.ceiling - self.entries.iter().map(|e| e.1).sum::<u64>()
    }

    /// The `--mem-util` with which `extra` bytes beyond the present reservations would fit.
    pub fn utilization_for(&self, extra: u64) -> f64 {
        let used = self.ceiling - self.remaining();
        (used + extra) as f64 / self.total as f64
    }

    /// Bytes of the device's memory.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that may be reserved.
    pub fn ceiling(&self) -> u64 {
        self.ceiling
    }

    pub fn entries(&self) -> &[(MemoryUse, u64)] {
        &self.entries
    }

    pub fn report(&self) -> MemoryReport {
        MemoryReport { total: self.total, ceiling: self.ceiling, entries: self.entries.clone() }
    }

    fn describe_entries(&self) -> String {
        if self.entries.is_empty() {
            return "nothing is reserved yet".into();
        }
        let parts: Vec<_> =
            self.entries.iter().map(|(used_for, bytes)| format!("{used_for} {}", human_bytes(*bytes))).collect();
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
    fn a_reservation_that_does_not_fit_changes_nothing_and_names_the_numbers() {
        let mut budget = MemoryBudget::new(1 << 30, 0.5);
        budget.reserve(MemoryUse::Weights, 500 << 20).unwrap();
        let before = budget.report();
        let error = budget.reserve(MemoryUse::KvCache, 13 << 20).unwrap_err().to_string();
        for part in ["kv_cache needs 13.0 MiB", "12.0 MiB of the ceiling of 512.0 MiB", "weights 500.0 MiB"] {
            assert!(error.contains(part), "{part:?} is missing in {error:?}");
        }
        assert_eq!(budget.report(), before);
        budget.reserve(MemoryUse::KvCache, 12 << 20).unwrap();
        assert_eq!(budget.remaining(), 0);
    }

    #[test]
    fn an_entry_changes_in_its_place_or_not_at_all() {
        let mut budget = MemoryBudget::new(1000, 1.0);
        budget.reserve(MemoryUse::Weights, 500).unwrap();
        budget.reserve(MemoryUse::KvCache, 300).unwrap();
        let before = budget.report();
        assert!(budget.set(MemoryUse::Weights, 701).is_err());
        assert_eq!(budget.report(), before);
        budget.set(MemoryUse::Weights, 700).unwrap();
        assert_eq!(budget.report().entries, [(MemoryUse::Weights, 700), (MemoryUse::KvCache, 300)]);
        budget.lower(MemoryUse::Weights, 650);
        assert_eq!(budget.report().entries, [(MemoryUse::Weights, 650), (MemoryUse::KvCache, 300)]);
        budget.free(MemoryUse::Weights);
        budget.free(MemoryUse::Workspace);
        budget.set(MemoryUse::UpdateStaging, 700).unwrap();
        assert_eq!(budget.report().entries, [(MemoryUse::KvCache, 300), (MemoryUse::UpdateStaging, 700)]);
        assert_eq!((budget.reserved(MemoryUse::UpdateStaging), budget.reserved(MemoryUse::Weights)), (700, 0));
    }

    #[test]
    fn bytes_are_readable() {
        for (bytes, text) in [(5, "5 B"), (1024, "1.00 KiB"), (300 << 20, "300.0 MiB"), (3 << 29, "1.50 GiB")] {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
