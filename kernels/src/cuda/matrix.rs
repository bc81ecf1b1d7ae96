//! Weight matrices in device memory.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys;
use half::bf16;

use super::arena::Allocation;
use super::context::Context;
use crate::backend::storage::MatrixImpl;
use crate::error::DeviceError;
use crate::weights::{MatrixShape, RowBits, WeightDtype, WeightRows};

/// Values that a run of a row is padded to: the `k` of one tensor-core instruction.
pub(super) const RUN_VALUES: usize = 16;

/// Weights `[n, k]`, row by row. A row is as many runs as the reduction has leaves; each run is padded with zeros to a
/// multiple of [`RUN_VALUES`].
pub(super) struct CudaMatrix {
    context: Arc<Context>,
    memory: Allocation,
    pub shape: MatrixShape,
}

/// How a row of a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowLayout {
    pub leaves: usize,
    /// Values of a run, without padding.
    pub run: usize,
    /// Values from the start of a run to that of the next.
    pub padded_run: usize,
}

impl RowLayout {
    pub fn of(shape: MatrixShape) -> Self {
        let run = shape.k / shape.leaves;
        Self { leaves: shape.leaves, run, padded_run: run.next_multiple_of(RUN_VALUES) }
    }

    /// Values of a row, padding included.
    pub fn stride(&self) -> usize {
        self.leaves * self.padded_run
    }

    /// Where the value of `column` is in the row.
    pub fn place(&self, column: usize) -> usize {
        column / self.run * self.padded_run + column % self.run
    }
}

impl CudaMatrix {
    pub fn bytes_for(shape: MatrixShape) -> usize {
        shape.n * RowLayout::of(shape).stride() * shape.dtype.bytes()
    }

    /// A matrix of zeros.
    pub fn zeros(context: &Arc<Context>, shape: MatrixShape) -> Result<Self, DeviceError> {
        let memory = context.zeros(&context.weights, Self::bytes_for(shape))?;
        Ok(Self { context: context.clone(), memory, shape })
    }

    pub fn layout(&self) -> RowLayout {
        RowLayout::of(self.shape)
    }

    /// Address of a row.
    pub fn row(&self, row: usize) -> sys::CUdeviceptr {
        self.memory.pointer + (row * self.layout().stride() * self.shape.dtype.bytes()) as u64
    }

    /// Copies packed rows to the device.
    fn store<T: Copy>(&self, row0: usize, rows: &[T]) {
        let end = row0 * self.layout().stride() + rows.len();
        assert!(end <= self.shape.n * self.layout().stride(), "rows from {row0} on pass the end of {}", self.shape.n);
        self.context.copies.write(self.row(row0), rows).unwrap_or_else(|e| panic!("weights were not written: {e}"));
    }

    /// Packs rows of `width` values of the host, each turned by `value` into what is stored.
    fn packed<T: Copy + Default>(
        &self,
        rows: WeightRows<'_>,
        width: usize,
        first_column: usize,
        value: impl Fn(f32) -> T,
    ) -> Vec<T> {
        let layout = self.layout();
        assert!(rows.len().is_multiple_of(width), "{} values are no whole rows of {width}", rows.len());
        let mut packed = vec![T::default(); rows.len() / width * layout.stride()];
        for (row, packed) in packed.chunks_exact_mut(layout.stride()).enumerate() {
            for column in 0..self.shape.k {
                packed[layout.place(column)] = value(value_at(rows, row * width + first_column + column));
            }
        }
        packed
    }
}

fn value_at(rows: WeightRows<'_>, i: usize) -> f32 {
    match rows {
        WeightRows::Bf16(values) => values[i].to_f32(),
        WeightRows::F16(values) => values[i].to_f32(),
        WeightRows::F32(values) => values[i],
    }
}

/// Copies the values of packed rows to `out`, which are whole rows without padding.
fn unpack<T: Copy, U>(layout: RowLayout, packed: &[T], out: &mut [U], value: impl Fn(T) -> U) {
    let columns = layout.leaves * layout.run;
    for (row, out) in packed.chunks_exact(layout.stride()).zip(out.chunks_exact_mut(columns)) {
        out.iter_mut().enumerate().for_each(|(column, out)| *out = value(row[layout.place(column)]));
    }
}

impl MatrixImpl for CudaMatrix {
    fn write_columns(&mut self, row0: usize, rows: WeightRows<'_>, width: usize, first_column: usize) {
        match self.shape.dtype {
            WeightDtype::Bf16 => self.store(row0, &self.packed(rows, width, first_column, bf16::from_f32)),
            WeightDtype::F32 => self.store(row0, &self.packed(rows, width, first_column, |x| x)),
        }
    }

    fn read_rows(&self, row0: usize, out: RowBits<'_>) {
        let (layout, k) = (self.layout(), self.shape.k);
        assert!(out.len().is_multiple_of(k), "{} values are no whole rows of {k}", out.len());
        let rows = out.len() / k;
        assert!(row0 + rows <= self.shape.n, "rows {row0} to {} of {}", row0 + rows, self.shape.n);
        let mut bf16s =
            vec![bf16::ZERO; if self.shape.dtype == WeightDtype::Bf16 { rows * layout.stride() } else { 0 }];
        let mut f32s = vec![0.0; if self.shape.dtype == WeightDtype::F32 { rows * layout.stride() } else { 0 }];
        let read = match self.shape.dtype {
            WeightDtype::Bf16 => self.context.copies.read(self.row(row0), &mut bf16s),
            WeightDtype::F32 => self.context.copies.read(self.row(row0), &mut f32s),
        };
        read.unwrap_or_else(|e| panic!("weights were not read: {e}"));
        match (out, self.shape.dtype) {
            (RowBits::Bf16(out), WeightDtype::Bf16) => unpack(layout, &bf16s, out, |x| x),
            (RowBits::F32(out), WeightDtype::Bf16) => unpack(layout, &bf16s, out, bf16::to_f32),
            (RowBits::F32(out), WeightDtype::F32) => unpack(layout, &f32s, out, |x| x),
            (RowBits::Bf16(_), WeightDtype::F32) => panic!("a float32 matrix cannot be read as bfloat16"),
        }
    }
}
