//! Definitions of the operators of mixture-of-experts layers. [`Ops`](crate::Ops) documents each.

use std::cmp::Ordering;
use std::ops::Range;

use super::operators::{dot, silu_mul};
use super::storage::RowMajor;
use crate::cpu::{Rows, RowsMut};
use crate::host::{ELSEWHERE, HostRouter, HostRouting};
use crate::routing_shape::{NOT_FORCED, RoutingShape};

/// Added to the sum by which sigmoids are normalised, as in transformers.
const SIGMOID_EPS: f64 = 1e-20;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The larger first; -0 is 0.
fn descending(a: f64, b: f64) -> Ordering {
    (b + 0.0).total_cmp(&(a + 0.0))
}

/// Writes the experts of each row of `x` and their weights to `routing`.
pub(crate) fn route(
    x: Rows<'_>,
    gate: &RowMajor,
    router: &HostRouter<'_>,
    forced: Option<&[u16]>,
    routing: &mut HostRouting,
) {
    let top_k = router.top_k;
    let entries = routing.experts.chunks_mut(top_k).zip(routing.weights.chunks_mut(top_k));
    for (i, (experts, weights)) in entries.take(x.rows()).enumerate() {
        let logits: Vec<f64> = (0..gate.rows()).map(|expert| dot(x.row(i), gate.row(expert))).collect();
        let forced = forced.map(|forced| &forced[i * top_k..(i + 1) * top_k]).filter(|row| row[0] != NOT_FORCED);
        let is_finite = logits.iter().all(|logit| (*logit as f32).is_finite());
        let chosen = match forced {
            Some(forced) => forced.to_vec(),
            None if is_finite => highest(&logits, router),
            None => (0..top_k as u16).collect(),
        };
        let mut weighed = weigh(&logits, router, &chosen);
        if is_finite {
            weighed.sort_by(|a, b| descending(a.1, b.1).then(a.0.cmp(&b.0)));
        }
        for (i, (expert, weight)) in weighed.into_iter().enumerate() {
            (experts[i], weights[i]) = (expert, if is_finite { weight as f32 } else { f32::NAN });
        }
    }
}

/// The experts with the highest scores.
fn highest(logits: &[f64], router: &HostRouter<'_>) -> Vec<u16> {
    let score = |expert: u16| match router.bias {
        None => logits[usize::from(expert)],
        Some(bias) => sigmoid(logits[usize::from(expert)]) + f64::from(bias[usize::from(expert)]),
    };
    let mut experts: Vec<u16> = (0..logits.len() as u16).collect();
    experts.sort_by(|a, b| descending(score(*a), score(*b)).then(a.cmp(b)));
    experts.truncate(router.top_k);
    experts
}

/// The chosen experts with their weights.
fn weigh(logits: &[f64], router: &HostRouter<'_>, chosen: &[u16]) -> Vec<(u16, f64)> {
    let logits_of_chosen = || chosen.iter().map(|expert| logits[usize::from(*expert)]);
    let largest = logits_of_chosen().fold(f64::NEG_INFINITY, f64::max);
    let is_sigmoid = router.bias.is_some();
    let value = |logit: f64| if is_sigmoid { sigmoid(logit) } else { (logit - largest).exp() };
    let divisor = match (router.normalise, is_sigmoid) {
        (true, false) => logits_of_chosen().map(value).sum(),
        (true, true) => logits_of_chosen().map(value).sum::<f64>() + SIGMOID_EPS,
        (false, false) => logits.iter().copied().map(value).sum(),
        (false, true) => 1.0,
    };
    let weights = logits_of_chosen().map(|logit| value(logit) / divisor * f64::from(router.scale));
    chosen.iter().copied().zip(weights).collect()
}

/// The product of each pair's row and its expert's rows of `w`, of which each expert has `out.width()`. `input` is the
/// row of `x` that a pair takes.
pub(crate) fn expert_linear(
    x: Rows<'_>,
    input: impl Fn(usize) -> usize,
    w: &RowMajor,
    starts: &[u32],
    mut out: RowsMut<'_>,
) {
    let (n, experts) = (out.width(), starts.len() - 1);
    for expert in 0..experts {
        for pair in starts[expert] as usize..starts[expert + 1] as usize {
            for (j, out) in out.row_mut(pair).iter_mut().enumerate() {
                *out = dot(x.row(input(pair)), w.row(expert * n + j)) as f32;
            }
        }
    }
}

/// `silu(left half) * right half` of the products of each pair.
pub(crate) fn expert_linear_silu_mul(x: Rows<'_>, w: &RowMajor, routing: &HostRouting, mut out: RowsMut<'_>) {
    let (width, pairs) = (out.width(), routing.pairs());
    let mut gate_up = vec![0.0; pairs.len() * 2 * width];
    if pairs.is_empty() {
        return;
    }
    let products = RowsMut::dense(&mut gate_up, 2 * width);
    expert_linear(x, |pair| pairs[pair] as usize, w, &routing.starts, products);
    for (pair, gate_up) in gate_up.chunks_exact(2 * width).enumerate() {
        silu_mul(Rows::dense(gate_up, 2 * width), RowsMut::dense(out.row_mut(pair), width));
    }
}

/// `out[row]` = the weighted sum of the rows of `expert_out` of a row's pairs, for grouped rows from `first` on.
pub(crate) fn combine(
    expert_out: Rows<'_>,
    routing: &HostRouting,
    shape: &RoutingShape,
    rows: Range<usize>,
    mut out: RowsMut<'_>,
) {
    let top_k = shape.top_k;
    for (i, row) in rows.enumerate() {
        let weights = &routing.weights[row * top_k..(row + 1) * top_k];
        let places = routing.places[i * top_k..(i + 1) * top_k].iter().zip(weights);
        let own: Vec<_> = places.filter(|(place, _)| **place != ELSEWHERE).collect();
        for (column, out) in out.row_mut(row).iter_mut().enumerate() {
            let term = |(place, weight): &(&u32, &f32)| {
                f64::from(**weight) * f64::from(expert_out.row(**place as usize)[column])
            };
            *out = own.iter().map(term).sum::<f64>() as f32;
        }
    }
}

/// `out += sigmoid(gates) * shared`, with one gate for each row.
pub(crate) fn add_gated(gates: Rows<'_>, shared: Rows<'_>, mut out: RowsMut<'_>) {
    for i in 0..gates.rows() {
        let weight = sigmoid(f64::from(gates.row(i)[0]));
        for (out, shared) in out.row_mut(i).iter_mut().zip(shared.row(i)) {
            *out = (f64::from(*out) + weight * f64::from(*shared)) as f32;
        }
    }
}
