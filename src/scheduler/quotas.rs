//! Quotas of tenants, which hold even when no other tenant asks for anything.

use super::{Scheduler, SeqId, TenantId};

/// Quotas of each tenant. Sequences beyond them wait.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantQuotas {
    /// Most samples that run at the same time.
    pub max_running: Option<usize>,
    /// Largest share of the KV blocks. One sequence may always run, even if it needs more.
    pub kv_share: Option<f64>,
}

impl Scheduler {
    /// Limits each tenant.
    pub fn limit_tenants(&mut self, quotas: TenantQuotas) {
        self.quotas = quotas;
    }

    /// Whether a tenant, which has `places` of which some may be held back, may run one sequence more: `next`, or the
    /// next one of its queue.
    pub(super) fn is_within_quotas(&mut self, tenant: TenantId, places: usize, next: Option<SeqId>) -> bool {
        if places == 0 || self.quotas == TenantQuotas::default() {
            return true;
        }
        if self.quotas.max_running.is_some_and(|most| places >= most) {
            return false;
        }
        let Some(most) = self.most_blocks() else { return true };
        let needed = match next.map(|id| &self.waiting[&id]) {
            Some(sequence) if !sequence.table.is_empty() => {
                self.cache.blocks_to_extend(&sequence.table, sequence.num_computed, sequence.num_tokens())
            }
            Some(sequence) => self.cache.blocks_for(sequence.num_tokens()),
            None => self.queue.front(tenant).map_or(0, |group| self.cache.blocks_for(group.prompt.tokens.len())),
        };
        self.blocks_of(tenant) + needed <= most
    }

    /// Preempts the youngest sequences of tenants whose running ones have grown beyond their share of the KV blocks,
    /// until one is left.
    pub(super) fn enforce_kv_share(&mut self) {
        let Some(most) = self.most_blocks() else { return };
        let tenants: Vec<TenantId> = self.tenants.live().collect();
        for tenant in tenants {
            while self.blocks_of(tenant) > most {
                let holders = self.holders().filter(|id| id.tenant == tenant);
                let mut holders: Vec<SeqId> = holders.collect();
                holders.sort();
                let [_, .., youngest] = holders[..] else { break };
                self.preempt(youngest);
            }
        }
    }

    fn most_blocks(&self) -> Option<usize> {
        self.quotas.kv_share.map(|share| (self.cache.counts().total as f64 * share) as usize)
    }
}
