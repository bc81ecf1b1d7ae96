//! Linear layers.
//!
//! The input of a bfloat16 layer is rounded and packed as the weights are; then blocks of `cu/linear_bf16.cu` or
//! `cu/linear_f32.cu` each sum some leaves of a tile of the output, which `add_parts` adds where there are several.

mod experts;
pub(super) mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, LaunchConfig, sys};
use half::bf16;

use super::context::Context;
use super::launch::{Launch, grid};
use super::matrix::CudaMatrix;
use super::module::{Module, fat_binary};
use super::scratch::DeviceScratch;
use super::tensor::TensorRows;
use crate::values::StorageDtype;
use crate::weights::MatrixShape;
use plan::{GemmLimits, GemmPlan, GemmSize, GemmTile, TILES};

/// Threads of a block of the kernels before and after a product.
const THREADS: u32 = 256;
/// Values that a thread of `pack_bf16` packs.
const PACKED_VALUES: usize = 8;

/// The kernels of linear layers, and the memory that they reuse.
pub(super) struct Gemm {
    context: Arc<Context>,
    limits: GemmLimits,
    pack: CudaFunction,
    pack_pairs: CudaFunction,
    gather_pairs: CudaFunction,
    add_parts: CudaFunction,
    /// Those of [`TILES`].
    products: Vec<CudaFunction>,
    /// Those of experts, for each of [`TILES`] that they have.
    expert_products: Vec<Option<CudaFunction>>,
    /// The input as bfloat16.
    packed: DeviceScratch,
    /// Sums of some leaves each, `[splits, m, n]`.
    parts: DeviceScratch,
}

/// The input as the kernels of a product read it.
struct GemmInput {
    pointer: sys::CUdeviceptr,
    stride: usize,
    /// Values from the start of a run to that of the next.
    run: usize,
}

impl Gemm {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.stream.context().attribute(shared).w()? as u32;
        let limits = GemmLimits { processors: context.processors as usize, shared };
        let load = |binary| Module::load(context.stream.context(), binary);
        let common = load(fat_binary!("linear"))?;
        let (of_bf16, of_f32) = (load(fat_binary!("linear_bf16"))?, load(fat_binary!("linear_f32"))?);
        let product = |tile: &GemmTile, kernel: &str| {
            let module = if tile.dtype == StorageDtype::Bf16 { &of_bf16 } else { &of_f32 };
            let function = module.function(kernel)?;
            let shared = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            if limits.fit(tile) {
                function.set_attribute(shared, tile.shared as i32).w()?;
            }
            Ok(function)
        };
        let of_experts = |tile: &GemmTile| {
            tile.is_of_experts().then(|| product(tile, &format!("experts_{}", tile.kernel))).transpose()
        };
        Ok(Self {
            context: context.clone(),
            limits,
            pack: common.function("pack_bf16")?,
            pack_pairs: common.function("pack_pairs_bf16")?,
            gather_pairs: common.function("gather_pairs")?,
            add_parts: common.function("add_parts")?,
            products: TILES.iter().map(|tile| product(tile, tile.kernel)).collect::<Result<_>>()?,
            expert_products: TILES.iter().map(of_experts).collect::<Result<_>>()?,
            packed: DeviceScratch::new(context),
            parts: DeviceScratch::new(context),
        })
    }

    /// `out = x wᵀ + bias`; the address of the bias is 0 if there is none.
    pub fn product(&self, x: TensorRows, w: &CudaMatrix, bias: sys::CUdeviceptr, out: TensorRows) -> Result<()> {
        assert_eq!((x.rows, x.width, w.shape.n), (out.rows, w.shape.k, out.width), "rows and widths of a linear layer");
        let MatrixShape { dtype, n, leaves, .. } = w.shape;
        let size = GemmSize { dtype, m: x.rows, n, leaves, is_gated: false };
        self.run(GemmPlan::of(size, self.limits), x, w, bias, out)
    }

    /// Whether [`Self::gated`] takes these weights.
    pub fn gates(&self, w: &CudaMatrix) -> bool {
        w.shape.dtype == StorageDtype::Bf16 && w.shape.leaves == 1
    }

    /// `out = silu(left half) * right half` of `x wᵀ + bias`, with the bits of the product and the activation one after
    /// the other.
    pub fn gated(&self, x: TensorRows, w: &CudaMatrix, bias: sys::CUdeviceptr, out: TensorRows) -> Result<()> {
        let MatrixShape { dtype, n, k, leaves } = w.shape;
        assert_eq!((x.rows, x.width, n), (out.rows, k, 2 * out.width), "rows and widths of a gated layer");
        let size = GemmSize { dtype, m: x.rows, n: out.width, leaves, is_gated: true };
        self.run(GemmPlan::of(size, self.limits), x, w, bias, out)
    }

    fn run(
        &self,
        plan: GemmPlan,
        x: TensorRows,
        w: &CudaMatrix,
        bias: sys::CUdeviceptr,
        out: TensorRows,
    ) -> Result<()> {
        let input = self.input(x, w)?;
        if plan.splits == 1 {
            return self.multiply(plan, &input, w, bias, out, 0);
        }
        let part = out.rows * out.width;
        let parts = self.parts.take(plan.splits * part * size_of::<f32>())?;
        let rows = TensorRows { pointer: parts, stride: out.width, ..out };
        self.multiply(plan, &input, w, 0, rows, part)?;
        let mut launch = Launch::of(&self.context.stream, &self.add_parts);
        launch.rows(out).pointer(parts).int(plan.splits).pointer(bias).int(out.width);
        // SAFETY: the parts are `[splits, m, n]`, the bias `[n]`, and the rows of `out` those of a tensor.
        unsafe { launch.start(by_rows(out.rows, out.width)) }
    }

    /// The input itself for float32 weights, and packed for bfloat16.
    fn input(&self, x: TensorRows, w: &CudaMatrix) -> Result<GemmInput> {
        let layout = w.layout();
        if w.shape.dtype == StorageDtype::F32 {
            return Ok(GemmInput { pointer: x.pointer, stride: x.stride, run: layout.run });
        }
        let pointer = self.packed.take(x.rows * layout.stride() * size_of::<bf16>())?;
        let mut launch = Launch::of(&self.context.stream, &self.pack);
        launch.pointer(pointer).rows(x).int(layout.leaves).int(layout.run).int(layout.padded_run);
        // SAFETY: the memory has a padded row for each of the tensor.
        unsafe { launch.start(by_rows(x.rows, layout.stride() / PACKED_VALUES)) }?;
        Ok(GemmInput { pointer, stride: layout.stride(), run: layout.padded_run })
    }

    /// Starts the blocks of a product, whose sums are `part` values apart for each of the splits.
    fn multiply(
        &self,
        plan: GemmPlan,
        x: &GemmInput,
        w: &CudaMatrix,
        bias: sys::CUdeviceptr,
        out: TensorRows,
        part: usize,
    ) -> Result<()> {
        let (layout, tile) = (w.layout(), &TILES[plan.tile]);
        let mut launch = Launch::of(&self.context.stream, &self.products[plan.tile]);
        launch.rows(out).long(part).pointer(x.pointer).long(x.stride).int(x.run).int(layout.run);
        launch.pointer(w.row(0)).long(layout.stride()).int(layout.padded_run).pointer(bias);
        launch.int(out.rows).int(out.width).int(layout.leaves / plan.splits);
        let blocks = [out.rows.div_ceil(tile.rows), out.width.div_ceil(tile.columns), plan.splits];
        let [x, y, z] = blocks.map(|blocks| u32::try_from(blocks).expect("blocks of a product"));
        // SAFETY: the input has a run for each leaf, and `out` memory for each of the splits.
        unsafe { launch.start(grid((x, y, z), tile.threads, tile.shared)) }
    }

    /// Gives the memory back.
    pub fn release(&self) {
        self.packed.release();
        self.parts.release();
    }
}

/// Blocks for each row, of a thread for each of `threads` places in it.
fn by_rows(rows: usize, threads: usize) -> LaunchConfig {
    let blocks = [rows, threads.div_ceil(THREADS as usize)];
    let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("rows and columns of a batch"));
    grid((x, y, 1), THREADS, 0)
}
