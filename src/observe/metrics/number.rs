//! Counters, gauges and histograms made of atomics: a write is one addition without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn raise(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn lower(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Unit of a histogram's integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Nanoseconds,
    /// Tokens, samples.
    Count,
}

impl Unit {
    /// `value` as readers see it: seconds, or a count.
    pub fn shown(self, value: u64) -> f64 {
        match self {
            Self::Nanoseconds => value as f64 / 1e9,
            Self::Count => value as f64,
        }
    }
}

/// Most bounds of a histogram.
const MOST_BOUNDS: usize = 20;

/// Counts of values below fixed bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    unit: Unit,
    /// Number of values in each bucket: at most the bound of the same index, and above the bound before it. The bucket
    /// after the last bound counts the values above all bounds.
    counts: [AtomicU64; MOST_BOUNDS + 1],
    sum: AtomicU64,
}

impl Histogram {
    pub(super) const fn new(unit: Unit, bounds: &'static [u64]) -> Self {
        assert!(bounds.len() <= MOST_BOUNDS);
        Self { bounds, unit, counts: [const { AtomicU64::new(0) }; MOST_BOUNDS + 1], sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn count(&self, value: usize) {
        self.add(value as u64);
    }

    fn add(&self, value: u64) {
        let bucket = self.bounds.iter().position(|&bound| value <= bound).unwrap_or(self.bounds.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Each bound in the shown unit with the number of values up to it, and the number of all values.
    pub(super) fn cumulative(&self) -> (Vec<(f64, u64)>, u64) {
        let mut total = 0;
        let mut below = Vec::with_capacity(self.bounds.len());
        for (&bound, count) in self.bounds.iter().zip(&self.counts) {
            total += count.load(Ordering::Relaxed);
            below.push((self.unit.shown(bound), total));
        }
        (below, total + self.counts[self.bounds.len()].load(Ordering::Relaxed))
    }

    pub(super) fn sum(&self) -> f64 {
        self.unit.shown(self.sum.load(Ordering::Relaxed))
    }
}

const MS: u64 = 1_000_000;

/// Bounds for the latencies of requests, from a millisecond to ten minutes.
pub(super) const LATENCY: &[u64] = &[
    MS,
    5 * MS,
    10 * MS,
    20 * MS,
    50 * MS,
    100 * MS,
    250 * MS,
    500 * MS,
    750 * MS,
    1_000 * MS,
    2_500 * MS,
    5_000 * MS,
    10_000 * MS,
    20_000 * MS,
    40_000 * MS,
    80_000 * MS,
    160_000 * MS,
    640_000 * MS,
];

/// Bounds for steps and for the time between tokens, from 0.1 ms to ten seconds.
pub(super) const STEP: &[u64] = &[
    MS / 10,
    MS / 4,
    MS / 2,
    MS,
    MS * 5 / 2,
    5 * MS,
    10 * MS,
    25 * MS,
    50 * MS,
    75 * MS,
    100 * MS,
    150 * MS,
    200 * MS,
    300 * MS,
    400 * MS,
    500 * MS,
    1_000 * MS,
    2_500 * MS,
    5_000 * MS,
    10_000 * MS,
];

/// Bounds for pushes, sleeps and wakes, from a millisecond to ten minutes.
pub(super) const ORDER: &[u64] = &[
    MS,
    5 * MS,
    10 * MS,
    25 * MS,
    50 * MS,
    100 * MS,
    250 * MS,
    500 * MS,
    1_000 * MS,
    2_500 * MS,
    5_000 * MS,
    10_000 * MS,
    30_000 * MS,
    60_000 * MS,
    120_000 * MS,
    600_000 * MS,
];

/// Bounds for tokens of prompts, completions and steps.
pub(super) const TOKENS: &[u64] =
    &[1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000];

/// Bounds for samples in a step.
pub(super) const SAMPLES: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fall_below_their_bounds_and_beyond_all() {
        let histogram = Histogram::new(Unit::Nanoseconds, ORDER);
        for ms in [0, 1, 2, 700_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let (below, total) = histogram.cumulative();
        assert_eq!((below[0], below[1], below[15], total), ((0.001, 2), (0.005, 3), (600.0, 3), 4));
        assert_eq!(histogram.sum(), 700.003);
        let histogram = Histogram::new(Unit::Count, SAMPLES);
        [1, 4, 5, 9999].iter().for_each(|&count| histogram.count(count));
        let (below, total) = histogram.cumulative();
        assert_eq!((below[0], below[2], below[3], total, histogram.sum()), ((1.0, 1), (4.0, 2), (8.0, 3), 4, 10009.0));
    }

    #[test]
    fn bounds_ascend() {
        for bounds in [LATENCY, STEP, ORDER, TOKENS, SAMPLES] {
            assert!(bounds.is_sorted_by(|a, b| a < b) && bounds.len() <= MOST_BOUNDS, "{bounds:?}");
        }
    }
}
