//! The divergences of two rows of logits.
//!
//! With `d = ln(p / q)` of a token, `KL(p || q)` is the sum of `p (d - 1 + e^-d)`, because `p e^-d = q` and both
//! distributions sum to 1. No term is below 0, so nothing cancels where the rows are nearly equal, and an error of the
//! normalisers, which shifts every `d`, only matters to second order. Where `d` is small, the factor of `p` is a series
//! in `d`; elsewhere the term is `p d - p + q`.

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::{VECTORS, VOCAB_BLOCK, VocabBlock, summarise};
use crate::divergence::Divergences;

/// Up to this `|d|` the series has the precision of float32.
const NEAR: f32 = 0.5;
/// Coefficients of the even and of the odd powers of `(d - 1 + e^-d) / d^2`, the highest first.
const EVEN: [f32; 4] = [1.0 / 40_320.0, 1.0 / 720.0, 1.0 / 24.0, 0.5];
const ODD: [f32; 4] = [1.0 / 362_880.0, 1.0 / 5_040.0, 1.0 / 120.0, 1.0 / 6.0];

/// The divergences of the distributions that two rows of logits have when they are multiplied by `scale`. The bits are
/// the same on every instruction set.
pub fn divergences(isa: Isa, policy: &[f32], reference: &[f32], scale: f32) -> Divergences {
    assert_eq!(policy.len(), reference.len(), "two rows of one vocabulary");
    let (mut maxima, mut sums) = (Vec::new(), Vec::new());
    let (policy_max, policy_total) = summarise(isa, policy, scale, &mut maxima, &mut sums);
    let (reference_max, reference_total) = summarise(isa, reference, scale, &mut maxima, &mut sums);
    let (kl, reverse_kl) = isa.dispatch(SumTerms {
        rows: [policy, reference],
        maxima: [policy_max, reference_max],
        inverse_totals: [policy_total, reference_total].map(|total| (1.0 / total) as f32),
        log_ratio: (reference_total.ln() - policy_total.ln()) as f32,
        scale,
    });
    Divergences::new(kl, reverse_kl)
}

struct SumTerms<'a> {
    /// The policy's and the reference's, as all below.
    rows: [&'a [f32]; 2],
    maxima: [f32; 2],
    inverse_totals: [f32; 2],
    /// The logarithm of the reference's total divided by the policy's.
    log_ratio: f32,
    scale: f32,
}

impl Kernel for SumTerms<'_> {
    type Output = (f64, f64);

    #[inline(always)]
    fn run<L: Lanes>(self) -> (f64, f64) {
        let [(policy, policy_rest), (reference, reference_rest)] =
            [self.rows[0].as_chunks::<VOCAB_BLOCK>(), self.rows[1].as_chunks::<VOCAB_BLOCK>()];
        let mut totals = [[0f64; LANES]; 2];
        for (b, (policy, reference)) in policy.iter().zip(reference).enumerate() {
            let terms = self.terms::<L>(policy, reference);
            for (totals, terms) in totals.iter_mut().zip(terms) {
                totals[b % LANES] += f64::from(sum::<L>(terms));
            }
        }
        if !policy_rest.is_empty() {
            let (mut last_policy, mut last_reference) = ([0.0; VOCAB_BLOCK], [0.0; VOCAB_BLOCK]);
            last_policy[..policy_rest.len()].copy_from_slice(policy_rest);
            last_reference[..reference_rest.len()].copy_from_slice(reference_rest);
            let terms = self.terms::<L>(&last_policy, &last_reference);
            for (totals, mut terms) in totals.iter_mut().zip(terms) {
                for (v, lanes) in terms.iter_mut().enumerate() {
                    let (mut values, left) = (lanes.to_array(), policy_rest.len().saturating_sub(v * LANES));
                    values[left.min(LANES)..].fill(0.0);
                    *lanes = L::from_array(&values);
                }
                totals[policy.len() % LANES] += f64::from(sum::<L>(terms));
            }
        }
        let mut half = LANES / 2;
        while half > 0 {
            for totals in &mut totals {
                for l in 0..half {
                    totals[l] += totals[l + half];
                }
            }
            half /= 2;
        }
        (totals[0][0], totals[1][0])
    }
}

impl SumTerms<'_> {
    /// The terms of `KL(policy || reference)` and of `KL(reference || policy)` of a block's tokens.
    #[inline(always)]
    fn terms<L: Lanes>(&self, policy: &VocabBlock, reference: &VocabBlock) -> [[L; VECTORS]; 2] {
        let scale = L::splat(self.scale);
        let (policy, reference) = (policy.as_chunks::<LANES>().0, reference.as_chunks::<LANES>().0);
        let (mut p, mut q, mut d) = ([L::zero(); VECTORS], [L::zero(); VECTORS], [L::zero(); VECTORS]);
        for v in 0..VECTORS {
            p[v] = L::from_array(&policy[v]).sub(L::splat(self.maxima[0])).mul(scale);
            q[v] = L::from_array(&reference[v]).sub(L::splat(self.maxima[1])).mul(scale);
            d[v] = p[v].sub(q[v]).add(L::splat(self.log_ratio));
        }
        (p, q) = (L::exp_each(p), L::exp_each(q));
        let (mut forward, mut reverse) = (d, d);
        for v in 0..VECTORS {
            let p = p[v].mul(L::splat(self.inverse_totals[0]));
            let q = q[v].mul(L::splat(self.inverse_totals[1]));
            let (d, negative, square) = (d[v], L::zero().sub(d[v]), d[v].mul(d[v]));
            let (mut even, mut odd) = (L::splat(EVEN[0]), L::splat(ODD[0]));
            for i in 1..EVEN.len() {
                even = even.mul_add(square, L::splat(EVEN[i]));
                odd = odd.mul_add(square, L::splat(ODD[i]));
            }
            // The series of d and of -d differ in the sign of the odd powers.
            let near_forward = p.mul(negative.mul_add(odd, even)).mul(square);
            let near_reverse = q.mul(d.mul_add(odd, even)).mul(square);
            let far_forward = p.mul_add(d, q.sub(p));
            let far_reverse = q.mul_add(negative, p.sub(q));
            let (size, negative_size) = (d.max(negative), d.min(negative));
            forward[v] = chosen(near_forward, far_forward, size, negative_size);
            reverse[v] = chosen(near_reverse, far_reverse, size, negative_size);
        }
        [forward, reverse]
    }
}

/// The near term where `|d|` is at most [`NEAR`], else the far one.
#[inline(always)]
fn chosen<L: Lanes>(near: L, far: L, size: L, negative_size: L) -> L {
    near.zero_where_below(negative_size, -NEAR).add(far.zero_where_below(size, NEAR.next_up()))
}

/// The sum of a block's terms: the second half is added to the first until one is left.
#[inline(always)]
fn sum<L: Lanes>(mut terms: [L; VECTORS]) -> f32 {
    let mut half = VECTORS / 2;
    while half > 0 {
        for v in 0..half {
            terms[v] = terms[v].add(terms[v + half]);
        }
        half /= 2;
    }
    terms[0].sum()
}
