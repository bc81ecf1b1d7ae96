//! How tenants share places, blocks and steps. With one tenant nothing of this has an effect.

use std::collections::btree_map::Range;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::tenants::{OUTPUT_TOKEN_SERVICE, PROMPT_TOKEN_SERVICE};
use super::{Scheduler, SeqId, Sequence, TenantId};
use crate::types::PlanSequence;

impl Scheduler {
    /// The running sequences in the order of service: the oldest of each tenant, then the second oldest of each, and so
    /// on.
    pub(super) fn running_order(&self) -> Vec<SeqId> {
        let mut order: Vec<(usize, SeqId)> = ranked(self.running.keys().copied()).collect();
        order.sort_by_key(|(rank, id)| (*rank, id.age()));
        order.into_iter().map(|(_, id)| id).collect()
    }

    /// The tenant whose next sequence is to be admitted to a free place: the one with the least service.
    pub(super) fn next_tenant(&mut self, held_back: &BTreeSet<SeqId>) -> Option<TenantId> {
        if self.running.len() + held_back.len() >= self.config.max_num_seqs {
            return None;
        }
        self.backlogged(held_back).into_iter().min_by_key(|&tenant| (self.tenants.counter(tenant), tenant))
    }

    /// The tenant with the least service among those that are owed a place. If no place is free, the tenant with the
    /// most places gives up one, that of its youngest sequence.
    pub(super) fn next_owed(&mut self, held_back: &BTreeSet<SeqId>) -> Option<TenantId> {
        let mut places: BTreeMap<TenantId, usize> = BTreeMap::new();
        self.running.keys().for_each(|id| *places.entry(id.tenant).or_default() += 1);
        places.retain(|_, places| *places >= 2);
        if places.is_empty() {
            return None;
        }
        let owed = self.backlogged(held_back).into_iter();
        let owed = owed.filter_map(|tenant| Some((tenant, self.debtor(tenant, held_back, &places)?)));
        let (tenant, youngest) = owed.min_by_key(|&(tenant, _)| (self.tenants.counter(tenant), tenant))?;
        if self.running.len() + held_back.len() >= self.config.max_num_seqs {
            self.displace(youngest);
        }
        Some(tenant)
    }

    /// The tenants with a sequence that only waits for a place and blocks.
    pub(super) fn backlogged(&mut self, held_back: &BTreeSet<SeqId>) -> Vec<TenantId> {
        let mut tenants: Vec<TenantId> = self.tenants.live().collect();
        tenants.retain(|&tenant| {
            let next = self.first_waiting(tenant, held_back);
            (next.is_some() || self.queue.has_turn(tenant))
                && self.is_within_quotas(tenant, self.places(tenant, held_back), next)
        });
        tenants
    }

    /// Number of places that a tenant has, with those of sequences that are held back.
    fn places(&self, tenant: TenantId, held_back: &BTreeSet<SeqId>) -> usize {
        self.running.range(SeqId::of(tenant)).count() + held_back.range(SeqId::of(tenant)).count()
    }

    /// The youngest running sequence that is not planned of the tenant that owes `tenant` a place: one that has had no
    /// less service, and has at least two places more, so that it does not have fewer afterwards. Of several it is the
    /// one with the most places. `places` has the numbers of places of tenants with more than one.
    fn debtor(
        &self,
        tenant: TenantId,
        held_back: &BTreeSet<SeqId>,
        places: &BTreeMap<TenantId, usize>,
    ) -> Option<SeqId> {
        let (own, served) = (self.places(tenant, held_back), self.tenants.counter(tenant));
        let richer = places.iter().filter(|(other, places)| **places >= own + 2 && **other != tenant);
        let owing = richer.filter(|(other, _)| self.tenants.counter(**other) >= served);
        let (other, _) = owing.max_by_key(|(other, places)| (**places, **other))?;
        let mut youngest_first = self.running.range(SeqId::of(*other)).rev().map(|(id, _)| *id);
        youngest_first.find(|id| !self.in_flight.contains(id))
    }

    /// Preempts one unplanned sequence of another tenant to free its blocks for the waiting sequence `id`. Only a
    /// tenant with more block-holding sequences and at least as much service loses one. Returns false if there is none.
    pub(super) fn take_blocks(&mut self, id: SeqId) -> bool {
        if !self.tenants.are_several() {
            return false;
        }
        let planned: HashSet<SeqId> = self.in_flight.iter().copied().collect();
        let own = self.holders().filter(|holder| holder.tenant == id.tenant && *holder != id).count();
        let served = self.tenants.counter(id.tenant);
        let owes = |tenant| tenant != id.tenant && self.tenants.counter(tenant) >= served;
        let victim = self.last_holder(|rank, victim| rank > own && owes(victim.tenant) && !planned.contains(&victim));
        victim.map(|victim| self.preempt(victim)).is_some()
    }

    /// The last sequence in the order of service that `may_lose` its blocks. That function is also given the number of
    /// older sequences of the same tenant that hold blocks.
    pub(super) fn last_holder(&self, may_lose: impl Fn(usize, SeqId) -> bool) -> Option<SeqId> {
        let mut holders: Vec<SeqId> = self.holders().collect();
        holders.sort();
        let losers = ranked(holders).filter(|&(rank, id)| may_lose(rank, id));
        losers.max_by_key(|(rank, id)| (*rank, id.age())).map(|(_, id)| id)
    }

    /// The running sequences, and the waiting ones that hold blocks.
    pub(super) fn holders(&self) -> impl Iterator<Item = SeqId> {
        let waiting = self.waiting.iter().filter(|(_, sequence)| !sequence.table.is_empty());
        self.running.keys().chain(waiting.map(|(id, _)| id)).copied()
    }

    /// Whether a tenant asks for anything that is not suspended.
    pub(super) fn is_active(&self, tenant: TenantId) -> bool {
        let has_any = |mut sequences: Range<SeqId, Sequence>| sequences.next().is_some();
        self.queue.has_turn(tenant)
            || has_any(self.running.range(SeqId::of(tenant)))
            || has_any(self.waiting.range(SeqId::of(tenant)))
    }

    /// Charges a tenant for the tokens of a planned sequence: those of the prompt that it is the first to compute, and
    /// those that are sampled.
    pub(super) fn charge(&mut self, id: SeqId, planned: &PlanSequence) {
        let sequence = self.running.get_mut(&id).expect("a planned sequence runs");
        let end = (planned.start + planned.tokens.len()).min(sequence.prompt.tokens.len());
        let computed = end.saturating_sub(sequence.charged);
        sequence.charged = sequence.charged.max(end);
        let sampled = planned.logits.iter().flat_map(|row| &row.tasks).filter(|task| task.target.is_none()).count();
        let service = PROMPT_TOKEN_SERVICE * computed as u64 + OUTPUT_TOKEN_SERVICE * sampled as u64;
        self.tenants.charge(id.tenant, service);
    }

    /// Charges a tenant for the tokens that a sequence was given besides the planned one, because drafts were right.
    pub(super) fn charge_drafts(&mut self, sequence: &Sequence, accepted: u64) {
        let tenant = self.groups[&sequence.key.group].tenant;
        self.tenants.charge(tenant, OUTPUT_TOKEN_SERVICE * accepted);
    }

    /// Notes the least service of all tenants that ask for something.
    pub(super) fn note_service(&mut self) {
        let active = self.tenants.live().filter(|&tenant| self.is_active(tenant));
        if let Some(least) = active.map(|tenant| self.tenants.counter(tenant)).min() {
            self.tenants.raise_floor(least);
        }
    }
}

/// Counts for each id, ascending, those of the same tenant before it.
fn ranked(ids: impl IntoIterator<Item = SeqId>) -> impl Iterator<Item = (usize, SeqId)> {
    let mut last = None;
    ids.into_iter().map(move |id| {
        let rank = match last {
            Some((tenant, rank)) if tenant == id.tenant => rank + 1,
            _ => 0,
        };
        last = Some((id.tenant, rank));
        (rank, id)
    })
}
