//! Anthropic's Messages API, as vLLM serves it: a body becomes that of a chat, and its answer has Anthropic's form.

mod answers;
mod blocks;
mod request;
mod writer;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::models::check_model;
use super::openai::request_id;
use super::{AppState, HttpError, HttpResult, JsonBody, counted, json, sample};
use crate::engine::ValidRequest;
use crate::memory::Traffic;
use crate::server::convert;
use crate::server::http::openai::chat;
use crate::server::requests::off_thread;
use answers::{ContextManagement, MessageAnswer, TokenCount};
use request::{CountRequest, MessagesRequest, takes_later_system};
use writer::MessageWriter;

/// The body of every answer with a status of 400 or more, as Anthropic's clients read it.
#[derive(Serialize, ToSchema)]
pub(super) struct MessagesError {
    r#type: &'static str,
    error: HttpError,
}

impl From<HttpError> for MessagesError {
    fn from(mut error: HttpError) -> Self {
        error.kind = match error.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        Self { r#type: "error", error }
    }
}

/// Whether the errors of a route have Anthropic's form.
pub(super) fn is_route(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// Writes the errors of these routes in Anthropic's form, wherever they come from.
pub(super) async fn write_errors(request: Request, next: Next) -> Response {
    let is_route = is_route(request.uri().path());
    let response = next.run(request).await;
    match response.extensions().get::<HttpError>().cloned() {
        Some(error) if is_route => response.map(|_| Body::from(json(&MessagesError::from(error)))),
        _ => response,
    }
}

/// Answers a conversation with one message, returned as one answer or as server-sent events.
#[utoipa::path(post, path = "/v1/messages", request_body = MessagesRequest, responses(
    (status = 200, description = "the message, or events of its parts", body = MessageAnswer),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "asleep, without weights, or of another weight version"),
))]
pub(super) async fn messages(
    State(app): State<AppState>,
    headers: HeaderMap,
    mut body: JsonBody<MessagesRequest>,
) -> HttpResult<Response> {
    // The chat's messages are written beside those of the body.
    body.charge.grow(2 * body.bytes as u64)?;
    sample(&app, body, |body, context| {
        let body = body.into_chat(|| takes_later_system(context))?;
        let (message, options) = chat::message(body, request_id(&headers), context)?;
        let spared = options.spared;
        Ok((message, spared, |request: &ValidRequest, traffic: &Traffic| MessageWriter::new(request, options, traffic)))
    })
    .await
}

/// Counts the tokens of a conversation, without answering it.
#[utoipa::path(post, path = "/v1/messages/count_tokens", request_body = CountRequest, responses(
    (status = 200, body = TokenCount),
    (status = 404, description = "no such model or adapter"),
))]
pub(super) async fn count_tokens(State(app): State<AppState>, body: JsonBody<CountRequest>) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody { value: CountRequest { model, prompt }, bytes, mut charge, ignored, .. } = body;
    check_model(model.as_deref(), &context).await?;
    charge.grow(2 * bytes as u64)?;
    let prompt = prompt.into_chat(|| takes_later_system(&context))?.prompt.into_message()?;
    let model = context.model.clone();
    let (input_tokens, charge) = off_thread(true, move || {
        let tokens = convert::unlimited(prompt, &model, &mut charge)?.tokens;
        Ok((tokens.len(), charge))
    })
    .await?;
    let context_management = ContextManagement { original_input_tokens: input_tokens };
    Ok(counted(ignored.name_in(Json(TokenCount { input_tokens, context_management })), charge))
}

#[cfg(test)]
mod tests;
