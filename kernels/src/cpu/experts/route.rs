//! The router: which experts a row takes, from its logits, and with which weights.

use super::super::isa::Kernel;
use super::super::lanes::{LANES, Lanes};
use super::super::linear::linear_unrounded;
use super::super::math::exp;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::rows::{Rows, RowsMut, SharedSlice};
use crate::host::{HostRouter, HostRouting};
use crate::routing_shape::NOT_FORCED;

/// Added to the sum by which sigmoids are normalised, as in transformers.
const SIGMOID_EPS: f32 = 1e-20;

/// Writes the experts of each row of `x` and their weights to `routing`; see [`Ops::route`](crate::Ops::route).
/// `logits` `[rows, experts]` is left unspecified.
///
/// # Panics
/// If shapes do not agree.
pub fn route(
    cpu: &Cpu,
    x: Rows<'_>,
    gate: &PackedMatrix,
    router: &HostRouter<'_>,
    forced: Option<&[u16]>,
    mut logits: RowsMut<'_>,
    routing: &mut HostRouting,
) {
    let (rows, count, top_k) = (x.rows(), gate.n(), router.top_k);
    assert_eq!((logits.rows(), logits.width()), (rows, count), "rows and width of the logits");
    assert!((1..=count).contains(&top_k), "{top_k} of {count} experts");
    assert!(router.bias.is_none_or(|bias| bias.len() == count), "length of the bias");
    linear_unrounded(cpu, x, gate, logits.reborrow());
    let HostRouting { experts, weights, .. } = routing;
    let (logits, experts, weights) = (logits.share(), SharedSlice::new(experts), SharedSlice::new(weights));
    cpu.for_ranges(rows, 4 * count, |from, to| {
        for row in from..to {
            // SAFETY: each row is in one range.
            let (logits, experts, weights) =
                unsafe { (logits.row(row), experts.part(row * top_k, top_k), weights.part(row * top_k, top_k)) };
            let forced = forced.map(|forced| &forced[row * top_k..][..top_k]);
            let forced = forced.filter(|experts| experts[0] != NOT_FORCED);
            cpu.isa().dispatch(RouteRow { router, forced, logits, experts, weights });
        }
    });
}

/// Chooses the experts of one row and weighs them.
struct RouteRow<'a> {
    router: &'a HostRouter<'a>,
    forced: Option<&'a [u16]>,
    logits: &'a mut [f32],
    experts: &'a mut [u16],
    weights: &'a mut [f32],
}

impl Kernel for RouteRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { router, forced, logits, experts, weights } = self;
        let is_finite = are_finite::<L>(logits);
        if router.bias.is_some() {
            sigmoids::<L>(logits);
        }
        match forced {
            Some(forced) => experts.copy_from_slice(forced),
            None if is_finite => choose(logits, router.bias, experts, weights),
            None => experts.iter_mut().zip(0..).for_each(|(to, expert)| *to = expert),
        }
        if !is_finite {
            weights.fill(f32::NAN);
            return;
        }
        for (weight, expert) in weights.iter_mut().zip(&*experts) {
            *weight = logits[usize::from(*expert)];
        }
        let divisor = match router.bias {
            None => softmax::<L>(logits, router.normalise, experts, weights),
            Some(_) => {
                sort(experts, weights);
                if router.normalise { weights.iter().sum::<f32>() + SIGMOID_EPS } else { 1.0 }
            }
        };
        weights.iter_mut().for_each(|weight| *weight = *weight / divisor * router.scale);
    }
}

/// Replaces the logits of the chosen experts by the powers of e, sorted, and returns what these are to be divided by.
#[inline(always)]
fn softmax<L: Lanes>(logits: &[f32], normalise: bool, experts: &mut [u16], weights: &mut [f32]) -> f32 {
    // Powers relative to the largest of those that are divided are never all 0.
    let most = |values: &[f32]| values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = if normalise { most(weights) } else { most(logits) };
    weights.iter_mut().for_each(|weight| *weight = exp(*weight - largest));
    sort(experts, weights);
    if normalise { weights.iter().sum() } else { sum_of_powers::<L>(logits, largest) }
}

/// Writes the experts with the highest scores, of equal scores that with the lower number, and the scores.
#[inline(always)]
fn choose(values: &[f32], bias: Option<&[f32]>, experts: &mut [u16], scores: &mut [f32]) {
    let top_k = experts.len();
    for (expert, value) in values.iter().enumerate() {
        let score = bias.map_or(*value, |bias| value + bias[expert]);
        let count = expert.min(top_k);
        if count == top_k && score <= scores[top_k - 1] {
            continue;
        }
        let mut place = count.min(top_k - 1);
        while place > 0 && score > scores[place - 1] {
            (scores[place], experts[place]) = (scores[place - 1], experts[place - 1]);
            place -= 1;
        }
        (scores[place], experts[place]) = (score, expert as u16);
    }
}

/// Sorts experts by descending weight, those of equal weights by number.
#[inline(always)]
fn sort(experts: &mut [u16], weights: &mut [f32]) {
    for i in 1..experts.len() {
        let mut at = i;
        while at > 0
            && (weights[at] > weights[at - 1] || weights[at] == weights[at - 1] && experts[at] < experts[at - 1])
        {
            weights.swap(at, at - 1);
            experts.swap(at, at - 1);
            at -= 1;
        }
    }
}

/// 16 values from a row's first on, with `padding` behind the last.
#[inline(always)]
fn lanes_of<L: Lanes>(values: &[f32], padding: f32) -> L {
    match values.first_chunk::<LANES>() {
        Some(values) => L::from_array(values),
        None => {
            let mut padded = [padding; LANES];
            padded[..values.len()].copy_from_slice(values);
            L::from_array(&padded)
        }
    }
}

#[inline(always)]
fn are_finite<L: Lanes>(values: &[f32]) -> bool {
    let mut zeros = L::zero();
    for values in values.chunks(LANES) {
        let values = lanes_of::<L>(values, 0.0);
        zeros = zeros.add(values.sub(values)); // NaN where a value is not finite
    }
    zeros.sum() == 0.0
}

/// Replaces each value by its sigmoid.
#[inline(always)]
fn sigmoids<L: Lanes>(values: &mut [f32]) {
    for values in values.chunks_mut(LANES) {
        let sigmoids = sigmoid(lanes_of::<L>(values, 0.0)).to_array();
        values.copy_from_slice(&sigmoids[..values.len()]);
    }
}

#[inline(always)]
pub(super) fn sigmoid<L: Lanes>(x: L) -> L {
    L::splat(1.0).div(L::splat(1.0).add(L::zero().sub(x).exp()))
}

/// The sum of `e^(value - largest)`.
#[inline(always)]
fn sum_of_powers<L: Lanes>(values: &[f32], largest: f32) -> f32 {
    let mut sum = L::zero();
    for values in values.chunks(LANES) {
        sum = sum.add(lanes_of::<L>(values, f32::NEG_INFINITY).sub(L::splat(largest)).exp());
    }
    sum.sum()
}
