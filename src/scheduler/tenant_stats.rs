//! The numbers of each tenant.

use super::{Scheduler, SeqId, TenantId};
use crate::types::{Tenant, TenantStats};

/// Most tenants with numbers of their own; the rest share those of [`OTHER`].
const MOST_NAMED: usize = TenantStats::MOST - 1;
/// The name under which all further tenants are counted.
const OTHER: &str = "other";

/// The numbers of the first tenants, in the order in which they came. None is ever removed.
#[derive(Debug, Default)]
pub(super) struct TenantTable {
    rows: Vec<(Tenant, TenantStats)>,
    /// For each KV block the number of the count that it was last part of.
    counted: Vec<u32>,
    count: u32,
}

impl TenantTable {
    /// The row that counts a tenant.
    pub fn row_of(&mut self, name: &Tenant) -> usize {
        if let Some(row) = self.rows.iter().position(|(named, _)| named == name) {
            return row;
        }
        let row = self.rows.len().min(MOST_NAMED);
        if row == self.rows.len() {
            let name = if row == MOST_NAMED { Tenant::parse(OTHER, "").expect("a name") } else { name.clone() };
            self.rows.push((name, TenantStats::default()));
        }
        row
    }

    pub fn row_mut(&mut self, row: usize) -> &mut TenantStats {
        &mut self.rows[row].1
    }
}

impl Scheduler {
    /// The numbers of each tenant, in an order that does not change.
    pub fn tenant_stats(&mut self) -> &[(Tenant, TenantStats)] {
        for (_, stats) in &mut self.tenant_table.rows {
            (stats.running_samples, stats.waiting_samples, stats.kv_blocks) = (0, 0, 0);
        }
        let mut last = None;
        while let Some((tenant, row, samples)) = self.tenants.next_live(last) {
            last = Some(tenant);
            let running = self.running.range(SeqId::of(tenant)).count();
            let blocks = self.blocks_of(tenant);
            let stats = self.tenant_table.row_mut(row);
            stats.running_samples += running as u64;
            stats.waiting_samples += (samples - running) as u64;
            stats.kv_blocks += blocks as u64;
        }
        &self.tenant_table.rows
    }

    /// Number of KV blocks that a tenant's sequences hold. A block that several tenants hold counts for each.
    pub(super) fn blocks_of(&mut self, tenant: TenantId) -> usize {
        let blocks = self.cache.counts();
        if !self.tenants.are_several() {
            return blocks.total - blocks.free;
        }
        let table = &mut self.tenant_table;
        table.counted.resize(blocks.total, 0);
        table.count = table.count.wrapping_add(1);
        let of_tenant = SeqId::of(tenant);
        let sequences = self.running.range(of_tenant.clone()).chain(self.waiting.range(of_tenant));
        let mut held = 0;
        for block in sequences.flat_map(|(_, sequence)| sequence.table.as_slice()) {
            let last = std::mem::replace(&mut table.counted[*block as usize], table.count);
            held += usize::from(last != table.count);
        }
        held
    }
}
