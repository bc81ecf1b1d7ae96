//! Assertions on the whole state of the engine between two turns, for simulations and tests.

use super::Engine;
use crate::executor::Executor;
use crate::memory::MemoryUse;

impl<X: Executor> Engine<X> {
    /// Asserts every invariant that must hold between two turns: those of the scheduler and its cache, leases, drains,
    /// the open update and the ledger. It walks all requests and blocks.
    pub fn check_integrity(&self) {
        self.core.scheduler.check_integrity();
        self.core.requests.check_integrity();
        self.adapters.check_integrity(&self.core);
        assert!(self.untold.is_none() || self.core.can_step(), "events are kept back, and no step follows");
        self.check_waiting();
        self.check_update();
        self.check_ledger();
    }

    /// Nothing waits for what has happened already, or for what cannot happen.
    fn check_waiting(&self) {
        assert!(self.drains.is_empty() || self.core.must_drain(), "a drain waits for no request");
        let may_start = |command: &_| !self.wants_newer(command);
        let startable = self.core.requests.held_keys(may_start);
        assert!(self.is_holding() || startable.is_empty(), "held requests may start: {startable:?}");
        if self.core.deadline.is_some() {
            assert_eq!(self.core.requests.num_held(), 0, "held requests during the shutdown");
            assert!(
                self.drains.is_empty() && self.updates.opened().is_none(),
                "drains or an update during the shutdown"
            );
        }
    }

    fn check_update(&self) {
        let commits = self.drains.num_commits();
        let committed = self.updates.opened().is_some_and(|open| open.facts(self.core.clock.now()).committed);
        assert_eq!(commits, usize::from(committed), "commits among the drains");
        let staged = self.core.budget.reserved(MemoryUse::UpdateStaging);
        assert!(staged == 0 || self.updates.opened().is_some(), "{staged} bytes are reserved for no update");
    }

    fn check_ledger(&self) {
        let reserved = |used_for| self.core.budget.reserved(used_for);
        let spare = reserved(MemoryUse::SpareWeights);
        assert_eq!(spare > 0, self.core.spare.is_some(), "{spare} bytes are reserved for spare weights");
        let merged = self.core.policy.merged().bytes();
        assert_eq!(reserved(MemoryUse::MergedAdapter), merged, "the merged adapter's entry");
        let awake = self.awake;
        if self.core.state.weights_awake() {
            assert_eq!(reserved(MemoryUse::Weights), awake.weights(), "the entry of weights that are awake");
            assert_eq!(reserved(MemoryUse::Offloaded), 0, "bytes are offloaded of weights that are awake");
        }
        let cache = [MemoryUse::Workspace, MemoryUse::KvCache].map(reserved);
        let expected = if self.core.state.kv_awake() { awake.cache() } else { [0; 2] };
        assert_eq!(cache, expected, "the entries of workspace and KV cache");
    }
}
