//! Suspending requests whose readers lag behind, so that nothing more is computed for them now.

use super::Scheduler;
use crate::types::RequestKey;

impl Scheduler {
    /// Leaves a request out of all plans until [`Scheduler::resume`]. Its sequences give their blocks back, as in a
    /// preemption, so that a reader that never comes back keeps no blocks from others.
    ///
    /// # Panics
    /// If the last plan has not been answered.
    pub fn suspend(&mut self, request: RequestKey) {
        assert!(self.in_flight.is_empty(), "the last plan has not been answered");
        self.queue.suspend(request);
        for map in [&mut self.running, &mut self.waiting] {
            for (id, mut sequence) in map.extract_if(.., |_, sequence| sequence.key.group.request == request) {
                sequence.release(&mut self.cache);
                self.suspended.insert(id, sequence);
            }
        }
    }

    /// Lets a suspended request run again. Its sequences recompute their KV, except for blocks that are still in the
    /// prefix cache.
    pub fn resume(&mut self, request: RequestKey) {
        let of_sequence = self.suspended.iter().find(|(_, sequence)| sequence.key.group.request == request);
        let tenant = of_sequence.map(|(id, _)| id.tenant).or_else(|| self.queue.tenant_of(request));
        if let Some(tenant) = tenant.filter(|tenant| !self.is_active(*tenant)) {
            self.tenants.lift(tenant);
        }
        self.queue.resume(request);
        let sequences = self.suspended.extract_if(.., |_, sequence| sequence.key.group.request == request);
        self.waiting.extend(sequences);
    }
}
