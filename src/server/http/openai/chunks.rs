//! Events of streams, as OpenAI's clients read them.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Serialize;

use super::report::Report;
use super::usage::Usage;
use crate::engine::Summary;
use crate::server::http::reply::event;
use crate::types::TokenId;

/// One event of a stream.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
    /// In the first event of a chat alone.
    #[serde(flatten)]
    prompt: Option<PromptIds<'a>>,
}

/// The prompt's tokens, if they were asked for.
#[derive(Serialize)]
pub(super) struct PromptIds<'a> {
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    pub(super) prompt_text: Option<String>,
}

/// What an event adds to one sample.
pub(super) trait ChunkChoice: Serialize {
    /// Whether the sample has ended.
    fn is_last(&self) -> bool;
}

/// The events of one request.
pub(super) struct Chunks {
    object: &'static str,
    prompt_tokens: u64,
    /// Tokens that were streamed so far.
    tokens: u64,
}

impl Chunks {
    pub(super) fn new(object: &'static str, prompt_tokens: u64) -> Self {
        Self { object, prompt_tokens, tokens: 0 }
    }

    pub(super) fn count_token(&mut self) {
        self.tokens += 1;
    }

    /// Sends what is new of one sample.
    pub(super) fn send<C: ChunkChoice>(
        &self,
        (id, report): (&str, &Report),
        choice: C,
        prompt: Option<PromptIds<'_>>,
        out: &mut VecDeque<Bytes>,
    ) {
        let options = report.stream_options;
        let usage = options.continuous_usage_stats.then(|| Usage::new(self.prompt_tokens, self.tokens));
        let has_fingerprint = choice.is_last() && !options.include_usage;
        out.push_back(self.chunk((id, report), &[choice], usage, has_fingerprint, prompt));
    }

    /// Sends the last event, if it was asked for.
    pub(super) fn end(&self, (id, report): (&str, &Report), summary: &Summary, out: &mut VecDeque<Bytes>) {
        if report.stream_options.include_usage {
            let usage = Usage::new(summary.prompt_tokens, summary.completion_tokens);
            out.push_back(self.chunk::<()>((id, report), &[], Some(usage), true, None));
        }
    }

    fn chunk<C: Serialize>(
        &self,
        (id, report): (&str, &Report),
        choices: &[C],
        usage: Option<Usage>,
        has_fingerprint: bool,
        prompt: Option<PromptIds<'_>>,
    ) -> Bytes {
        event(&Chunk {
            id,
            object: self.object,
            created: report.created,
            model: &report.model,
            choices,
            usage,
            system_fingerprint: has_fingerprint.then_some(&report.fingerprint),
            prompt,
        })
    }
}
