//! Merges adapters into weights with the arithmetic of PEFT's `merge_adapter()` on the CPU, bit by bit.
//!
//! The orders of the sums are those of PyTorch 2.15 on x86-64, found by experiment. A matrix product sums in ascending
//! `k` by fused multiply-add, with AVX2 and with AVX-512, up to rank 384; MKL splits longer sums, and their last bits
//! differ. The norm of DoRA has eight lanes with both instruction sets.

use std::ops::Range;

use candle_core::Result;
use half::{bf16, f16};

use super::isa::Isa;
use super::low_rank::add_low_rank;
use super::math::round_bf16;
use super::packed::PackedMatrix;
use super::pool::Cpu;
use super::rows::{Rows, RowsMut};
use crate::merge::{LoraDelta, LowRank, Magnitude, Merge, MergeBase, ReadValues, Replacement, WeightChange};
use crate::tensor::with_f32;
use crate::values::Dtype;

/// Rows of which the delta is held at once, where it cannot be added to the base directly.
const DELTA_ROWS: usize = 16;

/// Writes merged rows to `w`, from row `first_row` on. All threads merge some rows at a time.
pub(super) fn merge_rows(cpu: &Cpu, w: &mut PackedMatrix, first_row: usize, merge: &Merge<'_>) -> Result<()> {
    match &merge.base {
        MergeBase::Read(read) => fill(cpu, w, first_row, merge, *read),
        MergeBase::Matrix(base) => {
            assert!(!merge.goes_by_whole_rows(), "a merge that needs whole rows has a part of them");
            let base: &PackedMatrix = base.storage();
            let read = |rows: Range<usize>, _: Range<usize>, values: &mut [f32]| {
                base.read_f32(rows.start - merge.rows.start, values);
            };
            fill(cpu, w, first_row, merge, &read);
        }
        MergeBase::WholeRows(base) => with_f32(base, |base| {
            let read = |rows: Range<usize>, columns: Range<usize>, values: &mut [f32]| {
                let base = base.chunks_exact(merge.width).skip(rows.start - merge.rows.start);
                copy_columns(base, columns, values);
            };
            fill(cpu, w, first_row, merge, &read);
        })?,
    }
    Ok(())
}

/// Writes merged rows to `w`, from row `first_row` on; `read` gives the values of the base.
fn fill(cpu: &Cpu, w: &mut PackedMatrix, first_row: usize, merge: &Merge<'_>, read: &ReadValues<'_>) {
    w.fill_rows(cpu.pool(), first_row..first_row + merge.rows.len(), &|rows, values| {
        let start = merge.rows.start + rows.start - first_row;
        merge.values(cpu.isa(), start..start + rows.len(), read, values);
    });
}

impl Merge<'_> {
    /// Computes the merged values of some rows of the whole weight, in the columns that the matrix has, row-major
    /// float32 and not yet rounded; `read` gives those of the base. One thread.
    pub(crate) fn values(&self, isa: Isa, rows: Range<usize>, read: &ReadValues<'_>, out: &mut [f32]) {
        let merged = |columns: Range<usize>, values: &mut [f32]| {
            read(rows.clone(), columns.clone(), values);
            self.change.apply(isa, rows.clone(), columns, values);
        };
        if !self.goes_by_whole_rows() {
            return merged(self.columns.clone(), out);
        }
        let mut whole = vec![0.0; rows.len() * self.width];
        merged(0..self.width, &mut whole);
        copy_columns(whole.chunks_exact(self.width), self.columns.clone(), out);
    }
}

/// Copies `columns` of each row to `out`, whose rows have just these columns.
fn copy_columns<'a>(rows: impl Iterator<Item = &'a [f32]>, columns: Range<usize>, out: &mut [f32]) {
    for (to, from) in out.chunks_exact_mut(columns.len()).zip(rows) {
        to.copy_from_slice(&from[columns.clone()]);
    }
}

impl WeightChange {
    /// Turns the base's values of these rows and columns of the weight (row-major float32, of serving precision) into
    /// the changed values, in float32 and not yet rounded. It runs on one thread, and the bits of each element depend
    /// on nothing but the values of the base and the adapter in its row and column.
    pub(super) fn apply(&self, isa: Isa, rows: Range<usize>, columns: Range<usize>, values: &mut [f32]) {
        assert_eq!(values.len(), rows.len() * columns.len(), "values of the rows");
        if values.is_empty() {
            return;
        }
        if let Some(replacement) = &self.replacement {
            replacement.copy(rows.clone(), columns.clone(), values);
        }
        match &self.delta {
            None => {}
            Some(LoraDelta::LowRank(low_rank)) => low_rank.add(isa, rows, columns, values),
            Some(LoraDelta::Bias(bias)) => add(values, &bias[rows]),
        }
    }
}

impl Replacement {
    fn copy(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            self.values.read_f32(row * self.cols + columns.start, out);
        }
    }
}

impl LowRank {
    fn add(&self, isa: Isa, rows: Range<usize>, columns: Range<usize>, values: &mut [f32]) {
        let width = columns.len();
        let a = self.a.part_f32(columns.start..self.a.len());
        let a = Rows::new(&a, self.rank, width, self.cols);
        let b = self.b.part_f32(rows.start * self.rank..rows.end * self.rank);
        if self.product == Dtype::F32 && self.roundings.is_empty() && self.magnitude.is_none() {
            return add_low_rank(isa, Rows::dense(&b, self.rank), a, self.scaling, RowsMut::dense(values, width));
        }
        let mut delta = vec![0.0; DELTA_ROWS.min(rows.len()) * width];
        let parts = values.chunks_mut(DELTA_ROWS * width).zip(b.chunks(DELTA_ROWS * self.rank));
        for (first, (values, b)) in rows.step_by(DELTA_ROWS).zip(parts) {
            let delta = &mut delta[..values.len()];
            // Minus zero is the value whose addition changes nothing, not even the sign of a zero.
            delta.fill(-0.0);
            let b = Rows::dense(b, self.rank);
            if self.product == Dtype::F32 {
                add_low_rank(isa, b, a, self.scaling, RowsMut::dense(delta, width));
            } else {
                add_low_rank(isa, b, a, 1.0, RowsMut::dense(delta, width));
                round(self.product, delta);
                delta.iter_mut().for_each(|x| *x *= self.scaling);
            }
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
    /// Multiplies `row`, a whole row of `w + delta`, by `length` over its norm.
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

/// Rounds float32 values to the nearest of this type, ties to even.
pub fn round(dtype: Dtype, values: &mut [f32]) {
    match dtype {
        Dtype::F32 => {}
        Dtype::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        Dtype::Bf16 => values.iter_mut().for_each(|x| *x = bf16::to_f32(round_bf16(*x))),
    }
}

/// The Euclidean norm with the bits of `torch.linalg.norm(weight, dim=1)`: squares are multiplied and then added in
/// eight lanes, and the lanes are added in order. Of the remaining elements, whole groups of four are multiplied and
/// then added too, and the last ones are added by fused multiply-add.
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
