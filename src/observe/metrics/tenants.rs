//! The numbers of tenants.

use std::array::from_fn;
use std::sync::OnceLock;

use super::Gauge;
use crate::types::{Tenant, TenantStats};

/// The numbers of each tenant as the engine last published them.
#[derive(Debug)]
pub struct TenantMetrics([Row; TenantStats::MOST]);

#[derive(Debug, Default)]
struct Row {
    /// Set when the tenant first asks for something.
    name: OnceLock<Tenant>,
    values: [Gauge; TenantStats::METRICS.len()],
}

impl Default for TenantMetrics {
    fn default() -> Self {
        Self(from_fn(|_| Row::default()))
    }
}

impl TenantMetrics {
    /// Stores the numbers. A tenant keeps its place among them.
    pub fn publish(&self, tenants: &[(Tenant, TenantStats)]) {
        for (row, (name, stats)) in self.0.iter().zip(tenants) {
            row.name.get_or_init(|| name.clone());
            row.values.iter().zip(stats.values()).for_each(|(gauge, value)| gauge.set(value));
        }
    }

    /// The tenants that have asked for something, and their numbers.
    pub fn snapshot(&self) -> Vec<(Tenant, TenantStats)> {
        let named = self.0.iter().filter_map(|row| Some((row.name.get()?.clone(), &row.values)));
        named.map(|(name, values)| (name, TenantStats::from_values(from_fn(|i| values[i].get())))).collect()
    }
}
