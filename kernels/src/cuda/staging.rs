//! Small copies to the device that the host does not wait for.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result, sys};

/// Buffers in turn: the next is filled while the copy from the one before may still run.
const BUFFERS: usize = 2;
/// Words of a new buffer.
const FIRST_WORDS: usize = 16 << 10;

/// Pinned memory of the host from which words are copied to the device on the rank's stream.
pub(super) struct Staging {
    stream: Arc<CudaStream>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    buffers: [Option<Buffer>; BUFFERS],
    next: usize,
}

struct Buffer {
    memory: PinnedHostSlice<u32>,
    /// Recorded behind the last copy from it.
    copied: CudaEvent,
}

impl Staging {
    pub fn new(stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), state: RefCell::default() }
    }

    /// Starts to copy `words` to `to`, after what the stream has been given before.
    pub fn copy(&self, words: &[u32], to: sys::CUdeviceptr) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        let state = &mut *self.state.borrow_mut();
        let place = &mut state.buffers[state.next];
        state.next = (state.next + 1) % BUFFERS;
        let mut buffer = match place.take() {
            Some(buffer) => {
                buffer.copied.synchronize()?;
                if buffer.memory.len() < words.len() { self.buffer(words.len())? } else { buffer }
            }
            None => self.buffer(words.len())?,
        };
        let pinned = &mut buffer.memory.as_mut_slice()?[..words.len()];
        pinned.copy_from_slice(words);
        // SAFETY: the caller names device memory of its own; the buffer is not written before its copy has been made.
        unsafe { result::memcpy_htod_async(to, pinned, self.stream.cu_stream()) }?;
        buffer.copied.record(&self.stream)?;
        *place = Some(buffer);
        Ok(())
    }

    /// Gives the buffers back.
    pub fn release(&self) {
        self.state.take();
    }

    fn buffer(&self, words: usize) -> Result<Buffer, DriverError> {
        let context = self.stream.context();
        let len = words.max(FIRST_WORDS).next_power_of_two();
        // SAFETY: each word is written before it is read.
        let memory = unsafe { context.alloc_pinned_with_flags(len, 0) }?;
        Ok(Buffer { memory, copied: self.stream.record_event(None)? })
    }
}
