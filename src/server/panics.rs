//! Counts calls that panic. Each such call ends with INTERNAL, and all others go on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Number of calls that ended in a panic. Clones share one count.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Panics(Arc<AtomicU64>);

impl Panics {
    pub(in crate::server) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The result of `work`, or the error of a call that panicked. The panic itself is in the log.
    pub(in crate::server) fn catch<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
            let before = self.0.fetch_add(1, Ordering::Relaxed);
            tracing::error!(panics = before + 1, "a call was given up after a panic");
            Error::Internal("the call was given up after a panic; the server's log has it".into())
        })
    }
}
