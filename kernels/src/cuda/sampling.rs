//! Tokens and log-probabilities from logits.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::context::Context;
use super::tensor::Rows;
use crate::cpu::ThreadPool;
use crate::sampling::{Sampled, SamplingTask};
use crate::step::RowTasks;

/// Answers tasks; the answers are those of the CPU for the same logits.
pub(super) struct Sampler {
    context: Arc<Context>,
}

impl Sampler {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { context: context.clone() })
    }

    /// Starts to answer the tasks of `wanted`, whose logits are the rows of `logits`.
    pub fn sample(
        &self,
        host: &ThreadPool,
        logits: Rows,
        wanted: &[RowTasks],
        tasks: &[SamplingTask<'_>],
    ) -> Result<Sampled> {
        let _ = (&self.context, host, logits, wanted, tasks);
        bail!("sample")
    }

    /// Gives the memory that samplers reuse back.
    pub fn release(&self) {}
}
