//! What the scheduler is given, and what it tells.

use std::sync::Arc;

use crate::cache::CacheSalt;
use crate::types::{FinishReason, GroupKey, Prompt, SampleKey, SamplingParams, TokenLogprobs};

/// One prompt and what is asked of it.
#[derive(Clone, Debug)]
pub struct Group {
    /// Never used twice in the life of a scheduler.
    pub key: GroupKey,
    pub prompt: Prompt,
    pub params: Arc<SamplingParams>,
    /// The policy that serves it; [`Scheduler::change_policy`] gives it another epoch.
    ///
    /// [`Scheduler::change_policy`]: super::Scheduler::change_policy
    pub salt: CacheSalt,
    pub kind: GroupKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// One sample for each seed, at least one.
    Sample { seeds: Vec<u64>, prompt_logprobs: bool },
    /// Log-probabilities of the prompt's tokens, no samples.
    Score,
}

impl Group {
    /// What the group counts for in queues: its samples, or 1 if it is only scored.
    pub fn num_samples(&self) -> usize {
        match &self.kind {
            GroupKind::Sample { seeds, .. } => seeds.len(),
            GroupKind::Score => 1,
        }
    }

    pub(super) fn samples(&self) -> impl Iterator<Item = SampleKey> {
        let n = match &self.kind {
            GroupKind::Sample { seeds, .. } => seeds.len() as u32,
            GroupKind::Score => 0,
        };
        let group = self.key;
        (0..n).map(move |sample_index| SampleKey { group, sample_index })
    }
}

/// What a step has brought about. For each group: one `PromptDone`, then the `Token`s of its samples. A sample ends
/// with the token that has a reason, by [`Scheduler::finish`] or by [`Scheduler::abort`]; a scored prompt ends with its
/// `PromptDone`.
///
/// [`Scheduler::finish`]: super::Scheduler::finish
/// [`Scheduler::abort`]: super::Scheduler::abort
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The prompt has been computed.
    PromptDone {
        group: GroupKey,
        /// Tokens of the prompt whose KV came from the prefix cache; the samples of a group share one lookup.
        cached_tokens: u32,
        /// Log-probabilities of the prompt's tokens from the second on, each given those before it, if asked for
        /// (`prompt_logprobs`, [`GroupKind::Score`]).
        logprobs: Option<Vec<TokenLogprobs>>,
    },
    /// A sample has got its next token; if that was the last, why.
    Token { sample: SampleKey, logprobs: TokenLogprobs, finish: Option<FinishReason> },
}
