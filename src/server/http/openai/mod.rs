//! OpenAI's API, with the members that vLLM adds and trainers use.

pub(super) mod answers;
pub(super) mod chat;
pub(super) mod completions;
pub(super) mod invocations;
pub(super) mod load;
pub(super) mod logprobs;
mod prompt;
pub(super) mod responses;
pub(super) mod returned;
pub(super) mod routed_experts;
pub(super) mod sampling;
mod structured;
pub(super) mod tokens;

use axum::http::HeaderMap;

/// Longest X-Request-Id that is taken.
const MAX_REQUEST_ID_BYTES: usize = 256;

/// The name that a request's X-Request-Id header gives it.
pub(super) fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get("x-request-id")?.to_str().ok()?;
    (!id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES).then(|| id.to_owned())
}
