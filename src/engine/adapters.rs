//! Adapters that stay resident beside the policy: named, leased by requests, replaced by compare-and-swap.

mod loads;

use std::sync::Arc;

use super::client::CancelFlag;
use super::command::{AdapterStatus, AdapterTarget, Reply};
use super::core::{Attempt, EngineCore, Failure};
use crate::error::{Error, Result};
use crate::executor::{Executor, WeightOrder};
use crate::types::Tenant;
use crate::weights::Adapter;
use loads::{AdapterLoad, LoadCounts};

pub(super) use loads::LoadOutcome;

/// The resident adapters of all ranks. Each accepted request that uses an adapter holds a lease on it.
pub(super) struct Adapters {
    max_adapters: usize,
    /// Most of one tenant.
    max_of_tenant: Option<usize>,
    max_rank: usize,
    next_generation: u64,
    /// Number of requests that have named an adapter.
    uses: u64,
    resident: Vec<Resident>,
    /// The adapter that is being loaded because requests name it.
    load: Option<AdapterLoad>,
    counts: LoadCounts,
}

/// Where an adapter comes from.
struct Origin {
    tenant: Tenant,
    /// The directory that it was read from; `None` if a client sent it.
    directory: Option<String>,
    /// Whether it was loaded because a request named it.
    on_demand: bool,
}

struct Resident {
    /// Its status, whose leases are counted when it is asked for.
    status: AdapterStatus,
    /// Callers of `RemoveAdapter`, which wait for its last lease to end.
    removals: Vec<(CancelFlag, Reply<Result<u64>>)>,
}

impl Adapters {
    pub fn new(max_adapters: usize, max_of_tenant: Option<usize>, max_rank: usize) -> Self {
        Self {
            max_adapters,
            max_of_tenant,
            max_rank,
            next_generation: 1,
            uses: 0,
            resident: Vec::new(),
            load: None,
            counts: LoadCounts::default(),
        }
    }

    pub fn num_resident(&self) -> usize {
        self.resident.len()
    }

    pub fn list<X: Executor>(&self, core: &EngineCore<X>) -> Vec<AdapterStatus> {
        let status = |Resident { status, .. }: &Resident| AdapterStatus {
            leases: core.leases(status.generation),
            ..status.clone()
        };
        self.resident.iter().map(status).collect()
    }

    /// Generation of the adapter that has this name now, which `field` of a message has named.
    ///
    /// # Errors
    /// `NotFound` with the names of the resident adapters.
    pub fn find<X: Executor>(&self, core: &EngineCore<X>, field: &str, name: &str) -> Result<u64> {
        let found = self.named(name).map(|resident| resident.status.generation);
        found.ok_or_else(|| Error::NotFound(self.not_resident(core, field, name)))
    }

    /// Whether an adapter has this name now.
    pub fn has(&self, name: &str) -> bool {
        self.named(name).is_some()
    }

    fn not_resident<X: Executor>(&self, core: &EngineCore<X>, field: &str, name: &str) -> String {
        format!("{field}: {name:?} is not resident ({})", self.describe(core))
    }

    /// Generation of the adapter that `field` of a request names, and that it is about to use.
    ///
    /// # Errors
    /// `NotFound` with the names of the resident adapters.
    pub fn find_for_use<X: Executor>(&mut self, core: &EngineCore<X>, field: &str, name: &str) -> Result<u64> {
        let generation = self.find(core, field, name)?;
        self.uses += 1;
        let used = self.resident.iter_mut().find(|resident| resident.status.generation == generation);
        used.expect("it was found").status.last_use = self.uses;
        Ok(generation)
    }

    /// Checks that an adapter of a tenant may get the name of `target` and finds a slot. Returns the name of the
    /// adapter that has to leave its slot first, if one has to.
    ///
    /// # Errors
    /// `VersionConflict` if the name has another generation, `ResourceExhausted` if there is no slot.
    pub fn check_target<X: Executor>(
        &self,
        core: &EngineCore<X>,
        target: &AdapterTarget,
        tenant: &Tenant,
    ) -> Result<Option<String>> {
        let old = self.named(&target.name).map_or(0, |old| old.status.generation);
        check_generation(&target.name, old, target.expected_generation)?;
        let may_leave = |status: &AdapterStatus| target.evicts || status.on_demand;
        self.find_slot(core, &target.name, tenant, may_leave).ok_or_else(|| {
            if let Some(most) = self.quota_of(tenant, &target.name) {
                return Error::ResourceExhausted(format!(
                    "adapter: {:?} would be more than --tenant-max-adapters {most} of the tenant {:?} ({}); remove one \
                     of its adapters first",
                    target.name,
                    tenant.as_str(),
                    self.describe(core),
                ));
            }
            Error::ResourceExhausted(format!(
                "adapter: {:?} finds no free slot of --max-adapters {} ({}); remove one first",
                target.name,
                self.max_adapters,
                self.describe(core),
            ))
        })
    }

    /// Finds a slot for an adapter of this name. Returns `Some(None)` for a free slot, `Some(Some(name))` for a slot
    /// whose adapter must be evicted first, and `None` if every slot is in use. Evicts the least recently used adapter
    /// without leases that `may_leave` accepts. A tenant at its quota evicts only its own adapters.
    fn find_slot<X: Executor>(
        &self,
        core: &EngineCore<X>,
        name: &str,
        tenant: &Tenant,
        may_leave: impl Fn(&AdapterStatus) -> bool,
    ) -> Option<Option<String>> {
        // The adapter that has the name frees its slot if no request uses it.
        let frees = |old: &Resident| core.leases(old.status.generation) == 0;
        let occupied = self.resident.len() - usize::from(self.named(name).is_some_and(frees));
        let is_full = self.quota_of(tenant, name).is_some();
        if occupied < self.max_adapters && !is_full {
            return Some(None);
        }
        let may_leave = |status: &AdapterStatus| may_leave(status) && (!is_full || status.tenant == *tenant);
        let idle = self.resident.iter().map(|resident| &resident.status);
        let idle = idle.filter(|status| may_leave(status) && !status.retired && core.leases(status.generation) == 0);
        idle.min_by_key(|status| status.last_use).map(|status| Some(status.name.clone()))
    }

    /// The most adapters that a tenant may have, if it has them already, without that of this name.
    fn quota_of(&self, tenant: &Tenant, name: &str) -> Option<usize> {
        let is_other = |status: &AdapterStatus| status.tenant == *tenant && !status.retired && status.name != name;
        let others = self.resident.iter().filter(|resident| is_other(&resident.status)).count();
        self.max_of_tenant.filter(|most| others >= *most)
    }

    /// Checks that an adapter can be resident on this server.
    fn check_adapter(&self, adapter: &Adapter) -> Result<()> {
        adapter.check_unmerged()?;
        self.check_rank(adapter.rank())
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank > self.max_rank {
            let most = self.max_rank;
            return Err(Error::invalid("adapter", format!("its rank {rank} is above --max-lora-rank {most}")));
        }
        Ok(())
    }

    /// Makes an adapter resident and returns its generation. An adapter that had its name, or has to leave its slot,
    /// retires, even if the device then has no memory for the new one.
    pub fn add<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        target: &AdapterTarget,
        tenant: &Tenant,
        adapter: &Arc<Adapter>,
        directory: Option<String>,
    ) -> Attempt<u64> {
        self.check_adapter(adapter).map_err(Failure::Refused)?;
        let evicted = self.check_target(core, target, tenant).map_err(Failure::Refused)?;
        let origin = Origin { tenant: tenant.clone(), directory, on_demand: false };
        self.put(core, &target.name, adapter, evicted, origin)
    }

    /// Makes a checked adapter resident in a slot that was found, from which `evicted` retires.
    fn put<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        name: &str,
        adapter: &Arc<Adapter>,
        evicted: Option<String>,
        origin: Origin,
    ) -> Attempt<u64> {
        let order = WeightOrder::AddAdapter { generation: self.next_generation, adapter: adapter.clone() };
        core.check_order(&order)?;
        if let Some(evicted) = evicted {
            tracing::info!(adapter = evicted, "removing the least recently used adapter for {name:?}");
            self.counts.evicted += 1;
            self.retire(&evicted);
        }
        let generation = self.insert(name, adapter, origin);
        self.drop_unused(core).map_err(Failure::Fatal)?;
        match core.executor.write(order) {
            Err(error @ Error::ResourceExhausted(_)) => {
                // Other ranks may have loaded the adapter.
                self.retire(name);
                self.drop_unused(core).map_err(Failure::Fatal)?;
                Err(Failure::Refused(error))
            }
            added => added.map(|()| generation).map_err(Failure::Fatal),
        }
    }

    /// Retires an adapter. The caller gets the reply when the adapter has been dropped.
    pub fn remove<X: Executor>(
        &mut self,
        core: &EngineCore<X>,
        name: &str,
        expected_generation: Option<u64>,
        cancel: CancelFlag,
        reply: Reply<Result<u64>>,
    ) {
        let check = || {
            core.check_serving()?;
            check_generation(name, self.find(core, "adapter", name)?, expected_generation)
        };
        match check() {
            Err(error) => reply(Err(error)),
            Ok(()) => self.retire(name).expect("it was found").removals.push((cancel, reply)),
        }
    }

    /// Frees the memory of retired adapters that no request uses, and answers the callers that wait for it.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn drop_unused<X: Executor>(&mut self, core: &mut EngineCore<X>) -> Result<()> {
        let unused = |adapter: &mut Resident| adapter.status.retired && core.leases(adapter.status.generation) == 0;
        let unused: Vec<_> = self.resident.extract_if(.., unused).collect();
        for Resident { status: AdapterStatus { generation, .. }, removals } in unused {
            let result = core.executor.write(WeightOrder::RemoveAdapter { generation });
            for (_, reply) in removals {
                reply(result.clone().map(|()| generation));
            }
            result?;
        }
        Ok(())
    }

    /// Frees the memory of all adapters. No request may be using one.
    pub fn drop_all<X: Executor>(&mut self, core: &mut EngineCore<X>) -> Attempt<()> {
        self.resident.iter_mut().for_each(|adapter| adapter.status.retired = true);
        self.drop_unused(core).map_err(Failure::Fatal)
    }

    /// Adds an adapter and returns its generation. An adapter that had its name retires.
    fn insert(&mut self, name: &str, adapter: &Adapter, Origin { tenant, directory, on_demand }: Origin) -> u64 {
        self.retire(name);
        let generation = self.next_generation;
        self.next_generation += 1;
        let status = AdapterStatus {
            name: name.to_string(),
            generation,
            rank: adapter.rank(),
            bytes: adapter.bytes(),
            tenant,
            directory,
            on_demand,
            leases: 0,
            last_use: self.uses,
            retired: false,
        };
        self.resident.push(Resident { status, removals: Vec::new() });
        generation
    }

    /// Retires the adapter of this name.
    fn retire(&mut self, name: &str) -> Option<&mut Resident> {
        let found = self.resident.iter_mut().find(|resident| resident.is_named(name))?;
        found.status.retired = true;
        Some(found)
    }

    /// Drops callers of `RemoveAdapter` that are gone. Their adapters are still removed.
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

    /// Asserts that requests lease only resident adapters, that none is kept without need, and that names and slots
    /// suffice.
    pub fn check_integrity<X: Executor>(&self, core: &EngineCore<X>) {
        assert!(self.resident.len() <= self.max_adapters, "{} adapters are resident", self.resident.len());
        let mut leases = 0;
        for Resident { status: AdapterStatus { name, generation, retired, .. }, removals } in &self.resident {
            leases += core.leases(*generation);
            assert!(!retired || core.leases(*generation) > 0, "{name:?} is retired and unused");
            assert!(removals.is_empty() || *retired, "{name:?} is to be removed and not retired");
            let named = self.resident.iter().filter(|resident| resident.is_named(name)).count();
            assert!(named <= 1, "{named} adapters are named {name:?}");
        }
        let leasing = core.requests.iter().map(|request| request.adapters().len()).sum::<usize>();
        assert_eq!(leases, leasing, "leases of requests on resident adapters");
    }

    fn named(&self, name: &str) -> Option<&Resident> {
        self.resident.iter().find(|resident| resident.is_named(name))
    }

    fn describe<X: Executor>(&self, core: &EngineCore<X>) -> String {
        if self.resident.is_empty() {
            return "no adapter is resident".into();
        }
        let describe = |Resident { status, .. }: &Resident| {
            let (leases, retired) = (core.leases(status.generation), if status.retired { ", retired" } else { "" });
            format!("{:?} with {leases} running requests{retired}", status.name)
        };
        let names: Vec<_> = self.resident.iter().map(describe).collect();
        format!("resident: {}", names.join(", "))
    }
}

impl Resident {
    /// Whether requests can use the adapter by this name.
    fn is_named(&self, name: &str) -> bool {
        self.status.name == name && !self.status.retired
    }
}

fn check_generation(name: &str, have: u64, expected: Option<u64>) -> Result<()> {
    match expected {
        Some(expected) if expected != have => Err(Error::VersionConflict(format!(
            "expected_generation: {expected} is not that of adapter {name:?}; that is {have} (0: the name is free)"
        ))),
        _ => Ok(()),
    }
}
