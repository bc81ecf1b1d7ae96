//! Keys and values of a layer in device memory.

use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::ArenaAllocation;
use super::context::Context;
use crate::backend::storage::KvCacheImpl;
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;

/// Keys `[blocks, kv_heads, block_size, head_dim]`, then values of the same shape.
pub(super) struct CudaKv {
    memory: ArenaAllocation,
    pub layout: KvLayout,
}

impl CudaKv {
    /// Allocates the memory; its content is unspecified.
    pub fn new(context: &Context, layout: KvLayout) -> Result<Self, DeviceError> {
        let memory = context.kv.allocate(layout.blocks * layout.bytes_per_block())?;
        Ok(Self { memory, layout })
    }

    /// Address of the keys.
    pub fn keys(&self) -> sys::CUdeviceptr {
        self.memory.pointer
    }

    /// Address of the values.
    pub fn values(&self) -> sys::CUdeviceptr {
        self.memory.pointer + (self.layout.blocks * self.layout.bytes_per_block() / 2) as u64
    }
}

impl KvCacheImpl for CudaKv {
    fn release(&mut self) -> bool {
        self.memory.release();
        true
    }

    fn restore(&mut self) -> Result<(), DeviceError> {
        self.memory.restore()
    }
}
