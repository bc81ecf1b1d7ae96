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

/// Bounds of a histogram's buckets in its unit, ascending.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Those under our names.
    pub ours: &'static [u64],
    /// Those of vLLM 0.33; empty if vLLM has no such histogram.
    pub vllm: &'static [u64],
}

/// Counts of values below fixed bounds.
#[derive(Debug)]
pub struct Histogram {
    /// All bounds that readers ask for, so that each value is counted once.
    bounds: Box<[u64]>,
    unit: Unit,
    pub(super) shown: Bounds,
    /// Number of values in each bucket: at most the bound of the same index, and above the bound before it. The bucket
    /// after the last bound counts the values above all bounds.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    pub(super) fn new(unit: Unit, shown: Bounds) -> Self {
        Self::with(unit, shown, &[])
    }

    /// A histogram of times that can also estimate quantiles to about a sixth.
    pub(super) fn with_quantiles(shown: Bounds) -> Self {
        const MANTISSAS: [u64; 7] = [100, 150, 200, 300, 400, 500, 700];
        let decades = (3..9).map(|exponent| 10_u64.pow(exponent));
        let fine: Vec<u64> = decades.flat_map(|decade| MANTISSAS.map(|mantissa| mantissa * decade)).collect();
        Self::with(Unit::Nanoseconds, shown, &fine)
    }

    fn with(unit: Unit, shown: Bounds, more: &[u64]) -> Self {
        let mut bounds = [shown.ours, shown.vllm, more].concat();
        bounds.sort_unstable();
        bounds.dedup();
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds: bounds.into(), unit, shown, counts, sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn count(&self, value: usize) {
        self.add(value as u64);
    }

    fn add(&self, value: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Each of these bounds, which are among the histogram's, in the shown unit with the number of values up to it, and
    /// the number of all values.
    pub(super) fn cumulative(&self, shown: &[u64]) -> (Vec<(f64, u64)>, u64) {
        let (mut total, mut below) = (0, Vec::with_capacity(shown.len()));
        let mut counts = self.bounds.iter().zip(&self.counts).peekable();
        for &bound in shown {
            while let Some((_, count)) = counts.next_if(|(upper, _)| **upper <= bound) {
                total += count.load(Ordering::Relaxed);
            }
            below.push((self.unit.shown(bound), total));
        }
        total += counts.map(|(_, count)| count.load(Ordering::Relaxed)).sum::<u64>();
        (below, total + self.counts[self.bounds.len()].load(Ordering::Relaxed))
    }

    /// The buckets that have values: both bounds in the shown unit, and the number of values. The bucket of the values
    /// above all bounds has no upper bound.
    pub fn buckets(&self) -> Vec<(f64, Option<f64>, u64)> {
        let shown = |bound: &u64| self.unit.shown(*bound);
        let uppers = self.bounds.iter().map(|bound| Some(shown(bound))).chain([None]);
        let lowers = [0.0].into_iter().chain(self.bounds.iter().map(shown));
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        lowers
            .zip(uppers)
            .zip(counts)
            .map(|((lower, upper), n)| (lower, upper, n))
            .filter(|bucket| bucket.2 > 0)
            .collect()
    }

    pub(super) fn sum(&self) -> f64 {
        self.unit.shown(self.sum.load(Ordering::Relaxed))
    }
}

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

/// Bounds for the latencies of requests, from a millisecond to ten minutes; vLLM's go to two hours.
pub(super) const LATENCY: Bounds = Bounds {
    ours: &[
        MS,
        5 * MS,
        10 * MS,
        20 * MS,
        50 * MS,
        100 * MS,
        250 * MS,
        500 * MS,
        750 * MS,
        S,
        2_500 * MS,
        5 * S,
        10 * S,
        20 * S,
        40 * S,
        80 * S,
        160 * S,
        640 * S,
    ],
    vllm: &[
        300 * MS,
        500 * MS,
        800 * MS,
        S,
        1_500 * MS,
        2 * S,
        2_500 * MS,
        5 * S,
        10 * S,
        15 * S,
        20 * S,
        30 * S,
        40 * S,
        50 * S,
        60 * S,
        120 * S,
        240 * S,
        480 * S,
        960 * S,
        1_920 * S,
        7_680 * S,
    ],
};

/// Bounds for the time to the first token.
pub(super) const FIRST_TOKEN: Bounds = Bounds {
    ours: LATENCY.ours,
    vllm: &[
        MS,
        5 * MS,
        10 * MS,
        20 * MS,
        40 * MS,
        60 * MS,
        80 * MS,
        100 * MS,
        250 * MS,
        500 * MS,
        750 * MS,
        S,
        2_500 * MS,
        5 * S,
        7_500 * MS,
        10 * S,
        20 * S,
        40 * S,
        80 * S,
        160 * S,
        640 * S,
        2_560 * S,
    ],
};

/// Bounds for steps, from 0.1 ms to ten seconds.
pub(super) const STEP: Bounds = Bounds {
    ours: &[
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
        S,
        2_500 * MS,
        5 * S,
        10 * S,
    ],
    vllm: &[],
};

/// Bounds for the time between tokens.
pub(super) const NEXT_TOKEN: Bounds = Bounds {
    ours: STEP.ours,
    vllm: &[
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
        750 * MS,
        S,
        2_500 * MS,
        5 * S,
        7_500 * MS,
        10 * S,
        20 * S,
        40 * S,
        80 * S,
    ],
};

/// Bounds for pushes, sleeps and wakes, from a millisecond to ten minutes.
pub(super) const ORDER: Bounds = Bounds {
    ours: &[
        MS,
        5 * MS,
        10 * MS,
        25 * MS,
        50 * MS,
        100 * MS,
        250 * MS,
        500 * MS,
        S,
        2_500 * MS,
        5 * S,
        10 * S,
        30 * S,
        60 * S,
        120 * S,
        600 * S,
    ],
    vllm: &[],
};

/// Bounds for tokens of prompts and completions. vLLM's end at the longest context that is served, and no supported
/// model has a longer one than the last.
pub(super) const TOKENS: Bounds = Bounds {
    ours: &[1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000],
    vllm: &[
        1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
        1_000_000,
    ],
};

/// Bounds for tokens of a step.
pub(super) const STEP_TOKENS: Bounds =
    Bounds { ours: TOKENS.ours, vllm: &[1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384] };

/// Bounds for samples in a step.
pub(super) const SAMPLES: Bounds = Bounds { ours: &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048], vllm: &[] };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fall_below_their_bounds_and_beyond_all() {
        let histogram = Histogram::new(Unit::Nanoseconds, ORDER);
        for ms in [0, 1, 2, 700_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let (below, total) = histogram.cumulative(ORDER.ours);
        assert_eq!((below[0], below[1], below[15], total), ((0.001, 2), (0.005, 3), (600.0, 3), 4));
        assert_eq!(histogram.sum(), 700.003);
        let histogram = Histogram::new(Unit::Count, SAMPLES);
        [1, 4, 5, 9999].iter().for_each(|&count| histogram.count(count));
        let (below, total) = histogram.cumulative(SAMPLES.ours);
        assert_eq!((below[0], below[2], below[3], total, histogram.sum()), ((1.0, 1), (4.0, 2), (8.0, 3), 4, 10009.0));
    }

    #[test]
    fn a_value_counts_once_for_all_lists_of_bounds() {
        let histogram = Histogram::with_quantiles(FIRST_TOKEN);
        for ms in [5, 30, 45, 3_000_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let ours = histogram.cumulative(FIRST_TOKEN.ours);
        assert_eq!((ours.0[1], ours.0[3], ours.0[4], ours.1), ((0.005, 1), (0.02, 1), (0.05, 3), 4));
        let vllm = histogram.cumulative(FIRST_TOKEN.vllm);
        assert_eq!((vllm.0[1], vllm.0[4], vllm.0[5], vllm.1), ((0.005, 1), (0.04, 2), (0.06, 3), 4));
        assert_eq!(histogram.cumulative(&FIRST_TOKEN.vllm[..2]), (vllm.0[..2].to_vec(), 4));
        let buckets = histogram.buckets();
        assert_eq!(buckets, [(0.004, Some(0.005), 1), (0.02, Some(0.03), 1), (0.04, Some(0.05), 1), (2560.0, None, 1)]);
    }

    #[test]
    fn bounds_ascend() {
        for Bounds { ours, vllm } in [LATENCY, FIRST_TOKEN, STEP, NEXT_TOKEN, ORDER, TOKENS, STEP_TOKENS, SAMPLES] {
            assert!(ours.is_sorted_by(|a, b| a < b) && vllm.is_sorted_by(|a, b| a < b), "{ours:?} {vllm:?}");
        }
    }
}
