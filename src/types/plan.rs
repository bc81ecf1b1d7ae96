//! The plan of one engine step: made by the scheduler, run by the executor, answered by a [`StepOutput`].

use std::sync::Arc;

/// Copy of the first `tokens` slots of a block (all layers, K and V), for a fork that writes into a shared block.
pub use rollout_kernels::BlockCopy;

use super::{Prompt, RequestKey, SampleKey, SamplingParams, TokenId, TokenLogprobs};

/// A physical block of the paged KV cache.
pub type BlockId = u32;

/// Everything one step does, in the order it does it: copies, then all sequences as one flat batch.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    pub copies: Vec<BlockCopy>,
    pub sequences: Vec<PlanSequence>,
}

/// A run of consecutive tokens of one sequence: a prefill chunk, a decode (one token) or anything between. A decode may
/// have drafts behind its token, guesses at what comes next.
#[derive(Clone, Debug)]
pub struct PlanSequence {
    /// Index of `tokens[0]` in the sequence. KV of `[0, start)` is read, that of `[start, start + tokens.len())` is
    /// written.
    pub start: usize,
    pub tokens: Vec<TokenId>,
    /// The prompt that the sequence begins with: `tokens` are of it, of its completion or of both.
    pub prompt: Prompt,
    /// Blocks of `[0, start + tokens.len())`, in order.
    pub block_table: Vec<BlockId>,
    /// Generation of the resident adapter that these rows go through, if any.
    pub adapter: Option<u64>,
    /// Rows of which logits are wanted, ascending by `offset`.
    pub logits: Vec<LogitsRow>,
}

/// One row of logits and what is asked of it.
#[derive(Clone, Debug)]
pub struct LogitsRow {
    /// Index into the sequence's `tokens`.
    pub offset: usize,
    /// Several for the last row of a group's prompt: one logits row, n samples.
    pub tasks: Vec<LogitsTask>,
}

/// One question to a row of logits.
#[derive(Clone, Debug)]
pub struct LogitsTask {
    /// Whose token this is. For prompt log-probabilities, sample 0 of the group.
    pub sample: SampleKey,
    pub params: Arc<SamplingParams>,
    /// The sample's own seed (see [`super::sample_seed`]).
    pub seed: u64,
    /// Number of output tokens before this one: the counter of the random generator, and what `min_tokens` counts.
    pub output_index: u32,
    /// `Some(token)`: give its log-probabilities instead of sampling (scoring, prompt log-probabilities).
    pub target: Option<TokenId>,
    /// What the penalties count, if there are any. The scheduler gives none to tokens of the prompt (`target`), since
    /// penalties are of what is sampled after the whole prompt.
    pub history: Option<History>,
}

/// The tokens before the one that is sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    pub prompt: Arc<[TokenId]>,
    /// Sampled so far, drafts before this place included.
    pub output: Vec<TokenId>,
}

/// What a step has computed.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// Answers to all tasks of the plan, flat, in the plan's order (sequences, their rows, their tasks).
    pub tokens: Vec<TokenLogprobs>,
    /// Requests of which an answer panicked, with the panic's message. Their answers in `tokens` mean nothing.
    pub failed: Vec<(RequestKey, String)>,
}

impl PlanSequence {
    /// Rotary position of each of `tokens`.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        self.prompt.positions(self.start..self.start + self.tokens.len())
    }
}

impl StepPlan {
    /// Number of token rows the model runs.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// All tasks in the order in which a [`StepOutput`] answers them.
    pub fn tasks(&self) -> impl Iterator<Item = &LogitsTask> {
        self.sequences.iter().flat_map(|s| &s.logits).flat_map(|r| &r.tasks)
    }

    /// Whether logits are wanted of every row, as when all sequences generate: no prompt is computed for its KV alone.
    pub fn is_decode(&self) -> bool {
        self.sequences.iter().all(|s| s.logits.len() == s.tokens.len())
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
}
