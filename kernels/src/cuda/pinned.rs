//! Memory of the host for copies from and to the device.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DeviceRepr, DriverError, PinnedHostSlice, ValidAsZeroBits, result, sys,
};

use crate::cpu::Plain;

/// Bytes of the smallest buffer.
const LEAST_BYTES: usize = 64 << 10;

/// Memory of the host, page-locked so that the device copies from and to it by itself. Where the system locks no more
/// it is ordinary memory, which the driver copies through its own before its call returns: slower, but a push that has
/// begun cannot go back.
pub(super) enum HostMemory<T> {
    Locked(PinnedHostSlice<T>),
    Ordinary(Vec<T>),
}

impl<T: DeviceRepr + ValidAsZeroBits + Default + Clone> HostMemory<T> {
    /// # Errors
    /// If the device has failed.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, DriverError> {
        // SAFETY: every bit pattern is a value.
        match unsafe { context.alloc_pinned_with_flags(len, 0) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(Self::Ordinary(vec![T::default(); len])),
            memory => memory.map(Self::Locked),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Locked(memory) => memory.len(),
            Self::Ordinary(memory) => memory.len(),
        }
    }

    /// # Errors
    /// If the device has failed.
    pub fn as_slice(&self) -> Result<&[T], DriverError> {
        match self {
            Self::Locked(memory) => memory.as_slice(),
            Self::Ordinary(memory) => Ok(memory),
        }
    }

    /// # Errors
    /// If the device has failed.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], DriverError> {
        match self {
            Self::Locked(memory) => memory.as_mut_slice(),
            Self::Ordinary(memory) => Ok(memory),
        }
    }
}

/// Memory for one copy at a time.
pub(super) struct PinnedBuffer {
    /// Words, so that it can hold values of any plain type.
    memory: HostMemory<u64>,
    /// Recorded behind the last copy.
    copied: CudaEvent,
}

impl PinnedBuffer {
    /// A buffer of at least `bytes`.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        let len = bytes.max(LEAST_BYTES).next_power_of_two();
        let memory = HostMemory::new(context, len / size_of::<u64>())?;
        Ok(Self { memory, copied: context.new_event(None)? })
    }

    pub fn bytes(&self) -> usize {
        self.memory.len() * size_of::<u64>()
    }

    /// The first `len` values, after the last copy has finished. Their content is unspecified.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn values<T: Plain>(&mut self, len: usize) -> Result<&mut [T], DriverError> {
        self.wait()?;
        let words = &mut self.memory.as_mut_slice()?[..(len * size_of::<T>()).div_ceil(size_of::<u64>())];
        // SAFETY: a plain type has no invalid bits, and is aligned as a word is.
        Ok(unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) })
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

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("a copy from or to the device has failed: {error}");
        }
    }
}
