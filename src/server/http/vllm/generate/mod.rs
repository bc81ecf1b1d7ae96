//! `/inference/v1/generate`: tokens in, tokens out.

mod writer;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Deserialize;
use serde::de::IgnoredAny;
use utoipa::ToSchema;

use crate::error::{Error, Result};
use crate::server::context::ModelFacts;
use crate::server::http::Door;
use crate::server::http::body::JsonBody;
use crate::server::http::error::{ErrorBody, HttpError};
use crate::server::http::members::{BodyOf, members};
use crate::server::http::openai::report::Report;
use crate::server::http::openai::request_id;
use crate::server::http::openai::sampling::{Sampling, StreamOptions, Unsupported};
use crate::server::http::samples::sample;
use crate::server::pb;
use writer::{GenerateWriter, Options};

members! {
    /// The members beside those of sampling.
    pub(in crate::server::http) struct Tokens {
        /// The prompt.
        token_ids: Vec<u32>,
        #[schema(value_type = Option<SamplingParams>)]
        sampling_params: BodyOf<((Limits, Sampling), Unsupported)>,
        /// The policy's name, or that of a resident adapter; none, null or "" is the policy.
        model: String,
        /// Name by which the request can be aborted, unique among running ones. The header X-Request-Id wins.
        request_id: String,
        /// Whether to send tokens as they are made, as server-sent events (default: false).
        stream: bool,
        /// What a stream tells beside its tokens.
        stream_options: StreamOptions,
        /// Report the ids of the prompt's tokens (default: false).
        return_token_ids: bool,
        /// Only `tokens` is supported.
        output_mode: OutputMode,
        /// Of images, which are not supported: null.
        #[schema(value_type = Option<String>)]
        features: IgnoredAny,
    }
}

members! {
    /// The members of `sampling_params` that other routes have elsewhere, or with another default.
    pub(in crate::server::http) struct Limits {
        /// Most tokens of a sample (default: what is left of the context, which is also the most).
        max_tokens: u32,
        /// Report log-probabilities, with those of this many most likely tokens.
        logprobs: u32,
    }
}

/// What a sample is reported as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::server::http) enum OutputMode {
    Tokens,
    Text,
}

/// How to sample: the members of a completion's body.
#[derive(ToSchema)]
#[allow(dead_code, reason = "it is only described; the body is read as groups of members")]
pub(in crate::server::http) struct SamplingParams {
    #[serde(flatten)]
    own: Limits,
    #[serde(flatten)]
    shared: Sampling,
}

/// Continues a prompt of token ids: `n` samples, as one answer or as server-sent events.
#[utoipa::path(
    post,
    path = "/inference/v1/generate",
    request_body = Tokens,
    responses(
        (status = 200, description = "the samples, or events of their tokens", body = writer::Generated),
        (status = 400, description = "a member of the body is wrong", body = ErrorBody),
        (status = 404, description = "no such model or adapter", body = ErrorBody),
        (status = 409, description = "asleep, without weights, or another weight version", body = ErrorBody),
        (status = 413, description = "the body is too large", body = ErrorBody),
        (status = 429, description = "queue or memory for requests is full", body = ErrorBody),
        (status = 503, description = "the server starts or ends", body = ErrorBody),
    )
)]
pub(in crate::server::http) async fn generate(
    State(door): State<Door>,
    headers: HeaderMap,
    body: JsonBody<BodyOf<Tokens>>,
) -> std::result::Result<Response, HttpError> {
    sample::<_, GenerateWriter>(&door, body, |BodyOf(tokens), context| {
        let (prompt, limits, mut sampling) = parts(tokens)?;
        if let Some(id) = request_id(&headers) {
            sampling.request_id = Some(id);
        }
        let options = Options { report: Report::new(&sampling, context)?, logprobs: limits.logprobs };
        let message = message(prompt, &limits, sampling, &options, &context.model, &context.info.model)?;
        Ok((message, options))
    })
    .await
}

/// The prompt, and how to sample, with what stands beside `sampling_params`.
fn parts(tokens: Tokens) -> Result<(Vec<u32>, Limits, Sampling)> {
    if tokens.features.is_some() {
        return Err(Error::invalid("features", "this server takes no images; leave them out"));
    }
    if tokens.output_mode == Some(OutputMode::Text) {
        return Err(Error::invalid("output_mode", "samples are tokens here; /v1/completions makes texts of them"));
    }
    let missing = |member: &str| Error::invalid(member, "is missing");
    let prompt = tokens.token_ids.ok_or_else(|| missing("token_ids"))?;
    let BodyOf(((limits, mut sampling), _)) = tokens.sampling_params.ok_or_else(|| missing("sampling_params"))?;
    sampling.model = tokens.model.or(sampling.model);
    sampling.request_id = tokens.request_id.or(sampling.request_id);
    sampling.stream = tokens.stream.or(sampling.stream);
    sampling.stream_options = tokens.stream_options.or(sampling.stream_options);
    sampling.return_token_ids = tokens.return_token_ids.or(sampling.return_token_ids);
    Ok((prompt, limits, sampling))
}

/// The message that a gRPC client would send.
fn message(
    prompt: Vec<u32>,
    limits: &Limits,
    sampling: Sampling,
    options: &Options,
    model: &ModelFacts,
    policy: &str,
) -> Result<pb::GenerateRequest> {
    let report = &options.report;
    // A prompt that leaves no room is refused when the message is checked.
    let room = u32::try_from(model.max_model_len.saturating_sub(prompt.len()).max(1)).unwrap_or(u32::MAX);
    let max_tokens = limits.max_tokens.map_or(room, |most| most.min(room));
    // Ranks are computed beside at least one most likely token.
    let asked = limits.logprobs.max(report.prompt_logprobs);
    let top = asked.map_or(0, |top| top.max(1));
    let stops = !sampling.stop_strings().is_empty();
    let prompts =
        vec![pb::Prompt { kind: Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids: prompt })), ..Default::default() }];
    let message = sampling.into_message(prompts, Some(max_tokens), top, policy)?;
    // The text tells which stop string has ended a sample.
    Ok(pb::GenerateRequest { prompt_logprobs: report.prompt_logprobs.is_some(), return_text: stops, ..message })
}
