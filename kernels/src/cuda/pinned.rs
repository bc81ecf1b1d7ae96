//! Page-locked memory of the host, which the device copies from and to by itself.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, PinnedHostSlice, result, sys,
};

use crate::cpu::Plain;

/// Bytes of the smallest buffer.
const LEAST_BYTES: usize = 64 << 10;

/// Page-locked memory for one copy at a time.
pub(super) struct Pinned {
    memory: PinnedHostSlice<u8>,
    /// Recorded behind the last copy.
    copied: CudaEvent,
}

impl Pinned {
    /// A buffer of at least `bytes`.
    ///
    /// # Errors
    /// If the system cannot lock as much memory.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        let len = bytes.max(LEAST_BYTES).next_power_of_two();
        // SAFETY: any bytes are values of the types that the buffer is used as.
        let memory = unsafe { context.alloc_pinned_with_flags(len, 0) }?;
        Ok(Self { memory, copied: context.new_event(None)? })
    }

    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The first `len` values, after the last copy has been made. What they are is unspecified.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn values<T: Plain>(&mut self, len: usize) -> Result<&mut [T], DriverError> {
        self.wait()?;
        let bytes = &mut self.memory.as_mut_slice()?[..len * size_of::<T>()];
        // SAFETY: a plain type has no invalid bits, and the memory starts with a page.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) })
    }

    /// Waits until the last copy has been made.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.copied.synchronize()
    }

    /// Starts to copy the first `bytes` to the device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn upload(&mut self, stream: &CudaStream, bytes: usize, to: sys::CUdeviceptr) -> Result<(), DriverError> {
        let values = &self.values::<u8>(bytes)?[..];
        // SAFETY: the caller names device memory of its own; nobody writes the values before the copy has been made.
        unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }?;
        self.copied.record(stream)
    }

    /// Starts to copy from the device to the first `bytes`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn download(&mut self, stream: &CudaStream, bytes: usize, from: sys::CUdeviceptr) -> Result<(), DriverError> {
        let values = self.values::<u8>(bytes)?;
        // SAFETY: as in `upload`; nobody reads the values before.
        unsafe { result::memcpy_dtoh_async(values, from, stream.cu_stream()) }?;
        self.copied.record(stream)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("a copy from or to the device has failed: {error}");
        }
    }
}
