//! The indices of a step in device memory.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::ArenaAllocation;
use super::attention::flash::plan::{FlashPlan, is_of_flash};
use super::attention::plan::CudaAttentionPlan;
use super::context::Context;
use super::sampling::{TaskBatch, TaskCounts};
use super::scratch::DeviceScratch;
use super::staging::Staging;
use crate::backend::device::AttentionKernel;
use crate::step::{AttentionSequence, Padding, RowTasks, StepInput};

/// Slot of a padding row: nothing is written there. `NO_SLOT` in `cu/kv.cu`.
const NO_SLOT: u32 = u32::MAX;
/// Least memory for padded steps, so that it seldom grows: graphs are of no use once it has moved.
const LEAST_BYTES: usize = 64 << 10;

/// The part of a step that operators read, in one copy from the host.
pub(super) struct CudaStep {
    words: sys::CUdeviceptr,
    /// `None` where the words lie in memory that is kept from one step to the next.
    _memory: Option<ArenaAllocation>,
    /// Those of the input, and those that it is padded with.
    pub rows: usize,
    /// Positions of a row.
    pub axes: usize,
    /// Where the words of the plan begin.
    attention: usize,
    /// Of all sequences but those of `flash`.
    pub plan: CudaAttentionPlan,
    pub flash: Option<FlashPlan>,
    /// Of a padded step.
    padding: Option<Padding>,
    graph_tasks: Option<GraphTasks>,
}

/// One task for each row, which the step's graph answers.
struct GraphTasks {
    /// Where they begin, in words.
    first: usize,
    counts: TaskCounts,
    vocabulary: usize,
}

/// The shape of a step: what its launches depend on, beside the memory that operators keep. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GraphKey {
    rows: usize,
    axes: usize,
    spans: usize,
    /// Whether tasks are answered.
    samples: bool,
    /// As [`Padding::variant`].
    variant: Option<u64>,
}

impl CudaStep {
    /// Starts the copy on the rank's stream.
    pub fn upload(
        context: &Arc<Context>,
        staging: &Staging,
        input: &StepInput<'_>,
        by: AttentionKernel,
    ) -> Result<Self> {
        let rows = input.tokens.len();
        let mut words = indices(input, rows);
        let is_of_flash = |sequence: &AttentionSequence<'_>| by == AttentionKernel::Flash && is_of_flash(sequence);
        let (of_flash, others): (Vec<_>, Vec<_>) = input.sequences.iter().copied().partition(is_of_flash);
        let flash = FlashPlan::write(&of_flash, &mut words);
        let attention = words.len();
        let plan = CudaAttentionPlan::write(&others, &mut words);
        let memory = context.upload(staging, &words)?;
        let (words, _memory) = (memory.pointer, Some(memory));
        Ok(Self { words, _memory, rows, axes: input.axes, attention, plan, flash, padding: None, graph_tasks: None })
    }

    /// As [`CudaStep::upload`], with padding rows behind those of the input. The step lasts until the next is
    /// uploaded to the same `memory`.
    ///
    /// # Panics
    /// If a sequence has not one row, or there are more than `rows`.
    pub fn upload_padded(
        memory: &DeviceScratch,
        staging: &Staging,
        input: &StepInput<'_>,
        rows: usize,
        padding: Padding,
    ) -> Result<Self> {
        let (mut words, vocabulary) = (indices(input, rows), padding.vocabulary);
        // Everything but the block tables, which come last, has its place by the number of rows and of axes.
        // Tasks have values of two words, whose addresses are even.
        words.resize(((3 + input.axes) * rows).next_multiple_of(2), 0);
        let has_one_task = |(wanted, i): (&RowTasks, usize)| wanted.row as usize == i && wanted.tasks == (i..i + 1);
        let all = input.logits.len() == input.tokens.len() && input.logits.iter().zip(0..).all(has_one_task);
        let tasks = all.then(|| TaskBatch::one_of_each(input.tasks, rows, vocabulary)).flatten();
        let graph_tasks = tasks.map(|tasks| {
            let first = words.len();
            words.extend(tasks.words());
            GraphTasks { first, counts: tasks.counts(), vocabulary }
        });
        let attention = words.len();
        let plan = CudaAttentionPlan::write_padded(input.sequences, rows, &mut words);
        let at = memory.take(size_of_val(&words[..]).next_power_of_two().max(LEAST_BYTES))?;
        staging.copy(&words, at).w()?;
        let (axes, padding) = (input.axes, Some(padding));
        Ok(Self { words: at, _memory: None, rows, axes, attention, plan, flash: None, padding, graph_tasks })
    }

    /// The shape of a padded step; `None` for other steps, which have no graphs.
    pub fn key(&self) -> Option<GraphKey> {
        let Padding { variant, .. } = self.padding?;
        let (rows, axes, samples) = (self.rows, self.axes, self.graph_tasks.is_some());
        Some(GraphKey { rows, axes, spans: self.plan.spans, samples, variant })
    }

    /// The address of the tasks that the step's graph answers, their counts, and the number of logits of a row.
    pub fn graph_tasks(&self) -> Option<(sys::CUdeviceptr, TaskCounts, usize)> {
        self.graph_tasks.as_ref().map(|tasks| (self.word(tasks.first), tasks.counts, tasks.vocabulary))
    }

    /// Address of the token of each row.
    pub fn tokens(&self) -> sys::CUdeviceptr {
        self.words
    }

    /// Address of the positions of each row.
    pub fn positions(&self) -> sys::CUdeviceptr {
        self.word(self.rows)
    }

    /// Address of the slot of each row.
    pub fn slots(&self) -> sys::CUdeviceptr {
        self.word((1 + self.axes) * self.rows)
    }

    /// Address of the rows whose logits are wanted.
    pub fn logits_rows(&self) -> sys::CUdeviceptr {
        self.word((2 + self.axes) * self.rows)
    }

    /// Address of what the plan has written.
    pub fn attention(&self) -> sys::CUdeviceptr {
        self.word(self.attention)
    }

    /// Address of a word by its index.
    pub fn word(&self, index: usize) -> sys::CUdeviceptr {
        self.words + (index * size_of::<u32>()) as u64
    }
}

/// Token, positions and slot of each of `rows` rows, and the rows whose logits are wanted.
fn indices(input: &StepInput<'_>, rows: usize) -> Vec<u32> {
    let mut words = Vec::with_capacity((4 + input.axes) * rows + 64);
    words.extend_from_slice(input.tokens);
    words.resize(rows, 0);
    words.extend_from_slice(input.positions);
    words.resize((1 + input.axes) * rows, 0);
    words.extend_from_slice(input.slots);
    words.resize((2 + input.axes) * rows, NO_SLOT);
    words.extend(input.logits.iter().map(|wanted| wanted.row));
    words
}
