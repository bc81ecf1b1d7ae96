//! Device memory that an operator needs while it runs, and keeps for the next time.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::ArenaAllocation;
use super::context::Context;

/// Memory that grows to the most that was asked for, so that a step that repeats allocates nothing. Until it grows it
/// has one address, also from one release to the next.
pub(super) struct DeviceScratch {
    context: Arc<Context>,
    held: RefCell<Option<ScratchMemory>>,
}

struct ScratchMemory {
    bytes: usize,
    memory: ArenaAllocation,
    is_released: bool,
}

impl DeviceScratch {
    pub fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), held: RefCell::default() }
    }

    /// At least `bytes`, of which no more than one user's kernels may be under way: what they hold is unspecified.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn take(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        let mut held = self.held.borrow_mut();
        if let Some(held) = held.as_mut().filter(|held| held.bytes >= bytes) {
            if held.is_released {
                held.memory.restore_for_step()?;
                held.is_released = false;
            }
            return Ok(held.memory.pointer);
        }
        // Kernels that still use what was held run before those that get its addresses next: on one stream.
        *held = None;
        self.context.moved();
        let memory = self.context.scratch.allocate_for_step(bytes)?;
        Ok(held.insert(ScratchMemory { bytes, memory, is_released: false }).memory.pointer)
    }

    /// Gives the memory back.
    pub fn release(&self) {
        if let Some(held) = &mut *self.held.borrow_mut() {
            held.memory.release();
            held.is_released = true;
        }
    }
}
