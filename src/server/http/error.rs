//! Errors as HTTP answers: the status by what the caller can do, the body in OpenAI's shape.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::{HeaderValue, WWW_AUTHENTICATE};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Content, Ref, RefOr, Response as ResponseDescription};

use crate::error::{Error, shown};

/// Longest message of an error in bytes.
const MAX_MESSAGE_BYTES: usize = 2048;

/// Errors of every route that reads a body, and their reasons.
const COMMON_ERRORS: [(&str, &str); 5] = [
    ("400", "a member of the body, or an argument of the query, is wrong"),
    ("408", "the body arrives too slowly"),
    ("413", "the body is too large"),
    ("429", "the queue or the memory for requests is full"),
    ("503", "the server is starting or shutting down"),
];

/// The body of every answer with a status of 400 or more, as OpenAI's clients read it.
#[derive(Serialize, ToSchema)]
pub(super) struct ErrorBody {
    error: HttpError,
}

/// The error of an answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ErrorFacts)]
pub(super) struct HttpError {
    #[serde(skip)]
    pub(super) status: StatusCode,
    /// The reason, with the offending value, and the remedy.
    pub(super) message: String,
    /// The kind of error, such as `BadRequestError` or `NotFoundError`.
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    /// The wrong member of the body.
    pub(super) param: Option<String>,
    /// The HTTP status.
    code: u16,
}

/// The result of a route.
pub(super) type HttpResult<T> = std::result::Result<T, HttpError>;

impl HttpError {
    pub(super) fn new(status: StatusCode, kind: &'static str, param: Option<String>, message: &str) -> Self {
        let message = shown(message, MAX_MESSAGE_BYTES);
        match status {
            StatusCode::INTERNAL_SERVER_ERROR => tracing::error!(error = message, "request failed"),
            _ => tracing::debug!(%status, error = message, "call refused"),
        }
        Self { status, message, kind, param, code: status.as_u16() }
    }

    /// A member of the body, or an argument of the query, is wrong.
    pub(super) fn invalid(param: impl Into<String>, message: &str) -> Self {
        Error::invalid(param, message).into()
    }

    /// The `model` of a request is neither a name of the policy nor that of a resident adapter.
    pub(super) fn no_model(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", Some("model".into()), message)
    }

    pub(super) fn no_route() -> Self {
        Error::NotFound("unknown route; /openapi.json lists all routes".into()).into()
    }

    pub(super) fn wrong_method() -> Self {
        let message = "the route has other methods; /openapi.json lists them";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowedError", None, message)
    }

    /// The body, for an error in the middle of a stream, whose status has been sent already.
    pub(super) fn into_body(self) -> ErrorBody {
        ErrorBody { error: self }
    }
}

impl From<Error> for HttpError {
    fn from(error: Error) -> Self {
        let (status, kind) = match &error {
            Error::InvalidArgument { .. } => (StatusCode::BAD_REQUEST, "BadRequestError"),
            Error::NotFound(_) => (StatusCode::NOT_FOUND, "NotFoundError"),
            Error::FailedPrecondition(_) => (StatusCode::CONFLICT, "FailedPreconditionError"),
            Error::VersionConflict(_) | Error::Aborted(_) => (StatusCode::CONFLICT, "AbortedError"),
            Error::AlreadyExists(_) => (StatusCode::CONFLICT, "AlreadyExistsError"),
            Error::DataLoss(_) => (StatusCode::UNPROCESSABLE_ENTITY, "DataLossError"),
            Error::ResourceExhausted(_) => (StatusCode::TOO_MANY_REQUESTS, "ResourceExhaustedError"),
            Error::DeadlineExceeded(_) => (StatusCode::REQUEST_TIMEOUT, "TimeoutError"),
            Error::Unauthenticated(_) => (StatusCode::UNAUTHORIZED, "AuthenticationError"),
            Error::PermissionDenied(_) => (StatusCode::FORBIDDEN, "PermissionDeniedError"),
            Error::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
            // A Config error ends the start, so one in a running server is a bug.
            Error::Config(_) | Error::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError"),
        };
        match error {
            Error::InvalidArgument { field, message } => {
                let param = member(&field);
                Self::new(status, kind, Some(param.clone()), &format!("{param}: {message}"))
            }
            error => Self::new(status, kind, None, &error.to_string()),
        }
    }
}

/// The member of a body that became the field `path` of a protobuf message.
fn member(path: &str) -> String {
    let path = path.strip_prefix("sampling.").unwrap_or(if path == "adapter" { "model" } else { path });
    let Some(rest) = path.strip_prefix("prompts") else { return path.to_owned() };
    let (index, kind) = rest.split_once(']').map_or(("", rest), |(index, kind)| (&index[1..], kind));
    if let Some(chat) = kind.strip_prefix(".chat") {
        let member = chat.strip_prefix('.').unwrap_or("messages");
        return member.replacen("template_arguments", "chat_template_kwargs", 1).replacen("_json", "", 1);
    }
    if let Some(within) = kind.strip_prefix(".images[") {
        let (index, _) = within.split_once(']').unwrap_or((within, ""));
        return format!("images[{index}]");
    }
    if let Some(within) = kind.strip_prefix(".logprob_token_ids") {
        return format!("sampling_params.prompt_logprob_token_ids{}", within.replacen(".ids", "", 1));
    }
    let within = kind.strip_prefix(".tokens.ids").unwrap_or("");
    if index.is_empty() { format!("prompt{within}") } else { format!("prompt[{index}]{within}") }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.clone().into_body())).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the middleware that records errors.
        response.extensions_mut().insert(self);
        response
    }
}

/// Completes the description of a route: errors that it has in common with others, and the schema of their body.
pub(super) fn describe_errors(operation: &mut Operation, body: &str) {
    let responses = &mut operation.responses.responses;
    for (status, reason) in COMMON_ERRORS {
        if operation.request_body.is_some() {
            responses.entry(status.into()).or_insert_with(|| ResponseDescription::new("").into());
        }
        if let Some(RefOr::T(response)) = responses.get_mut(status)
            && response.description.is_empty()
        {
            response.description = reason.into();
        }
    }
    for (_, response) in responses.range_mut("400".to_owned()..) {
        if let RefOr::T(response) = response {
            let body = Content::new(Some(Ref::from_schema_name(body)));
            response.content.insert("application/json".into(), body.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_member_of_the_body() {
        for (field, param) in [
            ("sampling.temperature", "temperature"),
            ("prompts", "prompt"),
            ("prompts[2].text", "prompt[2]"),
            ("prompts[0].tokens.ids[7]", "prompt[0][7]"),
            ("prompts[0].chat.messages[1].role", "messages[1].role"),
            ("prompts[0].chat", "messages"),
            ("prompts[0].chat.messages_json[1].content[0]", "messages[1].content[0]"),
            ("prompts[0].chat.template_arguments_json.tools", "chat_template_kwargs.tools"),
            ("prompts[0].logprob_token_ids[3].ids[1]", "sampling_params.prompt_logprob_token_ids[3][1]"),
            ("n", "n"),
            ("adapter", "model"),
        ] {
            assert_eq!(member(field), param, "{field}");
        }
    }
}
