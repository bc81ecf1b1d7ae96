//! Bytes of a request's events that wait for the request's reader.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Traffic;

/// Divisor: one reader's backlog may take this part of the bytes that requests can still take. It is a part of what is
/// left, not of the whole, so that many slow readers share what there is and none of them can fill it (Choudhury and
/// Hahne 1998, dynamic thresholds of shared buffers).
const SHARE: u64 = 8;
/// Bytes that may always wait for a reader, so that a request continues as soon as its reader reads.
const LEAST: u64 = 64 << 10;
/// Most bytes that may wait for a reader: a reader that lags by so much is no faster with more.
const MOST: u64 = 16 << 20;

/// Count of the bytes of a request's events that its reader has not taken yet; [`Traffic`] counts them too. Clones
/// share one count. When the last clone is dropped, the rest is given back to [`Traffic`].
#[derive(Clone, Debug)]
pub struct Backlog(Arc<Waiting>);

#[derive(Debug)]
struct Waiting {
    traffic: Traffic,
    bytes: AtomicU64,
    /// Whether the engine has seen that the backlog is full, and not yet that it has drained.
    lags: AtomicBool,
}

impl Backlog {
    pub fn new(traffic: &Traffic) -> Self {
        let (bytes, lags) = (AtomicU64::new(0), AtomicBool::new(false));
        Self(Arc::new(Waiting { traffic: traffic.clone(), bytes, lags }))
    }

    /// Counts an event of `bytes` bytes that waits from now on.
    pub fn add(&self, bytes: u64) {
        self.0.traffic.add(bytes);
        self.0.bytes.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Subtracts `bytes` that the reader has taken. Returns whether to notify the engine, which has suspended the
    /// request, that the request may continue.
    #[must_use]
    pub fn take(&self, bytes: u64) -> bool {
        let left = self.0.bytes.fetch_sub(bytes, Ordering::SeqCst) - bytes;
        self.0.traffic.give_back(bytes);
        left <= self.mark() / 2 && self.0.lags.swap(false, Ordering::SeqCst)
    }

    /// Whether so many bytes wait that the request must make no more tokens. It stays true until the reader has drained
    /// the backlog below half the mark.
    pub fn is_full(&self) -> bool {
        // `lags` is set before the bytes are read, so that a reader that drains them at this moment either is counted
        // or sees it.
        let lagged = self.0.lags.swap(true, Ordering::SeqCst);
        let mark = if lagged { self.mark() / 2 } else { self.mark() };
        let is_full = self.bytes() > mark;
        if !is_full {
            self.0.lags.store(false, Ordering::SeqCst);
        }
        is_full
    }

    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::SeqCst)
    }

    fn mark(&self) -> u64 {
        let traffic = &self.0.traffic;
        (traffic.bulk_limit().saturating_sub(traffic.used()) / SHARE).clamp(LEAST, MOST)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.traffic.give_back(self.bytes.load(Ordering::SeqCst));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_full_above_its_mark_and_until_it_is_drained_below_half() {
        let traffic = Traffic::new(4 << 20);
        let backlog = Backlog::new(&traffic);
        backlog.add(100 << 10);
        assert!(!backlog.is_full() && !backlog.take(0), "a reader that keeps up is not reported");
        // The mark is now 238 KiB, an eighth of what is left of 2.25 MiB.
        backlog.add(300 << 10);
        assert!(backlog.is_full());
        assert!(!backlog.take(100 << 10) && backlog.is_full(), "300 KiB are above half the mark");
        assert!(backlog.take(200 << 10), "100 KiB are below half the mark");
        assert!(!backlog.take(10 << 10), "the engine is told once");
        assert!(!backlog.is_full());
        assert_eq!((traffic.used(), backlog.bytes()), (90 << 10, 90 << 10));
    }

    #[test]
    fn many_slow_readers_share_what_there_is() {
        let traffic = Traffic::new(64 << 20);
        let backlogs: Vec<_> = (0..64).map(|_| Backlog::new(&traffic)).collect();
        while let Some(next) = backlogs.iter().filter(|b| !b.is_full()).min_by_key(|b| b.bytes()) {
            next.add(10_000);
        }
        assert!(traffic.used() < traffic.bulk_limit(), "{} are used", traffic.used());
        assert!(traffic.charge(1 << 20).is_ok(), "others can still come in");
    }

    #[test]
    fn what_nobody_took_goes_back_with_the_last_clone() {
        let traffic = Traffic::new(1 << 20);
        let backlog = Backlog::new(&traffic);
        let other = backlog.clone();
        backlog.add(1000);
        drop(backlog);
        assert_eq!(traffic.used(), 1000);
        drop(other);
        assert_eq!(traffic.used(), 0);
    }

    #[test]
    fn a_reader_that_drains_while_the_engine_looks_is_never_forgotten() {
        let traffic = Traffic::new(8 << 20);
        for _ in 0..2000 {
            let backlog = Backlog::new(&traffic);
            backlog.add(2 << 20);
            let reader = backlog.clone();
            let told = std::thread::spawn(move || reader.take(2 << 20));
            let is_full = backlog.is_full();
            let told = told.join().unwrap();
            assert!(!is_full || told || !backlog.is_full(), "held and never told");
            assert!(!is_full || told, "the engine was told that it is full, and nobody tells it to look again");
        }
    }
}
