//! `/v1/chat/completions/render`: the tokens of a chat and how to sample, without generating.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::{ChatRequest, message};
use crate::server::convert;
use crate::server::http::openai::answers::Null;
use crate::server::http::openai::request_id;
use crate::server::http::{AppState, HttpResult, JsonBody};
use crate::server::pb::{self, structured_outputs::Kind};
use crate::server::requests::off_thread;
use crate::types::TokenId;

/// A chat as token ids: a body for `/inference/v1/generate`.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Rendered {
    request_id: String,
    token_ids: Vec<TokenId>,
    token_offsets: Null,
    features: Null,
    content_parts: Null,
    sampling_params: RenderedSampling,
    model: String,
    stream: bool,
    cache_salt: Null,
    priority: i32,
}

/// How to sample.
#[derive(Default, Serialize, ToSchema)]
struct RenderedSampling {
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    temperature: f32,
    top_p: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    min_p: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    stop: Vec<String>,
    stop_token_ids: Vec<TokenId>,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_tokens: Option<u32>,
    bad_words: Vec<String>,
    /// Absent if true.
    #[serde(skip_serializing_if = "Option::is_none")]
    skip_special_tokens: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<RenderedGrammar>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking_token_budget: Option<u32>,
}

/// The grammar of the text.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum RenderedGrammar {
    Json(String),
    Regex(String),
    Choice(Vec<String>),
    Grammar(String),
    JsonObject(bool),
}

impl From<Kind> for RenderedGrammar {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::JsonSchema(schema) => Self::Json(schema),
            Kind::Regex(regex) => Self::Regex(regex),
            Kind::Choice(pb::Choices { choices }) => Self::Choice(choices),
            Kind::Grammar(grammar) => Self::Grammar(grammar),
            Kind::JsonObject(asked) => Self::JsonObject(asked),
        }
    }
}

/// The token ids of a chat, checked like a request for samples of it.
#[utoipa::path(post, path = "/v1/chat/completions/render", request_body = ChatRequest, responses(
    (status = 200, body = Rendered),
))]
pub(in crate::server::http) async fn render(
    State(app): State<AppState>,
    headers: HeaderMap,
    body: JsonBody<ChatRequest>,
) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody { value: body, mut charge, ignored, .. } = body;
    let (mut message, options) = message(body, request_id(&headers), &context)?;
    let sampling = message.sampling.get_or_insert_default();
    // Compiled only by a request that samples.
    let grammar = sampling.structured_outputs.take().and_then(|outputs| outputs.kind);
    let seed = sampling.seed.map(u64::cast_signed);
    let bad_words = sampling.bad_words.clone();
    let model = context.model.clone();
    let request = off_thread(true, move || convert::generate(message, &model, &mut charge)).await?;
    let params = request.params;
    let rendered = Rendered {
        request_id: format!("chatcmpl-{}", request.request_id),
        token_ids: request.prompts.first().map_or_else(Vec::new, |prompt| prompt.tokens.to_vec()),
        sampling_params: RenderedSampling {
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: (params.top_k > 0).then_some(params.top_k),
            min_p: params.min_p,
            seed,
            stop: params.stop_strings.clone(),
            stop_token_ids: params.stop_token_ids.clone(),
            max_tokens: params.max_tokens,
            min_tokens: (params.min_tokens > 0).then_some(params.min_tokens),
            bad_words,
            skip_special_tokens: (!params.skip_special_tokens).then_some(false),
            structured_outputs: grammar.map(RenderedGrammar::from),
            thinking_token_budget: params.thinking.map(|budget| budget.tokens),
        },
        model: options.report.model,
        stream: options.report.is_stream,
        ..Rendered::default()
    };
    Ok(ignored.name_in(Json(rendered)))
}
