//! Routings in device memory.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::super::arena::ArenaAllocation;
use super::super::context::Context;
use crate::backend::storage::RoutingImpl;
use crate::error::DeviceError;
use crate::routing_shape::RoutingShape;

/// Experts and weights `[rows, top_k]`, the pairs of the grouped rows, and the experts of layers that are kept, one
/// behind the other in one allocation.
pub(in crate::cuda) struct CudaRouting {
    context: Arc<Context>,
    memory: ArenaAllocation,
    /// Experts of all rows.
    entries: usize,
    /// Experts of the rank.
    local: usize,
}

impl CudaRouting {
    pub fn new(context: &Arc<Context>, shape: &RoutingShape) -> std::result::Result<Self, DeviceError> {
        let memory = context.zeros(&context.workspace, shape.bytes())?;
        Ok(Self { context: context.clone(), memory, entries: shape.rows * shape.top_k, local: shape.local.len() })
    }

    /// Address of the weights, float32.
    pub fn weights(&self) -> sys::CUdeviceptr {
        self.memory.pointer
    }

    /// Address of the row of each sorted pair, 32 bits each, as are those that follow.
    pub fn tokens(&self) -> sys::CUdeviceptr {
        self.word(self.entries)
    }

    /// Address of the place among the sorted pairs of each pair of a grouped row and an expert of this rank.
    pub fn places(&self) -> sys::CUdeviceptr {
        self.word(2 * self.entries)
    }

    /// Address of the experts, 16 bits each.
    pub fn experts(&self) -> sys::CUdeviceptr {
        self.word(3 * self.entries)
    }

    /// Address of the experts from this entry on.
    pub fn experts_of(&self, entry: usize) -> sys::CUdeviceptr {
        self.experts() + (entry * size_of::<u16>()) as u64
    }

    /// Address of the weights from this entry on.
    pub fn weights_of(&self, entry: usize) -> sys::CUdeviceptr {
        self.weights() + (entry * size_of::<f32>()) as u64
    }

    /// Address of the first pair of each of the rank's experts, and of the end of the last one's.
    pub fn starts(&self) -> sys::CUdeviceptr {
        self.word(3 * self.entries + self.entries.div_ceil(2))
    }

    /// Address of the experts that are kept, `[rows, layers, top_k]`, 16 bits each, from this one of the first row on.
    pub fn kept_of(&self, expert: usize) -> sys::CUdeviceptr {
        self.starts() + ((self.local + 1) * size_of::<u32>() + expert * size_of::<u16>()) as u64
    }

    fn word(&self, index: usize) -> sys::CUdeviceptr {
        self.memory.pointer + (index * size_of::<u32>()) as u64
    }
}

impl RoutingImpl for CudaRouting {
    fn read_experts(&self, entries: Range<usize>) -> Result<Vec<u16>> {
        let mut experts = vec![0; entries.len()];
        self.context.copies.read(self.experts_of(entries.start), &mut experts)?;
        Ok(experts)
    }

    fn read_weights(&self, entries: Range<usize>) -> Result<Vec<f32>> {
        let mut weights = vec![0.0; entries.len()];
        self.context.copies.read(self.weights_of(entries.start), &mut weights)?;
        Ok(weights)
    }
}
