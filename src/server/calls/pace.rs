//! How fast the bytes of a request must come. Without a limit an incomplete one could hold its memory for ever.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::error::{Error, Result};
use crate::memory::human_bytes;

/// Time in which an incomplete request must grow by [`PROGRESS`].
pub(in crate::server) const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that an incomplete request must grow by within [`PATIENCE`]: 35 KB/s, slower than any network through which a
/// rollout server is reached.
const PROGRESS: usize = 1 << 20;

/// Watches how a request grows.
pub(in crate::server) struct Pace {
    patience: Duration,
    /// Bytes that were there at the last check.
    seen: usize,
    next_check: Instant,
}

impl Pace {
    pub(in crate::server) fn new(patience: Duration) -> Self {
        Self { patience, seen: 0, next_check: Instant::now() + patience }
    }

    /// Waits until the next check is due, at which `here` bytes of `length` are there.
    ///
    /// # Errors
    /// `DeadlineExceeded` if too few bytes have come since the check before.
    pub(in crate::server) async fn check(&mut self, here: usize, length: Option<usize>) -> Result<()> {
        sleep_until(self.next_check).await;
        if here < self.seen + PROGRESS {
            let of = length.map_or_else(String::new, |length| format!(" of {length}"));
            return Err(Error::DeadlineExceeded(format!(
                "request: {here}{of} bytes are here, and fewer than {} came in {} s",
                human_bytes(PROGRESS as u64),
                self.patience.as_secs_f64(),
            )));
        }
        (self.seen, self.next_check) = (here, Instant::now() + self.patience);
        Ok(())
    }
}
