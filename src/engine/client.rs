//! The signs that clients give: a request's or command's end, and a push's progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::clock::Clock;

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

/// Time of the last sign of life of a push: bytes that arrived, or work that the server did for it. Clones share it.
#[derive(Clone, Debug)]
pub struct Activity(Arc<ActivityState>);

#[derive(Debug)]
struct ActivityState {
    clock: Clock,
    since: Instant,
    /// The last sign of life, in milliseconds after `since`.
    last: AtomicU64,
    /// Number of live [`BusyGuard`]s.
    busy: AtomicUsize,
}

impl Activity {
    /// Starts with a sign of life now.
    pub fn start() -> Self {
        Self::by(Clock::System)
    }

    /// Starts with a sign of life now, measured by `clock`.
    pub fn by(clock: Clock) -> Self {
        let (last, busy) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self(Arc::new(ActivityState { since: clock.now(), clock, last, busy }))
    }

    /// Notes a sign of life.
    pub fn touch(&self) {
        let now = u64::try_from(self.0.clock.since(self.0.since).as_millis()).unwrap_or(u64::MAX);
        self.0.last.fetch_max(now, Ordering::Relaxed);
    }

    /// Notes that the server works for the push until the guard is dropped. The push is not idle meanwhile.
    pub fn busy(&self) -> BusyGuard {
        self.0.busy.fetch_add(1, Ordering::AcqRel);
        BusyGuard(self.clone())
    }

    /// Time since the last sign of life; zero while a [`BusyGuard`] lives.
    pub fn idle(&self) -> Duration {
        if self.0.busy.load(Ordering::Acquire) > 0 {
            return Duration::ZERO;
        }
        self.0.clock.since(self.0.since).saturating_sub(Duration::from_millis(self.0.last.load(Ordering::Relaxed)))
    }
}

/// Marks that the server works for a push. Dropping it is a sign of life.
pub struct BusyGuard(Activity);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.touch();
        self.0.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}
