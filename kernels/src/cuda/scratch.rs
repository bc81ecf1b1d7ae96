//! Device memory that an operator needs while it runs, and keeps for the next time.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::Allocation;
use super::context::Context;

/// Memory that grows to the most that was asked for, so that a step that repeats allocates nothing.
pub(super) struct Scratch {
    context: Arc<Context>,
    held: RefCell<Option<(usize, Allocation)>>,
}

impl Scratch {
    pub fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), held: RefCell::default() }
    }

    /// At least `bytes`, of which no more than one user's kernels may be under way: what they hold is unspecified.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn take(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        let mut held = self.held.borrow_mut();
        match &*held {
            Some((size, memory)) if *size >= bytes => Ok(memory.pointer),
            _ => {
                // Kernels that still use what was held run before those that get its addresses next: on one stream.
                *held = None;
                let memory = self.context.workspace.allocate(bytes).map_err(candle_core::Error::wrap)?;
                Ok(held.insert((bytes, memory)).1.pointer)
            }
        }
    }

    /// Gives the memory back.
    pub fn release(&self) {
        self.held.take();
    }
}
