//! The operators as their definitions read: plain loops that accumulate in float64, without vector instructions,
//! packing or threads. The other devices are compared with this one, and a model can be served from it (`--device
//! reference`) to tell an error of a kernel from one of everything else. It is far slower.
//!
//! Activations are float32 in the host's memory; weights and KV are float32 values of their type's precision, row by
//! row.

mod experts;
mod operators;
mod ops;
mod sampling;
mod storage;

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use crate::activations::Activations;
use crate::backend::device::{DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::operators::OpsImpl;
use crate::backend::storage::{KvCacheImpl, MatrixImpl, MemoryImpl, RoutingImpl};
use crate::error::DeviceError;
use crate::host::{HostRouting, memory};
use crate::kv_layout::KvLayout;
use crate::routing_shape::RoutingShape;
use crate::tensor::{with_f32, with_f32_mut};
use crate::weights::MatrixShape;
#[cfg(test)]
pub(crate) use experts::{add_gated, route};
#[cfg(test)]
pub(crate) use operators::{add_scaled, attention, gelu, layer_norm, linear, rms_norm, rope, silu_mul};
use ops::ReferenceOps;
#[cfg(test)]
pub(crate) use sampling::distribution;
pub(crate) use storage::{RowMajor, Slots};

/// The host's memory and one of its threads.
pub(crate) struct ReferenceDevice;

impl ReferenceDevice {
    /// # Errors
    /// `Unsupported` if a kernel is asked for: there is one way to compute.
    pub fn open(options: &DeviceOptions<'_>) -> std::result::Result<Self, DeviceError> {
        match options.kernel {
            "auto" => Ok(Self),
            kernel => Err(DeviceError::Unsupported(format!("--kernel {kernel}: the reference device has only auto"))),
        }
    }
}

impl DeviceImpl for ReferenceDevice {
    fn kernel(&self) -> &'static str {
        "reference"
    }

    fn check(&self, _: &ModelShape) -> std::result::Result<(), DeviceError> {
        Ok(())
    }

    fn memory(&self) -> usize {
        0
    }

    fn total_bytes(&self) -> u64 {
        memory::total_bytes()
    }

    fn used_bytes(&self) -> u64 {
        memory::resident_bytes()
    }

    fn trim(&self) {
        memory::trim();
    }

    fn ops(&self) -> Box<dyn OpsImpl> {
        Box::new(ReferenceOps)
    }
}

impl MemoryImpl for ReferenceDevice {
    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        size_of::<f32>() * shape.n * shape.k
    }

    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError> {
        Ok(Box::new(RowMajor::zeros(shape)))
    }

    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError> {
        Ok(Box::new(Slots::new(layout)))
    }

    fn routing(&self, shape: &RoutingShape) -> std::result::Result<Box<dyn RoutingImpl>, DeviceError> {
        Ok(Box::new(HostRouting::new(shape)))
    }

    fn zeros(&self, len: usize) -> Result<Activations> {
        Tensor::zeros(len, DType::F32, &Device::Cpu).map(Activations::owned)
    }

    fn activations(&self, rows: usize, width: usize) -> Result<Activations> {
        Tensor::zeros((rows, width), DType::F32, &Device::Cpu).map(Activations::owned)
    }

    fn write(&self, to: &Tensor, start: usize, values: &[f32]) -> Result<()> {
        with_f32_mut(to, |stored| stored[start..start + values.len()].copy_from_slice(values))
    }

    fn read(&self, from: &Tensor, range: Range<usize>) -> Result<Vec<f32>> {
        with_f32(from, |stored| stored[range].to_vec())
    }
}
