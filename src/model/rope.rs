//! Rotary embedding: its tables on the device.

use candle_core::Tensor;
use rollout_kernels::{Device, DeviceBuffer, Ops, RotaryTables, Step};

use crate::error::Result;

/// Cosines and sines of the rotary angles, `[positions, rotary_dim / 2]` each. An angle is position times frequency in
/// float32, as transformers computes it.
pub(super) struct RopeTables {
    /// How many of the first dimensions of each head are rotated: two for each frequency.
    rotary_dim: usize,
    cos: DeviceBuffer,
    sin: DeviceBuffer,
    /// The axis of the position that each frequency takes; empty where positions have one axis.
    axis_of: Vec<u8>,
}

impl RopeTables {
    /// Tables of the positions below `positions`, on `device`.
    pub fn new(device: &Device, inv_freq: &[f32], axis_of: Vec<u8>, positions: usize) -> Result<Self> {
        let angles: Vec<f32> = (0..positions).flat_map(|p| inv_freq.iter().map(move |f| p as f32 * f)).collect();
        let table = |function: fn(f32) -> f32| device.upload(&angles.iter().copied().map(function).collect::<Vec<_>>());
        Ok(Self { rotary_dim: 2 * inv_freq.len(), cos: table(f32::cos)?, sin: table(f32::sin)?, axis_of })
    }

    /// Rotates each head of `x` (`[rows, heads * head_dim]`) in place by its row's position.
    pub fn rotate(&self, ops: &Ops, step: &Step<'_>, x: &Tensor, head_dim: usize) -> Result<()> {
        let Self { rotary_dim, cos, sin, axis_of } = self;
        Ok(ops.rope(x, head_dim, step, &RotaryTables { rotary_dim: *rotary_dim, cos, sin, axis_of })?)
    }
}
