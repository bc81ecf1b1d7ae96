//! Makes the answers of `/v1/chat/completions` from the events of a request.

use std::collections::VecDeque;

use bytes::Bytes;
use rand::distr::{Alphanumeric, SampleString as _};

use super::answers::{Call, ChatAnswer, Choice, ChunkChoice, Function, Message, MessageDelta};
use super::tools::ToolCalling;
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::answers::{Chunks, PromptIds, Report, Usage, finish_reason};
use crate::server::http::openai::logprobs::{ChatLogprobs, PromptLogprobs, TokenTexts};
use crate::server::http::{FinishedSamples, Samples, json, samples_per_prompt};
use crate::text::{Piece, ToolCall, ToolFormat, ToolParser};
use crate::types::{Prompt, TokenId, TokenLogprobs};

/// Bytes that are kept for each sample until the answer is sent, besides the names of the tools.
const SAMPLE: usize = 512;
/// Most copies of a sample's text while it is searched for calls.
const COPIES: usize = 4;

/// The options of a chat's answer.
pub(super) struct ChatOptions {
    pub(super) report: Report,
    /// The role of the answer.
    pub(super) role: String,
    pub(super) calling: ToolCalling,
    /// Whether calls have names of nine letters and digits: Mistral's templates take no others.
    pub(super) has_short_ids: bool,
}

/// The state of one streamed sample.
struct Streamed {
    logprobs: TokenWriter,
    parser: Option<ToolParser>,
    calls: usize,
}

/// Writes tokens of one sample beside their log-probabilities.
struct TokenWriter {
    /// The tokens as text or as `token_id:N`.
    names: TokenTexts,
    /// The tokens as text, for their bytes.
    texts: TokenTexts,
}

impl TokenWriter {
    fn new(report: &Report) -> Self {
        Self { names: report.token_texts(), texts: report.plain_texts() }
    }

    /// The log-probabilities of `tokens`, if they were requested.
    fn write(&mut self, tokens: &[TokenLogprobs], report: &Report) -> Option<ChatLogprobs> {
        let top = report.logprobs?;
        let mut logprobs = ChatLogprobs::default();
        for token in tokens {
            logprobs.push(token, report.mode, top as usize, &mut self.names, &mut self.texts);
        }
        Some(logprobs)
    }
}

/// Turns the events of one request into its answer, or into the events of its stream.
pub(super) struct ChatWriter {
    options: ChatOptions,
    prompt: Prompt,
    prompt_logprobs: Option<PromptLogprobs>,
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
        let bytes = samples * (SAMPLE + options.calling.heap_bytes());
        Self {
            kept: FinishedSamples::new(if options.report.is_stream { 0 } else { samples }, bytes, traffic),
            options,
            chunks: Chunks::new(
                format!("chatcmpl-{}", request.request_id),
                "chat.completion.chunk",
                prompt.tokens.len() as u64,
            ),
            prompt,
            prompt_logprobs: None,
            samples,
            streamed: Vec::new(),
        }
    }

    fn parser(&self) -> Option<ToolParser> {
        match &self.options.calling {
            ToolCalling::Never | ToolCalling::Named(_) => None,
            ToolCalling::Required { names } => Some(ToolParser::new(ToolFormat::List, names.clone())),
            ToolCalling::Auto { format, names } => Some(ToolParser::new(*format, names.clone())),
        }
    }

    /// The content of a sample's text, and the calls that are found in it.
    fn message(&self, text: String) -> (Option<String>, Vec<Call>) {
        let mut pieces = Vec::new();
        match (self.parser(), &self.options.calling) {
            (Some(mut parser), _) => {
                parser.push(&text, &mut pieces);
                parser.finish(&mut pieces);
            }
            (None, ToolCalling::Named(name)) => {
                pieces.push(Piece::Call(ToolCall { name: name.clone(), arguments: text }))
            }
            (None, _) => pieces.push(Piece::Content(text)),
        }
        let (mut content, mut calls) = (None::<String>, Vec::new());
        for piece in pieces {
            match piece {
                Piece::Content(text) => content.get_or_insert_default().push_str(&text),
                Piece::Call(call) => calls.push(self.whole_call(call)),
            }
        }
        (content, calls)
    }

    fn whole_call(&self, call: ToolCall) -> Call {
        let function = Function { name: Some(call.name), arguments: Some(call.arguments) };
        Call { id: Some(self.call_id()), r#type: Some("function"), index: None, function }
    }

    /// A name for a call.
    fn call_id(&self) -> String {
        if self.options.has_short_ids {
            return Alphanumeric.sample_string(&mut rand::rng(), 9);
        }
        format!("chatcmpl-tool-{:016x}", rand::random::<u64>())
    }

    /// The finish reason in OpenAI's words. A call that was forced by its name is the answer, and ends as one.
    fn ended(&self, completion: &Completion, has_calls: bool) -> &'static str {
        match finish_reason(completion.finish_reason) {
            "stop" if has_calls && !matches!(self.options.calling, ToolCalling::Named(_)) => "tool_calls",
            reason => reason,
        }
    }

    /// Sends the first event of each sample, before all others.
    fn begin(&mut self, out: &mut VecDeque<Bytes>) {
        if !self.streamed.is_empty() {
            return;
        }
        let report = &self.options.report;
        let streamed =
            || Streamed { logprobs: TokenWriter::new(&self.options.report), parser: self.parser(), calls: 0 };
        let streamed = (0..self.samples).map(|_| Some(streamed())).collect();
        for index in 0..self.samples {
            let role = Some(self.options.role.as_str());
            let delta = MessageDelta { role, ..MessageDelta::text(String::new()) };
            let ids = report.returns_ids.then_some(&self.prompt.tokens[..]);
            let prompt = PromptIds { prompt_token_ids: ids, ..PromptIds::default() };
            self.send(ChunkChoice { index, delta, ..ChunkChoice::default() }, Some(prompt), out);
        }
        self.streamed = streamed;
    }

    /// The deltas that the parser of a sample finds when `advance` advances it, or `text` itself without a parser.
    fn deltas(
        &mut self,
        index: usize,
        advance: impl FnOnce(&mut ToolParser, &mut Vec<Piece>),
        text: &str,
    ) -> Vec<MessageDelta<'static>> {
        let Some(streamed) = self.streamed[index].as_mut() else { return Vec::new() };
        match (&mut streamed.parser, &self.options.calling) {
            (Some(parser), _) => {
                let mut pieces = Vec::new();
                advance(parser, &mut pieces);
                self.written(index, pieces)
            }
            (None, ToolCalling::Named(_)) => self.arguments(index, text),
            (None, _) => vec![MessageDelta::text(text.to_owned())],
        }
    }

    /// The part that `text` adds to the call that was forced by its name.
    fn arguments(&mut self, index: usize, text: &str) -> Vec<MessageDelta<'static>> {
        let id = self.call_id();
        let (ToolCalling::Named(name), Some(streamed)) = (&self.options.calling, self.streamed[index].as_mut()) else {
            return Vec::new();
        };
        let is_first = streamed.calls == 0;
        streamed.calls = 1;
        let begin = is_first.then(|| begun_call(0, id, name.clone()));
        let rest = (!text.is_empty()).then(|| call_arguments(0, text.to_owned()));
        begin.into_iter().chain(rest).collect()
    }

    fn written(&mut self, index: usize, pieces: Vec<Piece>) -> Vec<MessageDelta<'static>> {
        let mut deltas = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Content(text) => deltas.push(MessageDelta::text(text)),
                Piece::Call(call) => {
                    let id = self.call_id();
                    let Some(streamed) = self.streamed[index].as_mut() else { continue };
                    let number = streamed.calls;
                    streamed.calls += 1;
                    deltas.push(begun_call(number, id, call.name));
                    deltas.push(call_arguments(number, call.arguments));
                }
            }
        }
        deltas
    }

    /// Sends `deltas`, the first with the token's log-probabilities and id. A token that adds nothing to the message
    /// yet has an event of its own only if these are reported.
    fn send_deltas(
        &self,
        index: usize,
        deltas: Vec<MessageDelta<'static>>,
        mut logprobs: Option<ChatLogprobs>,
        mut ids: Option<Vec<TokenId>>,
        out: &mut VecDeque<Bytes>,
    ) {
        let has_more = logprobs.is_some() || ids.is_some();
        let nothing = (deltas.is_empty() && has_more).then(MessageDelta::default);
        for delta in deltas.into_iter().chain(nothing) {
            let (logprobs, ids) = (logprobs.take(), ids.take());
            let token_ids = Some(ids.or_else(|| self.options.report.returns_ids.then(Vec::new)));
            self.send(ChunkChoice { index, delta, logprobs, token_ids, ..ChunkChoice::default() }, None, out);
        }
    }

    /// Sends one event of a stream.
    fn send(&self, choice: ChunkChoice<'_>, prompt: Option<PromptIds<'_>>, out: &mut VecDeque<Bytes>) {
        let is_last = choice.finish_reason.is_some();
        self.chunks.send(&self.options.report, (choice, is_last), prompt, out);
    }
}

/// The first part of a streamed call.
fn begun_call(number: usize, id: String, name: String) -> MessageDelta<'static> {
    let function = Function { name: Some(name), arguments: None };
    MessageDelta::call(Call { id: Some(id), r#type: Some("function"), index: Some(number), function })
}

/// A later part of a streamed call.
fn call_arguments(number: usize, arguments: String) -> MessageDelta<'static> {
    let function = Function { name: None, arguments: Some(arguments) };
    MessageDelta::call(Call { id: None, r#type: None, index: Some(number), function })
}

impl Samples for ChatWriter {
    fn prompt_logprobs(&mut self, _: usize, logprobs: Vec<TokenLogprobs>) -> Result<()> {
        let report = &self.options.report;
        self.prompt_logprobs = report.of_prompt(report.prompt_logprobs, &self.prompt, &logprobs, &mut self.kept)?;
        Ok(())
    }

    fn token(
        &mut self,
        (_, sample): (u32, u32),
        token: &TokenLogprobs,
        text: String,
        out: &mut VecDeque<Bytes>,
    ) -> Result<()> {
        self.begin(out);
        self.chunks.tokens += 1;
        let report = &self.options.report;
        let (index, held) = (sample as usize, self.kept.hold(report.logprobs_bytes(1))?);
        let Some(streamed) = self.streamed[index].as_mut() else { return Ok(()) };
        let logprobs = streamed.logprobs.write(std::slice::from_ref(token), report);
        let ids = report.returns_ids.then(|| vec![token.token]);
        let deltas = self.deltas(index, |parser, pieces| parser.push(&text, pieces), &text);
        self.send_deltas(index, deltas, logprobs, ids, out);
        self.kept.release(held);
        Ok(())
    }

    fn text(&mut self, (_, sample): (u32, u32), text: String, out: &mut VecDeque<Bytes>) {
        self.begin(out);
        let deltas = self.deltas(sample as usize, |parser, pieces| parser.push(&text, pieces), &text);
        self.send_deltas(sample as usize, deltas, None, None, out);
    }

    fn end_sample(&mut self, completion: &Completion, out: &mut VecDeque<Bytes>) {
        self.begin(out);
        let index = completion.sample_index as usize;
        let stop_reason = self.options.report.stop_reason(completion);
        let ending = self.options.report.ending(stop_reason.as_ref()).to_owned();
        let Some(parser) = self.streamed[index].as_mut().map(|streamed| streamed.parser.take()) else { return };
        let delta = match parser {
            Some(mut parser) => {
                let mut pieces = Vec::new();
                parser.push(&ending, &mut pieces);
                parser.finish(&mut pieces);
                let deltas = self.written(index, pieces);
                self.send_deltas(index, deltas, None, None, out);
                MessageDelta::default()
            }
            None if self.options.calling.is_forced() => {
                let deltas = self.arguments(index, &ending);
                self.send_deltas(index, deltas, None, None, out);
                MessageDelta::default()
            }
            None => MessageDelta::text(ending),
        };
        let has_calls = self.streamed[index].take().is_some_and(|streamed| streamed.calls > 0);
        let report = &self.options.report;
        let choice = ChunkChoice {
            index,
            delta,
            finish_reason: Some(self.ended(completion, has_calls)),
            stop_reason: Some(stop_reason),
            token_ids: Some(report.returns_ids.then(Vec::new)),
            weight_versions: report.versions(completion),
            ..ChunkChoice::default()
        };
        self.send(choice, None, out);
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let report = &self.options.report;
        let copies = COPIES * completion.text.as_ref().map_or(0, String::len);
        let held = self.kept.hold(copies + report.logprobs_bytes(completion.tokens.len()))?;
        let stop_reason = report.stop_reason(&completion);
        let mut text = completion.text.clone().unwrap_or_default();
        text.push_str(report.ending(stop_reason.as_ref()));
        let (content, calls) = self.message(text);
        let tokens = &completion.tokens;
        let choice = Choice {
            index: completion.sample_index as usize,
            logprobs: TokenWriter::new(report).write(tokens, report),
            finish_reason: self.ended(&completion, !calls.is_empty()),
            stop_reason,
            token_ids: report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect()),
            weight_versions: report.versions(&completion),
            message: Message {
                role: &self.options.role,
                content: content.or_else(|| (calls.is_empty() || self.options.calling.is_forced()).then(String::new)),
                tool_calls: calls,
                ..Message::default()
            },
            ..Choice::default()
        };
        self.kept.push(choice.index, &choice, held)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut VecDeque<Bytes>) {
        self.chunks.end(&self.options.report, summary, out);
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
                usage: Usage::of(summary),
                prompt_logprobs: self.prompt_logprobs.as_ref(),
                prompt_token_ids: report.returns_ids.then_some(&self.prompt.tokens[..]),
                ..ChatAnswer::default()
            })
        })
    }
}
