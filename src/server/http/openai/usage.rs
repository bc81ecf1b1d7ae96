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
    /// None in events of streams, which have no such members.
    #[serde(flatten)]
    details: Option<Details>,
}

/// What makes up the tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Details {
    prompt_tokens_details: PromptDetails,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    completion_tokens_details: Option<()>,
}

/// What is known of a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct PromptDetails {
    /// Tokens whose keys and values came from the prefix cache.
    cached_tokens: u64,
}

/// Members of an answer that are always null here; vLLM's clients read them.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Unused {
    #[schema(value_type = Option<String>)]
    kv_transfer_params: Option<()>,
    #[schema(value_type = Option<String>)]
    ec_transfer_params: Option<()>,
    #[schema(value_type = Option<String>)]
    metrics: Option<()>,
}

impl Usage {
    pub(in crate::server::http) fn new(prompt_tokens: u64, completion_tokens: u64) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Self { prompt_tokens, total_tokens, completion_tokens, details: None }
    }

    /// The figures of a request that has ended.
    pub(in crate::server::http) fn of(summary: &Summary) -> Self {
        let prompt_tokens_details = PromptDetails { cached_tokens: summary.cached_tokens };
        let usage = Self::new(summary.prompt_tokens, summary.completion_tokens);
        Self { details: Some(Details { prompt_tokens_details, completion_tokens_details: None }), ..usage }
    }
}
