//! Mixtures of experts: which experts rows take, their pairs sorted by expert, and the sums of their outputs. The
//! products of experts are linear layers (`linear/experts.rs`). The host never reads a routing for a step, so that a
//! step with experts can be a graph.

mod routing;

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, sys};

use super::context::Context;
use super::download::DownloadPool;
use super::launch::{Launch, grid, rows_grid};
use super::matrix::CudaMatrix;
use super::module::{Module, fat_binary};
use super::staging::Staging;
use super::tensor::TensorRows;
use crate::deferred::Deferred;
use crate::routing::Routing;
use crate::values::StorageDtype;
pub(super) use routing::CudaRouting;

const WARP_THREADS: u32 = 32;
/// Threads of a block that computes logits, of one that sorts pairs, and of one that sums outputs.
const LOGITS_THREADS: u32 = 256;
const GROUP_THREADS: u32 = 128;
const SUM_THREADS: u32 = 256;
/// Warps of a block that computes logits.
const LOGITS_WARPS: usize = (LOGITS_THREADS / WARP_THREADS) as usize;
/// Bytes that an expert of a row takes of shared memory: its weight twice and its number, and then a term of the sum.
const SHARED_BYTES: usize = 12;

/// Rows and experts whose logits a warp computes.
struct LogitsTile {
    suffix: &'static str,
    rows: usize,
    experts: usize,
}

/// Many warps with one logit each while there are few rows; then some that load each weight for several rows.
const LOGITS_TILES: [LogitsTile; 2] =
    [LogitsTile { suffix: "1x1", rows: 1, experts: 1 }, LogitsTile { suffix: "8x4", rows: 8, experts: 4 }];

/// Bytes of the host that kept experts are copied to at most, where a step has `bytes` of them.
pub(super) fn max_kept_bytes(bytes: usize) -> u64 {
    if bytes == 0 { 0 } else { bytes.next_power_of_two() as u64 }
}

/// How a router chooses and weighs; see [`Router`](crate::Router).
pub(super) struct DeviceRouter<'a> {
    pub gate: &'a CudaMatrix,
    /// Address of the bias of sigmoids; 0 for a softmax.
    pub bias: sys::CUdeviceptr,
    pub normalise: bool,
    pub scale: f32,
    /// Number of the layer among those with experts.
    pub layer: usize,
}

/// The kernels of mixtures of experts.
pub(super) struct ExpertKernels {
    context: Arc<Context>,
    /// Those of [`LOGITS_TILES`], for each type of weights.
    logits_bf16: Vec<CudaFunction>,
    logits_f32: Vec<CudaFunction>,
    route: CudaFunction,
    group: CudaFunction,
    combine: CudaFunction,
    add_gated: CudaFunction,
    kept: DownloadPool<u16>,
}

impl ExpertKernels {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("experts"))?;
        let logits = |dtype: &str| -> Result<Vec<CudaFunction>> {
            let name = |tile: &LogitsTile| format!("router_logits_{dtype}_{}", tile.suffix);
            LOGITS_TILES.iter().map(|tile| module.function(&name(tile))).collect()
        };
        Ok(Self {
            context: context.clone(),
            logits_bf16: logits("bf16")?,
            logits_f32: logits("f32")?,
            route: module.function("route")?,
            group: module.function("group_by_expert")?,
            combine: module.function("combine_experts")?,
            add_gated: module.function("add_gated")?,
            kept: DownloadPool::new(&context.stream),
        })
    }

    /// See [`Ops::route`](crate::Ops::route).
    pub fn route(
        &self,
        staging: &Staging,
        x: TensorRows,
        router: &DeviceRouter<'_>,
        forced: Option<&[u16]>,
        logits: TensorRows,
        routing: &Routing,
    ) -> Result<()> {
        self.compute_logits(x, router.gate, logits)?;
        let forced: Option<Vec<u32>> = forced.map(|forced| forced.iter().map(|expert| u32::from(*expert)).collect());
        let forced = forced.map(|words| self.context.upload(staging, &words)).transpose()?;
        let (shape, to) = (routing.shape(), routing.storage::<CudaRouting>());
        let (top_k, kept) = (shape.top_k, shape.kept_places(router.layer).map_or(0, |places| to.kept_of(places.start)));
        let mut launch = Launch::of(&self.context.stream, &self.route);
        launch.rows(logits).int(logits.width).pointer(router.bias);
        launch.pointer(forced.as_ref().map_or(0, |memory| memory.pointer));
        launch.int(router.normalise.into()).float(router.scale).int(top_k);
        launch.pointer(to.experts()).pointer(to.weights()).pointer(kept).int(shape.kept_row());
        // SAFETY: the routing and the forced rows have `top_k` entries for each row, the kept experts have a row of
        // `kept_row` for each, and the bias has an entry for each column of the logits.
        unsafe { launch.start(grid(blocks([logits.rows, 1]), WARP_THREADS, shared(top_k))) }
    }

    /// See [`Ops::kept_experts`](crate::Ops::kept_experts).
    pub fn kept<'a>(&'a self, routing: &'a Routing, rows: usize) -> Result<Deferred<'a, Vec<u16>>> {
        let (len, from) = (rows * routing.shape().kept_row(), routing.storage::<CudaRouting>());
        let mut copy = self.kept.take(len)?;
        for to in copy.places(len) {
            // SAFETY: the rows are in the device's memory, and they are read when the copy has been made.
            unsafe { self.kept.copy(from.kept_of(0), to)? };
        }
        copy.record()?;
        Ok(Deferred::new(move || Ok(copy.read()?.to_vec())))
    }

    /// Gives the memory of the host that copies reuse back.
    pub fn release(&self) {
        self.kept.release();
    }

    /// `logits = x gateᵀ` in float32.
    fn compute_logits(&self, x: TensorRows, gate: &CudaMatrix, logits: TensorRows) -> Result<()> {
        assert_eq!(gate.shape.leaves, 1, "leaves of a router's gate");
        let kernels = if gate.shape.dtype == StorageDtype::Bf16 { &self.logits_bf16 } else { &self.logits_f32 };
        let in_warps = |tile: &LogitsTile| blocks_of([x.rows, logits.width], [tile.rows, tile.experts * LOGITS_WARPS]);
        let is_busy = |tile: &LogitsTile| in_warps(tile).iter().product::<usize>() >= self.context.processors as usize;
        let tile = LOGITS_TILES.iter().rposition(is_busy).unwrap_or(0);
        let mut launch = Launch::of(&self.context.stream, &kernels[tile]);
        launch.rows(x).pointer(gate.row(0)).long(gate.layout().stride()).rows(logits);
        launch.int(x.rows).int(logits.width).int(x.width);
        // SAFETY: the gate has a row of as many values as `x` for each logit.
        unsafe { launch.start(grid(blocks(in_warps(&LOGITS_TILES[tile])), LOGITS_THREADS, 0)) }
    }

    /// See [`Ops::group_by_expert`](crate::Ops::group_by_expert).
    pub fn group(&self, routing: &Routing) -> Result<()> {
        let (shape, rows, to) = (routing.shape(), routing.grouped(), routing.storage::<CudaRouting>());
        let (top_k, local) = (shape.top_k, &shape.local);
        let mut launch = Launch::of(&self.context.stream, &self.group);
        launch.pointer(to.experts_of(rows.start * top_k)).int(rows.len() * top_k).int(top_k).int(rows.start);
        launch.int(local.start).int(local.len());
        launch.pointer(to.tokens()).pointer(to.starts()).pointer(to.places());
        let warps = (GROUP_THREADS / WARP_THREADS) as usize;
        // SAFETY: the routing has memory for the pairs of all its rows.
        unsafe { launch.start(grid(blocks([local.len().div_ceil(warps), 1]), GROUP_THREADS, 0)) }
    }

    /// See [`Ops::combine`](crate::Ops::combine).
    pub fn combine(&self, expert_out: TensorRows, routing: &Routing, out: TensorRows) -> Result<()> {
        let (shape, rows, from) = (routing.shape(), routing.grouped(), routing.storage::<CudaRouting>());
        let (top_k, local, first) = (shape.top_k, &shape.local, rows.start * shape.top_k);
        let mut launch = Launch::of(&self.context.stream, &self.combine);
        launch.rows(expert_out).pointer(from.experts_of(first)).pointer(from.weights_of(first)).pointer(from.places());
        launch.int(top_k).int(local.start).int(local.len()).int(local.len() / shape.group_len());
        launch.rows(out.rows_from(rows.start)).int(out.width);
        let columns = out.width.div_ceil(SUM_THREADS as usize);
        // SAFETY: `expert_out` has a row for each pair, and `out` one for each that is routed.
        unsafe { launch.start(grid(blocks([rows.len(), columns]), SUM_THREADS, shared(top_k))) }
    }

    /// See [`Ops::add_gated`](crate::Ops::add_gated).
    pub fn add_gated(&self, gates: TensorRows, input: TensorRows, out: TensorRows) -> Result<()> {
        let mut launch = Launch::of(&self.context.stream, &self.add_gated);
        launch.rows(gates).rows(input).rows(out).int(out.width);
        // SAFETY: the rows are of tensors, of which there are as many.
        unsafe { launch.start(rows_grid(out.rows)) }
    }
}

/// Blocks along rows and columns that are cut into parts.
fn blocks_of(size: [usize; 2], part: [usize; 2]) -> [usize; 2] {
    [size[0].div_ceil(part[0]), size[1].div_ceil(part[1])]
}

fn blocks([x, y]: [usize; 2]) -> (u32, u32, u32) {
    let [x, y] = [x, y].map(|blocks| u32::try_from(blocks).expect("rows and columns of a batch"));
    (x, y, 1)
}

/// Bytes of shared memory of a block that works on the experts of a row.
fn shared(top_k: usize) -> u32 {
    u32::try_from(top_k * SHARED_BYTES).expect("experts of a row")
}
