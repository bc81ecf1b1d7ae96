//! The indices of a step in device memory.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::arena::Allocation;
use super::attention::flash::plan::{FlashPlan, is_of_flash};
use super::attention::plan::AttentionPlan;
use super::context::Context;
use super::sampling::{Counts, Questions};
use super::scratch::Scratch;
use super::staging::Staging;
use crate::backend::device::AttentionKernel;
use crate::step::{AttentionSequence, Padding, RowTasks, StepInput};

/// Slot of a row that nobody reads: nothing is written there. `NO_SLOT` in `cu/kv.cu`.
const NO_SLOT: u32 = u32::MAX;
/// Least memory for padded steps: it seldom grows then, and what was recorded stays of use.
const LEAST_BYTES: usize = 64 << 10;

/// What the operators read of a step: all of it in one copy from the host.
pub(super) struct CudaStep {
    words: sys::CUdeviceptr,
    /// `None` where the words lie in memory that is kept from one step to the next.
    _memory: Option<Allocation>,
    /// Those of the input, and those that it is padded with.
    pub rows: usize,
    /// Where the words of the plan begin.
    attention: usize,
    /// Of all sequences but those of `flash`.
    pub plan: AttentionPlan,
    pub flash: Option<FlashPlan>,
    /// Of a padded step.
    padding: Option<Padding>,
    questions: Option<Asked>,
}

/// A question to each row, which a pass answers.
struct Asked {
    /// Where they begin, in words.
    first: usize,
    counts: Counts,
    vocabulary: usize,
}

/// What the launches of a pass over a step depend on, beside the memory that operators keep: the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    rows: usize,
    spans: usize,
    /// Whether tasks are answered.
    samples: bool,
    /// That of [`Padding::kind`].
    kind: Option<u64>,
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
        let plan = AttentionPlan::write(&others, &mut words);
        let memory = context.upload(staging, &words)?;
        let (words, _memory) = (memory.pointer, Some(memory));
        Ok(Self { words, _memory, rows, attention, plan, flash, padding: None, questions: None })
    }

    /// As [`CudaStep::upload`], with rows that nobody reads behind those of the input. The step lasts until the next is
    /// uploaded to the same `memory`.
    ///
    /// # Panics
    /// If a sequence has not one row, or there are more than `rows`.
    pub fn upload_padded(
        memory: &Scratch,
        staging: &Staging,
        input: &StepInput<'_>,
        rows: usize,
        padding: Padding,
    ) -> Result<Self> {
        let (mut words, vocabulary) = (indices(input, rows), padding.vocabulary);
        // Everything but the block tables, which come last, has its place by the number of rows.
        words.resize(4 * rows, 0);
        let is_asked_once = |(wanted, i): (&RowTasks, usize)| wanted.row as usize == i && wanted.tasks == (i..i + 1);
        let all = input.logits.len() == input.tokens.len() && input.logits.iter().zip(0..).all(is_asked_once);
        let questions = all.then(|| Questions::one_of_each(input.tasks, rows, vocabulary)).flatten();
        let questions = questions.map(|questions| {
            let first = words.len();
            words.extend(questions.words());
            Asked { first, counts: questions.counts(), vocabulary }
        });
        let attention = words.len();
        let plan = AttentionPlan::write_padded(input.sequences, rows, &mut words);
        let at = memory.take(size_of_val(&words[..]).next_power_of_two().max(LEAST_BYTES))?;
        staging.copy(&words, at).w()?;
        Ok(Self { words: at, _memory: None, rows, attention, plan, flash: None, padding: Some(padding), questions })
    }

    /// What the launches of a pass over a padded step depend on.
    pub fn key(&self) -> Option<Key> {
        let Padding { kind, .. } = self.padding?;
        Some(Key { rows: self.rows, spans: self.plan.spans, samples: self.questions.is_some(), kind })
    }

    /// Where the questions are that a pass answers, how many, and about how many logits.
    pub fn questions(&self) -> Option<(sys::CUdeviceptr, Counts, usize)> {
        self.questions.as_ref().map(|asked| (self.word(asked.first), asked.counts, asked.vocabulary))
    }

    /// Address of the token of each row.
    pub fn tokens(&self) -> sys::CUdeviceptr {
        self.words
    }

    /// Address of the position of each row.
    pub fn positions(&self) -> sys::CUdeviceptr {
        self.word(self.rows)
    }

    /// Address of the slot of each row.
    pub fn slots(&self) -> sys::CUdeviceptr {
        self.word(2 * self.rows)
    }

    /// Address of the rows whose logits are wanted.
    pub fn logits_rows(&self) -> sys::CUdeviceptr {
        self.word(3 * self.rows)
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

/// Token, position and slot of each of `rows` rows, and the rows whose logits are wanted.
fn indices(input: &StepInput<'_>, rows: usize) -> Vec<u32> {
    let mut words = Vec::with_capacity(5 * rows + 64);
    words.extend_from_slice(input.tokens);
    words.resize(rows, 0);
    words.extend_from_slice(input.positions);
    words.resize(2 * rows, 0);
    words.extend_from_slice(input.slots);
    words.resize(3 * rows, NO_SLOT);
    words.extend(input.logits.iter().map(|wanted| wanted.row));
    words
}
