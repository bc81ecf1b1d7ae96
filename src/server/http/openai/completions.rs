//! `/v1/completions`: continues prompts of text or of token ids.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::answers::{Chunks, Null, Report, RequestMetrics, StopReason, Usage, VersionSpan, finish_reason};
use super::logprobs::{Logprobs, LogprobsCount, LogprobsWriter, PromptLogprobs, most_likely};
use super::prompt::{PromptInput, Prompts};
use super::request_id;
use super::returned::Returned;
use super::sampling::{LogprobsMode, Sampling};
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::http::{
    AppState, FinishedSamples, HttpResult, JsonBody, Outbox, Samples, json, members, sample, samples_per_prompt,
};
use crate::server::{ServingContext, pb};
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
        /// Report log-probabilities, with those of this many most likely tokens; -1 is all, true is 1, false reports
        /// none.
        #[schema(value_type = Option<i32>)]
        logprobs: LogprobsCount,
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
#[utoipa::path(post, path = "/v1/completions", request_body = CompletionRequest, responses(
    (status = 200, description = "the samples, or events of their tokens", body = CompletionAnswer),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "asleep, without weights, or of another weight version"),
))]
pub(in crate::server::http) async fn completions(
    State(app): State<AppState>,
    headers: HeaderMap,
    body: JsonBody<CompletionRequest>,
) -> HttpResult<Response> {
    sample(&app, body, |body, context| {
        let (message, options) = message(body, request_id(&headers), context)?;
        Ok((message, None, |request: &ValidRequest, traffic: &Traffic| {
            CompletionWriter::new(request, options, traffic)
        }))
    })
    .await
}

/// The message that a gRPC client would send for the body, and the options of its answer. `id` is the request's name by
/// its headers.
///
/// # Errors
/// `InvalidArgument` for members whose values only HTTP's bodies can have.
fn message(
    body: CompletionRequest,
    id: Option<String>,
    context: &ServingContext,
) -> Result<(pb::GenerateRequest, CompletionOptions)> {
    let CompletionRequest { mut sampling, logprobs, max_tokens, add_special_tokens, .. } = body;
    sampling.request_id = id.or(sampling.request_id);
    let logprobs = most_likely("logprobs", logprobs.and_then(|count| count.0), &context.model)?;
    let report = Report::new(&sampling, logprobs, context)?;
    if body.echo == Some(true) && sampling.logprob_token_ids.as_ref().is_some_and(|ids| !ids.is_empty()) {
        return Err(Error::invalid("logprob_token_ids", "cannot be combined with echo, whose tokens are not sampled"));
    }
    let prompts = body.prompt.ok_or_else(|| Error::invalid("prompt", "is missing; give a text or token ids"))?.0;
    let is_echo = body.echo.unwrap_or(false);
    let given_text = |prompt: &PromptInput| match prompt {
        PromptInput::Text(text) => Some(text.clone()),
        PromptInput::Tokens(_) => None,
    };
    let prompt_texts = if is_echo { prompts.iter().map(given_text).collect() } else { Vec::new() };
    let prompts = messages(prompts, add_special_tokens);
    // OpenAI's way to score a text: no token is made, and the answer has the text's own log-probabilities. Here one
    // token is made and dropped.
    let drops_tokens = is_echo && max_tokens == Some(0);
    let max_tokens = if drops_tokens { Some(1) } else { max_tokens };
    let prompt_logprobs = report.prompt_logprobs.is_some() || is_echo && logprobs.is_some();
    let top = report.top_logprobs(prompt_logprobs);
    let message = sampling.into_message(prompts, max_tokens, top, &context.model)?;
    let return_text = context.model.encoder.is_some();
    let options = CompletionOptions { report, is_echo, prompt_texts, drops_tokens };
    Ok((pb::GenerateRequest { prompt_logprobs, return_text, ..message }, options))
}

/// The messages of prompts, in a list that does not grow: that would take its memory three times.
fn messages(prompts: Vec<PromptInput>, add_special_tokens: Option<bool>) -> Vec<pb::Prompt> {
    let mut messages = Vec::with_capacity(prompts.len());
    messages.extend(prompts.into_iter().map(|prompt| prompt.into_message(add_special_tokens)));
    messages
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
    metrics: Option<RequestMetrics>,
}

/// One sample, or the part of it in one event.
#[derive(Default, Serialize, ToSchema)]
struct Choice<'a> {
    /// Number of the prompt times `n`, plus the number of the sample.
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    /// `stop`, `length`, or `abort` for a sample that was aborted; null before its end.
    finish_reason: Option<&'static str>,
    /// The stop string or stop token that ended the sample.
    stop_reason: Option<StopReason>,
    /// In events, where vLLM has it before the tokens.
    #[serde(rename = "prompt_token_ids", skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    event_prompt: Option<Option<&'a [TokenId]>>,
    token_ids: Option<Vec<TokenId>>,
    /// Absent in events, as is `routed_experts`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<PromptLogprobs>)]
    prompt_logprobs: Option<Option<&'a PromptLogprobs>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<TokenId>>)]
    prompt_token_ids: Option<Option<&'a [TokenId]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    routed_experts: Option<Option<String>>,
    /// The values that `returns` asked for; absent in events, and without `returns`.
    #[serde(skip_serializing_if = "Option::is_none")]
    returned: Option<Returned>,
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

/// Turns the events of one request into its answer, or into the events of its stream.
struct CompletionWriter {
    options: CompletionOptions,
    prompts: Vec<Prompt>,
    samples: usize,
    facts: Vec<PromptFacts>,
    kept: FinishedSamples,
    /// The samples of a stream that have begun.
    streamed: Vec<Option<LogprobsWriter>>,
    chunks: Chunks,
}

impl CompletionWriter {
    fn new(request: &ValidRequest, options: CompletionOptions, traffic: &Traffic) -> Self {
        let samples = samples_per_prompt(request);
        let count = request.prompts.len() * samples;
        let (kept, streamed) = if options.report.is_stream { (0, count) } else { (count, 0) };
        let echoes: usize = options.prompt_texts.iter().flatten().map(|text| text.len() + size_of::<String>()).sum();
        Self {
            options,
            prompts: request.prompts.clone(),
            samples,
            facts: request.prompts.iter().map(|_| PromptFacts::default()).collect(),
            kept: FinishedSamples::new(kept, echoes + count * SAMPLE, traffic),
            streamed: (0..streamed).map(|_| None).collect(),
            chunks: Chunks {
                id: format!("cmpl-{}", request.request_id),
                object: "text_completion",
                prompt_tokens: request.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum(),
                tokens: 0,
                reasoning_tokens: None,
            },
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
        given.unwrap_or_else(|| self.options.report.prompt_text(&self.prompts[prompt].tokens))
    }

    fn logprobs_writer(&self) -> LogprobsWriter {
        let report = &self.options.report;
        LogprobsWriter::new(report.token_texts(), report.logprobs.unwrap_or(0))
    }

    /// The log-probabilities of `tokens`, if they were requested. The first of a sample follow those of an echo.
    fn logprobs(
        &self,
        prompt: usize,
        tokens: &[TokenLogprobs],
        are_first: bool,
        writer: &mut LogprobsWriter,
    ) -> Option<Logprobs> {
        self.options.report.logprobs?;
        let mut logprobs = Logprobs::default();
        if let Some(echo) = self.facts[prompt].echo.as_ref().filter(|_| are_first) {
            writer.push_first(self.prompts[prompt].tokens[0], &mut logprobs);
            echo.iter().for_each(|token| writer.push(token, LogprobsMode::Raw, &mut logprobs));
        }
        tokens.iter().for_each(|token| writer.push(token, self.options.report.mode, &mut logprobs));
        Some(logprobs)
    }

    /// The ids of `tokens`, if they were requested.
    fn ids(&self, tokens: &[TokenLogprobs]) -> Option<Vec<TokenId>> {
        self.options.report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect())
    }

    /// The end of a sample, with the text that follows that of its tokens.
    fn ended(&self, completion: &Completion) -> Choice<'static> {
        let report = &self.options.report;
        let stop_reason = report.stop_reason(completion);
        Choice {
            index: self.index((completion.prompt_index, completion.sample_index)),
            text: report.ending(completion),
            finish_reason: Some(finish_reason(completion.finish_reason)),
            stop_reason,
            token_ids: self.ids(&[]),
            weight_versions: report.versions(completion),
            ..Choice::default()
        }
    }

    /// Sends one event of a stream: `tokens` of the sample `at`, the text that they complete, and the members of `end`.
    fn stream(
        &mut self,
        at: (u32, u32),
        tokens: &[TokenLogprobs],
        text: String,
        end: Choice<'static>,
        out: &mut Outbox,
    ) -> Result<()> {
        let (prompt, index) = (at.0 as usize, self.index(at));
        self.chunks.tokens += tokens.len() as u64;
        let is_first = self.streamed[index].is_none();
        let held = self.hold_logprobs(prompt, tokens.len(), is_first)?;
        let mut writer = self.streamed[index].take().unwrap_or_else(|| self.logprobs_writer());
        let dropped = self.options.drops_tokens;
        let (tokens, text) = if dropped { (&[][..], String::new()) } else { (tokens, text + &end.text) };
        let shows_prompt = is_first && self.options.report.returns_ids;
        let is_last = end.finish_reason.is_some();
        let choice = Choice {
            index,
            text: if is_first { self.echo(prompt) + &text } else { text },
            logprobs: self.logprobs(prompt, tokens, is_first, &mut writer),
            event_prompt: Some(shows_prompt.then_some(&self.prompts[prompt].tokens[..])),
            token_ids: self.ids(tokens),
            ..end
        };
        self.chunks.send(&self.options.report, choice, is_last, None, out);
        self.streamed[index] = Some(writer);
        self.kept.release(held);
        Ok(())
    }
}

impl Samples for CompletionWriter {
    fn prompt_routing(&mut self, prompt: usize, routing: Vec<u8>) -> Result<()> {
        self.options.report.keep_prompt_routing(prompt, routing, &mut self.kept)
    }

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

    fn token(&mut self, at: (u32, u32), token: &TokenLogprobs, text: String, out: &mut Outbox) -> Result<()> {
        self.stream(at, std::slice::from_ref(token), text, Choice::default(), out)
    }

    fn end_sample(
        &mut self,
        completion: &Completion,
        last: Option<&TokenLogprobs>,
        text: String,
        out: &mut Outbox,
    ) -> Result<()> {
        let ended = self.ended(completion);
        let at = (completion.prompt_index, completion.sample_index);
        self.stream(at, last.map_or(&[], std::slice::from_ref), text, ended, out)
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let prompt = completion.prompt_index as usize;
        let held = self.hold_logprobs(prompt, completion.tokens.len(), true)?;
        let report = &self.options.report;
        let (routed_experts, of_experts) = report.routed_experts(&completion, &mut self.kept)?;
        let (returned, of_returned) = report.returned(&completion, &mut self.kept)?;
        let ended = self.ended(&completion);
        let (mut tokens, mut text) = (&[][..], self.echo(prompt));
        if !self.options.drops_tokens {
            tokens = &completion.tokens;
            text.push_str(completion.text.as_deref().unwrap_or_default());
            text.push_str(&ended.text);
        }
        let choice = Choice {
            text,
            logprobs: self.logprobs(prompt, tokens, true, &mut self.logprobs_writer()),
            token_ids: self.ids(tokens),
            prompt_logprobs: Some(self.facts[prompt].reported.as_ref()),
            prompt_token_ids: Some(report.returns_ids.then_some(&self.prompts[prompt].tokens[..])),
            routed_experts: Some(routed_experts),
            returned,
            ..ended
        };
        self.kept.push(choice.index, &choice, held + of_experts + of_returned)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox) {
        let report = &self.options.report;
        self.chunks.end(report, summary, report.prompt_details(summary), out);
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
                usage: Usage::of(summary, report.prompt_details(summary)),
                metrics: report.metrics(summary),
                ..CompletionAnswer::default()
            })
        })
    }
}

#[cfg(test)]
mod tests;
