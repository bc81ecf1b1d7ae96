//! Rotary embedding.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::launch::{Launch, rows_grid};
use super::module::{Module, fat_binary};
use super::step::CudaStep;
use super::tensor::{TensorRows, pointer};
use crate::rotary::RotaryTables;

/// The kernel of [`Ops::rope`](crate::Ops::rope).
pub(super) struct Rope {
    context: Arc<Context>,
    rope: CudaFunction,
}

impl Rope {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("rope"))?;
        Ok(Self { context: context.clone(), rope: module.function("rope")? })
    }

    /// Rotates each head of `x` in place by the step's positions.
    ///
    /// # Panics
    /// If `x` has other heads, or there are axes of too many frequencies.
    pub fn rotate(&self, x: TensorRows, head_dim: usize, step: &CudaStep, tables: &RotaryTables<'_>) -> Result<()> {
        assert!(x.width.is_multiple_of(head_dim), "{} values are no heads of {head_dim}", x.width);
        let mut launch = Launch::of(&self.context.stream, &self.rope);
        launch.rows(x).int(x.width / head_dim).int(head_dim).int(tables.rotary_dim);
        launch.pointer(step.positions()).int(step.axes);
        launch.pointer(pointer(tables.cos.tensor())?).pointer(pointer(tables.sin.tensor())?);
        for word in packed(tables.axis_of) {
            launch.bits(word);
        }
        // SAFETY: the rows are of a tensor; the step has positions for each, of which the tables have the angles.
        unsafe { launch.start(rows_grid(x.rows)) }
    }
}

/// The axes of all frequencies in the kernel's arguments, so that they need no memory of the device: two bits each, the
/// first frequency lowest.
///
/// # Panics
/// If there are more than 128 frequencies, those of heads of 256.
fn packed(axis_of: &[u8]) -> [u64; 4] {
    let mut words = [0; 4];
    for (i, axis) in axis_of.iter().enumerate() {
        words[i / 32] |= u64::from(*axis) << (2 * (i % 32));
    }
    words
}
