//! Definitions over rows. [`Ops`](crate::Ops) documents each.

use super::storage::{RowMajor, Slots};
use crate::cpu::{Rows, RowsMut};
use crate::step::{AttentionSequence, AttentionShape, RotaryPositions};

fn dot(a: &[f32], b: &[f32]) -> f64 {
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

/// Rotates each head of `x` in place.
pub(crate) fn rope(mut x: RowsMut<'_>, head_dim: usize, positions: RotaryPositions<'_>, cos: &[f32], sin: &[f32]) {
    let half = head_dim / 2;
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
