//! How weights lie in device memory.

use candle_core::cuda_backend::cudarc::driver::sys;
use half::bf16;

use crate::cpu::Plain;
use crate::cpu::math::{round_bf16, widen_f16};
use crate::values::{StorageDtype, TensorView};
use crate::weights::MatrixShape;

/// Values that a run of a row is padded to: the `k` of one tensor-core instruction.
const RUN_VALUES: usize = 16;

/// How a row of a matrix lies in memory: as many runs as the reduction has leaves, each padded with zeros to a multiple
/// of [`RUN_VALUES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedRowLayout {
    pub leaves: usize,
    /// Values of a run, without padding.
    pub run: usize,
    /// Values from the start of a run to that of the next.
    pub padded_run: usize,
}

impl PackedRowLayout {
    pub fn of(shape: MatrixShape) -> Self {
        let run = shape.k / shape.leaves;
        Self { leaves: shape.leaves, run, padded_run: run.next_multiple_of(RUN_VALUES) }
    }

    /// A row without padding.
    pub fn dense(columns: usize) -> Self {
        Self { leaves: 1, run: columns, padded_run: columns }
    }

    /// Values of a row, without padding.
    pub fn columns(&self) -> usize {
        self.leaves * self.run
    }

    /// Values of a row, padding included.
    pub fn stride(&self) -> usize {
        self.leaves * self.padded_run
    }

    /// Where the value of `column` is in the row.
    pub fn place(&self, column: usize) -> usize {
        column / self.run * self.padded_run + column % self.run
    }

    /// Packs rows of `width` values, of which it takes the columns from `first_column` on, each turned by `value` into
    /// what is stored.
    fn pack<S: Copy, T: Plain + Default>(
        &self,
        rows: &[S],
        width: usize,
        first_column: usize,
        out: &mut [T],
        value: impl Fn(S) -> T,
    ) {
        for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact_mut(self.stride())) {
            let row = &row[first_column..first_column + self.columns()];
            for (run, out) in row.chunks_exact(self.run).zip(out.chunks_exact_mut(self.padded_run)) {
                let (values, padding) = out.split_at_mut(self.run);
                values.iter_mut().zip(run).for_each(|(to, from)| *to = value(*from));
                padding.fill(T::default());
            }
        }
    }

    /// Copies the values of packed rows to `out`, which are rows without padding.
    pub fn unpack<T: Copy, U>(&self, packed: &[T], out: &mut [U], value: impl Fn(T) -> U) {
        for (row, out) in packed.chunks_exact(self.stride()).zip(out.chunks_exact_mut(self.columns())) {
            for (run, out) in row.chunks_exact(self.padded_run).zip(out.chunks_exact_mut(self.run)) {
                out.iter_mut().zip(run).for_each(|(to, from)| *to = value(*from));
            }
        }
    }
}

/// Rows of weights in device memory, as kernels see them.
#[derive(Clone, Copy)]
pub(super) struct DeviceRows {
    pub pointer: sys::CUdeviceptr,
    pub dtype: StorageDtype,
    /// Values from the start of a row to that of the next.
    pub stride: usize,
    pub layout: PackedRowLayout,
}

/// A type of stored weights.
pub(super) trait Weight: Plain + Default {
    /// Packs rows of `width` values, of which it takes the columns from `first_column` on, rounded to nearest even.
    fn pack(layout: PackedRowLayout, rows: TensorView<'_>, width: usize, first_column: usize, out: &mut [Self]);
}

impl Weight for bf16 {
    fn pack(layout: PackedRowLayout, rows: TensorView<'_>, width: usize, first_column: usize, out: &mut [Self]) {
        match rows {
            TensorView::Bf16(rows) => layout.pack(rows, width, first_column, out, |x| x),
            TensorView::F16(rows) => layout.pack(rows, width, first_column, out, |x| round_bf16(widen_f16(x))),
            TensorView::F32(rows) => layout.pack(rows, width, first_column, out, round_bf16),
        }
    }
}

impl Weight for f32 {
    fn pack(layout: PackedRowLayout, rows: TensorView<'_>, width: usize, first_column: usize, out: &mut [Self]) {
        match rows {
            TensorView::Bf16(rows) => {
                layout.pack(rows, width, first_column, out, |x| f32::from_bits(u32::from(x.to_bits()) << 16));
            }
            TensorView::F16(rows) => layout.pack(rows, width, first_column, out, widen_f16),
            TensorView::F32(rows) => layout.pack(rows, width, first_column, out, |x| x),
        }
    }
}
