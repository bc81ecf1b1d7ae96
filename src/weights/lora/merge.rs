//! What an adapter does to one parameter: the arithmetic of PEFT's `merge_adapter()` on the CPU, to the bit.
//!
//! The orders of the sums are those of PyTorch 2.15 on x86-64, found by experiment. A product sums in ascending `k` by
//! fused multiply-add, with AVX2 and with AVX-512, up to rank 384; MKL cuts longer sums, and their last bits differ.
//! The norm of DoRA has eight lanes on both.

use half::{bf16, f16};
use rollout_kernels::cpu::math::round_bf16;
use rollout_kernels::cpu::{Isa, Rows, RowsMut, add_low_rank};

use crate::weights::parameters::{Dtype, Slice, TensorData};

/// Rows whose delta is held at once where it cannot be added right away.
const DELTA_ROWS: usize = 16;

/// The change of one parameter: first the whole, then the delta.
#[derive(Debug)]
pub(super) struct Change {
    pub whole: Option<Whole>,
    pub delta: Option<Delta>,
}

/// Values in place of the base's.
#[derive(Debug)]
pub(super) struct Whole {
    /// `[rows, cols]` in the serving precision, or in a lower one.
    pub values: TensorData<'static>,
    pub cols: usize,
}

#[derive(Debug)]
pub(super) enum Delta {
    LowRank(LowRank),
    /// Added to a bias.
    Bias(Vec<f32>),
}

/// `scaling * b a`.
#[derive(Debug)]
pub(super) struct LowRank {
    pub rank: usize,
    pub cols: usize,
    /// `[rank, cols]`
    pub a: Vec<f32>,
    /// `[rows, rank]`
    pub b: Vec<f32>,
    pub scaling: f32,
    /// The precisions that the delta is rounded to, one after the other, before it is added.
    pub roundings: Vec<Dtype>,
    pub magnitude: Option<Magnitude>,
    /// Whether it is of a linear layer that has its matrix to itself.
    pub linear: bool,
}

/// DoRA: each row of `w + delta` is given this length.
#[derive(Debug)]
pub(super) struct Magnitude {
    /// `[rows]`
    pub lengths: Vec<f32>,
    /// To what PyTorch rounds `w + delta` and its norm.
    pub sum: Dtype,
    /// To what it rounds length by norm.
    pub factor: Dtype,
}

impl Change {
    /// Bytes of the values that it holds.
    pub fn bytes(&self) -> u64 {
        let whole = self.whole.as_ref().map_or(0, |whole| whole.values.len() * whole.values.dtype().size());
        let floats = match &self.delta {
            None => 0,
            Some(Delta::Bias(bias)) => bias.len(),
            Some(Delta::LowRank(LowRank { a, b, magnitude, .. })) => {
                a.len() + b.len() + magnitude.as_ref().map_or(0, |magnitude| magnitude.lengths.len())
            }
        };
        (whole + size_of::<f32>() * floats) as u64
    }

    pub fn low_rank(&self) -> Option<&LowRank> {
        match &self.delta {
            Some(Delta::LowRank(low_rank)) => Some(low_rank),
            _ => None,
        }
    }

    pub fn merge(&self, isa: Isa, slice: &Slice, values: &mut [f32]) {
        if slice.is_empty() {
            return;
        }
        if let Some(whole) = &self.whole {
            whole.read(slice, values);
        }
        match &self.delta {
            None => {}
            Some(Delta::LowRank(low_rank)) => low_rank.merge(isa, slice, values),
            Some(Delta::Bias(bias)) => add(values, &bias[slice.rows.clone()]),
        }
    }
}

impl Whole {
    fn read(&self, slice: &Slice, out: &mut [f32]) {
        for (row, out) in slice.rows.clone().zip(out.chunks_exact_mut(slice.cols.len())) {
            let range = row * self.cols + slice.cols.start..row * self.cols + slice.cols.end;
            match &self.values {
                TensorData::F32(values) => out.copy_from_slice(&values[range]),
                TensorData::F16(values) => out.iter_mut().zip(&values[range]).for_each(|(out, x)| *out = x.to_f32()),
                TensorData::Bf16(values) => out.iter_mut().zip(&values[range]).for_each(|(out, x)| *out = x.to_f32()),
            }
        }
    }
}

impl LowRank {
    /// Whether it is all that changes its layer: the output for `x` is that of the base plus `scaling * b (a x)`.
    pub fn is_plain(&self) -> bool {
        self.linear && self.magnitude.is_none()
    }

    fn merge(&self, isa: Isa, slice: &Slice, values: &mut [f32]) {
        let width = slice.cols.len();
        let a = Rows::new(&self.a[slice.cols.start..], self.rank, width, self.cols);
        let b =
            |first: usize, rows: usize| Rows::dense(&self.b[first * self.rank..(first + rows) * self.rank], self.rank);
        if self.roundings.is_empty() && self.magnitude.is_none() {
            let b = b(slice.rows.start, slice.rows.len());
            return add_low_rank(isa, b, a, self.scaling, RowsMut::dense(values, width));
        }
        let mut delta = vec![0.0; DELTA_ROWS.min(slice.rows.len()) * width];
        for (first, values) in slice.rows.clone().step_by(DELTA_ROWS).zip(values.chunks_mut(DELTA_ROWS * width)) {
            let delta = &mut delta[..values.len()];
            // Minus zero is what nothing changes by being added to, not even the sign of a zero.
            delta.fill(-0.0);
            let b = b(first, values.len() / width);
            add_low_rank(isa, b, a, self.scaling, RowsMut::dense(delta, width));
            self.roundings.iter().for_each(|dtype| round(*dtype, delta));
            add(values, delta);
            if let Some(magnitude) = &self.magnitude {
                let lengths = &magnitude.lengths[first..];
                values.chunks_exact_mut(width).zip(lengths).for_each(|(row, length)| magnitude.scale(row, *length));
            }
        }
    }
}

impl Magnitude {
    /// `row`, a whole one, is `w + delta`.
    fn scale(&self, row: &mut [f32], length: f32) {
        round(self.sum, row);
        let mut norm = [norm(row)];
        round(self.sum, &mut norm);
        let mut factor = [length / norm[0]];
        round(self.factor, &mut factor);
        row.iter_mut().for_each(|x| *x *= factor[0]);
    }
}

fn add(values: &mut [f32], delta: &[f32]) {
    values.iter_mut().zip(delta).for_each(|(value, delta)| *value += delta);
}

/// To the nearest of this type, ties to even.
pub(super) fn round(dtype: Dtype, values: &mut [f32]) {
    match dtype {
        Dtype::F32 => {}
        Dtype::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        Dtype::Bf16 => values.iter_mut().for_each(|x| *x = bf16::to_f32(round_bf16(*x))),
    }
}

/// The Euclidean norm with the bits of `torch.linalg.norm(weight, dim=1)`: squares are multiplied, then added, in eight
/// lanes; the lanes are added in order; of what is left, whole fours likewise and the others by fused multiply-add.
fn norm(row: &[f32]) -> f32 {
    let (eights, rest) = row.as_chunks::<8>();
    let mut lanes = [0.0_f32; 8];
    for eight in eights {
        for (lane, x) in lanes.iter_mut().zip(eight) {
            *lane += x * x;
        }
    }
    let sum = lanes.into_iter().reduce(|sum, lane| sum + lane).unwrap_or_default();
    let (fours, rest) = rest.as_chunks::<4>();
    let sum = fours.as_flattened().iter().fold(sum, |sum, x| sum + x * x);
    rest.iter().fold(sum, |sum, x| x.mul_add(*x, sum)).sqrt()
}
