//! Device memory of another process, by CUDA IPC.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, sys};

use super::capture::forbid_captures;
use super::context::Context;
use super::digest::{DeviceRange, MOST_SHORT_BYTES};
use super::layout::PackedRowLayout;
use super::peer::{self, RowsOf};
use super::weight_row_copy::CopiedRows;
use crate::backend::storage::{BorrowedImpl, BorrowedRows, Digested};
use crate::borrowed::MemoryHandle;
use crate::error::DeviceError;

/// Most digests that are computed at once: more than models have matrices, and no more memory for them than one matrix.
const MOST_DIGESTS: usize = 4096;

/// Bytes of rows that come from another device at a time. One row alone may be more.
pub(super) const ARRIVING_BYTES: usize = 8 << 20;

/// An allocation that `cuIpcGetMemHandle` of another process has named.
pub(super) struct CudaBorrowed {
    context: Arc<Context>,
    pointer: sys::CUdeviceptr,
    bytes: u64,
}

impl CudaBorrowed {
    /// Opens it in this process.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] with the driver's word if it does not know the handle;
    /// [`DeviceError::OutOfMemory`].
    pub fn open(context: &Arc<Context>, handle: &MemoryHandle) -> std::result::Result<Self, DeviceError> {
        context.stream.context().bind_to_thread().map_err(refused)?;
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte.cast_signed()) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut pointer = 0;
        let opened = {
            let _no_captures = forbid_captures();
            // SAFETY: the address is written. The driver takes any bytes as a handle and refuses those that are none.
            unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags) }
        };
        opened.result().map_err(refused)?;
        let mut borrowed = Self { context: context.clone(), pointer, bytes: 0 };
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: both are written.
        let range = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, pointer) };
        range.result().map_err(refused)?;
        // The driver may have mapped more than the allocation, in front of it too.
        borrowed.bytes = (start + bytes as u64).saturating_sub(pointer);
        Ok(borrowed)
    }
}

fn refused(error: DriverError) -> DeviceError {
    match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            DeviceError::OutOfMemory(format!("the device cannot map memory of another process: {error}"))
        }
        _ => DeviceError::Unsupported(error.to_string()),
    }
}

impl BorrowedImpl for CudaBorrowed {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, part: Range<u64>, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.context.copies.download(self.pointer + part.start, (part.end - part.start) as usize, take)
    }

    fn can_digest(&self, rows: &BorrowedRows<'_>) -> bool {
        rows.bytes() > MOST_SHORT_BYTES
    }

    fn is_beside(&self, other: &(dyn BorrowedImpl + 'static)) -> bool {
        opened(other).is_some_and(|other| Arc::ptr_eq(&other.context, &self.context))
    }

    fn digest(&self, all: &[BorrowedRows<'_>]) -> Result<Vec<Digested>> {
        let range = |rows: &BorrowedRows<'_>| {
            let memory = opened(rows.memory).expect("rows in memory of this device");
            DeviceRange { pointer: memory.pointer + rows.offset, bytes: rows.bytes(), dtype: rows.dtype }
        };
        let ranges: Vec<_> = all.iter().map(range).collect();
        let Context { digests, scratch, copies, .. } = &*self.context;
        let parts = ranges.chunks(MOST_DIGESTS).map(|part| digests.compute(scratch, copies, part));
        parts.collect::<Result<Vec<_>>>().map(|parts| parts.concat())
    }
}

/// Whether kernels can be given borrowed rows by [`with_columns`]: they are in memory of such a device, and aligned
/// there.
pub(super) fn can_be_given(rows: &BorrowedRows<'_>) -> bool {
    opened(rows.memory).is_some_and(|memory| (memory.pointer + rows.offset).is_multiple_of(rows.dtype.size() as u64))
}

/// Has `start` start what kernels of a device do with some columns of borrowed rows, and waits until that is done.
/// Where the rows are in the device's own memory they are given at once, where they lie. Those of another device come
/// to this one before, at most [`ARRIVING_BYTES`] at a time: `start` is called again for the next ones, with their
/// numbers.
///
/// # Errors
/// If the device has no memory for those that come, or a device has failed; those of `start`.
///
/// # Panics
/// Unless [`can_be_given`].
pub(super) fn with_columns(
    context: &Arc<Context>,
    rows: &BorrowedRows<'_>,
    columns: Range<usize>,
    start: impl Fn(&CudaStream, CopiedRows, Range<usize>) -> Result<()>,
) -> Result<()> {
    let memory = opened(rows.memory).expect("rows of such a device");
    let (dtype, layout) = (rows.dtype, PackedRowLayout::dense(columns.len()));
    let pointer = memory.pointer + rows.offset + (columns.start * dtype.size()) as u64;
    if Arc::ptr_eq(&memory.context, context) {
        let whole = CopiedRows { pointer, dtype, stride: rows.columns, layout };
        return context.copies.run(|stream| start(stream, whole, 0..rows.rows));
    }
    let [stride_bytes, row_bytes] = [rows.columns, columns.len()].map(|values| values * dtype.size());
    let at_once = (ARRIVING_BYTES / row_bytes).clamp(1, rows.rows.max(1));
    let arriving = context.scratch.allocate(at_once * row_bytes)?;
    // Operators that have used these addresses may still run.
    context.copies.wait_for_operators()?;
    context.copies.run(|stream| {
        (0..rows.rows).step_by(at_once).try_for_each(|first| {
            let part = first..rows.rows.min(first + at_once);
            let from = pointer + (first * stride_bytes) as u64;
            let from = RowsOf { device: &memory.context, pointer: from, stride_bytes };
            let to = RowsOf { device: context, pointer: arriving.pointer, stride_bytes: row_bytes };
            peer::start(stream, &from, &to, part.len(), row_bytes)?;
            start(stream, CopiedRows { pointer: to.pointer, dtype, stride: columns.len(), layout }, part)
        })
    })
}

/// The memory, if it was opened on such a device.
fn opened<'a>(memory: &'a (dyn BorrowedImpl + 'static)) -> Option<&'a CudaBorrowed> {
    let memory: &dyn Any = memory;
    memory.downcast_ref()
}

impl Drop for CudaBorrowed {
    fn drop(&mut self) {
        // The driver may wait for all streams of the device, which would invalidate a capture on one of them.
        let _no_captures = forbid_captures();
        let bound = self.context.stream.context().bind_to_thread();
        // SAFETY: the address is one that the driver has opened, and every copy from it has been made.
        let closed = bound.and_then(|()| unsafe { sys::cuIpcCloseMemHandle(self.pointer) }.result());
        if let Err(error) = closed {
            tracing::error!("memory of another process stays open: {error}");
        }
    }
}
