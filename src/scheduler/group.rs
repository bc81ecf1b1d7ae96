//! The scheduler's input, groups, and its output, outcomes.

use std::sync::Arc;

use crate::cache::CacheSalt;
use crate::grammar::{Grammar, GrammarError};
use crate::types::{FinishReason, GroupKey, PolicyRows, Prompt, SampleKey, SamplingParams, TokenLogprobs};

/// One prompt, to be sampled from or scored.
#[derive(Clone, Debug)]
pub struct Group {
    /// Names the group. A scheduler is never given two groups with the same key.
    pub key: GroupKey,
    pub prompt: Prompt,
    pub params: Arc<SamplingParams>,
    /// The policy and the adapter that serve it. [`Scheduler::change_policy`] changes its epoch.
    ///
    /// [`Scheduler::change_policy`]: super::Scheduler::change_policy
    pub salt: CacheSalt,
    pub kind: GroupKind,
    /// The grammar that the samples' texts must match; `None` for any text.
    pub grammar: Option<Arc<Grammar>>,
    /// Whether outcomes have the experts that tokens took. The scheduler must keep them
    /// ([`SchedulerConfig::routing_row_bytes`](super::SchedulerConfig::routing_row_bytes)).
    pub returns_routing: bool,
    /// The parameters under which the tokens that a sample has are scored when a change of the policy has them computed
    /// again; `None` if they are not. Without an effect on a group that is scored.
    pub current: Option<Arc<SamplingParams>>,
    /// The policy from which the log-probabilities of a scored group have divergences: its row for each of them.
    pub policy: Option<PolicyRows>,
}

/// The work of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// One sample per seed, of which there is at least one; with `prompt_logprobs`, the prompt's log-probabilities too.
    /// Without, those of the tokens beside which [`Prompt::logprob_token_ids`] are reported.
    Sample { seeds: Vec<u64>, prompt_logprobs: bool },
    /// The log-probabilities of the prompt's tokens that follow those from `scored_from` on, and no samples.
    Score { scored_from: usize },
}

impl Group {
    /// Number of samples that the group counts for in queues; a scored prompt counts as one.
    pub fn num_samples(&self) -> usize {
        match &self.kind {
            GroupKind::Sample { seeds, .. } => seeds.len(),
            GroupKind::Score { .. } => 1,
        }
    }

    pub(super) fn samples(&self) -> impl Iterator<Item = SampleKey> {
        let n = match &self.kind {
            GroupKind::Sample { seeds, .. } => seeds.len() as u32,
            GroupKind::Score { .. } => 0,
        };
        let group = self.key;
        (0..n).map(move |sample_index| SampleKey { group, sample_index })
    }
}

/// Result of a step for one group or sample. Each group has one `PromptDone`, then the `Token`s of its samples. A
/// sample ends with the token that has a `finish`, with `GrammarFailed`, with [`Scheduler::finish`] or with
/// [`Scheduler::abort`]; a scored prompt ends with its `PromptDone`.
///
/// [`Scheduler::finish`]: super::Scheduler::finish
/// [`Scheduler::abort`]: super::Scheduler::abort
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All tokens of the group's prompt have been computed.
    PromptDone {
        group: GroupKey,
        /// Number of the prompt's tokens whose KV came from the prefix cache. The samples of a group share one lookup.
        cached_tokens: u32,
        /// Log-probabilities of the prompt's last tokens, each given the tokens before it: of all from the second on if
        /// asked for by `prompt_logprobs`, of those that [`GroupKind::Score`] asks for, else of those that have
        /// [`Prompt::logprob_token_ids`]. `None` if there are none.
        logprobs: Option<Vec<TokenLogprobs>>,
        /// The experts of the prompt's tokens, of which a scored prompt does not run the last. Empty if not asked for.
        routing: Vec<u8>,
    },
    /// A sample has got its next token. `finish` says why it is the sample's last one, if it is. `grammar_bytes` is
    /// what its grammar takes more than before. `routing` has the experts of the sample's token before it: empty for
    /// the first one, and if not asked for.
    Token {
        sample: SampleKey,
        logprobs: TokenLogprobs,
        finish: Option<FinishReason>,
        grammar_bytes: usize,
        routing: Vec<u8>,
    },
    /// Tokens of a sample from the output `start` on were computed again under the present policy, which gives them
    /// these log-probabilities ([`Group::current`]).
    Rescored { sample: SampleKey, start: usize, logprobs: Vec<TokenLogprobs> },
    /// A sample's grammar cannot say which tokens may follow, for this reason. The sample has ended, and its request
    /// cannot continue.
    GrammarFailed { sample: SampleKey, error: GrammarError },
}
