//! Copies between host and device.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

/// Copies of any thread, beside the operators: on a stream of their own, which first waits for what the operators have
/// been given before. Each copy has been made when its call returns.
pub(super) struct Copies {
    operators: Arc<CudaStream>,
    /// One copy at a time.
    stream: Mutex<Arc<CudaStream>>,
}

impl Copies {
    pub fn new(operators: &Arc<CudaStream>) -> Result<Self> {
        let stream = operators.context().new_stream().w()?;
        Ok(Self { operators: operators.clone(), stream: Mutex::new(stream) })
    }

    /// Copies `values` to the device.
    pub fn write<T: Copy>(&self, to: sys::CUdeviceptr, values: &[T]) -> Result<()> {
        self.after_operators(|stream| {
            // SAFETY: callers name device memory of their own, as long as `values`, which live until the copy is made.
            unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }.w()
        })
    }

    /// Copies from the device to `values`.
    pub fn read<T: Copy>(&self, from: sys::CUdeviceptr, values: &mut [T]) -> Result<()> {
        self.after_operators(|stream| {
            // SAFETY: as in `write`.
            unsafe { result::memcpy_dtoh_async(values, from, stream.cu_stream()) }.w()
        })
    }

    /// Sets `bytes` to zero.
    pub fn zero(&self, at: sys::CUdeviceptr, bytes: usize) -> Result<()> {
        self.after_operators(|stream| {
            // SAFETY: callers name device memory of their own.
            unsafe { result::memset_d8_async(at, 0, bytes, stream.cu_stream()) }.w()
        })
    }

    fn after_operators(&self, copy: impl FnOnce(&CudaStream) -> Result<()>) -> Result<()> {
        self.operators.context().bind_to_thread().w()?;
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.wait(&self.operators.record_event(None).w()?).w()?;
        copy(&stream)?;
        stream.synchronize().w()
    }
}
