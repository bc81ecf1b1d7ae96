//! Copies from the device that the host does not wait for until it reads them.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DeviceRepr, ValidAsZeroBits, result, sys};

use super::pinned::HostMemory;

/// Pinned memory of the host that is lent for one copy at a time, and kept.
pub(super) struct DownloadPool<T> {
    stream: Arc<CudaStream>,
    free: RefCell<Vec<DownloadBuffer<T>>>,
    lent: Cell<usize>,
}

struct DownloadBuffer<T> {
    memory: HostMemory<T>,
    /// Recorded behind the last copy to it.
    copied: CudaEvent,
}

/// Values that the device may still be copying.
pub(super) struct Download<'a, T: DeviceRepr + ValidAsZeroBits + Default + Clone> {
    of: &'a DownloadPool<T>,
    /// Taken when it is dropped.
    buffer: Option<DownloadBuffer<T>>,
    len: usize,
}

impl<T: DeviceRepr + ValidAsZeroBits + Default + Clone> DownloadPool<T> {
    pub fn new(stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), free: RefCell::default(), lent: Cell::new(0) }
    }

    /// How many are lent.
    pub fn lent(&self) -> usize {
        self.lent.get()
    }

    /// Lends memory for `len` values.
    pub fn take(&self, len: usize) -> Result<Download<'_, T>> {
        let fits = |buffer: &DownloadBuffer<T>| buffer.memory.len() >= len;
        let mut free = self.free.borrow_mut();
        let buffer = match free.iter().position(fits) {
            Some(i) => free.swap_remove(i),
            None => {
                free.pop(); // too small: the new one takes its place
                let context = self.stream.context();
                let memory = HostMemory::new(context, len.next_power_of_two()).w()?;
                DownloadBuffer { memory, copied: context.new_event(None).w()? }
            }
        };
        self.lent.set(self.lent.get() + 1);
        Ok(Download { of: self, buffer: Some(buffer), len })
    }

    /// Starts to copy from the device, after what the stream has been given before.
    ///
    /// # Safety
    /// `from` is memory of the device, and `to` is of a landing, which is recorded afterwards.
    pub unsafe fn copy(&self, from: sys::CUdeviceptr, to: &mut [T]) -> Result<()> {
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream.cu_stream()) }.w()
    }

    /// Gives the memory back that is not lent.
    pub fn release(&self) {
        self.free.take();
    }
}

impl<T: DeviceRepr + ValidAsZeroBits + Default + Clone> Download<'_, T> {
    /// The places of runs of `len` values each.
    pub fn places(&mut self, len: usize) -> impl Iterator<Item = &mut [T]> {
        let buffer = self.buffer.as_mut().expect("until it is dropped");
        let memory = buffer.memory.as_mut_slice().expect("nothing was ever recorded that could fail");
        memory[..self.len].chunks_exact_mut(len)
    }

    /// Says that all copies have been started.
    pub fn record(&self) -> Result<()> {
        self.buffer().copied.record(&self.of.stream).w()
    }

    /// Waits for the copies.
    pub fn read(&self) -> Result<&[T]> {
        self.buffer().copied.synchronize().w()?;
        Ok(&self.buffer().memory.as_slice().w()?[..self.len])
    }

    fn buffer(&self) -> &DownloadBuffer<T> {
        self.buffer.as_ref().expect("until it is dropped")
    }
}

impl<T: DeviceRepr + ValidAsZeroBits + Default + Clone> Drop for Download<'_, T> {
    /// Nothing may be copied to memory that is lent again, or given back: an unread landing waits here.
    fn drop(&mut self) {
        let buffer = self.buffer.take().expect("dropped once");
        if let Err(error) = buffer.copied.synchronize() {
            tracing::error!("answers of the device were not waited for: {error}");
        }
        self.of.lent.set(self.of.lent.get() - 1);
        self.of.free.borrow_mut().push(buffer);
    }
}
