//! How long to wait for a trainer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::Error;

/// The timeout of each wait for a trainer, and a flag that cancels them all. Clones share the flag.
#[derive(Clone, Debug)]
pub struct TrainerTimeout {
    limit: Duration,
    cancelled: Arc<AtomicBool>,
}

impl TrainerTimeout {
    /// Each wait takes at most `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, cancelled: Arc::default() }
    }

    /// Cancels every wait that uses this timeout.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Begins a wait.
    pub(super) fn start(&self) -> TrainerWait<'_> {
        TrainerWait { timeout: self, since: Instant::now() }
    }
}

/// One wait.
pub(super) struct TrainerWait<'a> {
    timeout: &'a TrainerTimeout,
    since: Instant,
}

impl TrainerWait<'_> {
    /// Whether the wait was cancelled or has timed out.
    pub fn is_over(&self) -> bool {
        self.timeout.cancelled.load(Ordering::Acquire) || self.since.elapsed() >= self.timeout.limit
    }

    /// The error of a wait for `what` that ended because of `why`.
    pub fn error(&self, what: &str, why: &str) -> Error {
        if self.timeout.cancelled.load(Ordering::Acquire) {
            return Error::Aborted(format!("{what}: the call that waited for it has ended"));
        }
        if self.since.elapsed() >= self.timeout.limit {
            let seconds = self.timeout.limit.as_secs_f64();
            return Error::DeadlineExceeded(format!(
                "{what}: nothing arrived for {seconds:.1} s (--update-idle-seconds): {why}"
            ));
        }
        Error::Aborted(format!("{what}: {why}"))
    }
}
