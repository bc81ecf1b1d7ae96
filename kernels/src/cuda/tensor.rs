//! The device's view of float32 tensors in its memory.

use std::mem::ManuallyDrop;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDevice as CandleDevice;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, sys};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail};

use super::arena::ArenaAllocation;
use crate::activations::Activations;

/// Rows of float32 values in device memory, each contiguous.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorRows {
    pub pointer: sys::CUdeviceptr,
    pub rows: usize,
    pub width: usize,
    /// Values from the start of a row to that of the next.
    pub stride: usize,
}

impl TensorRows {
    /// The first `rows` rows.
    pub fn first(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// The rows from `first` on.
    pub fn rows_from(self, first: usize) -> Self {
        let values = first * self.stride;
        Self { pointer: self.pointer + (values * size_of::<f32>()) as u64, rows: self.rows - first, ..self }
    }
}

/// The address of a tensor's first element.
///
/// # Errors
/// If the tensor is not float32 on a CUDA device.
pub(super) fn pointer(t: &Tensor) -> Result<sys::CUdeviceptr> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("a tensor on a CUDA device is needed, not on {:?}", t.device().location())
    };
    let slice = storage.as_cuda_slice::<f32>()?;
    let (start, _) = slice.device_ptr(slice.stream());
    Ok(start + (layout.start_offset() * size_of::<f32>()) as u64)
}

/// The rows of a 2-dimensional tensor with contiguous rows.
pub(super) fn rows(t: &Tensor) -> Result<TensorRows> {
    let (rows, width) = t.dims2()?;
    match t.stride() {
        [stride, 1] => Ok(TensorRows { pointer: pointer(t)?, rows, width, stride: *stride }),
        stride => bail!("rows must be contiguous, the strides are {stride:?}"),
    }
}

/// A tensor `[rows, width]` over an allocation, which goes back to its arena when the activations are dropped.
pub(super) fn over(device: &CandleDevice, allocation: ArenaAllocation, shape: impl Into<Shape>) -> Result<Activations> {
    let shape = shape.into();
    let len = shape.elem_count();
    // SAFETY: the allocation has as many bytes, and `Lent` takes the slice out of the tensor before the memory goes.
    let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<f32>(allocation.pointer, len) };
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
    Ok(Activations::over(tensor.clone(), Lent { tensor: ManuallyDrop::new(tensor), _allocation: allocation }))
}

/// Memory that a tensor has for as long as this lives. candle frees the memory of its tensors through the driver, which
/// knows nothing of parts of an arena: so the tensor is given memory of the driver's before it is dropped. Where there
/// is none, the tensor (some hundred bytes of the host) is never dropped.
struct Lent {
    tensor: ManuallyDrop<Tensor>,
    _allocation: ArenaAllocation,
}

impl Drop for Lent {
    fn drop(&mut self) {
        match self.tensor.inplace_op1(&TakeSlice) {
            // SAFETY: the tensor is dropped here alone, and not used after.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.tensor) },
            Err(error) => tracing::debug!("a tensor without memory stays: {error}"),
        }
    }
}

/// Replaces the memory of a tensor by one value of the driver's own.
struct TakeSlice;

impl InplaceOp1 for TakeSlice {
    fn name(&self) -> &'static str {
        "take the memory"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a tensor of the host keeps its memory itself")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let device = storage.device().clone();
        // SAFETY: the value is never read.
        let one = unsafe { device.alloc::<f32>(1)? };
        let lent = std::mem::replace(storage.as_cuda_slice_mut::<f32>()?, one);
        lent.leak();
        Ok(())
    }
}
