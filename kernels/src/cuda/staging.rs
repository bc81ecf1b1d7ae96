//! Copies to the device that the host does not wait for.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, sys};

use super::pinned::PinnedBuffer;
use crate::cpu::Plain;

/// Buffers in turn: the next is filled while the copy from the one before may still run.
const BUFFERS: usize = 2;

/// Bytes of the host that they take at most: no copy is longer.
pub(super) const MOST_BYTES: u64 = (BUFFERS * (16 << 20)) as u64;

/// Page-locked memory from which values are copied to the device on the rank's stream.
pub(super) struct Staging {
    stream: Arc<CudaStream>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    buffers: [Option<PinnedBuffer>; BUFFERS],
    next: usize,
}

impl Staging {
    pub fn new(stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), state: RefCell::default() }
    }

    /// Starts to copy `values` to `to`, after what the stream has been given before.
    pub fn copy<T: Plain>(&self, values: &[T], to: sys::CUdeviceptr) -> Result<(), DriverError> {
        self.fill(values.len(), to, |pinned| pinned.copy_from_slice(values))
    }

    /// As [`Staging::copy`], with `len` values that `fill` writes; what they are before is unspecified.
    pub fn fill<T: Plain>(
        &self,
        len: usize,
        to: sys::CUdeviceptr,
        fill: impl FnOnce(&mut [T]),
    ) -> Result<(), DriverError> {
        let context = self.stream.context();
        context.bind_to_thread()?;
        let state = &mut *self.state.borrow_mut();
        let place = &mut state.buffers[state.next];
        state.next = (state.next + 1) % BUFFERS;
        let bytes = len * size_of::<T>();
        let buffer = match place {
            Some(buffer) if buffer.bytes() >= bytes => buffer,
            _ => place.insert(PinnedBuffer::new(context, bytes)?),
        };
        fill(buffer.values(len)?);
        buffer.upload(&self.stream, bytes, to)
    }

    /// Gives the buffers back.
    pub fn release(&self) {
        self.state.take();
    }
}
