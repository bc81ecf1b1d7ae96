//! The product of two thin matrices, added to a tile of a weight matrix, which merges a LoRA adapter into it.

#![allow(clippy::needless_range_loop)] // indices, so that accumulators stay in registers

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::rows::{Rows, RowsMut};
use super::tile::{Operands, Prefetch, Single, accumulate};

/// Rows of a register tile. Merged rows come in tiles whose height is a multiple of four.
const MR: usize = 4;

/// Computes `out[i][j] += scaling * Σ_k b[i][k] * a[k][j]`. The sum runs in ascending `k` from zero by fused
/// multiply-add, and is then scaled and added, each step rounded to float32. One thread; the same bits on every
/// instruction set.
///
/// # Panics
/// If shapes do not agree.
pub fn add_low_rank(isa: Isa, b: Rows<'_>, a: Rows<'_>, scaling: f32, out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (b.rows(), a.width()), "rows of b and columns of a");
    assert_eq!(b.width(), a.rows(), "columns of b and rows of a");
    isa.dispatch(AddLowRank { b, a, scaling, out });
}

struct AddLowRank<'a> {
    b: Rows<'a>,
    a: Rows<'a>,
    scaling: f32,
    out: RowsMut<'a>,
}

impl Kernel for AddLowRank<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if L::ACCUMULATORS >= 4 * MR {
            self.column_blocks::<L, 4>();
        } else {
            self.column_blocks::<L, 1>();
        }
    }
}

impl AddLowRank<'_> {
    /// Takes `NV` vectors of columns at a time. Their part of `a` is copied to adjacent memory, so that it stays in the
    /// first-level cache whatever the stride is, and is padded with zeros.
    #[inline(always)]
    fn column_blocks<L: Lanes, const NV: usize>(&mut self) {
        let (rank, width) = (self.a.rows(), self.a.width());
        let mut block = vec![0.0; rank * NV * LANES];
        for from in (0..width).step_by(NV * LANES) {
            let columns = from..width.min(from + NV * LANES);
            for (k, packed) in block.chunks_exact_mut(NV * LANES).enumerate() {
                let row = &self.a.row(k)[columns.clone()];
                packed[..row.len()].copy_from_slice(row);
                packed[row.len()..].fill(0.0);
            }
            let whole = self.b.rows() / MR * MR;
            for row in (0..whole).step_by(MR) {
                self.tile::<L, MR, NV>(&block, row, columns.clone());
            }
            for row in whole..self.b.rows() {
                self.tile::<L, 1, NV>(&block, row, columns.clone());
            }
        }
    }

    #[inline(always)]
    fn tile<L: Lanes, const ROWS: usize, const NV: usize>(
        &mut self,
        block: &[f32],
        first: usize,
        columns: std::ops::Range<usize>,
    ) {
        let rank = self.a.rows();
        let mut acc = [[L::zero(); NV]; ROWS];
        if rank > 0 {
            assert_eq!(block.len(), rank * NV * LANES);
            let x = self.b.rows_from(first).as_ptr();
            assert!(first + ROWS <= self.b.rows());
            let x_row = self.b.stride();
            let w = std::array::from_fn(|v| block.as_ptr().wrapping_add(v * LANES));
            let (copy, ahead) = (std::ptr::null_mut(), Prefetch::Far(x.cast(), 64));
            let operands = Operands { x, x_row, x_step: 1, w, w_step: NV * LANES, copy, ahead };
            // SAFETY: rows `first..first + ROWS` of `b` have `rank` elements each, `stride` apart, and the block has
            // `rank` rows of `NV` vectors.
            unsafe { accumulate::<L, Single<f32>, ROWS, NV>(&mut acc, rank, &operands) };
        }
        let scaling = L::splat(self.scaling);
        if columns.len() == NV * LANES {
            // A loop of its own for whole vectors, so that the compiler unrolls it and the sums stay in registers.
            for m in 0..ROWS {
                let out = self.out.row_mut(first + m)[columns.clone()].as_mut_ptr();
                for v in 0..NV {
                    // SAFETY: the slice has `NV` vectors.
                    unsafe {
                        let out = out.add(v * LANES);
                        L::load(out).add(acc[m][v].mul(scaling)).store(out);
                    }
                }
            }
            return;
        }
        for m in 0..ROWS {
            let delta = acc[m].map(|sum| sum.mul(scaling).to_array());
            let out = &mut self.out.row_mut(first + m)[columns.clone()];
            out.iter_mut().zip(delta.as_flattened()).for_each(|(out, delta)| *out += delta);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    /// One element of the product by its definition.
    fn reference(b: Rows<'_>, a: Rows<'_>, scaling: f32, i: usize, j: usize) -> f32 {
        scaling * (0..a.rows()).fold(0.0, |sum, k| b.row(i)[k].mul_add(a.row(k)[j], sum))
    }

    #[test]
    fn the_product_is_that_of_the_definition_on_every_isa_inside_wider_rows() {
        for seed in 0..150 {
            let mut random = Random::new(seed);
            let (rows, rank, width) = (random.below(20), random.below(20), random.between(1, 150));
            let (b_stride, a_stride, stride) =
                (rank + 1 + random.below(3), width + random.below(5), width + random.below(5));
            let (b, a) = (random.normals(rows * b_stride, 1.0), random.normals(rank * a_stride, 1.0));
            let old = random.normals(rows * stride, 1.0);
            let (b, a) = (Rows::new(&b, rows, rank, b_stride), Rows::new(&a, rank, width, a_stride));
            for isa in Isa::available() {
                let mut out = old.clone();
                add_low_rank(isa, b, a, 0.7, RowsMut::new(&mut out, rows, width, stride));
                for (at, (new, old)) in out.iter().zip(&old).enumerate() {
                    let (i, j) = (at / stride, at % stride);
                    let expected = if j < width { old + reference(b, a, 0.7, i, j) } else { *old };
                    let context = format!("seed {seed}, {}: row {i}, column {j}", isa.name());
                    assert_eq!(new.to_bits(), expected.to_bits(), "{context}");
                }
            }
        }
    }
}
