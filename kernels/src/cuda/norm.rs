//! Normalisation of rows.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::launch::{Launch, grid, rows_grid};
use super::module::{Module, fat_binary};
use super::tensor::TensorRows;

/// Threads of a block that normalises heads, a warp for each.
const HEAD_THREADS: u32 = 128;
/// Heads that a block normalises.
const HEADS: usize = HEAD_THREADS as usize / 32;

/// The kernels of the norms. Addresses of weights and biases are of float32 vectors; 0 for no bias.
pub(super) struct Norms {
    context: Arc<Context>,
    rms_norm: CudaFunction,
    add_rms_norm: CudaFunction,
    rms_norm_heads: CudaFunction,
    layer_norm: CudaFunction,
}

impl Norms {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("norm"))?;
        Ok(Self {
            context: context.clone(),
            rms_norm: module.function("rms_norm")?,
            add_rms_norm: module.function("add_rms_norm")?,
            rms_norm_heads: module.function("rms_norm_heads")?,
            layer_norm: module.function("layer_norm")?,
        })
    }

    pub fn rms_norm(&self, x: TensorRows, weight: u64, eps: f32, out: TensorRows) -> Result<()> {
        assert_eq!((x.rows, x.width), (out.rows, out.width), "shapes of a norm");
        let mut launch = Launch::of(&self.context.stream, &self.rms_norm);
        launch.rows(x).pointer(weight).float(eps).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, and the weight is as long as they are wide.
        unsafe { launch.start(rows_grid(out.rows)) }
    }

    pub fn add_rms_norm(
        &self,
        residual: TensorRows,
        x: TensorRows,
        bias: u64,
        weight: u64,
        eps: f32,
        out: TensorRows,
    ) -> Result<()> {
        let shape = |rows: TensorRows| (rows.rows, rows.width);
        assert!(shape(residual) == shape(x) && shape(x) == shape(out), "shapes of a norm: {residual:?} {x:?} {out:?}");
        let mut launch = Launch::of(&self.context.stream, &self.add_rms_norm);
        launch.rows(residual).rows(x).pointer(bias).pointer(weight).float(eps).rows(out).int(out.width);
        // SAFETY: as in `rms_norm`; a bias is as long as the weight.
        unsafe { launch.start(rows_grid(out.rows)) }
    }

    pub fn rms_norm_heads(&self, x: TensorRows, weight: u64, head_dim: usize, eps: f32) -> Result<()> {
        assert!(x.width.is_multiple_of(head_dim), "{} values are no heads of {head_dim}", x.width);
        let heads = x.width / head_dim;
        let blocks = (x.rows * heads).div_ceil(HEADS);
        let mut launch = Launch::of(&self.context.stream, &self.rms_norm_heads);
        launch.rows(x).pointer(weight).float(eps).int(heads).int(head_dim).int(x.rows);
        // SAFETY: as in `rms_norm`, for the weight of one head.
        unsafe { launch.start(grid((u32::try_from(blocks).expect("heads of a batch"), 1, 1), HEAD_THREADS, 0)) }
    }

    pub fn layer_norm(&self, x: TensorRows, weight: u64, bias: u64, eps: f32, out: TensorRows) -> Result<()> {
        assert_eq!((x.rows, x.width), (out.rows, out.width), "shapes of a norm");
        let mut launch = Launch::of(&self.context.stream, &self.layer_norm);
        launch.rows(x).pointer(weight).pointer(bias).float(eps).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, and weight and bias are as long as they are wide.
        unsafe { launch.start(rows_grid(out.rows)) }
    }
}
