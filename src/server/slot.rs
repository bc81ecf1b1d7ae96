//! The place of an open connection.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::observe::Metrics;

/// Counts a connection, against its port's limit and for observers, until it is dropped.
pub(super) struct Slot {
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
}

impl Slot {
    /// A place among the free ones, if there is one.
    pub(super) fn take(free: &Arc<Semaphore>, metrics: &Arc<Metrics>) -> Option<Self> {
        let permit = free.clone().try_acquire_owned().ok()?;
        metrics.connections.raise();
        Some(Self { metrics: metrics.clone(), _permit: permit })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.metrics.connections.lower();
    }
}
