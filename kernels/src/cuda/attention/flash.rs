//! candle-flash-attn instead of our own kernels, for the sequences of a step that have several rows. Its result for a
//! row depends on the other rows of the sequence in the same step, so a row's bits no longer depend on its own inputs
//! alone.

mod library;
pub(in crate::cuda) mod plan;
#[cfg(all(test, feature = "flash-attn"))]
mod tests;

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;
use candle_core::{Result, bail};
use half::bf16;

use crate::backend::device::{AttentionKernel, ModelShape};
use crate::cuda::context::Context;
use crate::cuda::kv::CudaKv;
use crate::cuda::launch::{Launch, rows_grid};
use crate::cuda::module::{Module, fat_binary};
use crate::cuda::scratch::DeviceScratch;
use crate::cuda::staging::Staging;
use crate::cuda::step::CudaStep;
use crate::cuda::tensor::TensorRows;
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;
use crate::step::{AttentionSequence, AttentionShape, StepInput};
use crate::values::StorageDtype;
use library::FlashCall;
use plan::FlashPlan;

/// Positions that it reads at once, all of one block of the cache.
const UNIT: usize = 32;
/// Most memory for logarithms of sums, one for each row and head, that is set aside. A step of more takes what is free.
pub(in crate::cuda) const SUM_BYTES: usize = 8 << 20;

/// Whether `--attention flash` can be had of this binary.
pub(in crate::cuda) const IS_BUILT_IN: bool = cfg!(feature = "flash-attn");

/// Whether it computes on this device, with the blocks of such a cache.
///
/// # Errors
/// [`DeviceError::Unsupported`] naming what it cannot take.
pub(in crate::cuda) fn check(context: &Arc<Context>, model: &ModelShape) -> std::result::Result<(), DeviceError> {
    let ModelShape { block_size, kv, .. } = *model;
    if kv != StorageDtype::Bf16 {
        return Err(DeviceError::Unsupported("--attention flash: keys and values must be bfloat16 (--dtype)".into()));
    }
    if !block_size.is_multiple_of(UNIT) {
        return Err(DeviceError::Unsupported(format!(
            "--attention flash: --block-size {block_size} is not a multiple of {UNIT}"
        )));
    }
    Flash::load(context).and_then(|flash| flash.try_out(model)).map_err(|e| {
        let how = "build it for this card (CUDA_CARDS), or give --attention invariant";
        DeviceError::Unsupported(format!("--attention flash: it does not compute on this device: {e}; {how}"))
    })
}

pub(super) struct Flash {
    context: Arc<Context>,
    narrow: CudaFunction,
    widen: CudaFunction,
    /// Logarithms of the sums of each row and head, which are never read.
    sums: DeviceScratch,
}

impl Flash {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("flash"))?;
        let (narrow, widen) = (module.function("narrow_queries")?, module.function("widen_results")?);
        Ok(Self { context: context.clone(), narrow, widen, sums: DeviceScratch::new(context) })
    }

    /// Attention of the rows of a plan. Rows between those of its sequences get zeros.
    ///
    /// # Panics
    /// If shapes do not agree, or a block table is too short or names a block outside the cache.
    pub fn attend(
        &self,
        plan: &FlashPlan,
        q: TensorRows,
        shape: &AttentionShape,
        step: &CudaStep,
        cache: &CudaKv,
        out: TensorRows,
    ) -> Result<()> {
        let KvLayout { kv_heads, head_dim, block_size, .. } = cache.layout;
        plan.check(&cache.layout, q.rows);
        assert!(shape.heads.is_multiple_of(kv_heads), "{} heads share {kv_heads} KV heads", shape.heads);
        assert_eq!((q.rows, q.width, out.width), (out.rows, shape.heads * head_dim, q.width), "{q:?} and {out:?}");
        let [q, out] = [q, out].map(|rows| TensorRows { rows: plan.rows, ..rows });
        let sums = self.sums.take(plan.rows * shape.heads * size_of::<f32>())?;
        let mut launch = Launch::of(&self.context.stream, &self.narrow);
        launch.rows(out).rows(q).int(q.width);
        // SAFETY: the rows are of tensors, and as wide.
        unsafe { launch.start(rows_grid(plan.rows))? };
        let words = |at: usize| (step.word(plan.first_word + at)) as *const i32;
        let size = |value: usize| u32::try_from(value).expect("sizes of a step fit into 32 bits");
        let window = shape.sliding_window.filter(|window| *window <= plan.most_positions);
        let call = FlashCall {
            q: out.pointer,
            k: cache.keys(),
            v: cache.values(),
            out: out.pointer + (out.width * size_of::<bf16>()) as u64,
            sums,
            row_ends: words(0),
            position_ends: words(plan.parts + 1),
            tables: words(2 * (plan.parts + 1)),
            table: size(plan.table),
            // Rows of float32, in bfloat16 values.
            row_stride: size(2 * out.stride),
            block_stride: size(kv_heads * block_size * head_dim),
            parts: size(plan.parts),
            heads: size(shape.heads),
            kv_heads: size(kv_heads),
            head_dim: size(head_dim),
            block_size: size(block_size),
            rows: size(plan.rows),
            most_rows: size(plan.most_rows),
            most_positions: size(plan.most_positions),
            scale: shape.scale,
            window: window.map(|window| i32::try_from(window).expect("no more than positions")),
        };
        self.context.stream.context().bind_to_thread().w()?;
        // SAFETY: the plan was made of the step's rows and blocks, and there is a sum for each row and head.
        unsafe { call.start(self.context.stream.cu_stream().cast()) };
        let mut launch = Launch::of(&self.context.stream, &self.widen);
        launch.rows(out).int(out.width);
        // SAFETY: the rows are of a tensor.
        unsafe { launch.start(rows_grid(plan.rows)) }
    }

    /// Computes two rows and looks at what comes: candle-flash-attn does not tell when a launch has failed.
    ///
    /// # Errors
    /// If the rows are not the mean of the values that they see.
    pub fn try_out(&self, model: &ModelShape) -> Result<()> {
        let ModelShape { head_dim, block_size, .. } = *model;
        let layout = KvLayout { blocks: 1, block_size, kv_heads: 1, head_dim, dtype: StorageDtype::Bf16 };
        let cache = CudaKv::new(&self.context, layout)?;
        let value = |i: usize| if i < head_dim { 1.0 } else { 3.0 };
        let values: Vec<bf16> = (0..2 * head_dim).map(|i| bf16::from_f32(value(i))).collect();
        self.context.copies.zero(cache.keys(), layout.bytes_per_block())?;
        self.context.copies.write(cache.values(), &values)?;
        let sequence = AttentionSequence { first_row: 0, rows: 2, start_position: 0, visible: None, block_table: &[0] };
        let input = StepInput {
            tokens: &[0, 0],
            positions: &[0, 1],
            axes: 1,
            slots: &[0, 1],
            sequences: &[sequence],
            logits: &[],
            tasks: &[],
        };
        let step =
            CudaStep::upload(&self.context, &Staging::new(&self.context.stream), &input, AttentionKernel::Flash)?;
        let memory = self.context.scratch.allocate(4 * head_dim * size_of::<f32>())?;
        self.context.copies.zero(memory.pointer, 4 * head_dim * size_of::<f32>())?;
        let q = TensorRows { pointer: memory.pointer, rows: 2, width: head_dim, stride: head_dim };
        let out = TensorRows { pointer: q.pointer + (2 * head_dim * size_of::<f32>()) as u64, ..q };
        let plan = step.flash.as_ref().expect("the sequence has two rows");
        self.attend(plan, q, &AttentionShape { heads: 1, scale: 1.0, sliding_window: None }, &step, &cache, out)?;
        let mut rows = vec![0.0_f32; 2 * head_dim];
        self.context.copies.read(out.pointer, &mut rows)?;
        if rows.iter().enumerate().any(|(i, x)| *x != if i < head_dim { 1.0 } else { 2.0 }) {
            bail!("a row of ones is {} and one of twos is {}", rows[0], rows[head_dim]);
        }
        Ok(())
    }

    /// Gives the memory back.
    pub fn release(&self) {
        self.sums.release();
    }
}
