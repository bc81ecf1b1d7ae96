//! Bytes of requests and replies under way. They are counted before they are held, and refused beyond the ledger's
//! entry.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::human_bytes;
use crate::error::{Error, Result};

/// Divisor: this part of the limit is reserved for requests that are already accepted, and new requests are refused
/// beyond the rest. Otherwise a burst of uploads would leave no room for the tokens of running samples.
const KEPT_FOR_ACCEPTED: u64 = 4;
/// Largest charge in bytes that counts as small. Small charges may fill all that new requests may take, so that small
/// requests still come in when large ones have filled their part.
const SMALL: u64 = 64 << 10;
/// Divisor: this part of what new requests may take is reserved for small charges.
const KEPT_FOR_SMALL: u64 = 4;
/// Divisor: the count is [`Level::Tight`] when less than this part of the limit is left.
const TIGHT: u64 = 8;

/// A count of bytes below a limit, shared by everything that holds a part of a request or of a reply. Clones share one
/// count. It is a number, not serving state.
#[derive(Clone, Debug)]
pub struct Traffic(Arc<ByteCount>);

#[derive(Debug)]
struct ByteCount {
    limit: u64,
    used: AtomicU64,
    high_water: AtomicU64,
}

/// How full the count of bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Free,
    /// Less than an eighth of the limit is left: running requests should finish one by one.
    Tight,
    /// Nothing is left: a running request must end.
    Full,
}

impl Traffic {
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(ByteCount { limit, used: AtomicU64::new(0), high_water: AtomicU64::new(0) }))
    }

    /// Bytes that requests and replies may take together.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that requests may take before they are accepted.
    pub fn admission_limit(&self) -> u64 {
        self.0.limit - self.0.limit / KEPT_FOR_ACCEPTED
    }

    /// Bytes that charges of more than [`SMALL`] may take before their requests are accepted.
    pub(super) fn bulk_limit(&self) -> u64 {
        self.admission_limit() - self.admission_limit() / KEPT_FOR_SMALL
    }

    fn limit_of(&self, charge: u64) -> u64 {
        if charge <= SMALL { self.admission_limit() } else { self.bulk_limit() }
    }

    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::SeqCst)
    }

    /// The most bytes that were used since the last call of this method. The next call counts from now.
    pub fn take_high_water(&self) -> u64 {
        self.0.high_water.swap(self.used(), Ordering::SeqCst)
    }

    pub fn level(&self) -> Level {
        let (used, limit) = (self.used(), self.0.limit);
        if used >= limit {
            Level::Full
        } else if used >= limit - limit / TIGHT {
            Level::Tight
        } else {
            Level::Free
        }
    }

    /// Counts `bytes` of a request that can still be refused, until the charge is dropped.
    ///
    /// # Errors
    /// `ResourceExhausted` if the bytes do not fit; nothing is counted then.
    pub fn charge(&self, bytes: u64) -> Result<Charge> {
        let mut charge = self.charge_always(0);
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Counts `bytes` that can no longer be refused, such as tokens of running samples. The caller watches
    /// [`Traffic::level`].
    pub fn charge_always(&self, bytes: u64) -> Charge {
        self.add(bytes);
        Charge { traffic: self.clone(), bytes }
    }

    /// Counts `bytes` more, unless more than `limit` would be used.
    fn try_add(&self, bytes: u64, limit: u64) -> Result<()> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= limit);
        match self.0.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits) {
            Ok(before) => {
                self.0.high_water.fetch_max(before + bytes, Ordering::SeqCst);
                Ok(())
            }
            Err(used) => Err(self.refusal(bytes, used, limit)),
        }
    }

    pub(super) fn add(&self, bytes: u64) {
        let before = self.0.used.fetch_add(bytes, Ordering::SeqCst);
        self.0.high_water.fetch_max(before + bytes, Ordering::SeqCst);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        let before = self.0.used.fetch_sub(bytes, Ordering::SeqCst);
        debug_assert!(before >= bytes, "{bytes} bytes go back of {before}");
    }

    fn refusal(&self, bytes: u64, used: u64, limit: u64) -> Error {
        let is_too_large = bytes > limit;
        let (needed, limit, total) = (human_bytes(bytes), human_bytes(limit), human_bytes(self.0.limit));
        if is_too_large {
            return Error::ResourceExhausted(format!(
                "this needs {needed} for requests under way, and they may fill {limit} of --request-bytes {total} in \
                 all; split the request, or raise --request-bytes"
            ));
        }
        Error::ResourceExhausted(format!(
            "requests and replies under way hold {} of the {limit} that such requests may fill of --request-bytes {total}, \
             and this needs {needed} more; send fewer at once, split the request, or raise --request-bytes",
            human_bytes(used),
        ))
    }
}

/// Bytes that are counted in a [`Traffic`] until this value is dropped.
#[derive(Debug)]
pub struct Charge {
    traffic: Traffic,
    bytes: u64,
}

impl Charge {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the bytes are counted.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Counts `bytes` more.
    ///
    /// # Errors
    /// As for [`Traffic::charge`]; the charge is then unchanged.
    pub fn grow(&mut self, bytes: u64) -> Result<()> {
        self.traffic.try_add(bytes, self.traffic.limit_of(self.bytes.saturating_add(bytes)))?;
        self.bytes += bytes;
        Ok(())
    }

    /// Counts `bytes` more of a request that was accepted. While the charge is small they may also be taken of what is
    /// reserved for such requests.
    ///
    /// # Errors
    /// As for [`Charge::grow`].
    pub fn grow_accepted(&mut self, bytes: u64) -> Result<()> {
        let whole = self.bytes.saturating_add(bytes);
        let limit = if whole <= SMALL { self.traffic.limit() } else { self.traffic.limit_of(whole) };
        self.traffic.try_add(bytes, limit)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Counts `bytes` more that can no longer be refused.
    pub fn grow_always(&mut self, bytes: u64) {
        self.traffic.add(bytes);
        self.bytes += bytes;
    }

    /// Gives `bytes` back, or all of the charge if that is less.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.traffic.give_back(bytes);
        self.bytes -= bytes;
    }

    /// Makes `bytes` of the charge, or all of it if that is less, a charge of their own.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { traffic: self.traffic.clone(), bytes }
    }

    /// Counts `bytes` more while `work` runs.
    ///
    /// # Errors
    /// As for [`Charge::grow`]; `work` is not called then.
    pub fn hold<T>(&mut self, bytes: u64, work: impl FnOnce() -> T) -> Result<T> {
        let before = self.bytes;
        self.grow(bytes)?;
        let done = work();
        self.shrink(self.bytes - before);
        Ok(done)
    }

    /// Grows or shrinks the charge to `bytes`.
    ///
    /// # Errors
    /// As for [`Charge::grow`].
    pub fn set(&mut self, bytes: u64) -> Result<()> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.grow(more),
            None => {
                self.shrink(self.bytes - bytes);
                Ok(())
            }
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.traffic.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_counts_until_it_is_dropped() {
        let traffic = Traffic::new(1000);
        let mut one = traffic.charge(300).unwrap();
        let two = traffic.charge(400).unwrap();
        one.shrink(100);
        one.grow(50).unwrap();
        assert_eq!((traffic.used(), one.bytes()), (650, 250));
        one.set(100).unwrap();
        assert_eq!(traffic.used(), 500);
        one.set(300).unwrap();
        one.shrink(1000);
        assert_eq!((traffic.used(), one.bytes()), (400, 0));
        drop(two);
        assert_eq!((traffic.used(), traffic.take_high_water(), traffic.take_high_water()), (0, 700, 0));
        let mut whole = traffic.charge(50).unwrap();
        let part = whole.split(20);
        assert_eq!((whole.bytes(), part.bytes(), traffic.used()), (30, 20, 50));
        let rest = whole.split(100);
        assert_eq!((whole.bytes(), rest.bytes(), traffic.used()), (0, 30, 50));
        drop(part);
        assert_eq!(traffic.used(), 30);
    }

    #[test]
    fn a_refused_charge_counts_nothing_and_says_what_is_full() {
        let traffic = Traffic::new(1 << 30);
        let mut held = traffic.charge(500 << 20).unwrap();
        let error = traffic.charge(100 << 20).unwrap_err();
        assert!(matches!(error, Error::ResourceExhausted(_)));
        for part in
            ["hold 500.0 MiB of the 576.0 MiB", "needs 100.0 MiB more", "fewer", "split", "--request-bytes 1.00 GiB"]
        {
            assert!(error.to_string().contains(part), "{part:?} is missing in {error}");
        }
        assert!(held.grow(100 << 20).is_err());
        assert!(held.set(u64::MAX).is_err());
        assert_eq!((held.bytes(), traffic.used()), (500 << 20, 500 << 20));
        let error = traffic.charge(800 << 20).unwrap_err().to_string();
        assert!(error.contains("needs 800.0 MiB") && error.contains("576.0 MiB of --request-bytes"), "{error}");
    }

    #[test]
    fn what_is_accepted_may_take_what_requests_may_not() {
        let traffic = Traffic::new(800);
        let request = traffic.charge(600).unwrap();
        assert!(traffic.charge(1).is_err());
        let mut tokens = traffic.charge_always(99);
        assert_eq!(traffic.level(), Level::Free);
        assert!(tokens.grow(1).is_err() && tokens.grow_accepted(102).is_err());
        tokens.grow_accepted(1).unwrap();
        assert_eq!(traffic.level(), Level::Tight);
        tokens.grow_always(100);
        assert_eq!(traffic.level(), Level::Full);
        drop(request);
        assert_eq!((traffic.level(), traffic.used()), (Level::Free, 200));
    }

    #[test]
    fn small_requests_come_in_where_large_ones_have_filled_their_part() {
        let traffic = Traffic::new(64 << 20);
        let mut large = traffic.charge(36 << 20).unwrap();
        assert!(large.grow(1).is_err());
        assert!(traffic.charge(SMALL + 1).is_err());
        let mut small = traffic.charge(SMALL).unwrap();
        assert!(small.grow(1).is_err(), "it is large from here on");
        let more: Vec<_> = (0..1000).map_while(|_| traffic.charge(SMALL).ok()).collect();
        assert_eq!((more.len(), traffic.used()), (191, 48 << 20));
    }

    #[test]
    fn threads_never_pass_the_limit_together() {
        let traffic = Traffic::new(4000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let charges: Vec<_> = (0..8).map_while(|_| traffic.charge(250).ok()).collect();
                        assert!(traffic.used() <= traffic.admission_limit());
                        drop(charges);
                    }
                });
            }
        });
        assert_eq!((traffic.used(), traffic.take_high_water() <= 3000), (0, true));
    }
}
