//! Makes the answers of `/v1/chat/completions` from the events of a request.

use bytes::Bytes;

use super::answers::{Call, ChatAnswer, ChatChoice, ChunkChoice, Message, MessageDelta};
use super::message::{COPIES, ChatOptions, MessagePart, MessageReader, WholeMessage};
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::answers::{Chunks, PromptIds, Usage, finish_reason};
use crate::server::http::openai::logprobs::{ChatLogprobsWriter, PromptLogprobs};
use crate::server::http::{FinishedSamples, Outbox, Samples, json, samples_per_prompt};
use crate::types::{Prompt, TokenLogprobs};

/// The state of one streamed sample.
struct Streamed {
    logprobs: ChatLogprobsWriter,
    reader: MessageReader,
}

/// Turns the events of one request into its answer, or into the events of its stream.
pub(super) struct ChatWriter {
    options: ChatOptions,
    prompt: Prompt,
    prompt_logprobs: Option<PromptLogprobs>,
    /// The reader of each sample before its text.
    reader: MessageReader,
    samples: usize,
    kept: FinishedSamples,
    /// The samples of a stream, once it has begun.
    streamed: Vec<Option<Streamed>>,
    chunks: Chunks,
}

impl ChatWriter {
    pub(super) fn new(request: &ValidRequest, options: ChatOptions, traffic: &Traffic) -> Self {
        let samples = samples_per_prompt(request);
        let prompt = request.prompts.first().cloned().unwrap_or_default();
        let bytes = samples * options.sample_bytes() + options.echo.len();
        let mut reader = MessageReader::new(&options, request);
        Self {
            kept: FinishedSamples::new(if options.report.is_stream { 0 } else { samples }, bytes, traffic),
            options,
            chunks: Chunks {
                id: format!("chatcmpl-{}", request.request_id),
                object: "chat.completion.chunk",
                prompt_tokens: prompt.tokens.len() as u64,
                tokens: 0,
                reasoning_tokens: reader.reasoning_tokens(&[]),
            },
            reader,
            prompt,
            prompt_logprobs: None,
            samples,
            streamed: Vec::new(),
        }
    }

    /// The finish reason in OpenAI's words. A call that was forced by its name is the answer, and ends as one.
    fn ended(&self, completion: &Completion, has_calls: bool) -> &'static str {
        match finish_reason(completion.finish_reason) {
            "stop" if has_calls && !self.options.names_call() => "tool_calls",
            reason => reason,
        }
    }

    /// Sends the first event of each sample, before all others.
    fn begin(&mut self, out: &mut Outbox) {
        if !self.streamed.is_empty() {
            return;
        }
        for index in 0..self.samples {
            let role = Some(self.options.role.as_str());
            let delta = MessageDelta { role, ..MessageDelta::text(String::new()) };
            let ids = self.options.report.returns_ids.then_some(&self.prompt.tokens[..]);
            let prompt = PromptIds { prompt_token_ids: ids, ..PromptIds::default() };
            self.send(ChunkChoice { index, delta, ..ChunkChoice::default() }, Some(prompt), out);
            if !self.options.echo.is_empty() {
                let delta = MessageDelta::text(self.options.echo.clone());
                self.send(ChunkChoice { index, delta, ..ChunkChoice::default() }, None, out);
            }
            let logprobs = self.options.report.chat_logprobs_writer();
            self.streamed.push(Some(Streamed { logprobs, reader: self.reader.clone() }));
        }
    }

    /// The deltas that `text` adds to a sample, whose last text it is if `is_last`.
    fn deltas(&mut self, index: usize, text: String, is_last: bool) -> Vec<MessageDelta<'static>> {
        let Some(streamed) = self.streamed[index].as_mut() else { return Vec::new() };
        let includes_reasoning = self.options.includes_reasoning;
        let mut calls = streamed.reader.calls();
        let delta = |part| match part {
            MessagePart::Reasoning(text) => includes_reasoning.then(|| MessageDelta::reasoning(text)),
            MessagePart::Content(text) => Some(MessageDelta::text(text)),
            MessagePart::Call { id, name } => {
                calls += 1;
                Some(MessageDelta::begun_call(calls - 1, id, name))
            }
            MessagePart::Arguments(text) => Some(MessageDelta::arguments(calls - 1, text)),
        };
        streamed.reader.read(&self.options, &text, is_last).into_iter().filter_map(delta).collect()
    }

    /// Streams `tokens` of a sample and the text that they complete, and its end if `completion` is given. The first
    /// event has the log-probabilities and ids, the last one the end. Tokens that add nothing to the message yet have
    /// an event of their own only if these are reported.
    fn stream(
        &mut self,
        index: usize,
        tokens: &[TokenLogprobs],
        text: String,
        completion: Option<&Completion>,
        out: &mut Outbox,
    ) -> Result<()> {
        self.begin(out);
        self.chunks.tokens += tokens.len() as u64;
        let held = self.kept.hold(self.options.report.logprobs_bytes(tokens.len()))?;
        let mut deltas = self.deltas(index, text, completion.is_some());
        let report = &self.options.report;
        let Some(streamed) = self.streamed[index].as_mut() else { return Ok(()) };
        self.chunks.count_reasoning(streamed.reader.reasoning_tokens(tokens));
        let mut logprobs = None;
        if !tokens.is_empty() {
            logprobs = report.logprobs.map(|top| streamed.logprobs.write(tokens, report.mode, top));
        }
        let mut ids = report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect::<Vec<_>>());
        let mut end = completion.map(|completion| ChunkChoice {
            finish_reason: Some(self.ended(completion, self.calls(index) > 0)),
            stop_reason: Some(self.options.report.stop_reason(completion)),
            weight_versions: self.options.report.versions(completion),
            ..ChunkChoice::default()
        });
        if deltas.is_empty() && (logprobs.is_some() || ids.is_some() || end.is_some()) {
            deltas.push(MessageDelta::default());
        }
        let count = deltas.len();
        for (i, delta) in deltas.into_iter().enumerate() {
            let end = if i + 1 == count { end.take() } else { None };
            let token_ids = Some(ids.as_mut().map(std::mem::take));
            let choice = ChunkChoice { index, delta, logprobs: logprobs.take(), token_ids, ..end.unwrap_or_default() };
            self.send(choice, None, out);
        }
        self.kept.release(held);
        Ok(())
    }

    /// Number of calls that were found in a streamed sample.
    fn calls(&self, index: usize) -> usize {
        self.streamed[index].as_ref().map_or(0, |streamed| streamed.reader.calls())
    }

    /// Sends one event of a stream.
    fn send(&self, choice: ChunkChoice<'_>, prompt: Option<PromptIds<'_>>, out: &mut Outbox) {
        let is_last = choice.finish_reason.is_some();
        self.chunks.send(&self.options.report, choice, is_last, prompt, out);
    }
}

impl Samples for ChatWriter {
    fn prompt_routing(&mut self, prompt: usize, routing: Vec<u8>) -> Result<()> {
        self.options.report.keep_prompt_routing(prompt, routing, &mut self.kept)
    }

    fn prompt_logprobs(&mut self, _: usize, logprobs: Vec<TokenLogprobs>) -> Result<()> {
        let report = &self.options.report;
        self.prompt_logprobs = report.of_prompt(report.prompt_logprobs, &self.prompt, &logprobs, &mut self.kept)?;
        Ok(())
    }

    fn token(&mut self, (_, sample): (u32, u32), token: &TokenLogprobs, text: String, out: &mut Outbox) -> Result<()> {
        self.stream(sample as usize, std::slice::from_ref(token), text, None, out)
    }

    fn end_sample(
        &mut self,
        completion: &Completion,
        last: Option<&TokenLogprobs>,
        text: String,
        out: &mut Outbox,
    ) -> Result<()> {
        let text = text + &self.options.report.ending(completion);
        let tokens = last.map_or(&[][..], std::slice::from_ref);
        self.stream(completion.sample_index as usize, tokens, text, Some(completion), out)
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let report = &self.options.report;
        let copies = COPIES * (completion.text.as_ref().map_or(0, String::len) + self.options.echo.len());
        let held = self.kept.hold(copies + report.logprobs_bytes(completion.tokens.len()))?;
        let (routed_experts, of_experts) = report.routed_experts(&completion, &mut self.kept)?;
        let (returned, of_returned) = report.returned(&completion, &mut self.kept)?;
        let stop_reason = report.stop_reason(&completion);
        let mut text = completion.text.clone().unwrap_or_default();
        text.push_str(&report.ending(&completion));
        let (mut reader, tokens) = (self.reader.clone(), &completion.tokens);
        self.chunks.count_reasoning(reader.reasoning_tokens(tokens));
        let message = message(&self.options, reader.read_whole(&self.options, &text));
        let choice = ChatChoice {
            index: completion.sample_index as usize,
            logprobs: report.logprobs.map(|top| report.chat_logprobs_writer().write(tokens, report.mode, top)),
            finish_reason: self.ended(&completion, !message.tool_calls.is_empty()),
            stop_reason,
            token_ids: report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect()),
            routed_experts,
            returned,
            weight_versions: report.versions(&completion),
            message,
        };
        self.kept.push(choice.index, &choice, held + of_experts + of_returned)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox) {
        let report = &self.options.report;
        self.chunks.end(report, summary, report.chat_prompt_details(summary), out);
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let report = &self.options.report;
        self.kept.finish(|choices| {
            json(&ChatAnswer {
                id: &self.chunks.id,
                object: "chat.completion",
                created: report.created,
                model: &report.model,
                choices,
                system_fingerprint: &report.fingerprint,
                usage: Usage::of(summary, report.chat_prompt_details(summary))
                    .with_reasoning(self.chunks.reasoning_tokens),
                metrics: report.metrics(summary),
                prompt_logprobs: self.prompt_logprobs.as_ref(),
                prompt_token_ids: report.returns_ids.then_some(&self.prompt.tokens[..]),
                ..ChatAnswer::default()
            })
        })
    }
}

/// A whole message as chats answer it.
fn message(options: &ChatOptions, message: WholeMessage) -> Message<'_> {
    let WholeMessage { reasoning, mut content, calls } = message;
    if !options.echo.is_empty() {
        content.get_or_insert_default().insert_str(0, &options.echo);
    }
    let has_content = options.calling.is_forced() || calls.is_empty() && reasoning.is_none();
    let reasoning = reasoning.filter(|_| options.includes_reasoning);
    Message {
        role: &options.role,
        content: content.or_else(|| has_content.then(String::new)),
        tool_calls: calls.into_iter().map(|call| Call::new(call.id, call.name, call.arguments)).collect(),
        reasoning: reasoning.clone(),
        reasoning_content: reasoning,
        ..Message::default()
    }
}
