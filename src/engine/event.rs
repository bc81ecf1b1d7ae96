//! The events that a request sends to its client's reader.

use crate::error::Error;
use crate::types::{FinishReason, TokenLogprobs, WeightVersion};

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
