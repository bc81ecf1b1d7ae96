//! The products of experts: each of some pairs of a row and an expert, sorted by expert, and the expert's part of one
//! matrix. The tiles are those of other products, so a pair has the bits of a product with its expert's part alone.
//!
//! Where the pairs of an expert are is known on the device only. The grid has as many blocks as there can be tiles;
//! each finds its tile, and those without one end.

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;
use half::bf16;

use super::super::experts::CudaRouting;
use super::super::launch::{Launch, grid, rows_grid};
use super::super::matrix::CudaMatrix;
use super::super::tensor::TensorRows;
use super::plan::{ExpertsSize, TILES};
use super::{Gemm, GemmInput, PACKED_VALUES, by_rows};
use crate::routing::Routing;
use crate::values::StorageDtype;

impl Gemm {
    /// `out[pair] = x[pair] wᵀ` with the part of `w` of the pair's expert.
    pub fn of_experts(&self, x: TensorRows, w: &CudaMatrix, routing: &Routing, out: TensorRows) -> Result<()> {
        let (tile, size) = self.expert_tile(w, routing, out.width, false);
        let input = self.pairs(x, 0, w, routing, size.pairs)?;
        self.multiply_pairs(tile, size, &input, w, routing, out)
    }

    /// As [`Self::of_experts`], where a pair takes the row of `x` that is routed.
    pub fn of_experts_by_row(&self, x: TensorRows, w: &CudaMatrix, routing: &Routing, out: TensorRows) -> Result<()> {
        let (tile, size) = self.expert_tile(w, routing, out.width, false);
        let input = self.pairs(x, tokens(routing), w, routing, size.pairs)?;
        self.multiply_pairs(tile, size, &input, w, routing, out)
    }

    /// `out[pair] = silu(left half) * right half` of what [`Self::of_experts_by_row`] gives, with the bits of the
    /// product and the activation one after the other. Takes the weights that [`Self::gates`] takes.
    pub fn gated_of_experts(&self, x: TensorRows, w: &CudaMatrix, routing: &Routing, out: TensorRows) -> Result<()> {
        let (tile, size) = self.expert_tile(w, routing, out.width, true);
        let input = self.pairs(x, tokens(routing), w, routing, size.pairs)?;
        self.multiply_pairs(tile, size, &input, w, routing, out)
    }

    /// Which of [`TILES`] is the fastest, and the size of the products.
    fn expert_tile(&self, w: &CudaMatrix, routing: &Routing, n: usize, is_gated: bool) -> (usize, ExpertsSize) {
        let size = expert_size(w, routing, n, is_gated);
        (size.tile(self.limits), size)
    }

    /// The input of each pair, packed for bfloat16 weights. `rows` is the address of the row of `x` of each pair; 0 if
    /// `x` has the rows of the pairs.
    pub(super) fn pairs(
        &self,
        x: TensorRows,
        rows: sys::CUdeviceptr,
        w: &CudaMatrix,
        routing: &Routing,
        most: usize,
    ) -> Result<GemmInput> {
        let layout = w.layout();
        assert_eq!((layout.leaves, layout.run), (1, x.width), "leaves and width of the matrix of experts");
        let ends = routing.storage::<CudaRouting>().starts();
        let count = ends + (routing.shape().local.len() * size_of::<u32>()) as u64;
        if w.shape.dtype == StorageDtype::Bf16 {
            let pointer = self.packed.take(most * layout.stride() * size_of::<bf16>())?;
            let mut launch = Launch::of(&self.context.stream, &self.pack_pairs);
            launch.pointer(pointer).rows(x).int(layout.leaves).int(layout.run).int(layout.padded_run);
            launch.pointer(rows).pointer(count);
            // SAFETY: the memory has a padded row for each pair, and the rows are those that are routed.
            unsafe { launch.start(by_rows(most, layout.stride() / PACKED_VALUES)) }?;
            return Ok(GemmInput { pointer, stride: layout.stride(), run: layout.padded_run });
        }
        if rows == 0 {
            return Ok(GemmInput { pointer: x.pointer, stride: x.stride, run: layout.run });
        }
        let pointer = self.packed.take(most * x.width * size_of::<f32>())?;
        let mut launch = Launch::of(&self.context.stream, &self.gather_pairs);
        launch.pointer(pointer).rows(x).int(x.width).pointer(rows).pointer(count);
        // SAFETY: as above, with dense rows.
        unsafe { launch.start(rows_grid(most)) }?;
        Ok(GemmInput { pointer, stride: x.width, run: layout.run })
    }

    /// Starts the blocks of the products.
    pub(super) fn multiply_pairs(
        &self,
        tile: usize,
        size: ExpertsSize,
        x: &GemmInput,
        w: &CudaMatrix,
        routing: &Routing,
        out: TensorRows,
    ) -> Result<()> {
        let layout = w.layout();
        let function = self.expert_products[tile].as_ref().expect("a tile of experts");
        let mut launch = Launch::of(&self.context.stream, function);
        launch.rows(out).pointer(x.pointer).long(x.stride).int(x.run).int(layout.run);
        launch.pointer(w.row(0)).long(layout.stride()).int(layout.padded_run).int(out.width).int(layout.leaves);
        launch.pointer(routing.storage::<CudaRouting>().starts()).int(size.experts);
        let tile = &TILES[tile];
        let blocks = [size.tiles(tile), out.width.div_ceil(tile.columns)];
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("blocks of a product"));
        // SAFETY: input and `out` have a row for each pair, and `w` has a part for each expert.
        unsafe { launch.start(grid((x, y, 1), tile.threads, tile.shared)) }
    }
}

/// The address of the row that is routed of each pair.
fn tokens(routing: &Routing) -> sys::CUdeviceptr {
    routing.storage::<CudaRouting>().tokens()
}

fn expert_size(w: &CudaMatrix, routing: &Routing, n: usize, is_gated: bool) -> ExpertsSize {
    let (shape, rows) = (routing.shape(), routing.grouped().len());
    ExpertsSize {
        dtype: w.shape.dtype,
        experts: shape.local.len(),
        pairs: shape.most_pairs(rows),
        rows: (rows * shape.top_k).div_ceil(shape.experts),
        n,
        is_gated,
    }
}
