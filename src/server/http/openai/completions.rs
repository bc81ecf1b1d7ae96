//! `/v1/completions`: continues prompts of text or of token ids.

use std::collections::VecDeque;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::answers::{Chunks, Null, Report, StopReason, Usage, VersionSpan, finish_reason};
use super::logprobs::{Logprobs, PromptLogprobs, TokenTexts};
use super::prompt::{PromptInput, Prompts};
use super::request_id;
use super::sampling::{LogprobsMode, Sampling};
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::http::{
    AppState, ErrorBody, FinishedSamples, HttpError, JsonBody, Samples, json, members, sample, samples_per_prompt,
};
use crate::server::pb;
use crate::types::{Prompt, TokenId, TokenLogprobs};

/// Bytes that are kept for each sample until the answer is sent.
const SAMPLE: usize = 256;

members! {
    /// The body.
    pub(in crate::server::http) struct CompletionRequest {
        /// A text, a list of texts, token ids, or a list of lists of token ids.
        prompt: Prompts,
        /// Most tokens of a sample (default: 16).
        max_tokens: u32,
        /// Report log-probabilities, with those of this many most likely tokens.
        logprobs: u32,
        /// Whether the text begins with the prompt (default: false).
        echo: bool,
        /// Whether the tokenizer adds its special tokens to a text (default: true).
        add_special_tokens: bool,
        ..sampling: Sampling,
    }
}

/// The options of a completion's answer.
struct CompletionOptions {
    report: Report,
    /// Whether texts begin with the prompt.
    is_echo: bool,
    /// For an echo, the text of each prompt that came as one.
    prompt_texts: Vec<Option<String>>,
    /// Whether the one token that was sampled is left out.
    drops_tokens: bool,
}

/// Generates `n` samples of each prompt, returned as one answer or as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/completions",
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "the samples, or events of their tokens", body = CompletionAnswer),
        (status = 400, description = "a member of the body is wrong", body = ErrorBody),
        (status = 404, description = "no such model or adapter", body = ErrorBody),
        (status = 409, description = "the server is asleep or without weights, or has another weight version",
            body = ErrorBody),
        (status = 413, description = "the body is too large", body = ErrorBody),
        (status = 429, description = "the queue or the memory for requests is full, or the answer would be too \
            large", body = ErrorBody),
        (status = 503, description = "the server is starting or shutting down", body = ErrorBody),
    )
)]
pub(in crate::server::http) async fn completions(
    State(app): State<AppState>,
    headers: HeaderMap,
    body: JsonBody<CompletionRequest>,
) -> std::result::Result<Response, HttpError> {
    sample(&app, body, |mut body, context| {
        body.sampling.request_id = request_id(&headers).or(body.sampling.request_id);
        let report = Report::new(&body.sampling, body.logprobs, context)?;
        let is_echo = body.echo.unwrap_or(false);
        let mut options = CompletionOptions { report, is_echo, prompt_texts: Vec::new(), drops_tokens: false };
        let message = message(body, &mut options, &context.info.model)?;
        Ok((message, |request: &ValidRequest, traffic: &Traffic| CompletionWriter::new(request, options, traffic)))
    })
    .await
}

/// The message that a gRPC client would send for the body.
fn message(body: CompletionRequest, options: &mut CompletionOptions, policy: &str) -> Result<pb::GenerateRequest> {
    let sampling = body.sampling;
    let prompts = body.prompt.ok_or_else(|| Error::invalid("prompt", "is missing; give a text or token ids"))?.0;
    let keep = sampling.truncate_prompt_tokens.map(|keep| keep as usize);
    let prompt = |prompt: PromptInput| match (prompt, keep) {
        (PromptInput::Text(_), Some(_)) => {
            Err(Error::invalid("truncate_prompt_tokens", "is supported for prompts of token ids; send those"))
        }
        (PromptInput::Tokens(mut tokens), Some(keep)) => {
            tokens.drain(..tokens.len().saturating_sub(keep));
            Ok(PromptInput::Tokens(tokens).into_message(None))
        }
        (prompt, None) => Ok(prompt.into_message(body.add_special_tokens)),
    };
    if options.is_echo {
        let given_text = |prompt: &PromptInput| match prompt {
            PromptInput::Text(text) => Some(text.clone()),
            PromptInput::Tokens(_) => None,
        };
        options.prompt_texts = prompts.iter().map(given_text).collect();
    }
    let prompts = messages(prompts, prompt)?;
    // OpenAI's way to score a text: no token is made, and the answer has the text's own log-probabilities. Here one
    // token is made and dropped.
    options.drops_tokens = options.is_echo && body.max_tokens == Some(0);
    let max_tokens = if options.drops_tokens { Some(1) } else { body.max_tokens };
    let prompt_logprobs =
        options.report.prompt_logprobs.is_some() || options.is_echo && options.report.logprobs.is_some();
    let top = options.report.top_logprobs(prompt_logprobs);
    let message = sampling.into_message(prompts, max_tokens, top, policy)?;
    Ok(pb::GenerateRequest { prompt_logprobs, return_text: options.report.has_text(), ..message })
}

/// The messages that `message` makes of prompts, in a list that does not grow: that would take its memory three times.
fn messages(prompts: Vec<PromptInput>, message: impl Fn(PromptInput) -> Result<pb::Prompt>) -> Result<Vec<pb::Prompt>> {
    let mut messages = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        messages.push(message(prompt)?);
    }
    Ok(messages)
}

/// The samples of a request.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct CompletionAnswer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    #[schema(value_type = Vec<Choice>)]
    choices: Vec<Box<RawValue>>,
    service_tier: Null,
    system_fingerprint: &'a str,
    usage: Usage,
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    metrics: Null,
}

/// One sample.
#[derive(Default, Serialize, ToSchema)]
struct Choice<'a> {
    /// Number of the prompt times `n`, plus the number of the sample.
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    /// `stop`, `length`, or `abort` for a sample that was aborted.
    finish_reason: &'static str,
    /// The stop string or stop token that ended the sample.
    stop_reason: Option<StopReason>,
    token_ids: Option<Vec<TokenId>>,
    prompt_logprobs: Option<&'a PromptLogprobs>,
    prompt_token_ids: Option<&'a [TokenId]>,
    routed_experts: Null,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<Vec<VersionSpan>>,
}

/// The part of a sample in one event.
#[derive(Serialize, Default)]
struct ChunkChoice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    prompt_token_ids: Option<Vec<TokenId>>,
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<Vec<VersionSpan>>,
}

/// Log-probabilities of one prompt.
#[derive(Default)]
struct PromptFacts {
    /// Log-probabilities of its tokens from the second on, for an echo.
    echo: Option<Vec<TokenLogprobs>>,
    reported: Option<PromptLogprobs>,
}

/// The state of one streamed sample.
struct Streamed {
    texts: TokenTexts,
    /// Characters of the tokens so far.
    offset: usize,
}

/// Turns the events of one request into its answer, or into the events of its stream.
struct CompletionWriter {
    options: CompletionOptions,
    prompts: Vec<Prompt>,
    samples: usize,
    facts: Vec<PromptFacts>,
    kept: FinishedSamples,
    /// The samples of a stream that have begun.
    streamed: Vec<Option<Streamed>>,
    chunks: Chunks,
}

impl CompletionWriter {
    fn new(request: &ValidRequest, options: CompletionOptions, traffic: &Traffic) -> Self {
        let samples = samples_per_prompt(request);
        let count = request.prompts.len() * samples;
        let (kept, streamed) = if options.report.is_stream { (0, count) } else { (count, 0) };
        let echoes: usize = options.prompt_texts.iter().flatten().map(|text| text.len() + size_of::<String>()).sum();
        let prompt_tokens = request.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
        Self {
            options,
            prompts: request.prompts.clone(),
            samples,
            facts: request.prompts.iter().map(|_| PromptFacts::default()).collect(),
            kept: FinishedSamples::new(kept, echoes + count * SAMPLE, traffic),
            streamed: (0..streamed).map(|_| None).collect(),
            chunks: Chunks::new(format!("cmpl-{}", request.request_id), "text_completion", prompt_tokens),
        }
    }

    fn index(&self, (prompt, sample): (u32, u32)) -> usize {
        prompt as usize * self.samples + sample as usize
    }

    /// Counts the memory for turning the log-probabilities of `tokens` sampled tokens of `prompt` into text, with those
    /// of an echo. Returns it, to be given back.
    fn hold_logprobs(&mut self, prompt: usize, tokens: usize, with_echo: bool) -> Result<u64> {
        let echoed = self.facts[prompt].echo.as_ref().filter(|_| with_echo).map_or(0, Vec::len);
        self.kept.hold(self.options.report.logprobs_bytes(tokens + echoed))
    }

    /// The text that a sample of `prompt` begins with.
    fn echo(&self, prompt: usize) -> String {
        if !self.options.is_echo {
            return String::new();
        }
        let given = self.options.prompt_texts.get(prompt).cloned().flatten();
        given.unwrap_or_else(|| self.options.report.text(&self.prompts[prompt].tokens))
    }

    /// Log-probabilities that begin with those of the prompt, if it is echoed.
    fn begun_logprobs(&self, prompt: usize, texts: &mut TokenTexts, offset: &mut usize) -> Logprobs {
        let mut logprobs = Logprobs::default();
        let facts = &self.facts[prompt];
        if let Some(echo) = &facts.echo {
            let mode = LogprobsMode::Raw;
            let top = self.options.report.logprobs.unwrap_or(0) as usize;
            logprobs.push_first(self.prompts[prompt].tokens[0], texts, offset);
            echo.iter().for_each(|token| logprobs.push(token, mode, top, texts, offset));
        }
        logprobs
    }

    /// Sends one event of a stream.
    fn send(&self, choice: ChunkChoice, out: &mut VecDeque<Bytes>) {
        let is_last = choice.finish_reason.is_some();
        self.chunks.send(&self.options.report, (choice, is_last), None, out);
    }
}

impl Samples for CompletionWriter {
    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<TokenLogprobs>) -> Result<()> {
        // vLLM reports them for an echo too, though they were not requested.
        let report = &self.options.report;
        let echoed = report.logprobs.filter(|_| self.options.is_echo);
        let top = report.prompt_logprobs.or(echoed);
        self.facts[prompt].reported = report.of_prompt(top, &self.prompts[prompt], &logprobs, &mut self.kept)?;
        if echoed.is_some() {
            self.kept.hold(logprobs.iter().map(|token| size_of::<TokenLogprobs>() + token.heap_bytes()).sum())?;
            self.facts[prompt].echo = Some(logprobs);
        }
        Ok(())
    }

    fn token(&mut self, at: (u32, u32), token: &TokenLogprobs, text: String, out: &mut VecDeque<Bytes>) -> Result<()> {
        let (prompt, index) = (at.0 as usize, self.index(at));
        self.chunks.tokens += 1;
        let is_first = self.streamed[index].is_none();
        let held = self.hold_logprobs(prompt, 1, is_first)?;
        let mut chunk = ChunkChoice { index, ..Default::default() };
        let mut streamed = self.streamed[index]
            .take()
            .unwrap_or_else(|| Streamed { texts: self.options.report.token_texts(), offset: 0 });
        if let Some(top) = self.options.report.logprobs {
            let Streamed { texts, offset } = &mut streamed;
            let mut logprobs = if is_first { self.begun_logprobs(prompt, texts, offset) } else { Logprobs::default() };
            if !self.options.drops_tokens {
                logprobs.push(token, self.options.report.mode, top as usize, texts, offset);
            }
            chunk.logprobs = Some(logprobs);
        }
        self.streamed[index] = Some(streamed);
        if is_first {
            chunk.text = self.echo(prompt);
        }
        if !self.options.drops_tokens {
            chunk.text.push_str(&text);
        }
        if self.options.report.returns_ids {
            chunk.prompt_token_ids = is_first.then(|| self.prompts[prompt].tokens.to_vec());
            chunk.token_ids = Some(if self.options.drops_tokens { Vec::new() } else { vec![token.token] });
        }
        self.send(chunk, out);
        self.kept.release(held);
        Ok(())
    }

    fn text(&mut self, at: (u32, u32), text: String, out: &mut VecDeque<Bytes>) {
        let token_ids = self.options.report.returns_ids.then(Vec::new);
        self.send(ChunkChoice { index: self.index(at), text, token_ids, ..Default::default() }, out);
    }

    fn end_sample(&mut self, completion: &Completion, out: &mut VecDeque<Bytes>) {
        let report = &self.options.report;
        let stop_reason = report.stop_reason(completion);
        let choice = ChunkChoice {
            index: self.index((completion.prompt_index, completion.sample_index)),
            text: report.ending(stop_reason.as_ref()).to_owned(),
            finish_reason: Some(finish_reason(completion.finish_reason)),
            stop_reason,
            token_ids: report.returns_ids.then(Vec::new),
            weight_versions: report.versions(completion),
            ..Default::default()
        };
        self.send(choice, out);
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let prompt = completion.prompt_index as usize;
        let index = self.index((completion.prompt_index, completion.sample_index));
        let held = self.hold_logprobs(prompt, completion.tokens.len(), true)?;
        let report = &self.options.report;
        let tokens = if self.options.drops_tokens { &[][..] } else { &completion.tokens[..] };
        let logprobs = self.options.report.logprobs.map(|top| {
            let (mut texts, mut offset) = (report.token_texts(), 0);
            let mut logprobs = self.begun_logprobs(prompt, &mut texts, &mut offset);
            tokens.iter().for_each(|t| logprobs.push(t, report.mode, top as usize, &mut texts, &mut offset));
            logprobs
        });
        let stop_reason = report.stop_reason(&completion);
        let mut text = self.echo(prompt);
        if !self.options.drops_tokens {
            text.push_str(completion.text.as_deref().unwrap_or_default());
            text.push_str(report.ending(stop_reason.as_ref()));
        }
        let choice = Choice {
            index,
            text,
            logprobs,
            finish_reason: finish_reason(completion.finish_reason),
            stop_reason,
            token_ids: report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect()),
            prompt_logprobs: self.facts[prompt].reported.as_ref(),
            prompt_token_ids: report.returns_ids.then_some(&self.prompts[prompt].tokens[..]),
            weight_versions: report.versions(&completion),
            ..Choice::default()
        };
        self.kept.push(index, &choice, held)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut VecDeque<Bytes>) {
        self.chunks.end(&self.options.report, summary, out);
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let report = &self.options.report;
        self.kept.finish(|choices| {
            json(&CompletionAnswer {
                id: &self.chunks.id,
                object: "text_completion",
                created: report.created,
                model: &report.model,
                choices,
                system_fingerprint: &report.fingerprint,
                usage: Usage::of(summary),
                ..CompletionAnswer::default()
            })
        })
    }
}

#[cfg(test)]
mod tests;
