//! Changes of the policy while sequences run, and giving all blocks back.

use std::collections::BTreeSet;

use super::{Scheduler, Sequence};
use crate::cache::{KvCacheManager, RoutingCache};
use crate::types::RequestKey;

/// How a change of the policy treats the KV of samples that already have tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunningKv {
    /// The KV stays, and only what is computed from now on is of the new policy. The blocks of such a sequence are
    /// never registered in the prefix cache.
    Keep,
    /// The KV is computed again under the new policy.
    Recompute,
}

impl Scheduler {
    /// Changes the policy to that of `epoch`, which was never used before, from the next step on. The groups keep their
    /// adapters. A prompt that is partly computed starts again, since its KV and its log-probabilities must be of one
    /// policy. Cached prefixes are forgotten, and the embeddings of images if the vision tower `is_tower_new`.
    ///
    /// # Panics
    /// If the last plan has not been answered.
    pub fn change_policy(&mut self, epoch: u64, running: RunningKv, is_tower_new: bool) {
        self.queue.groups_mut().for_each(|group| group.salt.epoch = epoch);
        if is_tower_new {
            self.images.clear();
        }
        let keep = running == RunningKv::Keep;
        self.change_all(|sequence, cache| sequence.change_policy(epoch, keep, cache));
    }

    /// Gives every block back and forgets every cached prefix, before the memory of the cache is released. The
    /// sequences compute their tokens again when they continue.
    ///
    /// # Panics
    /// If the last plan has not been answered.
    pub fn release_all(&mut self) {
        self.images.clear();
        self.routing.iter_mut().for_each(RoutingCache::release);
        self.change_all(Sequence::release);
    }

    /// Requests with a sequence that has been admitted and has not ended.
    pub fn started_requests(&self) -> BTreeSet<RequestKey> {
        let sequences = self.running.values().chain(self.waiting.values()).chain(self.suspended.values());
        sequences
            .filter(|sequence| sequence.cached_tokens.is_some())
            .map(|sequence| sequence.key.group.request)
            .collect()
    }

    /// Applies `change` to all sequences. Running ones that have no blocks after it wait for a place, as after a
    /// preemption.
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
