//! The parts that the answers of completions, chats and `/inference/v1/generate` share: their options, usage figures,
//! and the events of streams.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::{ALTERNATIVE, ChatLogprobsWriter, LOGPROB, PromptLogprobs, TokenTexts, most_likely};
use super::returned::{ReturnOptions, Returned};
use super::routed_experts::RoutedExperts;
use super::sampling::{LogprobsMode, Sampling, UsageEvents};
use crate::engine::{Completion, SampleTimes, Summary};
use crate::error::{Error, Result};
use crate::server::ServingContext;
use crate::server::http::{FinishedSamples, event, unix_seconds};
use crate::text::Tokenizer;
use crate::types::{FinishReason, Prompt, TokenId, TokenLogprobs, WeightVersion};

/// A member that is always null here; vLLM's and OpenAI's clients read it.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(value_type = Option<String>)]
pub(in crate::server::http) struct Null(Option<()>);

/// The options of a request's answer, and the facts that it reports beside the samples.
pub(in crate::server::http) struct Report {
    pub(in crate::server::http) model: String,
    pub(super) fingerprint: String,
    /// Time of the answer in seconds since 1970.
    pub(in crate::server::http) created: u64,
    /// Distribution of the log-probabilities.
    pub(in crate::server::http) mode: LogprobsMode,
    /// Whether the request names the tokens to report beside each sampled one, instead of the most likely ones.
    names_tokens: bool,
    /// How many tokens to report beside each sampled one, if log-probabilities were requested.
    pub(in crate::server::http) logprobs: Option<u32>,
    /// How many most likely tokens to report for each token of the prompt, if at all.
    pub(in crate::server::http) prompt_logprobs: Option<u32>,
    pub(in crate::server::http) is_stream: bool,
    pub(in crate::server::http) usage_events: UsageEvents,
    pub(in crate::server::http) returns_ids: bool,
    pub(super) returns_versions: bool,
    /// Writes the experts of samples; `None` in a stream, and if the server does not keep them.
    pub(in crate::server::http) routed_experts: Option<RoutedExperts>,
    returns: Option<ReturnOptions>,
    reports_times: bool,
    /// Tokens of a KV block, if usage figures have the parts of prompts.
    cache_block: Option<u64>,
    /// Writes tokens beside log-probabilities as `token_id:N`.
    writes_ids: bool,
    pub(super) includes_stop: bool,
    stop: Vec<String>,
    skips_special: bool,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
}

/// The stop string or stop token that ended a sample.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(in crate::server::http) enum StopReason {
    Text(String),
    Token(u32),
}

/// Tokens of a sample that one version of the policy has made.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct VersionSpan {
    version: WeightVersion,
    /// Index of the span's first token.
    start: u32,
    /// Index after the span's last token.
    end: u32,
}

impl Report {
    /// # Errors
    /// `InvalidArgument` for an option that a stream cannot have, and for too many log-probabilities.
    pub(in crate::server::http) fn new(
        sampling: &Sampling,
        logprobs: Option<u32>,
        context: &ServingContext,
    ) -> Result<Self> {
        let (info, is_stream) = (&context.info, sampling.stream.unwrap_or(false));
        let named = sampling.logprob_token_ids.as_ref().map_or(0, Vec::len);
        if named > 0 && logprobs.is_none() {
            return Err(Error::invalid("logprob_token_ids", "needs logprobs, without which none are reported"));
        }
        if is_stream && sampling.prompt_logprobs.is_some() {
            return Err(Error::invalid("prompt_logprobs", "are not available in a stream; leave out one of the two"));
        }
        if is_stream && sampling.returns.is_some() {
            return Err(Error::invalid("returns", "is not available in a stream; leave out one of the two"));
        }
        Ok(Self {
            model: sampling.model.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| info.model.clone()),
            // Two servers whose bits may differ have different ones.
            fingerprint: format!("rollout-server-{}-{}-{}", env!("CARGO_PKG_VERSION"), info.kernel, info.dtype),
            created: unix_seconds(),
            mode: sampling.reported(),
            names_tokens: named > 0,
            logprobs: if named > 0 { u32::try_from(named).ok() } else { logprobs },
            prompt_logprobs: most_likely("prompt_logprobs", sampling.prompt_logprobs, &context.model)?,
            is_stream,
            usage_events: match context.forces_usage {
                true => UsageEvents::All,
                false => UsageEvents::requested(sampling.stream_options.as_ref()),
            },
            returns_ids: sampling.return_token_ids.unwrap_or(false),
            returns_versions: sampling.return_weight_versions.unwrap_or(false),
            routed_experts: RoutedExperts::new(&context.model, sampling.routed_experts_prompt_start)
                .filter(|_| !is_stream),
            returns: sampling.returns.clone(),
            reports_times: context.reports_times,
            cache_block: context.reports_prompt_details.then_some(u64::from(info.block_size)),
            writes_ids: sampling.return_tokens_as_token_ids.unwrap_or(context.writes_token_ids),
            includes_stop: sampling.include_stop_str_in_output.unwrap_or(false),
            stop: sampling.stop_strings(),
            skips_special: sampling.skip_special_tokens.unwrap_or(true),
            tokenizer: context.model.encoder.as_ref().map(|encoder| encoder.tokenizer.clone()),
        })
    }

    /// Writes the tokens of one text beside their log-probabilities.
    pub(super) fn token_texts(&self) -> TokenTexts {
        TokenTexts::new(self.tokenizer.as_ref().filter(|_| !self.writes_ids))
    }

    /// Writes the log-probabilities of one sample of a chat.
    pub(super) fn chat_logprobs_writer(&self) -> ChatLogprobsWriter {
        ChatLogprobsWriter {
            names: self.token_texts(),
            texts: TokenTexts::new(self.tokenizer.as_ref()),
            lists_sampled: self.names_tokens,
        }
    }

    /// The text of a prompt's tokens, with special tokens; empty without a tokenizer.
    pub(super) fn prompt_text(&self, tokens: &[TokenId]) -> String {
        self.decode(tokens, false)
    }

    fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        self.tokenizer.as_ref().map_or_else(String::new, |tokenizer| tokenizer.decode(tokens, skip_special))
    }

    /// The stop string or stop token of the request that ended a sample, if one did.
    pub(in crate::server::http) fn stop_reason(&self, completion: &Completion) -> Option<StopReason> {
        match completion.finish_reason {
            FinishReason::StopToken => completion.tokens.last().map(|last| StopReason::Token(last.token)),
            FinishReason::StopString => self.stop_string(completion).map(StopReason::Text),
            FinishReason::Eos | FinishReason::Length | FinishReason::Grammar | FinishReason::Aborted => None,
        }
    }

    /// The stop string that ended a sample. The engine's text ends before it.
    fn stop_string(&self, completion: &Completion) -> Option<String> {
        let tokens: Vec<_> = completion.tokens.iter().map(|token| token.token).collect();
        let whole = self.decode(&tokens, self.skips_special);
        let rest = whole.get(completion.text.as_ref()?.len()..)?;
        self.stop.iter().find(|stop| rest.starts_with(stop.as_str())).cloned()
    }

    /// The text that follows the engine's, if the request includes it: the stop string, or the token that ended the
    /// sample.
    pub(in crate::server::http) fn ending(&self, completion: &Completion) -> String {
        if !self.includes_stop {
            return String::new();
        }
        match (completion.finish_reason, self.stop_reason(completion), completion.tokens.last()) {
            (FinishReason::StopString, Some(StopReason::Text(text)), _) => text,
            (FinishReason::Eos | FinishReason::StopToken, _, Some(last)) => {
                self.decode(&[last.token], self.skips_special)
            }
            _ => String::new(),
        }
    }

    /// How many most likely tokens the engine must report. Ranks, which come with log-probabilities of prompts, are
    /// computed beside at least one.
    pub(in crate::server::http) fn top_logprobs(&self, with_prompt: bool) -> u32 {
        let sampled = self.logprobs.filter(|_| !self.names_tokens);
        sampled.max(self.prompt_logprobs).unwrap_or(0).max(u32::from(with_prompt))
    }

    /// Takes the experts of a prompt's tokens, which `kept` counts.
    ///
    /// # Errors
    /// `ResourceExhausted` if the reply would exceed `--request-bytes`.
    pub(in crate::server::http) fn keep_prompt_routing(
        &mut self,
        prompt: usize,
        routing: Vec<u8>,
        kept: &mut FinishedSamples,
    ) -> Result<()> {
        if let Some(experts) = &mut self.routed_experts {
            kept.hold(routing.len())?;
            experts.keep_prompt(prompt, routing);
        }
        Ok(())
    }

    /// The experts of a sample and of its prompt, if they are reported, and the bytes that `kept` holds for them.
    ///
    /// # Errors
    /// `ResourceExhausted` if the reply would exceed `--request-bytes`.
    pub(in crate::server::http) fn routed_experts(
        &self,
        completion: &Completion,
        kept: &mut FinishedSamples,
    ) -> Result<(Option<String>, u64)> {
        let Some(experts) = &self.routed_experts else { return Ok((None, 0)) };
        let held = kept.hold(experts.written_bytes(completion))?;
        Ok((Some(experts.written(completion)), held))
    }

    /// The further values of a sample that the request asks for, and the bytes that `kept` holds for them.
    ///
    /// # Errors
    /// `ResourceExhausted` if the reply would exceed `--request-bytes`.
    pub(in crate::server::http) fn returned(
        &self,
        completion: &Completion,
        kept: &mut FinishedSamples,
    ) -> Result<(Option<Returned>, u64)> {
        let Some(returns) = &self.returns else { return Ok((None, 0)) };
        let held = kept.hold(returns.bytes(completion))?;
        Ok((Some(Returned::new(returns, completion)), held))
    }

    /// Memory for turning the log-probabilities of `tokens` tokens into text.
    pub(super) fn logprobs_bytes(&self, tokens: usize) -> usize {
        self.logprobs.map_or(0, |top| tokens * (LOGPROB + ALTERNATIVE * top as usize))
    }

    /// The log-probabilities of a prompt's tokens with the `top` most likely ones each, if any were requested. `kept`
    /// counts them.
    ///
    /// # Errors
    /// `ResourceExhausted` if the reply would exceed `--request-bytes`.
    pub(in crate::server::http) fn of_prompt(
        &self,
        top: Option<u32>,
        prompt: &Prompt,
        logprobs: &[TokenLogprobs],
        kept: &mut FinishedSamples,
    ) -> Result<Option<PromptLogprobs>> {
        kept.hold(logprobs.iter().map(|token| LOGPROB + ALTERNATIVE * token.top.len()).sum())?;
        Ok(top.map(|top| PromptLogprobs::new(prompt.tokens[0], logprobs, top, self.token_texts())))
    }

    /// The times of the request's sample, if answers have them.
    pub(super) fn metrics(&self, summary: &Summary) -> Option<RequestMetrics> {
        summary.times.filter(|_| self.reports_times).map(|times| RequestMetrics::new(times, summary.completion_tokens))
    }

    /// The parts of the prompts' tokens, if usage figures have them.
    pub(in crate::server::http) fn prompt_details(&self, summary: &Summary) -> Option<PromptDetails> {
        let cached_tokens = summary.cached_tokens;
        self.cache_block.map(|_| PromptDetails { cached_tokens, created_cache_tokens: None })
    }

    /// The parts of a chat's only prompt, if usage figures have them.
    pub(in crate::server::http) fn chat_prompt_details(&self, summary: &Summary) -> Option<PromptDetails> {
        let block = self.cache_block?;
        let whole_blocks = summary.prompt_tokens / block * block;
        let created_cache_tokens = Some(whole_blocks.saturating_sub(summary.cached_tokens));
        Some(PromptDetails { created_cache_tokens, ..self.prompt_details(summary)? })
    }

    /// The versions that made a sample's tokens, if they were requested.
    pub(super) fn versions(&self, completion: &Completion) -> Option<Vec<VersionSpan>> {
        let span = |&(version, start, end): &_| VersionSpan { version, start, end };
        self.returns_versions.then(|| completion.weight_versions.iter().map(span).collect())
    }
}

/// The end of a sample in OpenAI's words, with vLLM's for an abort.
pub(in crate::server::http) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos | FinishReason::StopToken | FinishReason::StopString | FinishReason::Grammar => "stop",
        FinishReason::Length => "length",
        FinishReason::Aborted => "abort",
    }
}

/// How many tokens a request has taken.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    /// Null without `--enable-prompt-tokens-details`, and then absent in events of streams; else at their end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<PromptDetails>)]
    prompt_tokens_details: Option<Option<PromptDetails>>,
    /// Null if no reasoning is counted, and absent in events of streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<CompletionDetails>)]
    completion_tokens_details: Option<Option<CompletionDetails>>,
}

/// Times of a request's only sample.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct RequestMetrics {
    /// From the first step to the first token.
    time_to_first_token_ms: f64,
    /// From the first token to the last.
    generation_time_ms: f64,
    /// From the request's arrival to the first step.
    queue_time_ms: f64,
    /// Mean time between two tokens; null for one token, and then absent in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<f64>)]
    mean_itl_ms: Option<Option<f64>>,
    /// Tokens by the time from the first step to the last token.
    tokens_per_second: f64,
    /// Absent in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculative_decoding: Option<Null>,
}

impl RequestMetrics {
    fn new(times: SampleTimes, tokens: u64) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let computed = (times.first_token + times.decoded).as_secs_f64();
        Self {
            time_to_first_token_ms: ms(times.first_token),
            generation_time_ms: ms(times.decoded),
            queue_time_ms: ms(times.queued),
            mean_itl_ms: Some((tokens > 1).then(|| ms(times.decoded) / (tokens - 1) as f64)),
            tokens_per_second: tokens as f64 / computed,
            speculative_decoding: Some(Null::default()),
        }
    }

    /// The same without members that are null, which vLLM's streams leave out.
    fn in_stream(self) -> Self {
        Self { mean_itl_ms: self.mean_itl_ms.filter(Option::is_some), speculative_decoding: None, ..self }
    }
}

/// The parts of a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(in crate::server::http) struct PromptDetails {
    /// Tokens whose keys and values came from the prefix cache.
    pub(in crate::server::http) cached_tokens: u64,
    /// Tokens of a chat's prompt that the request has added to the prefix cache: those of whole KV blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::server::http) created_cache_tokens: Option<u64>,
}

/// The parts of the sampled tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct CompletionDetails {
    /// Tokens of the reasoning, without its marks.
    reasoning_tokens: u64,
}

impl Usage {
    pub(in crate::server::http) fn new(prompt_tokens: u64, completion_tokens: u64) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Self { prompt_tokens, total_tokens, completion_tokens, ..Self::default() }
    }

    /// The figures of a request that has ended, for a whole answer.
    pub(in crate::server::http) fn of(summary: &Summary, prompt: Option<PromptDetails>) -> Self {
        Self {
            prompt_tokens_details: Some(prompt),
            completion_tokens_details: Some(None),
            ..Self::new(summary.prompt_tokens, summary.completion_tokens)
        }
    }

    /// The figures of a request that has ended, for the last event of its stream.
    pub(in crate::server::http) fn at_end(summary: &Summary, prompt: Option<PromptDetails>) -> Self {
        Self { prompt_tokens_details: prompt.map(Some), ..Self::new(summary.prompt_tokens, summary.completion_tokens) }
    }

    /// The figures with the number of the reasoning's tokens, if they are counted.
    pub(super) fn with_reasoning(self, tokens: Option<u64>) -> Self {
        let details = tokens.map(|reasoning_tokens| Some(CompletionDetails { reasoning_tokens }));
        Self { completion_tokens_details: details.or(self.completion_tokens_details), ..self }
    }
}

/// One event of a stream.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<RequestMetrics>,
    /// In the first event of a chat alone.
    #[serde(flatten)]
    prompt: Option<PromptIds<'a>>,
}

/// The prompt's tokens, if they were requested.
#[derive(Default, Serialize)]
pub(super) struct PromptIds<'a> {
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    pub(super) prompt_text: Null,
}

/// The events of one request.
pub(super) struct Chunks {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) prompt_tokens: u64,
    /// Tokens that were streamed so far.
    pub(super) tokens: u64,
    /// How many of all samples' tokens are reasoning, if they are counted.
    pub(super) reasoning_tokens: Option<u64>,
}

impl Chunks {
    /// Sends the new part of one sample. `is_last`: the sample ends with it.
    pub(super) fn send(
        &self,
        report: &Report,
        choice: impl Serialize,
        is_last: bool,
        prompt: Option<PromptIds<'_>>,
        out: &mut VecDeque<Bytes>,
    ) {
        let events = report.usage_events;
        let figures = || Usage::new(self.prompt_tokens, self.tokens).with_reasoning(self.reasoning_tokens);
        let usage = (events == UsageEvents::All).then(figures);
        let fingerprint = (is_last && events == UsageEvents::None).then_some(&*report.fingerprint);
        let choices = [choice];
        let chunk = self.chunk(report, &choices);
        out.push_back(event(&Chunk { usage, system_fingerprint: fingerprint, prompt, ..chunk }));
    }

    /// Sends the last event, if it was requested.
    pub(super) fn end(
        &self,
        report: &Report,
        summary: &Summary,
        prompt: Option<PromptDetails>,
        out: &mut VecDeque<Bytes>,
    ) {
        if report.usage_events != UsageEvents::None {
            let usage = Some(Usage::at_end(summary, prompt).with_reasoning(self.reasoning_tokens));
            let metrics = report.metrics(summary).map(RequestMetrics::in_stream);
            let system_fingerprint = Some(&*report.fingerprint);
            let chunk = self.chunk::<()>(report, &[]);
            out.push_back(event(&Chunk { usage, system_fingerprint, metrics, ..chunk }));
        }
    }

    /// Counts `tokens` more tokens of reasoning, if they are counted.
    pub(super) fn count_reasoning(&mut self, tokens: Option<u64>) {
        self.reasoning_tokens = self.reasoning_tokens.zip(tokens).map(|(before, more)| before + more);
    }

    fn chunk<'a, C>(&'a self, report: &'a Report, choices: &'a [C]) -> Chunk<'a, C> {
        Chunk {
            id: &self.id,
            object: self.object,
            created: report.created,
            model: &report.model,
            choices,
            usage: None,
            system_fingerprint: None,
            metrics: None,
            prompt: None,
        }
    }
}
