//! Counts of gRPC and HTTP calls by method and status.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Most pairs of method and status that have a count of their own. Methods and statuses are closed sets, so only a bug
/// reaches this limit.
const MOST: usize = 1024;

/// Number of calls that have ended, by their labels. Only threads of the server take the lock, and hold it for one
/// addition.
#[derive(Clone, Debug, Default)]
pub struct CallCounts(Arc<Mutex<BTreeMap<[String; 3], u64>>>);

impl CallCounts {
    /// Counts a call. The labels must come from closed sets, never from the client.
    pub fn count(&self, labels: [&str; 3]) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = labels.map(String::from);
        if counts.len() < MOST || counts.contains_key(&key) {
            *counts.entry(key).or_default() += 1;
        }
    }

    pub(super) fn snapshot(&self) -> BTreeMap<[String; 3], u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
