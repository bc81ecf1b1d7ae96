//! OpenAI's API, with the members that vLLM adds and trainers use.

pub(super) mod answers;
pub(super) mod chat;
pub(super) mod completions;
pub(super) mod logprobs;
mod prompt;
pub(super) mod sampling;
mod structured;
pub(super) mod tokens;

use axum::http::HeaderMap;
use utoipa::IntoResponses;

use super::ErrorBody;

/// Longest X-Request-Id that is taken.
const MAX_REQUEST_ID_BYTES: usize = 256;

/// The name that a request's X-Request-Id header gives it.
pub(super) fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get("x-request-id")?.to_str().ok()?;
    (!id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES).then(|| id.to_owned())
}

/// The errors of all routes that take a body, for their descriptions.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "no answer is made of it")]
enum BodyErrors {
    #[response(status = 400, description = "a member of the body is wrong")]
    Invalid(ErrorBody),
    #[response(status = 413, description = "the body is too large")]
    TooLarge(ErrorBody),
    #[response(status = 429, description = "there is no room for the request or its answer")]
    NoRoom(ErrorBody),
    #[response(status = 503, description = "the server is starting or shutting down")]
    NotReady(ErrorBody),
}
