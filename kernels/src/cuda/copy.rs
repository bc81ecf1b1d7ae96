//! Copies between host and device.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, result, sys};

use super::capture::StreamLock;
use super::pinned::PinnedBuffer;
use crate::cpu::Plain;

/// Copies of any thread, beside the operators, on a stream of their own. Each copy has been made when its call returns.
pub(super) struct Copies {
    operators: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// Lock of `operators`.
    operators_lock: StreamLock,
    /// Those that no copy uses: there are as many as threads have copied at the same time.
    buffers: Mutex<Vec<PinnedBuffer>>,
}

impl Copies {
    pub fn new(operators: &Arc<CudaStream>, operators_lock: &StreamLock) -> Result<Self> {
        let stream = operators.context().new_stream().w()?;
        Ok(Self {
            operators: operators.clone(),
            stream,
            operators_lock: operators_lock.clone(),
            buffers: Mutex::default(),
        })
    }

    /// The lock of the operators' stream, for threads that capture on it or wait for it.
    pub fn operators_lock(&self) -> &StreamLock {
        &self.operators_lock
    }

    /// Lets the copies from now on run after what the operators have been given before.
    pub fn wait_for_operators(&self) -> Result<()> {
        let _lock = self.operators_lock.lock();
        self.stream.wait(&self.operators.record_event(None).w()?).w()
    }

    /// Copies `values` to the device, after the operators.
    pub fn write<T: Copy>(&self, to: sys::CUdeviceptr, values: &[T]) -> Result<()> {
        self.wait_for_operators()?;
        // SAFETY: callers name device memory of their own, as long as `values`, which live until the copy is made.
        unsafe { result::memcpy_htod_async(to, values, self.stream.cu_stream()) }.w()?;
        self.stream.synchronize().w()
    }

    /// Copies from the device to `values`, after the operators.
    pub fn read<T: Copy>(&self, from: sys::CUdeviceptr, values: &mut [T]) -> Result<()> {
        self.wait_for_operators()?;
        // SAFETY: as in `write`.
        unsafe { result::memcpy_dtoh_async(values, from, self.stream.cu_stream()) }.w()?;
        self.stream.synchronize().w()
    }

    /// Sets `bytes` to zero, after the operators.
    pub fn zero(&self, at: sys::CUdeviceptr, bytes: usize) -> Result<()> {
        self.wait_for_operators()?;
        // SAFETY: callers name device memory of their own.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream.cu_stream()) }.w()?;
        self.stream.synchronize().w()
    }

    /// Copies `len` values that `fill` writes to the device; they are unspecified before. Waits for no operator.
    pub fn upload<T: Plain>(&self, to: sys::CUdeviceptr, len: usize, fill: impl FnOnce(&mut [T])) -> Result<()> {
        let bytes = len * size_of::<T>();
        self.with_buffer(bytes, |buffer| {
            fill(buffer.values(len)?);
            buffer.upload(&self.stream, bytes, to)
        })
    }

    /// Hands `len` values of the device to `take`. Waits for no operator.
    pub fn download<T: Plain>(&self, from: sys::CUdeviceptr, len: usize, take: impl FnOnce(&[T])) -> Result<()> {
        self.with_buffer(len * size_of::<T>(), |buffer| {
            buffer.download(&self.stream, len * size_of::<T>(), from)?;
            buffer.values(len).map(|values| take(values))
        })
    }

    /// Has `start` start something on the stream, and waits until it is done, also after an error. Waits for no
    /// operator.
    ///
    /// # Errors
    /// Those of `start`; if the device has failed.
    pub fn run(&self, start: impl FnOnce(&CudaStream) -> Result<()>) -> Result<()> {
        self.operators.context().bind_to_thread().w()?;
        let started = start(&self.stream);
        let done = self.stream.synchronize().w();
        started.and(done)
    }

    /// Gives the buffers back.
    pub fn release(&self) {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Calls `copy` with a buffer of at least `bytes`, and waits for what it has started.
    fn with_buffer(
        &self,
        bytes: usize,
        copy: impl FnOnce(&mut PinnedBuffer) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let context = self.operators.context();
        context.bind_to_thread().w()?;
        let buffers = || self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let free = buffers().pop().filter(|buffer| buffer.bytes() >= bytes);
        let mut buffer = free.map_or_else(|| PinnedBuffer::new(context, bytes), Ok).w()?;
        copy(&mut buffer).w()?;
        buffer.wait().w()?;
        buffers().push(buffer);
        Ok(())
    }
}
