//! Rows that are gathered and scattered.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::download::DownloadPool;
use super::launch::{Launch, rows_grid};
use super::matrix::CudaMatrix;
use super::module::{Module, fat_binary};
use super::staging::Staging;
use super::tensor::TensorRows;
use crate::values::StorageDtype;

/// The kernels that copy rows by their indices.
pub(super) struct RowCopies {
    context: Arc<Context>,
    embed_bf16: CudaFunction,
    embed_f32: CudaFunction,
    select: CudaFunction,
    put_rows: CudaFunction,
    add_rows: CudaFunction,
    add: CudaFunction,
    add_scaled: CudaFunction,
    read: DownloadPool<f32>,
}

/// Most bytes of rows that are on their way to the host, unless one row has more.
pub(super) const READ_BYTES: usize = 1 << 20;

impl RowCopies {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("rows"))?;
        Ok(Self {
            context: context.clone(),
            embed_bf16: module.function("embed_bf16")?,
            embed_f32: module.function("embed_f32")?,
            select: module.function("select_rows")?,
            put_rows: module.function("put_rows")?,
            add_rows: module.function("add_rows")?,
            add: module.function("add")?,
            add_scaled: module.function("add_scaled")?,
            read: DownloadPool::new(&context.stream),
        })
    }

    /// `tokens` is the address of the token of each row of `out`.
    pub fn embed(&self, table: &CudaMatrix, first_token: usize, tokens: u64, out: TensorRows) -> Result<()> {
        let function = match table.shape.dtype {
            StorageDtype::Bf16 => &self.embed_bf16,
            StorageDtype::F32 => &self.embed_f32,
        };
        let layout = table.layout();
        assert_eq!(table.shape.k, out.width, "columns of an embedding");
        let mut launch = Launch::of(&self.context.stream, function);
        launch.pointer(table.row(0)).int(first_token).int(table.shape.n);
        launch.int(layout.stride()).int(layout.run).int(layout.padded_run);
        launch.pointer(tokens).rows(out).int(out.width);
        // SAFETY: the kernel reads rows of the table that it has, and writes those of a tensor.
        unsafe { launch.start(rows_grid(out.rows)) }
    }

    /// `out[i] = x[indices[i]]` for `count` indices at an address.
    pub fn select(&self, x: TensorRows, indices: u64, count: usize, out: TensorRows) -> Result<()> {
        assert!(count <= out.rows && x.width == out.width, "{count} rows of {x:?} for {out:?}");
        let mut launch = Launch::of(&self.context.stream, &self.select);
        launch.rows(x).pointer(indices).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, and the callers' indices are of rows of `x`.
        unsafe { launch.start(rows_grid(count)) }
    }

    /// As [`RowCopies::select`], with indices of the host.
    ///
    /// # Panics
    /// If an index is of no row of `x`.
    pub fn select_listed(&self, staging: &Staging, x: TensorRows, indices: &[u32], out: TensorRows) -> Result<()> {
        assert!(indices.iter().all(|index| (*index as usize) < x.rows), "rows {indices:?} of {}", x.rows);
        let memory = self.context.upload(staging, indices)?;
        self.select(x, memory.pointer, indices.len(), out)
    }

    /// These rows of `x`, one after the other.
    ///
    /// # Panics
    /// If an index is of no row of `x`.
    pub fn read(&self, x: TensorRows, indices: &[u32]) -> Result<Vec<f32>> {
        assert!(indices.iter().all(|index| (*index as usize) < x.rows), "rows {indices:?} of {}", x.rows);
        let mut values = Vec::with_capacity(indices.len() * x.width);
        for indices in indices.chunks((READ_BYTES / (x.width * size_of::<f32>())).max(1)) {
            let mut landing = self.read.take(indices.len() * x.width)?;
            for (index, to) in indices.iter().zip(landing.places(x.width)) {
                // SAFETY: the row is in the device's memory, and it is read when the copy has been made.
                unsafe { self.read.copy(x.rows_from(*index as usize).pointer, to)? };
            }
            landing.record()?;
            values.extend_from_slice(landing.read()?);
        }
        Ok(values)
    }

    /// Writes values of the host to all rows of `out`.
    pub fn write(&self, staging: &Staging, values: &[f32], out: TensorRows) -> Result<()> {
        for (row, values) in values.chunks_exact(out.width).take(out.rows).enumerate() {
            staging.copy(values, out.rows_from(row).pointer).w()?;
        }
        Ok(())
    }

    /// Gives the memory of the host that copies reuse back.
    pub fn release(&self) {
        self.read.release();
    }

    /// `out[indices[i]] = x[i]`, with indices of the host that are all different.
    ///
    /// # Panics
    /// If an index is of no row of `out`.
    pub fn put_listed(&self, staging: &Staging, x: TensorRows, indices: &[u32], out: TensorRows) -> Result<()> {
        self.scatter(&self.put_rows, staging, x, indices, out)
    }

    /// `out[indices[i]] += x[i]`, with indices of the host that are all different.
    ///
    /// # Panics
    /// If an index is of no row of `out`.
    pub fn add_listed(&self, staging: &Staging, x: TensorRows, indices: &[u32], out: TensorRows) -> Result<()> {
        self.scatter(&self.add_rows, staging, x, indices, out)
    }

    fn scatter(
        &self,
        function: &CudaFunction,
        staging: &Staging,
        x: TensorRows,
        indices: &[u32],
        out: TensorRows,
    ) -> Result<()> {
        assert!(indices.iter().all(|index| (*index as usize) < out.rows), "rows {indices:?} of {}", out.rows);
        assert!(indices.len() <= x.rows && x.width == out.width, "{} rows of {x:?} for {out:?}", indices.len());
        let memory = self.context.upload(staging, indices)?;
        let mut launch = Launch::of(&self.context.stream, function);
        launch.rows(x).pointer(memory.pointer).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, and the indices were checked.
        unsafe { launch.start(rows_grid(indices.len())) }
    }

    /// `out += x`.
    pub fn add(&self, x: TensorRows, out: TensorRows) -> Result<()> {
        assert_eq!((x.rows, x.width), (out.rows, out.width), "rows and widths that are added");
        let mut launch = Launch::of(&self.context.stream, &self.add);
        launch.rows(x).rows(out).int(out.width);
        // SAFETY: the rows are of tensors.
        unsafe { launch.start(rows_grid(out.rows)) }
    }

    /// `out += scale * x`, where `scale` is the address of a factor for each column.
    pub fn add_scaled(&self, x: TensorRows, scale: u64, out: TensorRows) -> Result<()> {
        assert_eq!((x.rows, x.width), (out.rows, out.width), "rows and widths that are added");
        let mut launch = Launch::of(&self.context.stream, &self.add_scaled);
        launch.rows(x).pointer(scale).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, and the scale is as long as they are wide.
        unsafe { launch.start(rows_grid(out.rows)) }
    }
}
