//! The memory ledger: what the process may take, and what is reserved of it.
//!
//! Where the device computes in the host's memory there is one ledger, below `--mem-util`. A device with memory of its
//! own has a ledger below `--mem-util`, and the host has another below `--host-memory`.

use super::ledger::{Home, Ledger, MemoryReport, MemoryUse};
use crate::error::Result;

/// Divides the memory that the process may take among named uses. Every large allocation is reserved here before it is
/// made.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    device: Ledger,
    /// `None` where the device's memory is the host's: all uses are in its ledger then.
    host: Option<Ledger>,
}

impl MemoryBudget {
    /// A budget of `total * utilization` bytes of the one memory there is, with `utilization` in `(0, 1]`.
    pub fn new(total: u64, utilization: f64) -> Self {
        Self { device: Ledger::new("the ceiling", total, share(total, utilization)), host: None }
    }

    /// A budget of `total * utilization` bytes of a device with memory of its own, and of `host_ceiling` bytes of the
    /// host's.
    pub fn beside_host(total: u64, utilization: f64, host_total: u64, host_ceiling: u64) -> Self {
        Self {
            device: Ledger::new("the device's ceiling", total, share(total, utilization)),
            host: Some(Ledger::new("the host's ceiling", host_total, host_ceiling)),
        }
    }

    /// Reserves `bytes` for `used_for`.
    ///
    /// # Errors
    /// `ResourceExhausted` with the whole ledger if they do not fit; nothing is reserved then.
    pub fn reserve(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        self.home_mut(used_for).reserve(used_for, bytes)
    }

    /// Changes the reservation for `used_for`, which may be new, to `bytes`; 0 takes it out of the ledger. To reduce
    /// one, [`MemoryBudget::lower`] cannot fail.
    ///
    /// # Errors
    /// As for [`MemoryBudget::reserve`]; nothing changes then.
    pub fn set(&mut self, used_for: MemoryUse, bytes: u64) -> Result<()> {
        self.home_mut(used_for).set(used_for, bytes)
    }

    /// As [`MemoryBudget::set`], for what takes memory of the device and of the host: in both ledgers, or their sum
    /// where there is one.
    ///
    /// # Errors
    /// As for [`MemoryBudget::reserve`]; nothing changes then.
    pub fn set_parts(&mut self, used_for: MemoryUse, of_device: u64, of_host: u64) -> Result<()> {
        let Some(host) = &mut self.host else { return self.device.set(used_for, of_device.saturating_add(of_host)) };
        let mut device = self.device.clone();
        device.set(used_for, of_device)?;
        host.set(used_for, of_host)?;
        self.device = device;
        Ok(())
    }

    /// Reduces the reservation for `used_for` to `bytes`, which cannot fail; 0 takes it out of the ledger.
    ///
    /// # Panics
    /// If fewer bytes are reserved.
    pub fn lower(&mut self, used_for: MemoryUse, bytes: u64) {
        self.home_mut(used_for).lower(used_for, bytes);
    }

    /// Gives back everything that is reserved for `used_for`.
    pub fn free(&mut self, used_for: MemoryUse) {
        self.device.lower(used_for, 0);
        self.host.iter_mut().for_each(|host| host.lower(used_for, 0));
    }

    /// Bytes reserved for `used_for`, of both memories together.
    pub fn reserved(&self, used_for: MemoryUse) -> u64 {
        self.device.reserved(used_for) + self.host.as_ref().map_or(0, |host| host.reserved(used_for))
    }

    /// Bytes of the device's memory below the ceiling that are not reserved.
    pub fn remaining(&self) -> u64 {
        self.device.remaining()
    }

    /// Bytes that are not reserved of the memory that `used_for` takes.
    pub fn remaining_for(&self, used_for: MemoryUse) -> u64 {
        self.home(used_for).remaining()
    }

    /// The flag that raises the ceiling of the memory that `used_for` takes.
    pub fn flag_for(&self, used_for: MemoryUse) -> &'static str {
        if self.host.is_some() && used_for.home() == Home::Host { "--host-memory" } else { "--mem-util" }
    }

    /// The `--mem-util` with which `extra` bytes of the device beyond the present reservations would fit.
    pub fn utilization_for(&self, extra: u64) -> f64 {
        let MemoryReport { total, ceiling, .. } = self.device.report();
        let used = ceiling - self.device.remaining();
        (used + extra) as f64 / *total as f64
    }

    /// The ledger of the device, or the only one.
    pub fn report(&self) -> &MemoryReport {
        self.device.report()
    }

    /// The host's ledger, where the device has memory of its own.
    pub fn host_report(&self) -> Option<&MemoryReport> {
        self.host.as_ref().map(Ledger::report)
    }

    fn home(&self, used_for: MemoryUse) -> &Ledger {
        match &self.host {
            Some(host) if used_for.home() == Home::Host => host,
            _ => &self.device,
        }
    }

    fn home_mut(&mut self, used_for: MemoryUse) -> &mut Ledger {
        match &mut self.host {
            Some(host) if used_for.home() == Home::Host => host,
            _ => &mut self.device,
        }
    }
}

fn share(total: u64, utilization: f64) -> u64 {
    assert!(utilization > 0.0 && utilization <= 1.0, "--mem-util {utilization} was not checked");
    (total as f64 * utilization) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rand::seq::IndexedRandom;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::error::Error;

    #[test]
    fn a_reservation_that_does_not_fit_changes_nothing_and_names_the_numbers() {
        let mut budget = MemoryBudget::new(1 << 30, 0.5);
        budget.reserve(MemoryUse::Weights, 500 << 20).unwrap();
        let before = budget.report().clone();
        let error = budget.reserve(MemoryUse::KvCache, 13 << 20).unwrap_err().to_string();
        for part in ["kv_cache needs 13.0 MiB", "12.0 MiB of the ceiling of 512.0 MiB", "weights 500.0 MiB"] {
            assert!(error.contains(part), "{part:?} is missing in {error:?}");
        }
        assert_eq!(budget.report(), &before);
        budget.reserve(MemoryUse::KvCache, 12 << 20).unwrap();
        assert_eq!(budget.remaining(), 0);
    }

    #[test]
    fn an_entry_changes_in_its_place_or_not_at_all() {
        let mut budget = MemoryBudget::new(1000, 1.0);
        budget.reserve(MemoryUse::Weights, 500).unwrap();
        budget.reserve(MemoryUse::KvCache, 300).unwrap();
        let before = budget.report().clone();
        assert!(budget.set(MemoryUse::Weights, 701).is_err());
        assert_eq!(budget.report(), &before);
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
    fn each_memory_has_its_own_ceiling_and_messages_name_it() {
        let mut budget = MemoryBudget::beside_host(1000, 0.5, 400, 100);
        budget.reserve(MemoryUse::Weights, 500).unwrap();
        budget.reserve(MemoryUse::Process, 100).unwrap();
        for (used_for, ceiling, flag) in [
            (
                MemoryUse::KvCache,
                "0 B of the device's ceiling of 500 B is left (reserved: weights 500 B)",
                "--mem-util",
            ),
            (
                MemoryUse::Requests,
                "0 B of the host's ceiling of 100 B is left (reserved: process 100 B)",
                "--host-memory",
            ),
        ] {
            let error = budget.reserve(used_for, 1).unwrap_err().to_string();
            assert!(error.contains(ceiling), "{error}");
            assert_eq!(budget.flag_for(used_for), flag);
        }
        assert_eq!(MemoryBudget::new(10, 1.0).flag_for(MemoryUse::Requests), "--mem-util");
    }

    #[test]
    fn a_part_that_does_not_fit_leaves_both_ledgers_as_they_were() {
        let mut budget = MemoryBudget::beside_host(100, 1.0, 100, 50);
        budget.set_parts(MemoryUse::UpdateStaging, 60, 20).unwrap();
        assert_eq!(budget.reserved(MemoryUse::UpdateStaging), 80);
        for (of_device, of_host) in [(101, 10), (10, 51), (u64::MAX, u64::MAX)] {
            assert!(budget.set_parts(MemoryUse::UpdateStaging, of_device, of_host).is_err());
            assert_eq!((budget.remaining(), budget.remaining_for(MemoryUse::Offloaded)), (40, 30));
        }
        let mut one = MemoryBudget::new(100, 1.0);
        assert!(one.set_parts(MemoryUse::UpdateStaging, u64::MAX, u64::MAX).is_err());
        one.set_parts(MemoryUse::UpdateStaging, 60, 20).unwrap();
        assert_eq!((one.remaining(), one.host_report()), (20, None));
    }

    /// Reservations by memory and use, as a plain table; with one memory only the first is used.
    struct Model {
        ceilings: [u64; 2],
        has_host: bool,
        entries: HashMap<(usize, &'static str), u64>,
    }

    impl Model {
        /// Uses that take the host's memory, as docs/memory.md lists them.
        const OF_HOST: [&'static str; 8] = [
            "process",
            "requests",
            "images",
            "routing",
            "merged_adapter",
            "update_staging",
            "copy_buffers",
            "offloaded",
        ];

        fn home(&self, used_for: MemoryUse) -> usize {
            usize::from(self.has_host && Self::OF_HOST.contains(&used_for.name()))
        }

        fn left(&self, memory: usize) -> u64 {
            self.ceilings[memory] - self.entries.iter().filter(|e| e.0.0 == memory).map(|e| e.1).sum::<u64>()
        }

        fn at(&self, memory: usize, used_for: MemoryUse) -> u64 {
            self.entries.get(&(memory, used_for.name())).copied().unwrap_or(0)
        }

        /// Sets an entry of each memory, if all fit.
        fn set(&mut self, used_for: MemoryUse, parts: &[(usize, u64)]) -> bool {
            let fits = parts.iter().all(|&(memory, bytes)| bytes <= self.left(memory) + self.at(memory, used_for));
            if fits {
                parts.iter().for_each(|&(memory, bytes)| {
                    self.entries.insert((memory, used_for.name()), bytes);
                });
            }
            fits
        }
    }

    #[test]
    fn random_reservations_are_those_of_a_plain_table() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let has_host = seed % 2 == 0;
            let (total, ceiling) = (rng.random_range(1..1000), rng.random_range(1..1000));
            let mut budget = match has_host {
                true => MemoryBudget::beside_host(total, 1.0, 1000, ceiling),
                false => MemoryBudget::new(total, 1.0),
            };
            let mut model = Model { ceilings: [total, ceiling], has_host, entries: HashMap::new() };
            for _ in 0..300 {
                let used_for = *MemoryUse::ALL.choose(&mut rng).unwrap();
                let (home, bytes, more) = (
                    model.home(used_for),
                    rng.random_range(0..300),
                    rng.random_range(0..u64::from(has_host) * 300 + 1),
                );
                let before = budget.clone();
                let (done, expected) = match rng.random_range(0..4) {
                    0 => (budget.set(used_for, bytes), model.set(used_for, &[(home, bytes)])),
                    1 if has_host => {
                        (budget.set_parts(used_for, bytes, more), model.set(used_for, &[(0, bytes), (1, more)]))
                    }
                    1 => (budget.set_parts(used_for, bytes, more), model.set(used_for, &[(0, bytes + more)])),
                    2 => {
                        let less = bytes.min(model.at(home, used_for));
                        budget.lower(used_for, less);
                        (Ok(()), model.set(used_for, &[(home, less)]))
                    }
                    _ => {
                        budget.free(used_for);
                        (Ok(()), model.set(used_for, &[(0, 0), (1, 0)]))
                    }
                };
                assert_eq!(done.is_ok(), expected, "{used_for} {bytes} {more}");
                if let Err(error) = done {
                    assert!(matches!(error, Error::ResourceExhausted(_)), "{error}");
                    assert_eq!(budget.report(), before.report());
                    assert_eq!(budget.host_report(), before.host_report());
                }
                assert_eq!(budget.remaining(), model.left(0));
                for used_for in MemoryUse::ALL {
                    assert_eq!(budget.reserved(used_for), model.at(0, used_for) + model.at(1, used_for), "{used_for}");
                    assert_eq!(budget.remaining_for(used_for), model.left(model.home(used_for)));
                }
            }
        }
    }
}
