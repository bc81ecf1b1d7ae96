//! Paged attention, and the cache that it reads.
//!
//! A block of `cu/attention_*.cu` computes some queries of a sequence that share a KV head, over all positions that
//! they see; or over one span of them where there is little else to do, and `fold_spans` then folds the spans in the
//! same order.

mod cache;
pub(super) mod flash;
pub(super) mod plan;
#[cfg(test)]
mod tests;

use std::f32::consts::LOG2_E;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, sys};

use super::context::Context;
use super::kv::CudaKv;
use super::launch::{Launch, grid};
use super::module::{Module, fat_binary};
use super::scratch::DeviceScratch;
use super::staging::Staging;
use super::step::CudaStep;
use super::tensor::TensorRows;
use crate::backend::device::AttentionKernel;
use crate::kv_layout::{BlockCopy, KvLayout};
use crate::step::AttentionShape;
use crate::values::StorageDtype;
use cache::CacheWrites;
use flash::Flash;
use plan::{AttentionTile, CallPlan, TILES};

/// Threads of a block of `fold_spans`.
const FOLD_THREADS: u32 = 64;

/// The kernels of attention, and the partial results that they reuse.
pub(super) struct PagedAttention {
    context: Arc<Context>,
    cache: CacheWrites,
    /// Those of [`TILES`].
    tiles: Vec<CudaFunction>,
    fold: CudaFunction,
    flash: Option<Flash>,
    /// Weighted values, then softmaxes, of spans.
    partials: DeviceScratch,
}

impl PagedAttention {
    pub fn load(context: &Arc<Context>, kernel: AttentionKernel) -> Result<Self> {
        let load = |binary| Module::load(context.stream.context(), binary);
        let (of_bf16, of_f32) = (load(fat_binary!("attention_bf16"))?, load(fat_binary!("attention_f32"))?);
        let tile = |tile: &AttentionTile| {
            let module = if tile.dtype == StorageDtype::Bf16 { &of_bf16 } else { &of_f32 };
            let function = module.function(tile.kernel)?;
            let shared = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(shared, tile.shared as i32).w()?;
            Ok(function)
        };
        Ok(Self {
            context: context.clone(),
            cache: CacheWrites::load(context)?,
            tiles: TILES.iter().map(tile).collect::<Result<_>>()?,
            fold: load(fat_binary!("attention"))?.function("fold_spans")?,
            flash: (kernel == AttentionKernel::Flash).then(|| Flash::load(context)).transpose()?,
            partials: DeviceScratch::new(context),
        })
    }

    /// For which steps are made.
    pub fn kernel(&self) -> AttentionKernel {
        if self.flash.is_some() { AttentionKernel::Flash } else { AttentionKernel::Invariant }
    }

    /// `slots` is the address of the slot of each row.
    pub fn write_kv(&self, k: TensorRows, v: TensorRows, slots: u64, cache: &CudaKv) -> Result<()> {
        self.cache.write(k, v, slots, cache)
    }

    /// Does the copies in order.
    pub fn copy_blocks(&self, staging: &Staging, cache: &CudaKv, copies: &[BlockCopy]) -> Result<()> {
        self.cache.copy_blocks(staging, cache, copies)
    }

    /// Attention of the rows of a step's sequences.
    ///
    /// # Panics
    /// If shapes do not agree, or a block table is too short or names a block outside the cache.
    pub fn attend(
        &self,
        q: TensorRows,
        shape: &AttentionShape,
        step: &CudaStep,
        cache: &CudaKv,
        out: TensorRows,
    ) -> Result<()> {
        if let Some(plan) = &step.flash {
            let flash = self.flash.as_ref().expect("steps are made for what was loaded");
            // What it writes between the rows of its sequences is overwritten by ours.
            flash.attend(plan, q, shape, step, cache, out)?;
        }
        let way = step.plan.way(&cache.layout, shape, self.context.processors as usize);
        self.attend_by(way, q, shape, step, cache, out)
    }

    fn attend_by(
        &self,
        way: CallPlan,
        q: TensorRows,
        shape: &AttentionShape,
        step: &CudaStep,
        cache: &CudaKv,
        out: TensorRows,
    ) -> Result<()> {
        let (plan, layout) = (&step.plan, &cache.layout);
        let KvLayout { kv_heads, head_dim, .. } = *layout;
        plan.check(layout, q.rows);
        assert!(shape.heads.is_multiple_of(kv_heads), "{} heads share {kv_heads} KV heads", shape.heads);
        assert_eq!((q.rows, q.width, out.width), (out.rows, shape.heads * head_dim, q.width), "{q:?} and {out:?}");
        let partials = if way.spans == 1 { 0 } else { plan.partials * shape.heads };
        let values = if partials == 0 { 0 } else { self.partials.take(partials * plan::partial_bytes(layout))? };
        let softmaxes = values + (partials * head_dim * size_of::<f32>()) as u64;
        let start = |function, blocks: [usize; 3], threads, shared| {
            let mut launch = Launch::of(&self.context.stream, function);
            launch.rows(out).rows(q).pointer(cache.keys()).pointer(cache.values());
            launch.pointer(step.attention()).int(plan.sequences()).int(shape.heads).int(kv_heads).int(head_dim);
            launch.int(layout.block_size).float(shape.scale * LOG2_E);
            launch.int(shape.sliding_window.map_or(i32::MAX as usize, |window| window.min(i32::MAX as usize)));
            launch.pointer(values).pointer(softmaxes);
            let [x, y, z] = blocks.map(|blocks| u32::try_from(blocks).expect("blocks of a call"));
            // SAFETY: shapes and block tables were checked, and there is memory for each partial result.
            unsafe { launch.start(grid((x, y, z), threads, shared)) }
        };
        let tile = &TILES[way.tile];
        let blocks = [plan.blocks(way.tile, layout, shape), kv_heads, way.spans];
        start(&self.tiles[way.tile], blocks, tile.threads, tile.shared)?;
        if partials == 0 {
            return Ok(());
        }
        start(&self.fold, [plan.rows, shape.heads, 1], FOLD_THREADS, 0)
    }

    /// Gives the partial results back.
    pub fn release(&self) {
        self.partials.release();
        self.flash.iter().for_each(Flash::release);
    }
}
