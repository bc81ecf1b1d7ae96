//! How long to wait for a trainer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::Error;

/// How long to wait for a trainer. Clones share that it is at its end.
#[derive(Clone, Debug)]
pub struct Patience {
    limit: Duration,
    ended: Arc<AtomicBool>,
}

impl Patience {
    /// Waits for `limit` at a time.
    pub fn new(limit: Duration) -> Self {
        Self { limit, ended: Arc::default() }
    }

    /// Ends every wait, because nobody wants what is waited for.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Begins a wait.
    pub(super) fn start(&self) -> Wait<'_> {
        Wait { patience: self, since: Instant::now() }
    }
}

/// One wait.
pub(super) struct Wait<'a> {
    patience: &'a Patience,
    since: Instant,
}

impl Wait<'_> {
    pub fn is_over(&self) -> bool {
        self.patience.ended.load(Ordering::Acquire) || self.since.elapsed() >= self.patience.limit
    }

    /// The error of a wait for `what` that ended with `why`.
    pub fn error(&self, what: &str, why: &str) -> Error {
        if self.patience.ended.load(Ordering::Acquire) {
            return Error::Aborted(format!("{what}: the call that waited for it has ended"));
        }
        if self.since.elapsed() >= self.patience.limit {
            let seconds = self.patience.limit.as_secs_f64();
            return Error::DeadlineExceeded(format!(
                "{what}: nothing came for {seconds:.1} s (--update-idle-seconds): {why}"
            ));
        }
        Error::Aborted(format!("{what}: {why}"))
    }
}
