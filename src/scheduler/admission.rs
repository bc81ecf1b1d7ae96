//! Admission: free places go to waiting sequences, then to groups of the queue.

use std::collections::BTreeSet;

use super::schedule::PlanBuilder;
use super::{GroupState, Scheduler, SeqId, Sequence, TenantId};
use crate::cache::PrefixMatch;

impl Scheduler {
    /// Admits sequences until the token budget, the places or the blocks are used up: the next one of the tenant with
    /// the least service, again and again. None overtakes one that waits for blocks: a long sequence would starve if
    /// short ones passed it.
    pub(super) fn admit(&mut self, builder: &mut PlanBuilder) {
        self.admit_of(|scheduler, held_back| scheduler.next_tenant(held_back), builder);
    }

    /// Admits sequences of tenants that are owed places, as long as they are. Each running sequence that has not been
    /// planned keeps one token of the budget.
    pub(super) fn admit_owed(&mut self, builder: &mut PlanBuilder) {
        if !self.tenants.are_several() {
            return;
        }
        let kept = (self.running.len() - self.in_flight.len()).min(builder.budget);
        builder.budget -= kept;
        self.admit_of(|scheduler, held_back| scheduler.next_owed(held_back), builder);
        builder.budget += kept;
    }

    /// Admits sequences of the tenants that `next` names. A sequence whose next block is in this plan waits for the
    /// prefix cache to have it, and keeps its place; each such step brings it a block.
    fn admit_of(&mut self, next: impl Fn(&mut Self, &BTreeSet<SeqId>) -> Option<TenantId>, builder: &mut PlanBuilder) {
        let mut held_back = BTreeSet::new();
        while builder.budget > 0 {
            let Some(tenant) = next(self, &held_back) else { return };
            let waiting = self.first_waiting(tenant, &held_back);
            let id = waiting.or_else(|| self.dequeue(tenant)).expect("a tenant with a turn has a sequence");
            if self.waits_for_prefix(id, builder) {
                held_back.insert(id);
            } else if !self.try_admit(id, builder) {
                return;
            }
        }
    }

    /// The oldest waiting sequence of a tenant that can run.
    pub(super) fn first_waiting(&self, tenant: TenantId, held_back: &BTreeSet<SeqId>) -> Option<SeqId> {
        let can_run = |(id, sequence): &(&SeqId, &Sequence)| sequence.pending.is_none() && !held_back.contains(*id);
        self.waiting.range(SeqId::of(tenant)).find(can_run).map(|(&id, _)| id)
    }

    /// Whether the plan computes the block that follows the cached prefix of a waiting sequence.
    fn waits_for_prefix(&self, id: SeqId, builder: &PlanBuilder) -> bool {
        let sequence = &self.waiting[&id];
        if builder.blocks.is_empty() || !sequence.table.is_empty() {
            return false;
        }
        let next = sequence.cacheable_block(self.find_prefix(sequence).num_blocks(), self.cache.block_size());
        next.is_some_and(|block| builder.blocks.contains(block))
    }

    /// Makes the next group of a tenant's queue a waiting sequence.
    fn dequeue(&mut self, tenant: TenantId) -> Option<SeqId> {
        let group = self.queue.pop(tenant)?;
        let id = SeqId { tenant, admission: self.next_admission, sample_index: 0 };
        self.next_admission += 1;
        let state = GroupState::new(id, group.num_samples());
        let before = self.groups.insert(group.key, state);
        assert!(before.is_none(), "{:?} is in use", group.key);
        self.waiting.insert(id, Sequence::new(group, self.cache.block_size()));
        Some(id)
    }

    /// Lets a waiting sequence run if all blocks it needs are free. Blocks are taken from other sequences only if none
    /// runs, or from tenants that hold more. Returns whether the sequence runs; it may have to wait for its first
    /// image.
    fn try_admit(&mut self, id: SeqId, builder: &mut PlanBuilder) -> bool {
        let prefix = loop {
            let sequence = &self.waiting[&id];
            let prefix = self.find_prefix(sequence);
            if self.fits(sequence, &prefix) {
                break prefix;
            }
            if self.running.is_empty() {
                assert!(self.preempt_for(id, &[]), "{id:?} does not fit into an empty cache");
            } else if !self.take_blocks(id) {
                return false;
            }
        };
        let mut sequence = self.waiting.remove(&id).expect("an admitted sequence waits");
        if sequence.table.is_empty() {
            sequence.num_registered = prefix.num_blocks();
            sequence.num_computed = prefix.num_blocks() * self.cache.block_size();
            sequence.charged = sequence.charged.max(sequence.num_computed);
            sequence.table = self.cache.acquire(prefix);
            self.count_admission(id.tenant, &mut sequence);
        }
        let start = sequence.num_computed;
        let end = sequence.num_tokens().min(start + builder.budget);
        let end = self.images.chunk_end(&sequence, end, builder);
        if end == start {
            self.running.insert(id, sequence);
            return true;
        }
        let extended = self.cache.extend(&mut sequence.table, start, end, &mut builder.plan.copies);
        assert!(extended, "{:?} was found to fit", sequence.key);
        self.running.insert(id, sequence);
        self.plan_sequence(id, end, builder);
        true
    }

    /// Looks up the cached prefix of a sequence without blocks; a sequence with blocks has no use for one.
    fn find_prefix(&self, sequence: &Sequence) -> PrefixMatch {
        if sequence.table.is_empty() {
            self.cache.find_prefix(&sequence.hashes, sequence.max_cached_tokens())
        } else {
            PrefixMatch::default()
        }
    }

    /// Whether all tokens of the sequence fit into free blocks, and one more block for each running sequence. Without
    /// that margin the running ones would soon preempt it, and its work would be lost.
    fn fits(&self, sequence: &Sequence, prefix: &PrefixMatch) -> bool {
        let end = sequence.num_tokens();
        let needed = if sequence.table.is_empty() {
            self.cache.blocks_for(end) - prefix.num_blocks()
        } else {
            self.cache.blocks_to_extend(&sequence.table, sequence.num_computed, end)
        };
        needed + self.running.len() <= self.cache.num_free() - prefix.num_free()
    }

    fn count_admission(&mut self, tenant: TenantId, sequence: &mut Sequence) {
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.num_computed as u32);
            self.begun.push(sequence.key.group);
            self.stats.prompt_tokens += sequence.prompt.tokens.len() as u64;
            let row = self.tenants.row(tenant);
            self.tenant_table.row_mut(row).prompt_tokens += sequence.prompt.tokens.len() as u64;
            self.stats.cached_tokens += sequence.num_computed as u64;
        }
    }
}
