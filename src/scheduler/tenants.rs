//! The tenants, and the service that each has had: virtual token counters (Sheng et al., "Fairness in Serving Large
//! Language Models", OSDI '24).

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use super::tenant_stats::TenantTable;
use crate::types::Tenant;

/// Service of a prompt token that is computed. Tokens of the prefix cache, and those that are computed again after a
/// preemption or a change of the policy, are free.
pub(super) const PROMPT_TOKEN_SERVICE: u64 = 1;
/// Service of a token that is sampled.
pub(super) const OUTPUT_TOKEN_SERVICE: u64 = 2;
/// Number of tenants from which on those without requests are forgotten, if their counters say nothing any more.
const MOST_KEPT: usize = 64;

/// Name of a tenant inside the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TenantId(u32);

#[derive(Debug)]
struct TenantState {
    name: Tenant,
    /// Service that it has had, or was lifted to.
    counter: u64,
    /// Number of samples that have not ended; a scored prompt counts as one.
    live_samples: usize,
    /// Its row among the numbers of tenants.
    row: usize,
}

/// Tenants that have requests, and those whose counters are still of use.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    ids: HashMap<Tenant, TenantId>,
    states: BTreeMap<TenantId, TenantState>,
    next_id: u32,
    num_live: usize,
    /// The least counter of an active tenant, as of the last plan that had one. Since every tenant that becomes active
    /// is lifted to it, it never falls.
    floor: u64,
}

impl Tenants {
    /// The id of a tenant of this name, which gets `samples` more.
    pub fn enter(&mut self, name: &Tenant, samples: usize, table: &mut TenantTable) -> TenantId {
        let id = self.ids.get(name).copied().unwrap_or_else(|| self.insert(name.clone(), table.row_of(name)));
        let state = self.states.get_mut(&id).expect("a tenant with an id has a state");
        self.num_live += usize::from(state.live_samples == 0 && samples > 0);
        state.live_samples += samples;
        id
    }

    fn insert(&mut self, name: Tenant, row: usize) -> TenantId {
        if self.states.len() >= MOST_KEPT {
            // An idle tenant at or below the floor is lifted to it when it comes back, as a new one is.
            self.states.retain(|_, state| state.live_samples > 0 || state.counter > self.floor);
            self.ids.retain(|_, id| self.states.contains_key(id));
        }
        let id = TenantId(self.next_id);
        self.next_id += 1;
        self.ids.insert(name.clone(), id);
        self.states.insert(id, TenantState { name, counter: self.floor, live_samples: 0, row });
        id
    }

    /// Notes that samples of a tenant have ended.
    pub fn leave(&mut self, id: TenantId, samples: usize) {
        let state = self.states.get_mut(&id).expect("a tenant with samples has a state");
        state.live_samples -= samples;
        self.num_live -= usize::from(state.live_samples == 0 && samples > 0);
    }

    /// Gives a tenant that becomes active no credit for the time in which it asked for nothing.
    pub fn lift(&mut self, id: TenantId) {
        let state = self.states.get_mut(&id).expect("a tenant that becomes active has a state");
        state.counter = state.counter.max(self.floor);
    }

    /// Notes the least counter of the tenants that are active now.
    pub fn raise_floor(&mut self, least: u64) {
        debug_assert!(least >= self.floor, "the least counter fell from {} to {least}", self.floor);
        self.floor = least;
    }

    /// Counts service to a tenant.
    pub fn charge(&mut self, id: TenantId, service: u64) {
        self.states.get_mut(&id).expect("a tenant that is served has a state").counter += service;
    }

    pub fn counter(&self, id: TenantId) -> u64 {
        self.states[&id].counter
    }

    /// Number of tenants that are not forgotten.
    #[cfg(test)]
    pub fn num_known(&self) -> usize {
        self.states.len()
    }

    /// The row of a tenant among the numbers of tenants.
    pub fn row(&self, id: TenantId) -> usize {
        self.states[&id].row
    }

    /// The first tenant after `last` with samples that have not ended, its row, and the number of these samples.
    pub fn next_live(&self, last: Option<TenantId>) -> Option<(TenantId, usize, usize)> {
        let after = (last.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let (id, state) = self.states.range(after).find(|(_, state)| state.live_samples > 0)?;
        Some((*id, state.row, state.live_samples))
    }

    /// Tenants with samples that have not ended.
    pub fn live(&self) -> impl Iterator<Item = TenantId> {
        self.states.iter().filter(|(_, state)| state.live_samples > 0).map(|(id, _)| *id)
    }

    /// Whether more than one tenant has samples that have not ended.
    pub fn are_several(&self) -> bool {
        self.num_live > 1
    }

    /// Asserts that the counts of samples are those of `live`.
    pub fn check_integrity(&self, live: &HashMap<TenantId, usize>) {
        assert_eq!(self.live().count(), self.num_live, "live tenants");
        assert_eq!(live.len(), self.num_live, "live tenants");
        for (id, state) in &self.states {
            let expected = live.get(id).copied().unwrap_or(0);
            assert_eq!(state.live_samples, expected, "live samples of the tenant {:?}", state.name);
            assert_eq!(self.ids.get(&state.name), Some(id));
        }
    }
}
