//! Adapters that stay resident beside the policy: named, leased by requests, replaced by compare-and-swap.

use std::sync::Arc;

use super::command::{AdapterStatus, AdapterTarget, CancelFlag, Reply};
use super::{Attempt, Engine, Failure};
use crate::error::{Error, Result};
use crate::executor::{Executor, WeightOrder};
use crate::weights::Adapter;

/// The resident adapters of all ranks, with their leases.
pub(super) struct Adapters {
    max_adapters: usize,
    max_rank: usize,
    next_generation: u64,
    resident: Vec<Resident>,
}

/// A resident adapter.
struct Resident {
    status: AdapterStatus,
    /// Callers of `RemoveAdapter` that wait for its last lease to end.
    removals: Vec<(CancelFlag, Reply<Result<u64>>)>,
}

impl Adapters {
    pub fn new(max_adapters: usize, max_rank: usize) -> Self {
        Self { max_adapters, max_rank, next_generation: 1, resident: Vec::new() }
    }

    pub fn num_resident(&self) -> usize {
        self.resident.len()
    }

    pub fn list(&self) -> Vec<AdapterStatus> {
        self.resident.iter().map(|resident| resident.status.clone()).collect()
    }

    /// Generation of the adapter that has this name now.
    ///
    /// # Errors
    /// `NotFound` with the names of the resident adapters.
    pub fn find(&self, name: &str) -> Result<u64> {
        let found = self.named(name).map(|resident| resident.status.generation);
        found.ok_or_else(|| Error::NotFound(format!("adapter: {name:?} is not resident ({})", self.describe())))
    }

    /// Checks that an adapter may get the name of `target`.
    ///
    /// # Errors
    /// `VersionConflict` if the name has another generation, `ResourceExhausted` if there is no free slot.
    pub fn check_target(&self, target: &AdapterTarget) -> Result<()> {
        let old = self.named(&target.name).map(|resident| &resident.status);
        check_generation(&target.name, old.map_or(0, |old| old.generation), target.expected_generation)?;
        // The adapter that has the name makes room if nobody uses it.
        let occupied = self.resident.len() - usize::from(old.is_some_and(|old| old.leases == 0));
        if occupied >= self.max_adapters {
            return Err(Error::ResourceExhausted(format!(
                "adapter: {:?} finds no free slot of --max-adapters {} ({}); remove one first",
                target.name,
                self.max_adapters,
                self.describe(),
            )));
        }
        Ok(())
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank > self.max_rank {
            let most = self.max_rank;
            return Err(Error::invalid("adapter", format!("its rank {rank} is above --max-lora-rank {most}")));
        }
        Ok(())
    }

    /// Adds an adapter and returns its generation. An adapter that had its name retires.
    fn insert(&mut self, name: &str, adapter: &Adapter) -> u64 {
        self.retire(name);
        let generation = self.next_generation;
        self.next_generation += 1;
        let (name, rank, bytes) = (name.to_string(), adapter.rank(), adapter.bytes());
        let status = AdapterStatus { name, generation, rank, bytes, leases: 0, retired: false };
        self.resident.push(Resident { status, removals: Vec::new() });
        generation
    }

    /// Retires the adapter of this name: requests cannot name it any more, and it is dropped with its last lease.
    fn retire(&mut self, name: &str) -> Option<&mut Resident> {
        let found = self.resident.iter_mut().find(|resident| is_named(resident, name))?;
        found.status.retired = true;
        Some(found)
    }

    /// Counts one more request that uses the adapter of a generation.
    pub fn lease(&mut self, generation: u64) {
        self.of(generation).status.leases += 1;
    }

    /// Counts one request less that uses the adapter of a generation.
    pub fn give_back(&mut self, generation: u64) {
        self.of(generation).status.leases -= 1;
    }

    /// Removes the adapters that are retired and have no lease, and returns them.
    fn take_unused(&mut self) -> Vec<Resident> {
        self.resident.extract_if(.., |resident| resident.status.retired && resident.status.leases == 0).collect()
    }

    /// Forgets callers that do not wait any more for a removal. The removals take place nevertheless.
    pub fn drop_cancelled(&mut self) {
        for resident in &mut self.resident {
            resident.removals.retain(|(cancel, _)| !cancel.is_cancelled());
        }
    }

    /// Answers all callers that wait for a removal with an error.
    pub fn refuse_removals(&mut self, error: &Error) {
        for (_, reply) in self.resident.iter_mut().flat_map(|resident| resident.removals.drain(..)) {
            reply(Err(error.clone()));
        }
    }

    /// Asserts that each adapter has as many leases as `leases_of` says for its generation, that none is kept without
    /// need, and that names and slots suffice.
    pub fn check_integrity(&self, leases_of: impl Fn(u64) -> usize) {
        assert!(self.resident.len() <= self.max_adapters, "{} adapters are resident", self.resident.len());
        for Resident { status, removals } in &self.resident {
            assert_eq!(status.leases, leases_of(status.generation), "leases of {status:?}");
            assert!(!status.retired || status.leases > 0, "{status:?} is retired and unused");
            assert!(removals.is_empty() || status.retired, "{status:?} is to be removed and not retired");
            let named = self.resident.iter().filter(|resident| is_named(resident, &status.name)).count();
            assert!(named <= 1, "{named} adapters are named {:?}", status.name);
        }
    }

    fn named(&self, name: &str) -> Option<&Resident> {
        self.resident.iter().find(|resident| is_named(resident, name))
    }

    fn of(&mut self, generation: u64) -> &mut Resident {
        let found = self.resident.iter_mut().find(|resident| resident.status.generation == generation);
        found.expect("a leased adapter is resident")
    }

    fn describe(&self) -> String {
        if self.resident.is_empty() {
            return "no adapter is resident".into();
        }
        let describe = |Resident { status, .. }: &Resident| {
            let retired = if status.retired { ", retired" } else { "" };
            format!("{:?} with {} running requests{retired}", status.name, status.leases)
        };
        let names: Vec<_> = self.resident.iter().map(describe).collect();
        format!("resident: {}", names.join(", "))
    }
}

fn is_named(resident: &Resident, name: &str) -> bool {
    resident.status.name == name && !resident.status.retired
}

fn check_generation(name: &str, have: u64, expected: Option<u64>) -> Result<()> {
    match expected {
        Some(expected) if expected != have => Err(Error::VersionConflict(format!(
            "expected_generation: {expected} is not that of adapter {name:?}; that is {have} (0: the name is free)"
        ))),
        _ => Ok(()),
    }
}

impl<X: Executor> Engine<X> {
    /// Makes an adapter resident and returns its generation. An adapter that had its name is dropped with its last
    /// lease, to make room: also where the device then turns out to have no memory for the new one.
    pub(super) fn add_adapter(&mut self, target: &AdapterTarget, adapter: Arc<Adapter>) -> Attempt<u64> {
        adapter.check_unmerged().map_err(Failure::Refused)?;
        self.adapters.check_rank(adapter.rank()).map_err(Failure::Refused)?;
        self.adapters.check_target(target).map_err(Failure::Refused)?;
        let generation = self.adapters.insert(&target.name, &adapter);
        self.drop_unused_adapters().map_err(Failure::Fatal)?;
        match self.executor.write(WeightOrder::AddAdapter { generation, adapter }) {
            Err(error @ Error::ResourceExhausted(_)) => {
                // Other ranks may have had the memory.
                self.adapters.of(generation).status.retired = true;
                self.drop_unused_adapters().map_err(Failure::Fatal)?;
                Err(Failure::Refused(error))
            }
            added => added.map(|()| generation).map_err(Failure::Fatal),
        }
    }

    /// Retires an adapter. The caller is answered when it has been dropped.
    pub(super) fn remove_adapter(
        &mut self,
        name: &str,
        expected_generation: Option<u64>,
        cancel: CancelFlag,
        reply: Reply<Result<u64>>,
    ) {
        let check = || {
            self.check_serving()?;
            let generation = self.adapters.find(name)?;
            check_generation(name, generation, expected_generation)
        };
        match check() {
            Err(error) => reply(Err(error)),
            Ok(()) => self.adapters.retire(name).expect("it was found").removals.push((cancel, reply)),
        }
    }

    /// Frees the memory of retired adapters that nobody uses any more, and answers the callers that wait for that.
    ///
    /// # Errors
    /// If the executor fails.
    pub(super) fn drop_unused_adapters(&mut self) -> Result<()> {
        for Resident { status, removals } in self.adapters.take_unused() {
            let generation = status.generation;
            let result = self.executor.write(WeightOrder::RemoveAdapter { generation });
            for (_, reply) in removals {
                reply(result.clone().map(|()| generation));
            }
            result?;
        }
        Ok(())
    }

    /// Frees the memory of all adapters. None may have a lease.
    pub(super) fn drop_all_adapters(&mut self) -> Attempt<()> {
        for resident in &mut self.adapters.resident {
            resident.status.retired = true;
        }
        self.drop_unused_adapters().map_err(Failure::Fatal)
    }
}
