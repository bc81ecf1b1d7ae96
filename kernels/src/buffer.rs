//! Float32 vectors in a device's memory.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use half::bf16;

use crate::activations::Activations;
use crate::backend::storage::MemoryImpl;
use crate::values::{StorageDtype, TensorView};

/// Float32 values in a device's memory, in one dimension: a bias, the weights of a norm, a table of the rotary
/// embedding.
pub struct DeviceBuffer {
    memory: Arc<dyn MemoryImpl>,
    values: Activations,
}

impl DeviceBuffer {
    /// `values` has one dimension.
    pub(crate) fn new(memory: Arc<dyn MemoryImpl>, values: Activations) -> Self {
        Self { memory, values }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.values.elem_count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * self.len()
    }

    /// Replaces the values from `start` on.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If they pass the end.
    pub fn write(&self, start: usize, values: &[f32]) -> Result<()> {
        self.memory.write(&self.values, start, values)
    }

    /// Replaces the values from `start` on by `values`, rounded to what a matrix of `dtype` would hold: in bfloat16
    /// every weight has bfloat16's precision, vectors too, as in the trainer.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If they pass the end.
    pub fn write_rounded(&self, start: usize, values: TensorView<'_>, dtype: StorageDtype) -> Result<()> {
        let rounded = |x: f32| if dtype == StorageDtype::Bf16 { bf16::from_f32(x).to_f32() } else { x };
        let rounded: Vec<f32> = match values {
            TensorView::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
            TensorView::F16(values) => values.iter().map(|x| rounded(x.to_f32())).collect(),
            TensorView::F32(values) => values.iter().map(|x| rounded(*x)).collect(),
        };
        self.write(start, &rounded)
    }

    /// Some of the values.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If `range` passes the end.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        self.memory.read(&self.values, range)
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.values
    }
}
