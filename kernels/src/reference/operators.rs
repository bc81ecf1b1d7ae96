//! Definitions over rows. [`Ops`](crate::Ops) documents each.

use super::storage::{RowMajor, Slots};
use crate::cpu::{Rows, RowsMut};
use crate::patches::Patches;
use crate::rotary::RotaryPositions;
use crate::step::{AttentionSequence, AttentionShape};

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// `out = x wᵀ + bias`.
pub(crate) fn linear(x: Rows<'_>, w: &RowMajor, bias: Option<&[f32]>, mut out: RowsMut<'_>) {
    for i in 0..x.rows() {
        for (j, out) in out.row_mut(i).iter_mut().enumerate() {
            *out = (dot(x.row(i), w.row(j)) + bias.map_or(0.0, |bias| f64::from(bias[j]))) as f32;
        }
    }
}

/// The normalised values of patches, one patch for each row.
pub(crate) fn patches(patches: &Patches<'_>, mut out: RowsMut<'_>) {
    let Patches { rgb, width, side, frames, mean, std, corners } = *patches;
    for (i, [row, column]) in corners.iter().enumerate() {
        let order = (0..3).flat_map(|channel| (0..frames * side * side).map(move |at| (channel, at % (side * side))));
        for (out, (channel, at)) in out.row_mut(i).iter_mut().zip(order) {
            let (y, x) = (*row as usize + at / side, *column as usize + at % side);
            *out = (f32::from(rgb[3 * (y * width + x) + channel]) - mean[channel]) / std[channel];
        }
    }
}

/// `out = silu(left half of gate_up) * right half`.
pub(crate) fn silu_mul(gate_up: Rows<'_>, mut out: RowsMut<'_>) {
    for i in 0..gate_up.rows() {
        let (gate, up) = gate_up.row(i).split_at(out.width());
        for (out, (gate, up)) in out.row_mut(i).iter_mut().zip(gate.iter().zip(up)) {
            let gate = f64::from(*gate);
            *out = (gate / (1.0 + (-gate).exp()) * f64::from(*up)) as f32;
        }
    }
}

/// `x = 0.5 * x * (1 + erf(x / sqrt(2)))`.
pub(crate) fn gelu(mut x: RowsMut<'_>) {
    for i in 0..x.rows() {
        for x in x.row_mut(i) {
            let wide = f64::from(*x);
            // An infinite value times an erfc of 0 would be NaN.
            *x =
                if x.is_infinite() { x.max(0.0) } else { (0.5 * wide * erfc(-wide / std::f64::consts::SQRT_2)) as f32 };
        }
    }
}

/// `1 - erf(x)`, with the precision of float64 also where erf is nearly 1.
fn erfc(x: f64) -> f64 {
    use std::f64::consts::FRAC_2_SQRT_PI;
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        // erf(x) = 2 / sqrt(pi) * e^(-x²) * (x + x³ 2/3 + x⁵ 2²/(3 · 5) + …), without terms below 0.
        let terms = std::iter::successors(Some((1.0, x)), |(n, term)| Some((n + 2.0, term * 2.0 * x * x / (n + 2.0))));
        return 1.0 - FRAC_2_SQRT_PI * (-x * x).exp() * terms.take(60).map(|(_, term)| term).sum::<f64>();
    }
    // The continued fraction x + (1/2) / (x + (2/2) / (x + (3/2) / (x + …))).
    let fraction = (1..=100).rev().fold(x, |fraction, i| x + f64::from(i) / 2.0 / fraction);
    0.5 * FRAC_2_SQRT_PI * (-x * x).exp() / fraction
}

fn normalise(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter_mut().zip(weight).for_each(|(x, weight)| *x = (f64::from(*x) * scale * f64::from(*weight)) as f32);
}

/// `out = x / rms(x) * weight` by row.
pub(crate) fn rms_norm(x: Rows<'_>, weight: &[f32], eps: f32, mut out: RowsMut<'_>) {
    for i in 0..x.rows() {
        out.row_mut(i).copy_from_slice(x.row(i));
        normalise(out.row_mut(i), weight, eps);
    }
}

/// `residual += x (+ bias)`, then `out = rms_norm(residual)`.
pub(crate) fn add_rms_norm(
    mut residual: RowsMut<'_>,
    x: Rows<'_>,
    bias: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    mut out: RowsMut<'_>,
) {
    for i in 0..x.rows() {
        for (j, residual) in residual.row_mut(i).iter_mut().enumerate() {
            *residual += x.row(i)[j] + bias.map_or(0.0, |bias| bias[j]);
        }
        out.row_mut(i).copy_from_slice(residual.row_mut(i));
        normalise(out.row_mut(i), weight, eps);
    }
}

/// Normalises each head of `x` in place.
pub(crate) fn head_rms_norm(mut x: RowsMut<'_>, weight: &[f32], eps: f32) {
    for i in 0..x.rows() {
        x.row_mut(i).chunks_exact_mut(weight.len()).for_each(|head| normalise(head, weight, eps));
    }
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` by row.
pub(crate) fn layer_norm(x: Rows<'_>, weight: &[f32], bias: &[f32], eps: f32, mut out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (x.rows(), x.width()), "rows and width of the output");
    assert_eq!((weight.len(), bias.len()), (x.width(), x.width()), "lengths of weight and bias");
    for i in 0..x.rows() {
        let row: Vec<f64> = x.row(i).iter().copied().map(f64::from).collect();
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        for (j, out) in out.row_mut(i).iter_mut().enumerate() {
            *out = ((row[j] - mean) * scale * f64::from(weight[j]) + f64::from(bias[j])) as f32;
        }
    }
}

/// `out += scale * x`, with one factor for each column.
pub(crate) fn add_scaled(x: Rows<'_>, scale: &[f32], mut out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (x.rows(), x.width()), "rows and widths that are added");
    assert_eq!(scale.len(), x.width(), "length of the scale");
    for i in 0..x.rows() {
        for (j, out) in out.row_mut(i).iter_mut().enumerate() {
            *out = (f64::from(*out) + f64::from(scale[j]) * f64::from(x.row(i)[j])) as f32;
        }
    }
}

/// Rotates each head of `x` in place.
pub(crate) fn rope(
    mut x: RowsMut<'_>,
    head_dim: usize,
    rotary_dim: usize,
    positions: RotaryPositions<'_>,
    cos: &[f32],
    sin: &[f32],
) {
    let half = rotary_dim / 2;
    for i in 0..x.rows() {
        for head in x.row_mut(i).chunks_exact_mut(head_dim) {
            for j in 0..half {
                let angle = positions.position(i, j) * half + j;
                let (cos, sin) = (f64::from(cos[angle]), f64::from(sin[angle]));
                let (a, b) = (f64::from(head[j]), f64::from(head[half + j]));
                (head[j], head[half + j]) = ((a * cos - b * sin) as f32, (b * cos + a * sin) as f32);
            }
        }
    }
}

/// `out[row] = softmax(scale * q[row] · K) V` per head; see [`Ops::paged_attention`](crate::Ops::paged_attention).
pub(crate) fn attention(
    q: Rows<'_>,
    shape: &AttentionShape,
    sequences: &[AttentionSequence<'_>],
    cache: &Slots,
    mut out: RowsMut<'_>,
) {
    let layout = cache.layout();
    let group = shape.heads / layout.kv_heads;
    for s in sequences {
        let slot = |t: usize| s.block_table[t / layout.block_size] as usize * layout.block_size + t % layout.block_size;
        for row in 0..s.rows {
            let end = s.end_of_row(row);
            let first = shape.sliding_window.map_or(0, |window| end.saturating_sub(window));
            for head in 0..shape.heads {
                let columns = head * layout.head_dim..(head + 1) * layout.head_dim;
                let q = &q.row(s.first_row + row)[columns.clone()];
                let score = |t: usize| f64::from(shape.scale) * dot(q, cache.head(slot(t), head / group).0);
                let scores: Vec<f64> = (first..end).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (d, out) in out.row_mut(s.first_row + row)[columns].iter_mut().enumerate() {
                    let value = |t: usize| f64::from(cache.head(slot(t), head / group).1[d]);
                    *out =
                        ((first..end).zip(&weights).map(|(t, weight)| weight * value(t)).sum::<f64>() / total) as f32;
                }
            }
        }
    }
}
