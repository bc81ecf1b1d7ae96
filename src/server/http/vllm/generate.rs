//! `/inference/v1/generate`: tokens in, tokens out.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::table::LogprobTable;
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::convert::data_url;
use crate::server::http::features::SentFeatures;
use crate::server::http::openai::answers::{Null, Report, StopReason, Usage, finish_reason};
use crate::server::http::openai::logprobs::{PromptLogprobs, chosen, most_likely, written};
use crate::server::http::openai::request_id;
use crate::server::http::openai::returned::Returned;
use crate::server::http::openai::sampling::{Sampling, StreamOptions, UsageEvents};
use crate::server::http::{
    AppState, FinishedSamples, HttpResult, JsonBody, Outbox, Samples, event, json, members, sample, samples_per_prompt,
};
use crate::server::{ServingContext, pb};
use crate::types::{Prompt, TokenId, TokenLogprobs};

/// Bytes that the log-probability of a sampled token takes until it is written, and that of each of its alternatives.
const LOGPROB: usize = 96;
const ALTERNATIVE: usize = 16;
/// Bytes that are kept for each sample until the answer is sent.
const SAMPLE: usize = 256;

members! {
    pub(in crate::server::http) struct InferenceRequest {
        token_ids: Vec<u32>,
        sampling_params: InferenceSampling,
        /// The policy's name, or that of a resident adapter; none, null or "" is the policy.
        model: String,
        /// Name by which the request can be aborted, unique among running ones. The header X-Request-Id wins.
        request_id: String,
        /// Whether to send tokens as they are made, as server-sent events (default: false).
        stream: bool,
        /// Further contents of a stream.
        stream_options: StreamOptions,
        /// Report the ids of the prompt's tokens (default: false).
        return_token_ids: bool,
        /// Only `tokens` is supported.
        output_mode: OutputMode,
        /// With false, a grammar constrains only the text after the model's reasoning, as in chats (default: true).
        reasoning_ended: bool,
        /// The images of the placeholders, as `/v1/chat/completions/render` has returned them.
        features: SentFeatures,
        /// Instead of features, the images as files: parts of the type image_url, with a `data:` URL.
        content_parts: Vec<ContentPart>,
    }
}

members! {
    /// How to sample: the members of a completion's body.
    pub(in crate::server::http) struct InferenceSampling {
        /// Maximum tokens of a sample (default and limit: the rest of the context).
        max_tokens: u32,
        /// Report log-probabilities, with those of this many most likely tokens; -1 is all.
        logprobs: i32,
        /// For each token of the prompt from `prompt_logprob_start + 1` on, the tokens whose log-probabilities are
        /// reported at its place: at most 128, of which -1 stands for none.
        prompt_logprob_token_ids: Vec<Vec<i32>>,
        /// Number of tokens before the one whose successor has the first row (default: 0).
        prompt_logprob_start: usize,
        ..shared: Sampling,
    }
}

/// An image beside token ids.
#[derive(Deserialize, ToSchema)]
struct ContentPart {
    /// `image_url`.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    _type: ImagePart,
    /// A `data:` URL of a PNG or JPEG file.
    #[serde(deserialize_with = "file_of_url")]
    #[schema(value_type = String)]
    url: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ImagePart {
    ImageUrl,
}

fn file_of_url<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    struct Url;

    impl de::Visitor<'_> for Url {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a data: URL")
        }

        fn visit_str<E: de::Error>(self, url: &str) -> std::result::Result<Vec<u8>, E> {
            data_url::decode(url).map_err(E::custom)
        }
    }

    deserializer.deserialize_str(Url)
}

/// The form of a reported sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::server::http) enum OutputMode {
    Tokens,
    Text,
}

/// Continues a prompt of token ids: `n` samples, as one answer or as server-sent events.
#[utoipa::path(post, path = "/inference/v1/generate", request_body = InferenceRequest, responses(
    (status = 200, description = "the samples, or events of their tokens", body = InferenceAnswer),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "the server is asleep or without weights, or has another weight version"),
))]
pub(in crate::server::http) async fn generate(
    State(app): State<AppState>,
    headers: HeaderMap,
    body: JsonBody<InferenceRequest>,
) -> HttpResult<Response> {
    sample(&app, body, |body, context| {
        let reasons = body.reasoning_ended == Some(false);
        let spared = context.model.encoder.as_ref().and_then(|encoder| encoder.reasoning(None)).filter(|_| reasons);
        let names_tokens = body.features.is_some();
        let (message, report, table) = message(body, request_id(&headers), context)?;
        let answer = (report, table, names_tokens);
        let writer = |request: &ValidRequest, traffic: &Traffic| InferenceWriter::new(request, answer, traffic);
        Ok((message, spared, writer))
    })
    .await
}

/// The message that a gRPC client would send. `id` is the request's name by its headers.
fn message(
    body: InferenceRequest,
    id: Option<String>,
    context: &ServingContext,
) -> Result<(pb::GenerateRequest, Report, Option<LogprobTable>)> {
    if body.output_mode == Some(OutputMode::Text) {
        return Err(Error::invalid("output_mode", "samples are tokens here; /v1/completions makes texts of them"));
    }
    let missing = |member: &str| Error::invalid(member, "is missing");
    let ids = body.token_ids.ok_or_else(|| missing("token_ids"))?;
    let images = match (body.features, body.content_parts) {
        (Some(_), Some(_)) => {
            return Err(Error::invalid("content_parts", "cannot be combined with features; give one of them"));
        }
        (Some(features), None) => features.into_images(&ids, context.model.images.as_ref())?,
        (None, parts) => {
            let encoded = |part: ContentPart| pb::Image { source: Some(pb::image::Source::Encoded(part.url)) };
            parts.into_iter().flatten().map(encoded).collect()
        }
    };
    let InferenceSampling {
        max_tokens,
        logprobs,
        prompt_logprob_token_ids,
        prompt_logprob_start,
        shared: mut sampling,
    } = body.sampling_params.ok_or_else(|| missing("sampling_params"))?;
    if sampling.truncate_prompt_tokens.is_some() {
        return Err(Error::invalid(
            "sampling_params.truncate_prompt_tokens",
            "send the tokens to keep, and leave it out",
        ));
    }
    sampling.model = body.model.or(sampling.model);
    sampling.request_id = id.or(body.request_id).or(sampling.request_id);
    sampling.stream = body.stream.or(sampling.stream);
    sampling.stream_options = body.stream_options.or(sampling.stream_options);
    sampling.return_token_ids = body.return_token_ids.or(sampling.return_token_ids);
    let logprobs = most_likely("sampling_params.logprobs", logprobs, &context.model)?;
    // As in vLLM, --enable-force-include-usage is for OpenAI's routes.
    let usage_events = UsageEvents::requested(sampling.stream_options.as_ref());
    let mut report = Report::new(&sampling, logprobs, context)?;
    report.usage_events = usage_events;
    // A prompt that leaves no room is rejected when the message is checked.
    let room = context.model.max_model_len.saturating_sub(ids.len()).max(1);
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    let max_tokens = max_tokens.unwrap_or(room).min(room);
    let prompt_logprobs = report.prompt_logprobs.is_some();
    let top = report.top_logprobs(prompt_logprobs || logprobs.is_some());
    // The text shows which stop string has ended a sample.
    let return_text = !sampling.stop_strings().is_empty();
    let table = LogprobTable::new(prompt_logprob_token_ids, prompt_logprob_start, ids.len(), report.is_stream)?;
    let logprob_token_ids = table.as_ref().map_or_else(Vec::new, LogprobTable::named);
    let kind = Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids }));
    let prompts = vec![pb::Prompt { kind, images, logprob_token_ids, ..Default::default() }];
    let message = sampling.into_message(prompts, Some(max_tokens), top, &context.model)?;
    Ok((pb::GenerateRequest { prompt_logprobs, return_text, ..message }, report, table))
}

/// The samples of a request.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct InferenceAnswer<'a> {
    /// `generate-tokens-` and the requested id, or a random one.
    request_id: &'a str,
    model: &'a str,
    created: u64,
    usage: Usage,
    prompt_logprobs: Option<&'a PromptLogprobs>,
    /// The log-probabilities of `prompt_logprob_token_ids`, as a file of numpy's (`.npy`) in base64: float32 of the
    /// shape [rows, longest row], minus infinity where a row has no token.
    prompt_token_id_logprobs: Option<&'a str>,
    prompt_token_ids: Option<&'a [TokenId]>,
    mm_placeholders: Null,
    metrics: Null,
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    output_mode: &'static str,
    #[schema(value_type = Vec<Sample>)]
    choices: Vec<Box<RawValue>>,
}

/// One sample, or the part of it in one event.
#[derive(Serialize, ToSchema, Default)]
struct Sample {
    index: usize,
    /// `stop`, `length`, or `abort` for a sample that was aborted; null before its end.
    finish_reason: Option<&'static str>,
    /// The stop string or stop token that ended the sample.
    stop_reason: Option<StopReason>,
    token_ids: Vec<TokenId>,
    /// As in chats.
    routed_experts: Option<String>,
    /// The values that `returns` asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    returned: Option<Returned>,
    sampling_mask: Null,
    /// Which version of the policy made which tokens; null before the sample's end.
    weight_versions: Option<Vec<NumberedSpan>>,
    logprobs: Option<SampleLogprobs>,
}

/// Tokens of a sample that one version of the policy has made.
#[derive(Serialize, ToSchema)]
struct NumberedSpan {
    /// A decimal number.
    version: String,
    /// Index of the span's first token.
    start: u32,
    /// Index after the span's last token.
    end: u32,
}

/// Log-probabilities of a sample's tokens.
#[derive(Serialize, ToSchema)]
struct SampleLogprobs {
    content: Vec<SampledToken>,
}

/// A sampled token, its log-probability and its place among all tokens.
#[derive(Serialize, ToSchema)]
struct SampledToken {
    #[serde(flatten)]
    token: RankedToken,
    /// The token itself, then the most likely ones.
    top_logprobs: Vec<RankedToken>,
}

/// A token with its log-probability: -9999 for minus infinity, null for NaN.
#[derive(Clone, Copy, Serialize, ToSchema)]
struct RankedToken {
    /// `token_id:` and the id, if the request has `features`: vLLM wrote it so before 0.32, and TRL 1.16 reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    token: Option<TokenName>,
    token_id: TokenId,
    logprob: Option<f32>,
    /// 1 for the most likely token.
    rank: u32,
}

/// A token, written as `token_id:` and its id.
#[derive(Clone, Copy)]
struct TokenName(TokenId);

impl Serialize for TokenName {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("token_id:{}", self.0))
    }
}

/// One event of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    request_id: &'a str,
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    output_mode: &'static str,
    choices: &'a [Sample],
}

/// Turns the events of one request into its answer, or into the events of its stream.
struct InferenceWriter {
    id: String,
    report: Report,
    /// Whether log-probabilities have the names of tokens beside their ids.
    names_tokens: bool,
    prompt: Prompt,
    prompt_logprobs: Option<PromptLogprobs>,
    table: Option<LogprobTable>,
    /// The table's log-probabilities, as they are answered.
    token_id_logprobs: Option<String>,
    kept: FinishedSamples,
    /// Whether a stream has begun.
    begun: bool,
    streamed_tokens: u64,
}

impl InferenceWriter {
    fn new(
        request: &ValidRequest,
        (report, table, names_tokens): (Report, Option<LogprobTable>, bool),
        traffic: &Traffic,
    ) -> Self {
        let samples = if report.is_stream { 0 } else { samples_per_prompt(request) };
        let bytes = samples * SAMPLE + table.as_ref().map_or(0, LogprobTable::bytes);
        Self {
            id: format!("generate-tokens-{}", request.request_id),
            report,
            names_tokens,
            prompt: request.prompts[0].clone(),
            prompt_logprobs: None,
            table,
            token_id_logprobs: None,
            kept: FinishedSamples::new(samples, bytes, traffic),
            begun: false,
            streamed_tokens: 0,
        }
    }

    /// The log-probabilities of tokens, if they were requested.
    fn logprobs(&self, tokens: &[TokenLogprobs]) -> Option<SampleLogprobs> {
        let top = self.report.logprobs? as usize;
        let ranked = |token_id, value, rank| {
            let token = self.names_tokens.then_some(TokenName(token_id));
            RankedToken { token, token_id, logprob: written(value), rank }
        };
        let entry = |token: &TokenLogprobs| {
            let own = ranked(token.token, chosen(token, self.report.mode), token.rank);
            let others = token.top.iter().zip(1..).take(top).filter(|((other, _), _)| *other != token.token);
            let others = others.map(|(&(token_id, value), rank)| ranked(token_id, value, rank));
            SampledToken { token: own, top_logprobs: std::iter::once(own).chain(others).collect() }
        };
        Some(SampleLogprobs { content: tokens.iter().map(entry).collect() })
    }

    /// The end of a sample, without its tokens.
    fn ended(&self, completion: &Completion) -> Sample {
        let span = |&(version, start, end): &(u64, u32, u32)| NumberedSpan { version: version.to_string(), start, end };
        Sample {
            index: completion.sample_index as usize,
            finish_reason: Some(finish_reason(completion.finish_reason)),
            stop_reason: self.report.stop_reason(completion),
            weight_versions: Some(completion.weight_versions.iter().map(span).collect()),
            logprobs: self.logprobs(&[]),
            ..Sample::default()
        }
    }

    /// Sends one event of a stream: `tokens` and the other members of `sample`.
    fn stream(&mut self, tokens: &[TokenLogprobs], sample: Sample, out: &mut Outbox) {
        self.streamed_tokens += tokens.len() as u64;
        let usage = Usage::new(self.prompt.tokens.len() as u64, self.streamed_tokens);
        let usage = (self.report.usage_events == UsageEvents::All).then_some(usage);
        let token_ids = tokens.iter().map(|token| token.token).collect();
        self.send(&[Sample { token_ids, logprobs: self.logprobs(tokens), ..sample }], usage, out);
    }

    /// Sends one event of a stream.
    fn send(&mut self, choices: &[Sample], usage: Option<Usage>, out: &mut Outbox) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let shows_prompt = is_first && self.report.returns_ids;
        out.push_back(event(&Chunk {
            request_id: &self.id,
            usage,
            prompt_token_ids: shows_prompt.then_some(&self.prompt.tokens[..]),
            output_mode: "tokens",
            choices,
        }));
    }
}

impl Samples for InferenceWriter {
    fn prompt_routing(&mut self, prompt: usize, routing: Vec<u8>) -> Result<()> {
        self.report.keep_prompt_routing(prompt, routing, &mut self.kept)
    }

    fn prompt_logprobs(&mut self, _: usize, mut logprobs: Vec<TokenLogprobs>) -> Result<()> {
        let report = &self.report;
        let rows = self.prompt.take_rows(&mut logprobs);
        if let Some(table) = self.table.take() {
            self.kept.hold(table.written_bytes())?;
            self.token_id_logprobs = Some(table.written(&rows));
        }
        if report.prompt_logprobs.is_some() {
            self.prompt_logprobs = report.of_prompt(report.prompt_logprobs, &self.prompt, &logprobs, &mut self.kept)?;
        }
        Ok(())
    }

    fn token(&mut self, (_, sample): (u32, u32), token: &TokenLogprobs, _: String, out: &mut Outbox) -> Result<()> {
        self.stream(std::slice::from_ref(token), Sample { index: sample as usize, ..Sample::default() }, out);
        Ok(())
    }

    /// The text only shows which stop string has ended a sample.
    fn end_sample(
        &mut self,
        completion: &Completion,
        last: Option<&TokenLogprobs>,
        _: String,
        out: &mut Outbox,
    ) -> Result<()> {
        let ended = self.ended(completion);
        self.stream(last.map_or(&[], std::slice::from_ref), ended, out);
        Ok(())
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let each = self.report.logprobs.map_or(0, |top| LOGPROB + ALTERNATIVE * top as usize) + size_of::<TokenId>();
        let held = self.kept.hold(completion.tokens.len() * each)?;
        let (routed_experts, of_experts) = self.report.routed_experts(&completion, &mut self.kept)?;
        let (returned, of_returned) = self.report.returned(&completion, &mut self.kept)?;
        let token_ids = completion.tokens.iter().map(|token| token.token).collect();
        let logprobs = self.logprobs(&completion.tokens);
        let choice = Sample { token_ids, logprobs, routed_experts, returned, ..self.ended(&completion) };
        self.kept.push(choice.index, &choice, held + of_experts + of_returned)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox) {
        if self.report.usage_events != UsageEvents::None {
            self.send(&[], Some(Usage::at_end(summary, self.report.prompt_details(summary))), out);
        }
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let report = &self.report;
        self.kept.finish(|choices| {
            json(&InferenceAnswer {
                request_id: &self.id,
                model: &report.model,
                created: report.created,
                usage: Usage::of(summary, report.prompt_details(summary)),
                prompt_logprobs: self.prompt_logprobs.as_ref(),
                prompt_token_id_logprobs: self.token_id_logprobs.as_deref(),
                prompt_token_ids: report.returns_ids.then_some(&self.prompt.tokens[..]),
                output_mode: "tokens",
                choices,
                ..InferenceAnswer::default()
            })
        })
    }
}
