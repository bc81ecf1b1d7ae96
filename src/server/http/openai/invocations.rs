//! `/invocations`: the one route that Amazon SageMaker calls, for chats and for completions.

use axum::extract::{FromRequest, Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::chat::{ChatRequest, chat_completions};
use super::completions::{CompletionRequest, completions};
use crate::server::http::request_body::{RawBody, parse};
use crate::server::http::{AppState, HttpError, HttpResult, JsonBody};

/// A body of one of two routes.
pub(in crate::server::http) enum Invocation {
    Chat(JsonBody<ChatRequest>),
    Completion(JsonBody<CompletionRequest>),
}

/// The member that only a chat has.
#[derive(Deserialize)]
struct ChatMember {
    messages: Option<IgnoredAny>,
}

impl FromRequest<AppState> for Invocation {
    type Rejection = HttpError;

    async fn from_request(request: Request, app: &AppState) -> HttpResult<Self> {
        let body = RawBody::from_request(request, app).await?;
        body.parse(|text, charge, caller| {
            let is_chat = serde_json::from_slice(text).is_ok_and(|ChatMember { messages }| messages.is_some());
            Ok(match is_chat {
                true => Self::Chat(parse(text, charge, caller)?),
                false => Self::Completion(parse(text, charge, caller)?),
            })
        })
        .await
    }
}

/// Answers a body with `messages` as `/v1/chat/completions` does, and any other as `/v1/completions` does.
#[utoipa::path(post, path = "/invocations", request_body = serde_json::Value, responses(
    (status = 200, description = "the answer of that route"),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "asleep, without weights, or of another weight version"),
))]
pub(in crate::server::http) async fn invocations(
    app: State<AppState>,
    headers: HeaderMap,
    body: Invocation,
) -> HttpResult<Response> {
    match body {
        Invocation::Chat(body) => chat_completions(app, headers, body).await,
        Invocation::Completion(body) => completions(app, headers, body).await,
    }
}
