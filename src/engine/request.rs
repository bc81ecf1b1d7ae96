//! A request as the server makes it, the events that it receives, and its entry in a list of requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::CancelFlag;
use crate::error::Error;
use crate::grammar::Grammar;
use crate::memory::{Backlog, Charge};
use crate::types::{
    Divergences, FinishReason, Owner, Prompt, RoutingFormat, SamplingParams, Tenant, TokenLogprobs, WeightVersion,
};

/// A request on its way into the engine.
pub struct GenerateCommand {
    pub request: ValidRequest,
    pub client: RequestClient,
}

/// A call to generate or score whose fields have all been checked against the model.
pub struct ValidRequest {
    /// Id from the client, or made by the server. No two requests in flight may have the same id.
    pub request_id: String,
    /// Prompts of at least one token, with all tokens below the vocabulary size. They are shorter than the context, or
    /// for [`RequestKind::Score`] at most as long.
    pub prompts: Vec<Prompt>,
    pub kind: RequestKind,
    pub params: Arc<SamplingParams>,
    /// The grammar that the samples' texts must match; `None` for any text.
    pub grammar: Option<Arc<Grammar>>,
    /// Sampling of the prompts, by index, to which `params` and `grammar` do not apply. Empty for
    /// [`RequestKind::Score`].
    pub prompt_sampling: BTreeMap<u32, PromptSampling>,
    /// The other policies under which finished samples and scored sequences are scored.
    pub policies: OtherPolicies,
    /// The encoding of the most likely tokens, if the reply has them in arrays.
    pub top_arrays: Option<TopArrays>,
    /// How the experts that tokens took are returned, if they are. The server must keep them.
    pub return_routing: Option<RoutingFormat>,
    /// Name of the resident adapter to use.
    pub adapter: Option<String>,
    /// The request is rejected if the policy has any other version.
    pub if_weight_version: Option<WeightVersion>,
    /// The request is held while the policy's version is lower than this.
    pub min_weight_version: Option<WeightVersion>,
    /// Time after its arrival at which it ends with the tokens that it has.
    pub time_limit: Option<Duration>,
}

impl ValidRequest {
    /// Number of samples that it requests; 0 if its prompts are scored.
    pub fn num_samples(&self) -> usize {
        match self.kind {
            RequestKind::Generate { n, .. } => self.prompts.len().saturating_mul(n as usize),
            RequestKind::Score => 0,
        }
    }

    /// Number of samples that it counts as in queues; each scored prompt counts as one.
    pub fn num_queued(&self) -> usize {
        match self.kind {
            RequestKind::Generate { .. } => self.num_samples(),
            RequestKind::Score => self.prompts.len(),
        }
    }
}

/// The field of a request that names this one of its references.
pub(super) fn reference_field(index: usize) -> String {
    format!("returns.references[{index}]")
}

/// The policies under which a request has its tokens scored, beside the one that samples or scores them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherPolicies {
    /// Names of resident adapters, and `None` for the policy without one.
    pub references: Vec<Option<String>>,
    /// The base below the merged adapter, which the server must keep.
    pub base: bool,
    /// The policy that serves when a sample ends, if another made some of its tokens. False for [`RequestKind::Score`].
    pub current: bool,
    /// Whether the references and the base have their divergences from the request's own policy.
    pub divergences: bool,
}

impl OtherPolicies {
    /// Whether there are any.
    pub(super) fn are_some(&self) -> bool {
        self.base || self.current || !self.references.is_empty()
    }
}

/// The most likely tokens of all positions in two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopArrays {
    /// Whether log-probabilities are rounded to bfloat16; they are float32 otherwise.
    pub as_bfloat16: bool,
}

/// Sampling of one prompt, in place of that of its request.
#[derive(Clone)]
pub struct PromptSampling {
    pub params: Arc<SamplingParams>,
    /// The grammar that the samples' texts must match; `None` for any text.
    pub grammar: Option<Arc<Grammar>>,
    /// The seed from which the samples' seeds are derived, as if the prompt were the only one; `None` for the
    /// request's.
    pub seed: Option<u64>,
}

/// Whether a request generates or scores.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestKind {
    /// Generates `n` samples of each prompt. With `prompt_logprobs`, all log-probabilities of each prompt too. With
    /// `stream_tokens`, each token is sent as it is sampled. With `return_text`, streamed tokens and completions have
    /// text, which requires a tokenizer.
    Generate { n: u32, seed: u64, prompt_logprobs: bool, stream_tokens: bool, return_text: bool },
    /// Computes log-probabilities of each prompt's tokens from the second on, and samples nothing.
    Score,
}

/// The client of a request: its identity, its time of arrival, and the receiver of its events.
pub struct RequestClient {
    /// The owner may end the request, as may callers who may end all.
    pub owner: Option<Owner>,
    /// The tenant whose share of the server it uses.
    pub tenant: Tenant,
    /// Time when the request's message had arrived.
    pub arrived: Instant,
    pub cancel: CancelFlag,
    /// Whether the request is held while the server is paused by [`DrainMode::Wait`](super::DrainMode::Wait) or
    /// [`DrainMode::Abort`](super::DrainMode::Abort); otherwise it is rejected.
    pub waits_for_resume: bool,
    pub responder: Responder,
    /// Reads adapters that the request names and that are not resident; `None` if the server reads none.
    pub adapter_reader: Option<AdapterReader>,
    /// Counts the events that the responder has sent and its reader has not taken.
    pub backlog: Backlog,
    /// Counts the bytes that the request holds until its terminal event: records of its samples, their tokens and
    /// texts. The prompts are not included; the reply counts them.
    pub charge: Charge,
}

/// Takes the events of a request, without blocking. The last one is a terminal event ([`Event::Done`] or
/// [`Event::Failed`]), and there is exactly one of these.
pub type Responder = Box<dyn FnMut(Event) + Send>;

/// Begins to read the adapter of a name, without blocking.
/// [`Command::AdapterRead`](super::Command::AdapterRead) follows.
pub type AdapterReader = Box<dyn Fn(&str) + Send>;

/// An event of a request. Its reader receives events in the order in which they happen.
#[derive(Clone, Debug)]
pub enum Event {
    /// One token of one sample, sent if `stream_tokens` is set. With `return_text`, `text` is the text that the token
    /// adds to the sample: complete characters that do not belong to a stop string and cannot become part of one.
    /// If `is_last`, the sample's end follows at once.
    Token { prompt_index: u32, sample_index: u32, logprobs: TokenLogprobs, text: Option<String>, is_last: bool },
    /// The end of a streamed text, which was held back until the sample ended. It is sent just before the completion,
    /// and is not empty.
    Text { prompt_index: u32, sample_index: u32, text: String },
    /// A prompt was computed, by one policy, `weight_version`. Sent if the request asks for one of these.
    PromptDone {
        prompt_index: u32,
        /// Log-probabilities of the prompt's last tokens: of all from the second on if the request scores or has
        /// `prompt_logprobs`, else of those that have [`Prompt::logprob_token_ids`].
        logprobs: Option<Vec<TokenLogprobs>>,
        /// The experts of the prompt's tokens but for the last one of a scored prompt, which is not run. Empty unless
        /// `return_routing` is set.
        routing: Vec<u8>,
        weight_version: WeightVersion,
        /// The scores of a scored sequence under other policies.
        scores: PolicyScores,
    },
    /// One sample has ended.
    Completion(Completion),
    /// All samples have ended. This is a terminal event.
    Done(Summary),
    /// The request was rejected, or an error ended it. This is a terminal event.
    Failed(Error),
}

impl Event {
    /// Approximate size of the event in bytes, while it waits for its reader.
    pub fn bytes(&self) -> u64 {
        let heap = match self {
            Self::Token { logprobs, text, .. } => logprobs.heap_bytes() + text.as_ref().map_or(0, String::len),
            Self::Text { text, .. } => text.len(),
            Self::PromptDone { logprobs, routing, scores, .. } => {
                logprobs.as_deref().map_or(0, tokens_bytes) + routing.len() + scores.bytes()
            }
            Self::Completion(c) => {
                let text = c.text.as_ref().map_or(0, String::len);
                tokens_bytes(&c.tokens)
                    + size_of_val(&c.weight_versions[..])
                    + text
                    + c.routing.len()
                    + c.scores.bytes()
            }
            Self::Done(_) | Self::Failed(_) => 0,
        };
        (size_of::<Self>() + heap) as u64
    }
}

/// Size of tokens in bytes.
pub(super) fn tokens_bytes(tokens: &[TokenLogprobs]) -> usize {
    size_of_val(tokens) + tokens.iter().map(TokenLogprobs::heap_bytes).sum::<usize>()
}

/// A sample that has ended.
#[derive(Clone, Debug)]
pub struct Completion {
    pub prompt_index: u32,
    pub sample_index: u32,
    pub tokens: Vec<TokenLogprobs>,
    pub finish_reason: FinishReason,
    /// The text of `tokens`, up to the stop string or the token that ended the sample; `None` unless `return_text` is
    /// set.
    pub text: Option<String>,
    /// Versions of the policies that made the tokens, as `(version, start, end)` over `tokens`.
    pub weight_versions: Vec<(WeightVersion, u32, u32)>,
    /// Seed that reproduces this sample alone.
    pub seed: u64,
    /// Number of the prompt's tokens whose KV came from the prefix cache.
    pub cached_tokens: u32,
    /// The experts of `tokens` without the last one, which is not run: those in the step that sampled the token after.
    /// Empty unless `return_routing` is set.
    pub routing: Vec<u8>,
    /// The scores of `tokens` under other policies.
    pub scores: PolicyScores,
}

/// The scores of one sequence under [`OtherPolicies`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyScores {
    /// In the order of [`OtherPolicies::references`]; empty if the request ended before they were there.
    pub references: Vec<PolicyScore>,
    pub base: Option<PolicyScore>,
    pub current: Option<PolicyScore>,
}

impl PolicyScores {
    pub fn all(&self) -> impl Iterator<Item = &PolicyScore> {
        self.references.iter().chain(&self.base).chain(&self.current)
    }

    fn bytes(&self) -> usize {
        self.all().map(PolicyScore::bytes).sum()
    }
}

/// Log-probabilities of consecutive tokens under one policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyScore {
    /// Raw and processed, for each token.
    pub logprobs: Vec<(f32, f32)>,
    /// The divergences from the request's own policy where each token was predicted; empty if they are not asked for.
    pub divergences: Vec<Divergences>,
    pub weight_version: WeightVersion,
}

impl PolicyScore {
    fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&self.logprobs[..]) + size_of_val(&self.divergences[..])
    }
}

/// Times of a sample that has tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleTimes {
    /// From the request's arrival to its first step.
    pub queued: Duration,
    /// From the first step to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decoded: Duration,
}

/// Totals of a request that has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub seconds: f64,
    /// Times of its sample, if it has only one.
    pub times: Option<SampleTimes>,
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestProgress {
    /// It waits for a newer policy, for an adapter to be loaded, for Resume, or for a drain to end.
    Held,
    /// None of its prompts has been computed yet.
    Queued,
    Running,
    /// Its reader lags, and nothing is computed for it.
    Suspended,
}

impl RequestProgress {
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Suspended => "suspended",
        }
    }
}

/// Status of a request that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestStatus {
    pub id: String,
    pub owner: Option<Owner>,
    pub progress: RequestProgress,
    pub prompts: usize,
    pub prompt_tokens: u64,
    /// Number of samples that it requests; 0 if its prompts are scored.
    pub samples: usize,
    /// Number of its samples that have not ended.
    pub open_samples: usize,
    /// Number of tokens that its samples have.
    pub tokens: u64,
    /// Time since its message arrived.
    pub age: Duration,
}

/// The oldest requests that have not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestList {
    /// Number of all requests that have not ended.
    pub total: usize,
    pub oldest: Vec<RequestStatus>,
}
