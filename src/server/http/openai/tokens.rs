//! `/tokenize` and `/detokenize`: between texts or chats and token ids.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::chat::ChatPrompt;
use crate::engine::Command;
use crate::error::{Error, shown};
use crate::server::calls::ask;
use crate::server::http::{AppState, ErrorBody, HttpError, JsonBody, counted, members};
use crate::server::requests::{INLINE_PARSE_BYTES, is_chat, off_thread};
use crate::server::{PromptEncoder, ServingContext, convert, pb};
use crate::types::TokenId;

/// Most tokens of one `/detokenize`: a thousand contexts.
const MAX_TOKENS: usize = 1 << 20;
/// Most bytes that a token takes while an answer is made, where no better bound is known.
const TOKEN: u64 = 64;
/// Longest name of a model in an error.
const MAX_NAME_BYTES: usize = 256;

members! {
    /// The body of `/tokenize`. A text gets special tokens unless `add_special_tokens` is false.
    pub(in crate::server::http) struct TokenizeRequest {
        /// The policy's name, or that of a resident adapter; all have the same tokenizer.
        model: String,
        /// A text, instead of `messages`.
        prompt: String,
        /// Whether to return the strings of the vocabulary as well (default: false).
        return_token_strs: bool,
        ..chat: ChatPrompt,
    }
}

members! {
    /// The body of `/detokenize`.
    pub(in crate::server::http) struct DetokenizeRequest {
        /// The policy's name, or that of a resident adapter; all have the same tokenizer.
        model: String,
        /// The token ids. Those without a token are left out.
        #[schema(value_type = Option<Vec<u64>>)]
        tokens: Vec<u32>,
    }
}

/// The token ids of a text or a chat.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct Tokenized {
    count: usize,
    /// Most tokens of prompt and completion together.
    max_model_len: usize,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

/// The text of token ids, special tokens included.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct Detokenized {
    prompt: String,
}

/// Tokenizes a text or a chat. The result may be longer than the context.
#[utoipa::path(post, path = "/tokenize", request_body = TokenizeRequest, responses(
    (status = 200, body = Tokenized),
    (status = 400, description = "a member of the body is wrong", body = ErrorBody),
    (status = 404, description = "no such model or adapter", body = ErrorBody),
    (status = 429, description = "the memory for requests is full", body = ErrorBody),
    (status = 503, description = "the server is starting or shutting down", body = ErrorBody),
))]
pub(in crate::server::http) async fn tokenize(
    State(app): State<AppState>,
    body: JsonBody<TokenizeRequest>,
) -> Result<Response, HttpError> {
    let context = app.server.context()?;
    let JsonBody {
        value: TokenizeRequest { model, prompt, return_token_strs, chat }, bytes, mut charge, ignored, ..
    } = body;
    check_model(model.as_deref(), &context).await?;
    let prompt = match (prompt, chat.has_messages()) {
        (None, true) => chat.into_message()?,
        (Some(text), false) => {
            let kind = Some(pb::prompt::Kind::Text(text));
            pb::Prompt { kind, add_special_tokens: chat.add_special_tokens, sampling: None }
        }
        (None, false) => return Err(Error::invalid("prompt", "is missing; give a text, or messages").into()),
        (Some(_), true) => {
            return Err(Error::invalid("prompt", "cannot be combined with messages; give one of them").into());
        }
    };
    let (model, names) = (context.model.clone(), return_token_strs.unwrap_or(false));
    let (tokens, token_strs, charge) = off_thread(is_chat(&prompt) || bytes > INLINE_PARSE_BYTES, move || {
        let tokens = convert::tokens(prompt, &model, &mut charge)?;
        charge.grow(tokens.len() as u64 * TOKEN)?;
        let name =
            |encoder: &Arc<PromptEncoder>, token: &TokenId| encoder.tokenizer.id_to_token(*token).unwrap_or_default();
        let encoder = model.encoder.as_ref().filter(|_| names);
        let strings = encoder.map(|encoder| tokens.iter().map(|token| name(encoder, token)).collect());
        Ok((tokens, strings, charge))
    })
    .await?;
    let max_model_len = context.model.max_model_len;
    let answer = ignored.name_in(Json(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs }));
    Ok(counted(answer, charge))
}

/// Returns the text of token ids.
#[utoipa::path(post, path = "/detokenize", request_body = DetokenizeRequest, responses(
    (status = 200, body = Detokenized),
    (status = 400, description = "a member of the body is wrong", body = ErrorBody),
    (status = 404, description = "no such model or adapter", body = ErrorBody),
    (status = 429, description = "the memory for requests is full", body = ErrorBody),
    (status = 503, description = "the server is starting or shutting down", body = ErrorBody),
))]
pub(in crate::server::http) async fn detokenize(
    State(app): State<AppState>,
    body: JsonBody<DetokenizeRequest>,
) -> Result<Response, HttpError> {
    let context = app.server.context()?;
    let JsonBody { value: DetokenizeRequest { model, tokens }, bytes, mut charge, ignored, .. } = body;
    check_model(model.as_deref(), &context).await?;
    let tokens = tokens.ok_or_else(|| Error::invalid("tokens", "is missing; give token ids"))?;
    if tokens.len() > MAX_TOKENS {
        return Err(Error::invalid("tokens", format!("{} are more than {MAX_TOKENS}", tokens.len())).into());
    }
    let encoder = context.model.encoder.clone();
    let encoder = encoder.ok_or_else(|| Error::invalid("tokens", "this model has no tokenizer"))?;
    let longest = encoder.tokenizer.max_bytes_per_token().map_or(TOKEN, |longest| longest as u64);
    let (prompt, charge) = off_thread(bytes > INLINE_PARSE_BYTES, move || {
        charge.grow(tokens.len() as u64 * longest)?;
        Ok((encoder.tokenizer.decode(&tokens, false), charge))
    })
    .await?;
    Ok(counted(ignored.name_in(Json(Detokenized { prompt })), charge))
}

/// Checks that `model` is the policy or a resident adapter.
async fn check_model(model: Option<&str>, context: &ServingContext) -> Result<(), HttpError> {
    let Some(name) = model.filter(|name| !name.is_empty() && *name != context.info.model) else { return Ok(()) };
    let adapters = ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
    if adapters.iter().any(|adapter| !adapter.retired && adapter.name == name) {
        return Ok(());
    }
    Err(HttpError::no_model(&format!("there is no model or adapter {:?}", shown(name, MAX_NAME_BYTES))))
}
