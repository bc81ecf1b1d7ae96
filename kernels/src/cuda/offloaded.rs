//! The content of a range of an arena, in page-locked host memory.

use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, PinnedHostSlice, result, sys};

use crate::error::DeviceError;

/// The bytes of a range of an arena, and where they were.
pub(super) struct Offloaded {
    range: Range<usize>,
    bytes: PinnedHostSlice<u8>,
}

impl Offloaded {
    /// Starts to copy `range` of the memory at `base` to the host. It must not be dropped before the copy is made.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the host cannot lock as much memory.
    pub fn take(stream: &Arc<CudaStream>, base: sys::CUdeviceptr, range: Range<usize>) -> Result<Self, DeviceError> {
        // SAFETY: the bytes are read only after the copy has written them.
        let memory = unsafe { stream.context().alloc_pinned_with_flags(range.len(), 0) };
        let mut bytes: PinnedHostSlice<u8> = memory.map_err(|e| {
            let len = range.len();
            DeviceError::OutOfMemory(format!("the host cannot lock {len} bytes for what the device holds: {e}"))
        })?;
        let to = bytes.as_mut_slice().map_err(failed)?;
        // SAFETY: the range is mapped, and the caller waits for the copy.
        unsafe { result::memcpy_dtoh_async(to, base + range.start as u64, stream.cu_stream()) }.map_err(failed)?;
        Ok(Self { range, bytes })
    }

    /// Starts to copy the part of it that is in `range` to where it was. Waited for before it is dropped.
    pub fn copy_back(
        &self,
        stream: &CudaStream,
        base: sys::CUdeviceptr,
        range: &Range<usize>,
    ) -> Result<(), DeviceError> {
        let part = self.range.start.max(range.start)..self.range.end.min(range.end);
        if part.is_empty() {
            return Ok(());
        }
        let from = &self.bytes.as_slice().map_err(failed)?[part.start - self.range.start..part.end - self.range.start];
        // SAFETY: the range is mapped, and the caller waits for the copy.
        unsafe { result::memcpy_htod_async(base + part.start as u64, from, stream.cu_stream()) }.map_err(failed)
    }

    pub fn has_part_of(&self, range: &Range<usize>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }

    pub fn bytes(&self) -> u64 {
        self.range.len() as u64
    }
}

fn failed(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::Unsupported(format!("the device has failed: {error}"))
}
