//! `/v1/responses`: OpenAI's Responses without a store. A body becomes that of a chat, and its answer is a list of
//! items.

mod answers;
mod input;
mod request;
mod writer;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::{chat, request_id};
use crate::engine::ValidRequest;
use crate::memory::Traffic;
use crate::server::http::{AppState, HttpResult, JsonBody, sample};
use answers::ResponseAnswer;
use request::ResponseRequest;
use writer::ResponseWriter;

/// Answers an input with a message and calls of functions, returned as one answer or as server-sent events. Nothing is
/// stored.
#[utoipa::path(post, path = "/v1/responses", request_body = ResponseRequest, responses(
    (status = 200, description = "the response, or events of its parts", body = ResponseAnswer),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "asleep, without weights, or of another weight version"),
))]
pub(in crate::server::http) async fn responses(
    State(app): State<AppState>,
    headers: HeaderMap,
    mut body: JsonBody<ResponseRequest>,
) -> HttpResult<Response> {
    // The chat's messages are written beside the input, and an answer repeats members of the body.
    body.charge.grow(4 * body.bytes as u64)?;
    body.value.without_effect().for_each(|name| body.ignored.add(name));
    sample(&app, body, |body, context| {
        let (chat, echo) = body.into_chat()?;
        let (message, options) = chat::message(chat, request_id(&headers), context)?;
        let spared = options.spared;
        let writer = |request: &ValidRequest, traffic: &Traffic| ResponseWriter::new(request, options, echo, traffic);
        Ok((message, spared, writer))
    })
    .await
}

#[cfg(test)]
mod tests;
