use super::super::math;
use super::*;
use crate::divergence::Divergences;

/// Rows of several lengths, each with ties, `-inf` and a wide range. In the long rows the logits become ever lower.
fn rows() -> Vec<Vec<f32>> {
    let mut state = 0x5EED_u64;
    println!("seed {state:#x}");
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    [1, 5, VOCAB_BLOCK - 1, VOCAB_BLOCK, VOCAB_BLOCK + 1, 1000, 4096, 49_152]
        .into_iter()
        .map(|n| {
            let row = (0..n).map(|i| {
                if i % 7 == 3 { f32::NEG_INFINITY } else { (next() * 40.0).round() / 2.0 - 12.0 - (i / 1000) as f32 }
            });
            row.collect()
        })
        .collect()
}

/// The results of [`summarise`].
struct Summary {
    maxima: Vec<f32>,
    sums: Vec<f32>,
    max: f32,
    total: f64,
}

impl Summary {
    fn new(isa: Isa, logits: &[f32], scale: f32) -> Summary {
        let (mut maxima, mut sums) = (vec![1.0], vec![1.0]);
        let (max, total) = summarise(isa, logits, scale, &mut maxima, &mut sums);
        Summary { maxima, sums, max, total }
    }

    fn row<'a>(&'a self, logits: &'a [f32]) -> Row<'a> {
        Row { logits, maxima: &self.maxima, max: self.max }
    }

    fn bits(&self) -> (Vec<u32>, u64) {
        (self.maxima.iter().chain(&self.sums).map(|x| x.to_bits()).collect(), self.total.to_bits())
    }
}

fn scalar() -> Isa {
    Isa::from_name("scalar").expect("always there")
}

/// Bounds that keep all tokens, the tokens up to one among equals, only the highest, and none.
fn bounds(row: &[f32]) -> Vec<LogitBound> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let last = |logit: f32, nth: usize| {
        let ids: Vec<usize> = (0..row.len()).filter(|&i| row[i] == logit).collect();
        LogitBound { logit, id: ids.get(nth).map_or(u32::MAX, |&id| id as u32) }
    };
    vec![LogitBound::NONE, last(0.5, 0), last(-3.0, 2), last(1.0, 40), last(max, 0), last(max.next_up(), 0)]
}

#[test]
fn maxima_and_sums_of_rows_and_blocks_are_the_same_bits_on_every_instruction_set() {
    for row in rows() {
        for scale in [1.0, 0.25, 3.0, 1e4, f32::MAX] {
            let found = Summary::new(Isa::detect(), &row, scale);
            let max = |b: &[f32]| b.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(found.max, max(&row));
            assert_eq!(found.maxima, row.chunks(VOCAB_BLOCK).map(max).collect::<Vec<_>>());
            let exact =
                |b: &[f32]| -> f64 { b.iter().map(|&x| (f64::from(x - found.max) * f64::from(scale)).exp()).sum() };
            let total = exact(&row);
            assert!(
                (found.total / total - 1.0).abs() < 1e-6,
                "{} at {scale}: {}, exact {total}",
                row.len(),
                found.total
            );
            for (sum, block) in found.sums.iter().zip(row.chunks(VOCAB_BLOCK)) {
                assert!((f64::from(*sum) - exact(block)).abs() < 2e-6 * exact(block) + 1e-37, "{sum} at {scale}");
            }
            for isa in Isa::available() {
                assert_eq!(Summary::new(isa, &row, scale).bits(), found.bits(), "{} at {scale}", isa.name());
            }
        }
    }
}

#[test]
fn rows_without_a_distribution_have_defined_maxima_and_sums() {
    let nan = f32::NAN;
    let max = |row: &[f32]| Summary::new(Isa::detect(), row, 1.0).max;
    let total = |row: &[f32]| Summary::new(Isa::detect(), row, 1.0).total;
    assert_eq!(max(&[nan, -3.0, nan]), -3.0);
    assert_eq!(max(&[nan]), f32::NEG_INFINITY);
    assert_eq!((max(&[f32::NEG_INFINITY; 300]), total(&[f32::NEG_INFINITY; 300])), (f32::NEG_INFINITY, 0.0));
    for bad in [nan, f32::INFINITY] {
        for (len, at) in [(1, 0), (300, 0), (300, 150), (300, 299)] {
            for other in [0.0, f32::NEG_INFINITY, -1e30] {
                let mut row = vec![other; len];
                row[at] = bad;
                assert!(total(&row).is_nan(), "{bad} at {at} of {len} among {other}");
            }
        }
    }
}

#[test]
fn sums_of_kept_tokens_are_close_to_float64_and_the_same_bits_on_every_instruction_set() {
    let (mut sums, mut portable) = (Vec::new(), Vec::new());
    for row in rows() {
        for scale in [1.0, 0.25, 3.0] {
            let summary = Summary::new(Isa::detect(), &row, scale);
            let total = sum_exp(Isa::detect(), &summary.row(&row), scale, LogitBound::NONE, &mut sums);
            assert_eq!((total, &sums), (summary.total, &summary.sums), "without a bound");
            for bound in bounds(&row) {
                let kept = |(i, &x): (usize, &f32)| bound.keeps(x, i as u32).then_some(x);
                let exact: f64 = row
                    .iter()
                    .enumerate()
                    .filter_map(kept)
                    .map(|x| (f64::from(x - summary.max) * f64::from(scale)).exp())
                    .sum();
                let total = sum_exp(Isa::detect(), &summary.row(&row), scale, bound, &mut sums);
                assert!((total - exact).abs() <= 1e-6 * exact, "{bound:?} of {}: {total}, exact {exact}", row.len());
                for isa in Isa::available() {
                    assert_eq!(total, sum_exp(isa, &summary.row(&row), scale, bound, &mut portable), "{}", isa.name());
                    assert_eq!(sums, portable, "{}", isa.name());
                }
            }
        }
    }
}

#[test]
fn inverse_cdf_inverts_the_running_sum_of_what_is_kept() {
    let (isa, mut sums) = (Isa::detect(), Vec::new());
    for logits in rows() {
        let summary = Summary::new(isa, &logits, 0.5);
        let row = summary.row(&logits);
        for bound in bounds(&logits) {
            let total = sum_exp(isa, &row, 0.5, bound, &mut sums);
            if total == 0.0 {
                continue;
            }
            for i in 0..=200 {
                let target = (f64::from(i) / 200.0 * total).min(total.next_down());
                let token = inverse_cdf(isa, &row, 0.5, bound, &sums, target);
                let weight = |i: usize| match bound.keeps(logits[i], i as u32) {
                    true => f64::from(math::exp((logits[i] - row.max) * 0.5)),
                    false => 0.0,
                };
                let before: f64 = (0..token).map(weight).sum();
                let tolerance = total * 1e-6;
                assert!(weight(token) > 0.0);
                assert!(before <= target + tolerance && target < before + weight(token) + tolerance);
                assert_eq!(token, inverse_cdf(scalar(), &row, 0.5, bound, &sums, target));
            }
        }
    }
}

#[test]
fn candidates_are_all_tokens_at_or_above_the_floor() {
    let mut out = Vec::new();
    for logits in rows() {
        let summary = Summary::new(Isa::detect(), &logits, 1.0);
        let max = summary.max;
        for floor in [f32::NEG_INFINITY, -12.0, 0.5, max, max.next_up()] {
            let naive: Vec<Candidate> = (0..logits.len())
                .filter(|&i| logits[i] >= floor)
                .map(|i| Candidate { logit: logits[i], weight: math::exp((logits[i] - max) * 2.0), id: i as u32 })
                .collect();
            for isa in Isa::available() {
                candidates(isa, &summary.row(&logits), floor, 2.0, &mut out);
                assert_eq!(out, naive, "{}", isa.name());
            }
        }
    }
    let row = [f32::NAN, 1.0];
    candidates(Isa::detect(), &Summary::new(Isa::detect(), &row, 1.0).row(&row), f32::NEG_INFINITY, 1.0, &mut out);
    assert_eq!(out.iter().map(|c| c.id).collect::<Vec<_>>(), [1]);
}

#[test]
fn bins_descend_with_the_logits_and_their_measures_are_those_of_their_tokens() {
    let mut out = Vec::new();
    for logits in rows() {
        let summary = Summary::new(Isa::detect(), &logits, 1.0);
        let row = summary.row(&logits);
        for depth in [0.5, 8.0, 100.0, f32::MIN_POSITIVE, f32::INFINITY] {
            let bins = Bins::new(row.max, depth);
            let masses = histogram(Isa::detect(), &row, bins, Measure::Mass(0.5));
            let counts = histogram(Isa::detect(), &row, bins, Measure::Count);
            let (mut lowest, mut tokens) = (f32::INFINITY, 0);
            for bin in (0..BINS).rev() {
                candidates_of_bin(Isa::detect(), &row, bins, bin, 0.5, &mut out);
                assert!(out.iter().all(|c| c.logit < lowest), "bin {bin} has no logit of the bins above");
                lowest = out.iter().map(|c| c.logit).fold(lowest, f32::min);
                tokens += out.len();
                let mass: f64 = out.iter().map(|c| f64::from(c.weight)).sum();
                if bin > 0 {
                    assert!((masses[bin] - mass).abs() <= 1e-12 * mass, "bin {bin}: {}, exact {mass}", masses[bin]);
                    assert_eq!(counts[bin], out.len() as f64, "bin {bin}");
                }
            }
            assert_eq!(tokens, logits.len(), "every token is in one bin");
            for isa in Isa::available() {
                assert_eq!(histogram(isa, &row, bins, Measure::Mass(0.5)), masses, "{}", isa.name());
                assert_eq!(histogram(isa, &row, bins, Measure::Count), counts, "{}", isa.name());
            }
        }
    }
}

/// Both divergences in float64.
fn exact_divergences(policy: &[f32], reference: &[f32], scale: f32) -> [f64; 2] {
    let logs = |row: &[f32]| {
        let scaled: Vec<f64> = row.iter().map(|x| f64::from(*x) * f64::from(scale)).collect();
        let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        scaled.into_iter().map(|x| x - max - total).collect::<Vec<_>>()
    };
    let (p, q) = (logs(policy), logs(reference));
    let kl = |p: &[f64], q: &[f64]| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum();
    [kl(&p, &q), kl(&q, &p)]
}

#[test]
fn divergences_are_close_to_float64_also_where_they_are_tiny_and_the_same_bits_on_every_instruction_set() {
    let mut state = 0xD1FF_u64;
    println!("seed {state:#x}");
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    for vocab in [1, 5, VOCAB_BLOCK - 1, VOCAB_BLOCK, VOCAB_BLOCK + 1, 1000, 49_152] {
        let policy: Vec<f32> = (0..vocab).map(|_| next() * 20.0).collect();
        for distance in [0.0, 1e-3, 0.03, 1.0, 4.0, 30.0] {
            let reference: Vec<f32> = policy.iter().map(|x| x + next() * distance + 3.0).collect();
            for scale in [1.0, 0.25, 2.0] {
                let found = divergences(Isa::detect(), &policy, &reference, scale);
                let exact = exact_divergences(&policy, &reference, scale);
                for (found, exact) in [found.kl, found.reverse_kl].into_iter().zip(exact) {
                    // Logits of up to 20 are rounded to float32. Rounding moves the divergence by at most the total
                    // variation distance times the rounding error, and Pinsker's inequality bounds that distance.
                    let rounding = f64::from(20.0 * scale * f32::EPSILON);
                    let distance_bound = (2.0 * exact.max(0.0)).sqrt();
                    let bound = 4e-6 * exact.abs() + rounding * distance_bound + rounding * rounding;
                    let error = (f64::from(found) - exact).abs();
                    assert!(error <= bound, "{vocab} at {distance}, {scale}: {found}, exact {exact}");
                    assert!(found >= 0.0);
                }
                for isa in Isa::available() {
                    let other = divergences(isa, &policy, &reference, scale);
                    let bits = |d: Divergences| (d.kl.to_bits(), d.reverse_kl.to_bits());
                    assert_eq!(bits(other), bits(found), "{}", isa.name());
                }
            }
        }
        let itself = divergences(Isa::detect(), &policy, &policy, 1.0);
        assert_eq!(itself, Divergences { kl: 0.0, reverse_kl: 0.0 });
    }
}

#[test]
fn divergences_of_rows_with_a_logit_that_is_not_finite_are_not_numbers() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (vocab, at) in [(1, 0), (300, 0), (300, 150), (300, 299)] {
            let (good, mut broken) = (vec![0.5; vocab], vec![0.25; vocab]);
            broken[at] = bad;
            for (policy, reference) in [(&good, &broken), (&broken, &good), (&broken, &broken)] {
                for isa in Isa::available() {
                    let found = divergences(isa, policy, reference, 1.0);
                    assert!(found.kl.is_nan() && found.reverse_kl.is_nan(), "{bad} at {at} of {vocab}: {found:?}");
                }
            }
        }
    }
}
