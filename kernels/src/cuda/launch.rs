//! Launches of kernels with their arguments.

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, result};

use super::tensor::TensorRows;

/// Threads of a block that handles one row of activations.
const ROW_THREADS: u32 = 128;

/// A kernel with its arguments so far, in the order of its parameters.
pub(super) struct Launch<'a> {
    stream: &'a CudaStream,
    function: &'a CudaFunction,
    /// Each argument in a word of its own, as the driver reads it: the low bytes are those of a smaller type.
    arguments: Vec<u64>,
}

impl<'a> Launch<'a> {
    pub fn of(stream: &'a CudaStream, function: &'a CudaFunction) -> Self {
        Self { stream, function, arguments: Vec::with_capacity(16) }
    }

    /// Rows as two parameters: the address and the stride, `T *` and `int64_t`.
    pub fn rows(&mut self, rows: TensorRows) -> &mut Self {
        self.pointer(rows.pointer).long(rows.stride)
    }

    /// A parameter `T *`.
    pub fn pointer(&mut self, pointer: u64) -> &mut Self {
        self.arguments.push(pointer);
        self
    }

    /// A parameter `int64_t`.
    pub fn long(&mut self, value: usize) -> &mut Self {
        self.arguments.push(value as u64);
        self
    }

    /// A parameter `uint64_t`.
    pub fn bits(&mut self, word: u64) -> &mut Self {
        self.arguments.push(word);
        self
    }

    /// A parameter `int`.
    ///
    /// # Panics
    /// If the value does not fit.
    pub fn int(&mut self, value: usize) -> &mut Self {
        self.arguments.push(i32::try_from(value).expect("an argument fits into 32 bits") as u64);
        self
    }

    /// A parameter `float`.
    pub fn float(&mut self, value: f32) -> &mut Self {
        self.arguments.push(u64::from(value.to_bits()));
        self
    }

    /// Starts the kernel on the stream. Does nothing if the grid is empty.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// The arguments are those of the kernel's parameters, and what it reads and writes is theirs.
    pub unsafe fn start(&mut self, grid: LaunchConfig) -> Result<()> {
        if grid.grid_dim.0 == 0 || grid.grid_dim.1 == 0 || grid.grid_dim.2 == 0 {
            return Ok(());
        }
        self.stream.context().bind_to_thread().w()?;
        let mut addresses: Vec<_> = self.arguments.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        // SAFETY: the caller's promise; the arguments live until the driver has read them, during the call.
        unsafe {
            result::launch_kernel(
                self.function.cu_function(),
                grid.grid_dim,
                grid.block_dim,
                grid.shared_mem_bytes,
                self.stream.cu_stream(),
                &mut addresses,
            )
        }
        .w()
    }
}

/// A grid of `blocks` blocks of `threads` threads with `shared` bytes of dynamic shared memory.
pub(super) fn grid(blocks: (u32, u32, u32), threads: u32, shared: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: blocks, block_dim: (threads, 1, 1), shared_mem_bytes: shared }
}

/// A block for each of `rows` rows.
pub(super) fn rows_grid(rows: usize) -> LaunchConfig {
    grid((u32::try_from(rows).expect("rows of a batch"), 1, 1), ROW_THREADS, 0)
}
