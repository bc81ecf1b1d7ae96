//! The plan of one engine step: made by the scheduler, run by the executor, answered by a [`StepOutput`].

use std::ops::Range;
use std::sync::Arc;

/// Copy of the first `tokens` slots of a block (all layers, K and V), for a fork that writes into a shared block.
pub use rollout_kernels::BlockCopy;

use super::{Distribution, Picture, Prompt, RequestKey, SampleKey, SamplingParams, TokenId, TokenLogprobs, TokenMask};

/// Index of a physical block of the paged KV cache.
pub type BlockId = u32;

/// The work of one step: it first copies blocks, then works on a picture, then runs the tokens of all sequences as one
/// flat batch.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Copies, in the order in which they are applied: the source of one may be the destination of an earlier one.
    pub copies: Vec<BlockCopy>,
    /// The picture that the vision tower encodes, if there is one.
    pub encode: Option<PictureEncode>,
    pub sequences: Vec<PlanSequence>,
}

/// Work of the vision tower on a picture: all of its blocks, or those that one step has time for. A picture's blocks
/// run in order, and no other picture comes between them.
#[derive(Clone, Debug)]
pub struct PictureEncode {
    pub picture: Picture,
    /// The tower's blocks that run in this step; those of a picture that begins start with block 0. The last of all
    /// completes the embeddings.
    pub blocks: Range<usize>,
    /// Rows of the embedding buffer that get the embeddings, one a token.
    pub rows: Range<usize>,
}

/// Rows of the embedding buffer that take the place of token embeddings in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingRows {
    /// Index into the sequence's `tokens` of the first of them.
    pub offset: usize,
    /// Rows of the embedding buffer, one for each of these tokens.
    pub rows: Range<usize>,
}

/// Consecutive tokens of one sequence that a step runs: a chunk of the prompt, the last sampled token, or anything
/// between. Draft tokens, which guess the next ones, may follow the last sampled token.
#[derive(Clone, Debug, Default)]
pub struct PlanSequence {
    /// Index of `tokens[0]` in the sequence. KV of `[0, start)` is read, that of `[start, start + tokens.len())` is
    /// written.
    pub start: usize,
    pub tokens: Vec<TokenId>,
    /// The prompt that the sequence begins with: `tokens` belong to it, to its completion or to both.
    pub prompt: Prompt,
    /// Embeddings of the images that `tokens` have placeholders of, ascending by `offset`.
    pub embeddings: Vec<EmbeddingRows>,
    /// Blocks of `[0, start + tokens.len())`, in order.
    pub block_table: Vec<BlockId>,
    /// The weights that run these tokens.
    pub weights: PolicyWeights,
    /// The tokens whose logits are needed, ascending by `offset`.
    pub logits: Vec<LogitsRow>,
}

/// The weights of one policy among those that an executor holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyWeights {
    /// The serving weights.
    #[default]
    Serving,
    /// The serving weights with the resident adapter of this generation.
    Adapter(u64),
    /// The base below the adapter that is merged into the serving weights.
    Base,
}

impl PolicyWeights {
    /// The serving weights, with an adapter if there is one.
    pub fn with_adapter(generation: Option<u64>) -> Self {
        generation.map_or(Self::Serving, Self::Adapter)
    }

    /// The generation of the resident adapter.
    pub fn adapter(self) -> Option<u64> {
        match self {
            Self::Adapter(generation) => Some(generation),
            Self::Serving | Self::Base => None,
        }
    }
}

/// The logits of one token, and the tasks that use them.
#[derive(Clone, Debug)]
pub struct LogitsRow {
    /// Index into the sequence's `tokens`.
    pub offset: usize,
    /// One task, except at the last token of a group's prompt: there its logits give each of the n samples its first
    /// token.
    pub tasks: Vec<LogitsTask>,
}

/// Asks a row of logits for one token: to sample it, or to score a given one.
#[derive(Clone, Debug)]
pub struct LogitsTask {
    /// The sample that gets the token. Tasks for prompt log-probabilities name sample 0 of their group.
    pub sample: SampleKey,
    pub params: Arc<SamplingParams>,
    /// The sample's own seed, made by [`super::sample_seed`].
    pub seed: u64,
    /// Number of the sample's tokens before this one, drafts included. It is the counter of the random generator, and
    /// the number that `min_tokens` limits.
    pub output_index: u32,
    /// The token to score; `None` to sample one.
    pub target: Option<TokenId>,
    /// The token that the sample gets instead of one that is drawn. Its log-probabilities are those that it would have
    /// if it were drawn. Always `None` if `target` is given.
    pub forced: Option<TokenId>,
    /// The tokens that penalties count, if the parameters have any. Always `None` if `target` is given: penalties apply
    /// only to tokens that are sampled after the whole prompt.
    pub history: Option<History>,
    /// The tokens that may be sampled; `None` for all, and if `target` is given.
    pub mask: Option<TokenMask>,
    /// The tokens that would complete a bad word.
    pub bad: Vec<TokenId>,
    /// The distribution of the tokens that are listed beside it, and of its rank.
    pub top_of: Distribution,
    /// Whether the answer has the final hidden state of the row.
    pub keeps_hidden: bool,
    /// The other policy that the answer has the divergences from, at the temperature of `params`. The row has no other
    /// task then.
    pub policy: Option<PolicyRow>,
}

/// The final hidden states of a policy at consecutive tokens, from which its logits there are computed again.
#[derive(Clone, Debug)]
pub struct PolicyRows {
    /// The weights whose head gives the logits. They must not have changed since the states were computed.
    pub weights: PolicyWeights,
    /// `[tokens, width]`.
    pub hidden: Arc<[f32]>,
    pub width: usize,
}

/// One row of [`PolicyRows`].
#[derive(Clone, Debug)]
pub struct PolicyRow {
    pub rows: PolicyRows,
    pub index: usize,
}

impl PolicyRow {
    pub fn hidden(&self) -> &[f32] {
        &self.rows.hidden[self.index * self.rows.width..][..self.rows.width]
    }
}

/// All tokens of a sequence before the sampled one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    pub prompt: Arc<[TokenId]>,
    /// The sampled tokens so far, and the drafts before the sampled one.
    pub output: Vec<TokenId>,
}

/// The answers to a plan's tasks.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One answer per task, in the order of [`StepPlan::tasks`].
    pub tokens: Vec<TokenLogprobs>,
    /// Requests for which computing an answer panicked, with the panic's message. Their answers in `tokens` are
    /// invalid.
    pub failed: Vec<(RequestKey, String)>,
    /// The experts of all tokens of the plan, in its order, as [`RoutingFormat`](super::RoutingFormat) writes them.
    /// Empty if the executor does not return them.
    pub routing: Vec<u8>,
}

impl PlanSequence {
    /// Whether its tokens run with the base.
    pub fn runs_base(&self) -> bool {
        self.weights == PolicyWeights::Base
    }

    /// Rotary position of each of `tokens`.
    pub fn positions(&self) -> impl Iterator<Item = [u32; 3]> {
        (self.start..self.start + self.tokens.len()).map(|index| self.prompt.position(index))
    }

    /// Those of `tokens` that are forced to experts, by their indices in the sequence, and the rows of their experts.
    pub fn forced_experts(&self) -> Option<(Range<usize>, &[u8])> {
        self.prompt.routing.as_ref()?.within(self.start..self.start + self.tokens.len())
    }
}

impl StepPlan {
    /// Number of tokens of all sequences, each a row of the model's batch.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// All tasks, sequence by sequence and row by row: the order in which a [`StepOutput`] answers them.
    pub fn tasks(&self) -> impl Iterator<Item = &LogitsTask> {
        self.sequences.iter().flat_map(|s| &s.logits).flat_map(|r| &r.tasks)
    }

    /// Whether the logits of every token are needed: all sequences decode, and no prompt is computed only for its KV.
    pub fn is_decode(&self) -> bool {
        self.sequences.iter().all(|s| s.logits.len() == s.tokens.len())
    }

    /// Whether some tokens are forced to experts.
    pub fn has_forced_experts(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.forced_experts().is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty() && self.encode.is_none()
    }
}
