//! A flag by which a client's handler ends its request or command.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Says that the client of a request or command is gone, or that the request's time limit has passed. The engine reads
/// the flag before each step, and ends the request or command.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicU8>);

impl CancelFlag {
    const WANTED: u8 = 0;
    const EXPIRED: u8 = 1;
    const CANCELLED: u8 = 2;

    /// Notes that the client is gone.
    pub fn cancel(&self) {
        self.0.store(Self::CANCELLED, Ordering::Release);
    }

    /// Notes that the time limit has passed: the client gets the tokens so far.
    pub fn expire(&self) {
        // The flag stays unchanged if the client is gone.
        let _ = self.0.compare_exchange(Self::WANTED, Self::EXPIRED, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::CANCELLED
    }

    pub fn is_expired(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::EXPIRED
    }
}
