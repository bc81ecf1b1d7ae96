//! `/v1/chat/completions/render`: the tokens of a chat and how to sample, without generating.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ChatRequest, message};
use crate::error::Error;
use crate::server::convert;
use crate::server::http::features::RenderedFeatures;
use crate::server::http::models::check_model;
use crate::server::http::openai::answers::{Null, Report};
use crate::server::http::openai::request_id;
use crate::server::http::openai::sampling::StreamOptions;
use crate::server::http::{AppState, HttpResult, JsonBody, counted, json, members};
use crate::server::pb::{self, structured_outputs::Kind};
use crate::server::requests::off_thread;
use crate::types::{SamplingParams, TokenId};

members! {
    /// The body.
    pub(in crate::server::http) struct RenderRequest {
        /// Whether the answer has the images' pixels (default: tensors).
        mm_payload: ImagePayload,
        ..chat: ChatRequest,
    }
}

/// The part of each image in an answer: its pixels beside its hash and place, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ImagePayload {
    Tensors,
    None,
}

/// A chat as token ids: a body for `/inference/v1/generate`.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Rendered {
    request_id: String,
    token_ids: Vec<TokenId>,
    token_offsets: Null,
    /// The images; null if there are none.
    features: Option<RenderedFeatures>,
    content_parts: Null,
    sampling_params: RenderedSampling,
    model: String,
    /// False if a grammar constrains only the text after the reasoning, true if `include_reasoning` is false; else
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_ended: Option<bool>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    /// Absent if false.
    #[serde(skip_serializing_if = "Option::is_none")]
    return_token_ids: Option<bool>,
    cache_salt: Null,
    priority: i32,
}

/// How to sample. Some members are absent if they have their default.
#[derive(Default, Serialize, ToSchema)]
struct RenderedSampling {
    #[serde(skip_serializing_if = "Option::is_none")]
    n: Option<u32>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprob_token_ids: Vec<TokenId>,
    bad_words: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    skip_special_tokens: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    include_stop_str_in_output: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<RenderedGrammar>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<TokenId, f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allowed_token_ids: Vec<TokenId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking_token_budget: Option<u32>,
}

impl RenderedSampling {
    /// The members that the message of a chat gives, of which `params` are the checked ones.
    fn new(given: pb::GenerateRequest, params: &SamplingParams, report: &Report) -> Self {
        let sampling = given.sampling.unwrap_or_default();
        let named = !given.logprob_token_ids.is_empty();
        Self {
            n: given.n.filter(|n| *n != 1),
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: (params.top_k > 0).then_some(params.top_k),
            min_p: params.min_p,
            seed: sampling.seed.map(u64::cast_signed),
            stop: params.stop_strings.clone(),
            stop_token_ids: params.stop_token_ids.clone(),
            ignore_eos: sampling.ignore_eos.then_some(true),
            max_tokens: params.max_tokens,
            min_tokens: (params.min_tokens > 0).then_some(params.min_tokens),
            logprobs: report.logprobs.map(|top| if named { 0 } else { top }),
            prompt_logprobs: report.prompt_logprobs,
            logprob_token_ids: given.logprob_token_ids,
            bad_words: sampling.bad_words,
            skip_special_tokens: (!params.skip_special_tokens).then_some(false),
            include_stop_str_in_output: report.includes_stop.then_some(true),
            structured_outputs: None,
            logit_bias: sampling.logit_bias.into_iter().collect(),
            allowed_token_ids: sampling.allowed_token_ids,
            thinking_token_budget: params.thinking.map(|budget| budget.tokens),
        }
    }
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
#[utoipa::path(post, path = "/v1/chat/completions/render", request_body = RenderRequest, responses(
    (status = 200, body = Rendered),
    (status = 404, description = "no such model or adapter"),
))]
pub(in crate::server::http) async fn render(
    State(app): State<AppState>,
    headers: HeaderMap,
    body: JsonBody<RenderRequest>,
) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody { value: RenderRequest { mm_payload, chat: body }, mut charge, mut ignored, .. } = body;
    body.prompt.without_effect().for_each(|name| ignored.add(name));
    check_model(body.sampling.model.as_deref(), &context).await?;
    let stream_options = body.sampling.stream_options;
    let (mut message, options) = message(body, request_id(&headers), &context)?;
    // Compiled only by a request that samples.
    let grammar = message.sampling.get_or_insert_default().structured_outputs.take().and_then(|outputs| outputs.kind);
    let prompts = std::mem::take(&mut message.prompts);
    let given = message.clone();
    message.prompts = prompts;
    let model = context.model.clone();
    let has_pixels = mm_payload != Some(ImagePayload::None);
    let (answer, charge) = off_thread(true, move || {
        let request = convert::generate(message, &model, &mut charge)?;
        let [prompt] = &request.prompts[..] else { return Err(Error::Internal("a chat is one prompt".into())) };
        // The pixels in base64, and the answer that has them.
        charge.grow(if has_pixels { 2 * RenderedFeatures::bytes(prompt) } else { 0 })?;
        let sampling_params = RenderedSampling {
            structured_outputs: grammar.map(RenderedGrammar::from),
            ..RenderedSampling::new(given, &request.params, &options.report)
        };
        let answer = json(&Rendered {
            request_id: format!("chatcmpl-{}", request.request_id),
            token_ids: prompt.tokens.to_vec(),
            features: RenderedFeatures::new(prompt, has_pixels),
            sampling_params,
            model: options.report.model,
            reasoning_ended: match options.spared {
                Some(_) => Some(false),
                None => (!options.includes_reasoning).then_some(true),
            },
            stream: options.report.is_stream,
            stream_options,
            return_token_ids: options.report.returns_ids.then_some(true),
            ..Rendered::default()
        });
        Ok((answer, charge))
    })
    .await?;
    Ok(counted(ignored.name_in(([(CONTENT_TYPE, "application/json")], answer)), charge))
}
