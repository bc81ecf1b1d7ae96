//! The usage figures of an answer.

use serde::Serialize;
use utoipa::ToSchema;

use crate::engine::Summary;

/// How many tokens a request has taken.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Usage {
    pub(super) prompt_tokens: u64,
    pub(super) total_tokens: u64,
    pub(super) completion_tokens: u64,
    /// None in events of streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_tokens_details: Option<PromptDetails>,
}

/// What is known of a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct PromptDetails {
    /// Tokens whose keys and values came from the prefix cache.
    cached_tokens: u64,
}

impl Usage {
    pub(super) fn new(prompt_tokens: u64, completion_tokens: u64) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Self { prompt_tokens, total_tokens, completion_tokens, prompt_tokens_details: None }
    }

    /// The figures of a request that has ended.
    pub(super) fn of(summary: &Summary) -> Self {
        let details = PromptDetails { cached_tokens: summary.cached_tokens };
        let usage = Self::new(summary.prompt_tokens, summary.completion_tokens);
        Self { prompt_tokens_details: Some(details), ..usage }
    }
}
