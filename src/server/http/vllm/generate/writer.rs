//! Makes the answers of `/inference/v1/generate` from the events of a request.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::logprobs::{PromptLogprobs, chosen, written};
use crate::server::http::openai::report::{Report, StopReason, finish_reason};
use crate::server::http::openai::sampling::LogprobsMode;
use crate::server::http::openai::usage::Usage;
use crate::server::http::reply::{event, json};
use crate::server::http::samples::{Kept, Samples, samples_per_prompt};
use crate::types::{Prompt, TokenId, TokenLogprobs};

/// Bytes that the log-probability of a sampled token takes until it is written, and that of each token that might have
/// come instead.
const LOGPROB: usize = 96;
const ALTERNATIVE: usize = 16;
/// The same of a prompt's tokens, which have texts.
const PROMPT_LOGPROB: usize = 192;
const PROMPT_ALTERNATIVE: usize = 80;
/// Bytes that are kept for each sample until the answer is sent.
const SAMPLE: usize = 256;

/// What the answers are to contain.
pub(super) struct Options {
    pub(super) report: Report,
    /// How many most likely tokens to report beside each sampled one, if log-probabilities were asked for.
    pub(super) logprobs: Option<u32>,
}

/// The samples of a request.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct Generated<'a> {
    /// `generate-tokens-` and the id that was asked for, or a random one.
    request_id: &'a str,
    model: &'a str,
    created: u64,
    usage: Usage,
    prompt_logprobs: Option<&'a PromptLogprobs>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    prompt_token_id_logprobs: Option<()>,
    prompt_token_ids: Option<&'a [TokenId]>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    mm_placeholders: Option<()>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    metrics: Option<()>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    kv_transfer_params: Option<()>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    ec_transfer_params: Option<()>,
    output_mode: &'static str,
    #[schema(value_type = Vec<Sample>)]
    choices: Vec<Box<RawValue>>,
}

/// One sample, or what an event adds to it.
#[derive(Serialize, ToSchema, Default)]
struct Sample {
    index: usize,
    /// `stop`, `length`, or `abort` for a sample that was ended by an order; null before its end.
    finish_reason: Option<&'static str>,
    /// The stop string or stop token that ended the sample.
    stop_reason: Option<StopReason>,
    token_ids: Vec<TokenId>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    routed_experts: Option<()>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    sampling_mask: Option<()>,
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
    token_id: TokenId,
    logprob: Option<f32>,
    /// 1 for the most likely token.
    rank: u32,
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
pub(super) struct GenerateWriter {
    id: String,
    options: Options,
    prompt: Prompt,
    prompt_logprobs: Option<PromptLogprobs>,
    kept: Kept,
    /// Whether a stream has begun.
    begun: bool,
    streamed_tokens: u64,
}

impl GenerateWriter {
    /// What is reported of tokens, if log-probabilities were asked for.
    fn logprobs(&self, tokens: &[TokenLogprobs]) -> Option<SampleLogprobs> {
        let top = self.options.logprobs? as usize;
        let content = tokens.iter().map(|token| entry(token, self.options.report.mode, top)).collect();
        Some(SampleLogprobs { content })
    }

    /// The end of a sample, without its tokens.
    fn ended(&self, completion: &Completion) -> Sample {
        let span = |&(version, start, end): &(u64, u32, u32)| NumberedSpan { version: version.to_string(), start, end };
        Sample {
            index: completion.sample_index as usize,
            finish_reason: Some(finish_reason(completion.finish_reason)),
            stop_reason: self.options.report.stop_reason(completion),
            weight_versions: Some(completion.weight_versions.iter().map(span).collect()),
            logprobs: self.logprobs(&[]),
            ..Sample::default()
        }
    }

    /// Sends one event of a stream.
    fn send(&mut self, choices: &[Sample], usage: Option<Usage>, out: &mut VecDeque<Bytes>) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let shows_prompt = is_first && self.options.report.returns_ids;
        out.push_back(event(&Chunk {
            request_id: &self.id,
            usage,
            prompt_token_ids: shows_prompt.then_some(&self.prompt.tokens[..]),
            output_mode: "tokens",
            choices,
        }));
    }
}

/// A token with its `top` most likely alternatives.
fn entry(token: &TokenLogprobs, mode: LogprobsMode, top: usize) -> SampledToken {
    let own = RankedToken { token_id: token.token, logprob: written(chosen(token, mode)), rank: token.rank };
    let others = token.top.iter().zip(1..).take(top).filter(|((other, _), _)| *other != token.token);
    let others = others.map(|(&(token_id, value), rank)| RankedToken { token_id, logprob: written(value), rank });
    SampledToken { token: own, top_logprobs: std::iter::once(own).chain(others).collect() }
}

impl Samples for GenerateWriter {
    type Options = Options;

    fn report(options: &Options) -> &Report {
        &options.report
    }

    fn new(request: &ValidRequest, options: Options, traffic: &Traffic) -> Self {
        let samples = if options.report.is_stream { 0 } else { samples_per_prompt(request) };
        Self {
            id: format!("generate-tokens-{}", request.request_id),
            options,
            prompt: request.prompts[0].clone(),
            prompt_logprobs: None,
            kept: Kept::new(samples, samples * SAMPLE, traffic),
            begun: false,
            streamed_tokens: 0,
        }
    }

    fn prompt_logprobs(&mut self, _: usize, logprobs: Vec<TokenLogprobs>) -> Result<()> {
        let kept = |token: &TokenLogprobs| PROMPT_LOGPROB + PROMPT_ALTERNATIVE * token.top.len();
        self.kept.hold(logprobs.iter().map(kept).sum())?;
        let report = &self.options.report;
        let first = self.prompt.tokens[0];
        let reported = |top| PromptLogprobs::new(first, &logprobs, top as usize, report.token_texts());
        self.prompt_logprobs = report.prompt_logprobs.map(reported);
        Ok(())
    }

    fn token(
        &mut self,
        (_, sample): (u32, u32),
        token: &TokenLogprobs,
        _: String,
        out: &mut VecDeque<Bytes>,
    ) -> Result<()> {
        self.streamed_tokens += 1;
        let usage = Usage::new(self.prompt.tokens.len() as u64, self.streamed_tokens);
        let usage = self.options.report.stream_options.continuous_usage_stats.then_some(usage);
        let choice = Sample {
            index: sample as usize,
            token_ids: vec![token.token],
            logprobs: self.logprobs(std::slice::from_ref(token)),
            ..Sample::default()
        };
        self.send(&[choice], usage, out);
        Ok(())
    }

    /// The text only tells which stop string has ended a sample.
    fn text(&mut self, _: (u32, u32), _: String, _: &mut VecDeque<Bytes>) {}

    fn end_sample(&mut self, completion: &Completion, out: &mut VecDeque<Bytes>) {
        let choice = self.ended(completion);
        self.send(&[choice], None, out);
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let each = self.options.logprobs.map_or(0, |top| LOGPROB + ALTERNATIVE * top as usize) + size_of::<TokenId>();
        let held = self.kept.hold(completion.tokens.len() * each)?;
        let token_ids = completion.tokens.iter().map(|token| token.token).collect();
        let choice = Sample { token_ids, logprobs: self.logprobs(&completion.tokens), ..self.ended(&completion) };
        self.kept.keep(choice.index, &choice, held)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut VecDeque<Bytes>) {
        if self.options.report.stream_options.include_usage {
            self.send(&[], Some(Usage::new(summary.prompt_tokens, summary.completion_tokens)), out);
        }
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let report = &self.options.report;
        self.kept.finish(|choices| {
            json(&Generated {
                request_id: &self.id,
                model: &report.model,
                created: report.created,
                usage: Usage::of(summary),
                prompt_logprobs: self.prompt_logprobs.as_ref(),
                prompt_token_id_logprobs: None,
                prompt_token_ids: report.returns_ids.then_some(&self.prompt.tokens[..]),
                mm_placeholders: None,
                metrics: None,
                kv_transfer_params: None,
                ec_transfer_params: None,
                output_mode: "tokens",
                choices,
            })
        })
    }
}
