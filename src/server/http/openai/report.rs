//! What an answer reports beside the text, and how: shared by completions and chats.

use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::TokenTexts;
use super::sampling::{LogprobsMode, Sampling, StreamOptions};
use crate::engine::Completion;
use crate::error::{Error, Result};
use crate::server::ServingContext;
use crate::server::http::unix_seconds;
use crate::text::Tokenizer;
use crate::types::{FinishReason, WeightVersion};

/// What a request's answer reports beside the text.
pub(in crate::server::http) struct Report {
    pub(in crate::server::http) model: String,
    pub(super) fingerprint: String,
    /// Time of the answer in seconds since 1970.
    pub(in crate::server::http) created: u64,
    /// Distribution of the log-probabilities.
    pub(in crate::server::http) mode: LogprobsMode,
    /// How many most likely tokens to report for each token of the prompt, if at all.
    pub(in crate::server::http) prompt_logprobs: Option<u32>,
    pub(in crate::server::http) is_stream: bool,
    pub(in crate::server::http) stream_options: StreamOptions,
    pub(in crate::server::http) returns_ids: bool,
    pub(super) returns_versions: bool,
    /// Writes tokens beside log-probabilities as `token_id:N`.
    writes_ids: bool,
    includes_stop: bool,
    stop: Vec<String>,
    tokenizer: Option<Arc<Tokenizer>>,
}

/// What ended a sample: a stop string or a stop token.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(in crate::server::http) enum StopReason {
    Text(String),
    Token(u32),
}

/// Tokens of a sample that one version of the policy has made.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct VersionSpan {
    version: WeightVersion,
    /// Index of the span's first token.
    start: u32,
    /// Index after the span's last token.
    end: u32,
}

impl Report {
    /// # Errors
    /// `InvalidArgument` for what a stream cannot report.
    pub(in crate::server::http) fn new(sampling: &Sampling, context: &ServingContext) -> Result<Self> {
        let (info, is_stream) = (&context.info, sampling.stream.unwrap_or(false));
        if is_stream && sampling.prompt_logprobs.is_some() {
            return Err(Error::invalid("prompt_logprobs", "are not available in a stream; leave out one of the two"));
        }
        Ok(Self {
            model: sampling.model.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| info.model.clone()),
            // What tells two servers apart whose bits may differ: version, instruction set and precision.
            fingerprint: format!("rollout-server-{}-{}-{}", env!("CARGO_PKG_VERSION"), info.kernel, info.dtype),
            created: unix_seconds(),
            mode: sampling.reported(),
            prompt_logprobs: sampling.prompt_logprobs,
            is_stream,
            stream_options: sampling.stream_options.unwrap_or_default(),
            returns_ids: sampling.return_token_ids.unwrap_or(false),
            returns_versions: sampling.return_weight_versions.unwrap_or(false),
            writes_ids: sampling.return_tokens_as_token_ids.unwrap_or(false),
            includes_stop: sampling.include_stop_str_in_output.unwrap_or(false),
            stop: sampling.stop_strings(),
            tokenizer: context.model.encoder.as_ref().map(|encoder| encoder.tokenizer().clone()),
        })
    }

    /// Whether the model has a tokenizer, so that samples have texts.
    pub(super) fn has_text(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Writes the tokens of one text beside their log-probabilities.
    pub(in crate::server::http) fn token_texts(&self) -> TokenTexts {
        TokenTexts::new(self.tokenizer.as_ref().filter(|_| !self.writes_ids))
    }

    /// Writes the tokens of one text as their texts.
    pub(super) fn plain_texts(&self) -> TokenTexts {
        TokenTexts::new(self.tokenizer.as_ref())
    }

    /// The text of `tokens`, without special tokens; empty without a tokenizer.
    pub(super) fn text(&self, tokens: &[u32]) -> String {
        self.tokenizer.as_ref().map_or_else(String::new, |tokenizer| tokenizer.decode(tokens, true))
    }

    /// What ended a sample, if it was a stop string or a stop token of the request.
    pub(in crate::server::http) fn stop_reason(&self, completion: &Completion) -> Option<StopReason> {
        match completion.finish_reason {
            FinishReason::StopToken => completion.tokens.last().map(|last| StopReason::Token(last.token)),
            FinishReason::StopString => self.stop_string(completion).map(StopReason::Text),
            FinishReason::Eos | FinishReason::Length | FinishReason::Grammar | FinishReason::Aborted => None,
        }
    }

    /// The stop string that ended a sample. The engine's text ends before it.
    fn stop_string(&self, completion: &Completion) -> Option<String> {
        let tokens: Vec<_> = completion.tokens.iter().map(|token| token.token).collect();
        let whole = self.text(&tokens);
        let rest = whole.get(completion.text.as_ref()?.len()..)?;
        self.stop.iter().find(|stop| rest.starts_with(stop.as_str())).cloned()
    }

    /// What follows the engine's text: the stop string, if it is to be a part of the text.
    pub(super) fn ending<'a>(&self, stop: Option<&'a StopReason>) -> &'a str {
        match stop {
            Some(StopReason::Text(text)) if self.includes_stop => text,
            _ => "",
        }
    }

    /// The versions that made a sample's tokens, if they were asked for.
    pub(super) fn versions(&self, completion: &Completion) -> Option<Vec<VersionSpan>> {
        let span = |&(version, start, end): &_| VersionSpan { version, start, end };
        self.returns_versions.then(|| completion.weight_versions.iter().map(span).collect())
    }
}

/// The end of a sample in OpenAI's words, with vLLM's for an abort.
pub(in crate::server::http) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos | FinishReason::StopToken | FinishReason::StopString | FinishReason::Grammar => "stop",
        FinishReason::Length => "length",
        FinishReason::Aborted => "abort",
    }
}
