//! Rotary embedding.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::launch::{Launch, rows_grid};
use super::module::{Module, fat_binary};
use super::tensor::TensorRows;

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

    /// Rotates each head of `x` in place; `positions` is the address of the position of each row, `cos` and `sin` those
    /// of tables `[positions, head_dim / 2]`.
    pub fn rotate(&self, x: TensorRows, head_dim: usize, positions: u64, cos: u64, sin: u64) -> Result<()> {
        assert!(x.width.is_multiple_of(head_dim), "{} values are no heads of {head_dim}", x.width);
        let mut launch = Launch::of(&self.context.stream, &self.rope);
        launch.rows(x).int(x.width / head_dim).int(head_dim).pointer(positions).pointer(cos).pointer(sin);
        // SAFETY: the rows are of a tensor; the step has a position for each, of which the tables have the angles.
        unsafe { launch.start(rows_grid(x.rows)) }
    }
}
