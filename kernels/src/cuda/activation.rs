//! Activations of feed-forward layers.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::launch::{Launch, rows_grid};
use super::module::{Module, fat_binary};
use super::tensor::TensorRows;

/// The kernels of [`Ops::silu_mul`](crate::Ops::silu_mul) and [`Ops::gelu`](crate::Ops::gelu).
pub(super) struct Activation {
    context: Arc<Context>,
    silu_mul: CudaFunction,
    gelu: CudaFunction,
}

impl Activation {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("activation"))?;
        Ok(Self { context: context.clone(), silu_mul: module.function("silu_mul")?, gelu: module.function("gelu")? })
    }

    /// `out = silu(left half of gate_up) * right half`.
    pub fn silu_mul(&self, gate_up: TensorRows, out: TensorRows) -> Result<()> {
        assert_eq!((gate_up.rows, gate_up.width), (out.rows, 2 * out.width), "rows and width of a gated layer");
        let mut launch = Launch::of(&self.context.stream, &self.silu_mul);
        launch.rows(gate_up).rows(out).int(out.width);
        // SAFETY: the kernel reads and writes the rows that were named, which tensors own.
        unsafe { launch.start(rows_grid(out.rows)) }
    }
    /// `x = gelu(x)`.
    pub fn gelu(&self, x: TensorRows) -> Result<()> {
        let mut launch = Launch::of(&self.context.stream, &self.gelu);
        launch.rows(x).int(x.width);
        // SAFETY: the rows are of a tensor.
        unsafe { launch.start(rows_grid(x.rows)) }
    }
}
