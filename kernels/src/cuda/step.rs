//! The indices of a step in device memory.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::Allocation;
use super::attention::plan::AttentionPlan;
use super::context::Context;
use super::staging::Staging;
use crate::step::StepInput;

/// What the operators read of a step: all of it in one copy from the host.
pub(super) struct CudaStep {
    memory: Allocation,
    /// Where each list begins, in words.
    positions: usize,
    slots: usize,
    logits_rows: usize,
    attention: usize,
    pub plan: AttentionPlan,
}

impl CudaStep {
    /// Starts the copy on the rank's stream.
    pub fn upload(context: &Arc<Context>, staging: &Staging, input: &StepInput<'_>) -> Result<Self> {
        let rows = input.tokens.len();
        let mut words = Vec::with_capacity(4 * rows + 64);
        words.extend_from_slice(input.tokens);
        words.extend_from_slice(input.positions);
        words.resize(2 * rows, 0);
        words.extend_from_slice(input.slots);
        words.resize(3 * rows, 0);
        words.extend(input.logits.iter().map(|wanted| wanted.row));
        let attention = words.len();
        let plan = AttentionPlan::write(input.sequences, &mut words);
        let memory = context.upload(staging, &words)?;
        Ok(Self { memory, positions: rows, slots: 2 * rows, logits_rows: 3 * rows, attention, plan })
    }

    /// Address of the token of each row.
    pub fn tokens(&self) -> sys::CUdeviceptr {
        self.memory.pointer
    }

    /// Address of the position of each row.
    pub fn positions(&self) -> sys::CUdeviceptr {
        self.word(self.positions)
    }

    /// Address of the slot of each row.
    pub fn slots(&self) -> sys::CUdeviceptr {
        self.word(self.slots)
    }

    /// Address of the rows whose logits are wanted.
    pub fn logits_rows(&self) -> sys::CUdeviceptr {
        self.word(self.logits_rows)
    }

    /// Address of what the plan has written.
    pub fn attention(&self) -> sys::CUdeviceptr {
        self.word(self.attention)
    }

    fn word(&self, index: usize) -> sys::CUdeviceptr {
        self.memory.pointer + (index * size_of::<u32>()) as u64
    }
}
