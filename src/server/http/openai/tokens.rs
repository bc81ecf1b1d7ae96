//! `/tokenize` and `/detokenize`: between texts or chats and token ids. `/tokenizer_info`: how.

use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::chat::ChatPrompt;
use super::prompt::PromptInput;
use crate::error::Error;
use crate::server::convert;
use crate::server::http::models::check_model;
use crate::server::http::{AppState, HttpResult, JsonBody, counted, members};
use crate::server::requests::{INLINE_PARSE_BYTES, is_chat, off_thread};
use crate::types::TokenId;

/// Most tokens of one `/detokenize`: a thousand contexts.
const MAX_TOKENS: usize = 1 << 20;
/// Most bytes that a token takes while an answer is made, where no better bound is known.
const TOKEN: u64 = 64;

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
    (status = 404, description = "no such model or adapter"),
))]
pub(in crate::server::http) async fn tokenize(
    State(app): State<AppState>,
    body: JsonBody<TokenizeRequest>,
) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody {
        value: TokenizeRequest { model, prompt, return_token_strs, chat },
        bytes,
        mut charge,
        mut ignored,
        ..
    } = body;
    chat.without_effect().for_each(|name| ignored.add(name));
    check_model(model.as_deref(), &context).await?;
    let prompt = match (prompt, chat.messages.is_some()) {
        (None, true) => chat.into_message()?,
        (Some(text), false) => PromptInput::Text(text).into_message(chat.add_special_tokens),
        (None, false) => return Err(Error::invalid("prompt", "is missing; give a text, or messages").into()),
        (Some(_), true) => {
            return Err(Error::invalid("prompt", "cannot be combined with messages; give one of them").into());
        }
    };
    let model = context.model.clone();
    let (answer, charge) = off_thread(is_chat(&prompt) || bytes > INLINE_PARSE_BYTES, move || {
        let tokens = convert::unlimited(prompt, &model, &mut charge)?.tokens;
        charge.grow(tokens.len() as u64 * TOKEN)?;
        let encoder = model.encoder.as_ref().filter(|_| return_token_strs == Some(true));
        let token_strs = encoder.map(|encoder| {
            tokens.iter().map(|&token| encoder.tokenizer.id_to_token(token).unwrap_or_default()).collect()
        });
        Ok((
            Tokenized { count: tokens.len(), max_model_len: model.max_model_len, tokens: tokens.to_vec(), token_strs },
            charge,
        ))
    })
    .await?;
    Ok(counted(ignored.name_in(Json(answer)), charge))
}

/// Returns the text of token ids.
#[utoipa::path(post, path = "/detokenize", request_body = DetokenizeRequest, responses(
    (status = 200, body = Detokenized),
    (status = 404, description = "no such model or adapter"),
))]
pub(in crate::server::http) async fn detokenize(
    State(app): State<AppState>,
    body: JsonBody<DetokenizeRequest>,
) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody { value: DetokenizeRequest { model, tokens }, bytes, mut charge, ignored, .. } = body;
    check_model(model.as_deref(), &context).await?;
    let tokens = tokens.ok_or_else(|| Error::invalid("tokens", "is missing; give token ids"))?;
    if tokens.len() > MAX_TOKENS {
        return Err(Error::invalid("tokens", format!("{} are more than {MAX_TOKENS}", tokens.len())).into());
    }
    let encoder =
        context.model.encoder.clone().ok_or_else(|| Error::invalid("tokens", "this model has no tokenizer"))?;
    let longest = encoder.tokenizer.max_bytes_per_token().map_or(TOKEN, |longest| longest as u64);
    let (prompt, charge) = off_thread(bytes > INLINE_PARSE_BYTES, move || {
        charge.grow(tokens.len() as u64 * longest)?;
        Ok((encoder.tokenizer.decode(&tokens, false), charge))
    })
    .await?;
    Ok(counted(ignored.name_in(Json(Detokenized { prompt })), charge))
}

/// The configuration of the tokenizer and the chat template in use: the members of `tokenizer_config.json`.
#[utoipa::path(get, path = "/tokenizer_info", responses(
    (status = 200, body = serde_json::Value, content_type = "application/json"),
    (status = 404, description = "the model has no tokenizer"),
    (status = 503),
))]
pub(in crate::server::http) async fn tokenizer_info(State(app): State<AppState>) -> HttpResult<Response> {
    let info = app.server.context()?.model.tokenizer_info.clone();
    if info.is_empty() {
        return Err(Error::NotFound("this model has no tokenizer".into()).into());
    }
    Ok(([(CONTENT_TYPE, "application/json")], info).into_response())
}
