//! Device memory of another process, by CUDA IPC.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};

use super::context::Context;
use super::digest::{DeviceRange, MOST_SHORT_BYTES};
use super::layout::RowLayout;
use super::recording::none_records;
use super::weight_row_copy::CopiedRows;
use crate::backend::storage::{BorrowedImpl, BorrowedRows, Digested};
use crate::borrowed::MemoryHandle;
use crate::error::DeviceError;

/// Most digests that are computed at once: more than models have matrices, and no more memory for them than one matrix.
const MOST_DIGESTS: usize = 4096;

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
            let _alone = none_records();
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
        opened_on(&self.context, other).is_some()
    }

    fn digest(&self, all: &[BorrowedRows<'_>]) -> Result<Vec<Digested>> {
        let range = |rows: &BorrowedRows<'_>| {
            let pointer = pointer_on(&self.context, rows).expect("rows in memory of this device");
            DeviceRange { pointer, bytes: rows.bytes(), dtype: rows.dtype }
        };
        let ranges: Vec<_> = all.iter().map(range).collect();
        let Context { digests, scratch, copies, .. } = &*self.context;
        let parts = ranges.chunks(MOST_DIGESTS).map(|part| digests.compute(scratch, copies, part));
        parts.collect::<Result<Vec<_>>>().map(|parts| parts.concat())
    }
}

/// Some columns of borrowed rows as kernels of the device see them; `None` unless the rows are in its memory, and
/// aligned there.
pub(super) fn copied_rows(
    context: &Arc<Context>,
    rows: &BorrowedRows<'_>,
    columns: Range<usize>,
) -> Option<CopiedRows> {
    let BorrowedRows { dtype, columns: stride, .. } = *rows;
    let start = pointer_on(context, rows).filter(|start| start.is_multiple_of(dtype.size() as u64))?;
    let pointer = start + (columns.start * dtype.size()) as u64;
    Some(CopiedRows { pointer, dtype, stride, layout: RowLayout::dense(columns.len()) })
}

/// The address of borrowed rows, if they are in memory that was opened on the device.
fn pointer_on(context: &Arc<Context>, rows: &BorrowedRows<'_>) -> Option<sys::CUdeviceptr> {
    opened_on(context, rows.memory).map(|memory| memory.pointer + rows.offset)
}

/// The memory, if it was opened on the device.
fn opened_on<'a>(context: &Arc<Context>, memory: &'a (dyn BorrowedImpl + 'static)) -> Option<&'a CudaBorrowed> {
    let memory: &dyn Any = memory;
    memory.downcast_ref::<CudaBorrowed>().filter(|memory| Arc::ptr_eq(&memory.context, context))
}

impl Drop for CudaBorrowed {
    fn drop(&mut self) {
        // The driver may wait for all streams of the device, which none of them allows that is being recorded.
        let _alone = none_records();
        let bound = self.context.stream.context().bind_to_thread();
        // SAFETY: the address is one that the driver has opened, and every copy from it has been made.
        let closed = bound.and_then(|()| unsafe { sys::cuIpcCloseMemHandle(self.pointer) }.result());
        if let Err(error) = closed {
            tracing::error!("memory of another process stays open: {error}");
        }
    }
}
