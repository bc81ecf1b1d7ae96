//! A request as the server makes it, the events that it gets back, and its status for those who list requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cancel::CancelFlag;
use crate::error::Error;
use crate::grammar::Grammar;
use crate::memory::{Backlog, Charge};
use crate::types::{FinishReason, Owner, Prompt, SamplingParams, TokenLogprobs, WeightVersion};

/// A request on its way into the engine.
pub struct GenerateCommand {
    pub request: ValidRequest,
    pub client: RequestClient,
}

/// A call to generate or score whose fields have all been checked against the model.
pub struct ValidRequest {
    /// Given by the client, or made by the server. No two requests under way may have the same.
    pub request_id: String,
    /// Prompts of at least one token, all tokens below the vocabulary size. They have fewer tokens than the context, or
    /// for [`RequestKind::Score`] at most as many.
    pub prompts: Vec<Prompt>,
    pub kind: RequestKind,
    pub params: Arc<SamplingParams>,
    /// The grammar that the samples' texts must match; `None` for any text.
    pub grammar: Option<Arc<Grammar>>,
    /// The prompts, by their index, to which `params` and `grammar` do not apply. Empty for [`RequestKind::Score`].
    pub prompt_sampling: BTreeMap<u32, PromptSampling>,
    /// Name of the resident adapter to use.
    pub adapter: Option<String>,
    /// The request is rejected under a policy of any other version.
    pub if_weight_version: Option<WeightVersion>,
    /// The request is held while the policy's version is lower.
    pub min_weight_version: Option<WeightVersion>,
    /// Time from its arrival after which it ends with the tokens that it has.
    pub time_limit: Option<Duration>,
}

impl ValidRequest {
    /// Number of samples that it asks for; 0 if its prompts are scored.
    pub fn num_samples(&self) -> usize {
        match self.kind {
            RequestKind::Generate { n, .. } => self.prompts.len().saturating_mul(n as usize),
            RequestKind::Score => 0,
        }
    }

    /// Number of samples that it counts for in queues; each prompt that is scored counts as one.
    pub fn num_queued(&self) -> usize {
        match self.kind {
            RequestKind::Generate { .. } => self.num_samples(),
            RequestKind::Score => self.prompts.len(),
        }
    }
}

/// How to sample one prompt of a request, instead of how the request says.
#[derive(Clone)]
pub struct PromptSampling {
    pub params: Arc<SamplingParams>,
    /// What the samples' texts must match; `None` for any text.
    pub grammar: Option<Arc<Grammar>>,
    /// The seed from which the samples have theirs, as if the prompt were the only one; `None` for the request's.
    pub seed: Option<u64>,
}

/// What a request asks of its prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestKind {
    /// `n` samples of each prompt. With `prompt_logprobs`, each prompt's log-probabilities too. With `stream_tokens`,
    /// each token is sent as it is sampled. With `return_text`, streamed tokens and completions have text, for which
    /// the model must have a tokenizer.
    Generate { n: u32, seed: u64, prompt_logprobs: bool, stream_tokens: bool, return_text: bool },
    /// Log-probabilities of each prompt's tokens from the second on. Nothing is sampled.
    Score,
}

/// The client of a request: who it is, since when it waits, and where its events go.
pub struct RequestClient {
    /// Who may end the request, beside callers who may end all.
    pub owner: Option<Owner>,
    /// When the request's message had come.
    pub arrived: Instant,
    pub cancel: CancelFlag,
    pub responder: Responder,
    /// Counts the events that the responder was given and its reader has not taken.
    pub backlog: Backlog,
    /// Counts what the request holds until its terminal event, besides the prompts, which its reply counts: records of
    /// its samples, their tokens and texts.
    pub charge: Charge,
}

/// Takes the events of a request, without blocking. The last one is a terminal event ([`Event::Done`] or
/// [`Event::Failed`]), and there is exactly one of these.
pub type Responder = Box<dyn FnMut(Event) + Send>;

/// What a request's reader is told, in the order in which it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// One token of one sample, if `stream_tokens` was asked for. With `return_text`, `text` is what the token adds to
    /// the sample's text: complete characters that are no part of a stop string and cannot become one.
    Token { prompt_index: u32, sample_index: u32, logprobs: TokenLogprobs, text: Option<String> },
    /// The end of a streamed text, which was held back until the sample had ended. Sent just before its completion, and
    /// not empty.
    Text { prompt_index: u32, sample_index: u32, text: String },
    /// Log-probabilities of a prompt's tokens from the second on, once all are computed, if the request scores or asks
    /// for `prompt_logprobs`. One policy, `weight_version`, has computed all of them.
    PromptLogprobs { prompt_index: u32, logprobs: Vec<TokenLogprobs>, weight_version: WeightVersion },
    /// One sample has ended.
    Completion(Completion),
    /// All samples have ended. This is a terminal event.
    Done(Summary),
    /// The request was refused, or ended by an error. This is a terminal event.
    Failed(Error),
}

impl Event {
    /// About the bytes that the event takes while it waits for its reader.
    pub fn bytes(&self) -> u64 {
        let heap = match self {
            Self::Token { logprobs, text, .. } => logprobs.heap_bytes() + text.as_ref().map_or(0, String::len),
            Self::Text { text, .. } => text.len(),
            Self::PromptLogprobs { logprobs, .. } => tokens_bytes(logprobs),
            Self::Completion(c) => {
                let text = c.text.as_ref().map_or(0, String::len);
                tokens_bytes(&c.tokens) + size_of_val(&c.weight_versions[..]) + text
            }
            Self::Done(_) | Self::Failed(_) => 0,
        };
        (size_of::<Self>() + heap) as u64
    }
}

/// Bytes that tokens take.
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
    /// The text of `tokens` without special tokens, up to the stop string if one ended the sample; `None` unless
    /// `return_text` was asked for.
    pub text: Option<String>,
    /// Versions of the policies that made the tokens, as `(version, start, end)` over `tokens`.
    pub weight_versions: Vec<(WeightVersion, u32, u32)>,
    /// Seed that gives this sample again, alone.
    pub seed: u64,
    /// Number of the prompt's tokens whose KV came from the prefix cache.
    pub cached_tokens: u32,
}

/// Totals of a request that has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub seconds: f64,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestProgress {
    /// It waits for a newer policy, for Resume, or for a drain to end.
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

/// What is known of a request that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestStatus {
    pub id: String,
    pub owner: Option<Owner>,
    pub progress: RequestProgress,
    pub prompts: usize,
    pub prompt_tokens: u64,
    /// Number of samples that it asks for; 0 if its prompts are scored.
    pub samples: usize,
    /// Number of its samples that have not ended.
    pub open_samples: usize,
    /// Number of tokens that its samples have been given.
    pub tokens: u64,
    /// Time since its message had come.
    pub age: Duration,
}

/// The oldest requests that have not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestList {
    /// Number of all requests that have not ended.
    pub total: usize,
    pub oldest: Vec<RequestStatus>,
}
