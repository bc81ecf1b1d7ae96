//! Weight matrices in device memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;
use half::bf16;

use super::arena::ArenaAllocation;
use super::borrowed::{can_be_given, with_columns};
use super::context::Context;
use super::layout::{DeviceRows, PackedRowLayout, Weight};
use crate::backend::storage::{BorrowedRows, MatrixImpl};
use crate::error::DeviceError;
use crate::values::{StorageDtype, TensorData, TensorView};
use crate::weights::MatrixShape;

/// Bytes of packed rows that are copied at once.
pub(super) const COPIED_BYTES: usize = 4 << 20;

/// Weights `[n, k]`, row by row; a row is as [`PackedRowLayout`] says, and its padding is always zero.
pub(super) struct CudaMatrix {
    context: Arc<Context>,
    memory: ArenaAllocation,
    pub shape: MatrixShape,
    /// Whether an operator has been given the matrix. Copies need not wait for the operators where none has: a push
    /// writes new matrices while steps run.
    is_used: AtomicBool,
}

impl CudaMatrix {
    pub fn bytes_for(shape: MatrixShape) -> usize {
        shape.n * PackedRowLayout::of(shape).stride() * shape.dtype.size()
    }

    /// A matrix of zeros.
    pub fn zeros(context: &Arc<Context>, shape: MatrixShape) -> std::result::Result<Self, DeviceError> {
        let memory = context.zeros(&context.weights, Self::bytes_for(shape))?;
        Ok(Self { context: context.clone(), memory, shape, is_used: AtomicBool::new(false) })
    }

    pub fn layout(&self) -> PackedRowLayout {
        PackedRowLayout::of(self.shape)
    }

    /// Address of a row, for an operator.
    pub fn row(&self, row: usize) -> sys::CUdeviceptr {
        self.is_used.store(true, Ordering::Relaxed);
        self.address(row)
    }

    /// The rows from `row` on, for an operator.
    pub fn rows(&self, row: usize) -> DeviceRows {
        DeviceRows { pointer: self.row(row), ..self.device_rows(row) }
    }

    fn device_rows(&self, row: usize) -> DeviceRows {
        let layout = self.layout();
        DeviceRows { pointer: self.address(row), dtype: self.shape.dtype, stride: layout.stride(), layout }
    }

    fn address(&self, row: usize) -> sys::CUdeviceptr {
        self.memory.pointer + (row * self.row_bytes()) as u64
    }

    fn row_bytes(&self) -> usize {
        self.layout().stride() * self.shape.dtype.size()
    }

    /// Rows that are copied at once.
    fn rows_at_once(&self) -> usize {
        (COPIED_BYTES / self.row_bytes()).max(1)
    }

    /// Lets the copies from now on run after the operators that have used the matrix.
    fn wait_for_operators(&self) -> Result<()> {
        if self.is_used.load(Ordering::Relaxed) { self.context.copies.wait_for_operators() } else { Ok(()) }
    }

    /// As [`CudaMatrix::wait_for_operators`], once: no operator can use the matrix while it is written.
    fn wait_for_last_operator(&mut self) -> Result<()> {
        self.wait_for_operators()?;
        *self.is_used.get_mut() = false;
        Ok(())
    }

    /// # Panics
    /// If so many rows of `width` values do not fit from `row0` on, or have too few columns.
    fn check(&self, row0: usize, count: usize, width: usize, first_column: usize) {
        let (MatrixShape { n, k, .. }, end) = (self.shape, row0 + count);
        assert!(end <= n, "rows {row0}..{end} pass the end of a matrix of {n} rows");
        assert!(first_column + k <= width, "{k} columns from {first_column} on of {width}");
    }

    fn write<T: Weight>(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) -> Result<()> {
        self.wait_for_last_operator()?;
        let (layout, count) = (self.layout(), rows.len() / width);
        for first in (0..count).step_by(self.rows_at_once()) {
            let end = count.min(first + self.rows_at_once());
            let rows = rows.part(first * width..end * width);
            self.context.copies.upload(self.address(row0 + first), (end - first) * layout.stride(), |packed| {
                T::pack(layout, rows, width, first_column, packed)
            })?;
        }
        Ok(())
    }

    /// # Panics
    /// If `out` is not of whole rows or passes the end, or the device fails.
    fn read<T: Weight, U>(&self, row0: usize, out: &mut [U], value: impl Fn(T) -> U) {
        let MatrixShape { n, k, .. } = self.shape;
        assert!(out.len().is_multiple_of(k), "{} values are not whole rows of {k}", out.len());
        let end = row0 + out.len() / k;
        assert!(end <= n, "rows {row0}..{end} pass the end of a matrix of {n} rows");
        self.try_read(row0, out, value).unwrap_or_else(|e| panic!("weights were not read: {e}"));
    }

    fn try_read<T: Weight, U>(&self, row0: usize, out: &mut [U], value: impl Fn(T) -> U) -> Result<()> {
        self.wait_for_operators()?;
        let (layout, at_once) = (self.layout(), self.rows_at_once());
        for (out, i) in out.chunks_mut(at_once * self.shape.k).zip(0..) {
            let len = out.len() / self.shape.k * layout.stride();
            let take = |packed: &[T]| layout.unpack(packed, out, &value);
            self.context.copies.download(self.address(row0 + i * at_once), len, take)?;
        }
        Ok(())
    }
}

impl MatrixImpl for CudaMatrix {
    fn release(&mut self) -> bool {
        self.memory.release();
        true
    }

    fn restore(&mut self) -> std::result::Result<(), DeviceError> {
        self.memory.restore()?;
        self.context.fill_with_zeros(&self.memory, Self::bytes_for(self.shape))
    }

    fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) {
        assert!(rows.len().is_multiple_of(width), "{} values are no whole rows of {width}", rows.len());
        self.check(row0, rows.len() / width, width, first_column);
        let written = match self.shape.dtype {
            StorageDtype::Bf16 => self.write::<bf16>(row0, rows, width, first_column),
            StorageDtype::F32 => self.write::<f32>(row0, rows, width, first_column),
        };
        written.unwrap_or_else(|e| panic!("weights were not written: {e}"));
    }

    fn read_rows(&self, rows: Range<usize>) -> TensorData<'static> {
        let len = rows.len() * self.shape.k;
        match self.shape.dtype {
            StorageDtype::Bf16 => {
                let mut values = vec![bf16::ZERO; len];
                self.read(rows.start, &mut values, |x: bf16| x);
                TensorData::Bf16(values.into())
            }
            StorageDtype::F32 => {
                let mut values = vec![0.0; len];
                self.read(rows.start, &mut values, |x: f32| x);
                TensorData::F32(values.into())
            }
        }
    }

    fn read_f32(&self, row0: usize, out: &mut [f32]) {
        match self.shape.dtype {
            StorageDtype::Bf16 => self.read(row0, out, bf16::to_f32),
            StorageDtype::F32 => self.read(row0, out, |x: f32| x),
        }
    }

    fn can_copy(&self, from: &BorrowedRows<'_>) -> bool {
        can_be_given(from)
    }

    fn copy_columns(&mut self, row0: usize, from: &BorrowedRows<'_>, first_column: usize) -> Result<()> {
        self.check(row0, from.rows, from.columns, first_column);
        self.wait_for_last_operator()?;
        let columns = first_column..first_column + self.shape.k;
        with_columns(&self.context, from, columns, |stream, rows, part| {
            let to = self.device_rows(row0 + part.start);
            self.context.weight_row_copies.start(stream, rows, to, part.len())
        })
    }
}
