//! Paged attention, and the cache that it reads.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::context::Context;
use super::kv::CudaKv;
use super::staging::Staging;
use super::step::CudaStep;
use super::tensor::Rows;
use crate::kv_layout::BlockCopy;
use crate::step::{AttentionSequence, AttentionShape};

/// What the host knows of the work of a step; the kernels read the rest from the words that it has written.
pub(super) struct AttentionPlan {}

impl AttentionPlan {
    /// Appends sequences and block tables to the words of a step.
    pub fn write(sequences: &[AttentionSequence<'_>], words: &mut Vec<u32>) -> Self {
        let _ = (sequences, words);
        Self {}
    }
}

/// The kernels of attention, and the partial results that they reuse.
pub(super) struct Attention {
    context: Arc<Context>,
}

impl Attention {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { context: context.clone() })
    }

    /// `slots` is the address of the slot of each row.
    pub fn write_kv(&self, k: Rows, v: Rows, slots: u64, cache: &CudaKv) -> Result<()> {
        let _ = (&self.context, k, v, slots, cache);
        bail!("write_kv")
    }

    pub fn copy_blocks(&self, staging: &Staging, cache: &CudaKv, copies: &[BlockCopy]) -> Result<()> {
        let _ = (&self.context, staging, cache, copies);
        bail!("copy_blocks")
    }

    pub fn attend(&self, q: Rows, shape: &AttentionShape, step: &CudaStep, cache: &CudaKv, out: Rows) -> Result<()> {
        let _ = (&self.context, q, shape, step, cache, out);
        bail!("paged_attention")
    }

    /// Gives the partial results back.
    pub fn release(&self) {}
}
