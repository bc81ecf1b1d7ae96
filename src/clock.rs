//! The clock that the engine reads: the system's, or one that a simulation advances.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A source of time. Clones read the same clock.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A clock that stands still between calls of [`VirtualClock::advance`].
    Virtual(VirtualClock),
}

impl Clock {
    pub fn now(&self) -> Instant {
        match self {
            Self::System => Instant::now(),
            Self::Virtual(clock) => clock.now(),
        }
    }

    /// Time since `then`; zero if `then` is in the future.
    pub fn since(&self, then: Instant) -> Duration {
        self.now().saturating_duration_since(then)
    }
}

/// A clock for simulations, so that a run depends on its seed alone.
#[derive(Clone, Debug)]
pub struct VirtualClock {
    origin: Instant,
    nanos: Arc<AtomicU64>,
}

impl VirtualClock {
    /// A clock that stands at the present time.
    pub fn start() -> Self {
        Self { origin: Instant::now(), nanos: Arc::default() }
    }

    pub fn now(&self) -> Instant {
        self.origin + Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    pub fn advance(&self, by: Duration) {
        self.nanos.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_clock_moves_only_when_it_is_moved() {
        let hand = VirtualClock::start();
        let clock = Clock::Virtual(hand.clone());
        let start = clock.now();
        assert_eq!((clock.now(), clock.since(start)), (start, Duration::ZERO));
        hand.advance(Duration::from_secs(90));
        assert_eq!(clock.since(start), Duration::from_secs(90));
        assert_eq!(clock.since(start + Duration::from_secs(100)), Duration::ZERO);
    }
}
