//! A change of the policy under sequences that run, and giving up all blocks.

use std::collections::BTreeSet;

use super::{Scheduler, Sequence};
use crate::cache::KvCacheManager;
use crate::types::RequestKey;

/// What becomes of the KV of samples that have tokens already when the policy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunningKv {
    /// It stays; what is computed from now on is the new policy's. Nobody else finds blocks of such a sequence.
    Keep,
    /// It is computed again under the new policy.
    Recompute,
}

impl Scheduler {
    /// From the next step on everything is computed under the policy of `epoch`, one that was never used before; the
    /// groups' adapters stay. Prompts that have not been computed to their end start again, since their
    /// log-probabilities and their KV must be of one policy. Cached prefixes are forgotten.
    ///
    /// # Panics
    /// If a plan has not been answered.
    pub fn change_policy(&mut self, epoch: u64, running: RunningKv) {
        self.queue.groups_mut().for_each(|group| group.salt.epoch = epoch);
        let keep = running == RunningKv::Keep;
        self.change_all(|sequence, cache| sequence.change_policy(epoch, keep, cache));
    }

    /// Gives every block back and forgets every cached prefix: for a cache whose memory goes. Sequences go on by
    /// computing their tokens again.
    ///
    /// # Panics
    /// If a plan has not been answered.
    pub fn release_all(&mut self) {
        self.change_all(Sequence::release);
    }

    /// Requests of which something has been computed and something is not done.
    pub fn started_requests(&self) -> BTreeSet<RequestKey> {
        let sequences = self.running.values().chain(self.waiting.values()).chain(self.suspended.values());
        sequences
            .filter(|sequence| sequence.cached_tokens.is_some())
            .map(|sequence| sequence.key.group.request)
            .collect()
    }

    /// Those that have no blocks any more wait for a place, as after a preemption.
    fn change_all(&mut self, change: impl Fn(&mut Sequence, &mut KvCacheManager)) {
        assert!(self.in_flight.is_empty(), "the last plan has not been answered");
        let sequences = self.running.values_mut().chain(self.waiting.values_mut()).chain(self.suspended.values_mut());
        for sequence in sequences {
            change(sequence, &mut self.cache);
        }
        let released = self.running.extract_if(.., |_, sequence| sequence.table.is_empty());
        self.waiting.extend(released);
        self.cache.reset_prefix_cache();
    }
}
