//! Holding requests back between two steps: those whose readers lag behind, for whom nothing more should be made now.

use super::Scheduler;
use crate::types::RequestKey;

impl Scheduler {
    /// Leaves a request out of all plans until [`Scheduler::resume`]. Its sequences give their blocks back, as after a
    /// preemption, so that a reader who never comes back keeps nothing from others.
    ///
    /// # Panics
    /// If a plan has not been answered.
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

    /// A request that was held back goes on; what its sequences had computed is computed again where the prefix cache
    /// does not have it any more.
    pub fn resume(&mut self, request: RequestKey) {
        self.queue.resume(request);
        let sequences = self.suspended.extract_if(.., |_, sequence| sequence.key.group.request == request);
        self.waiting.extend(sequences);
    }
}
