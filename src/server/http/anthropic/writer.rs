//! Makes messages, or the events of their streams, from the events of a request.

use bytes::Bytes;
use serde_json::value::RawValue;

use super::MessagesError;
use super::answers::{ContentBlock, ContentDelta, MessageAnswer, MessageEnding, MessageEvent, MessageUsage};
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::answers::{StopReason, finish_reason};
use crate::server::http::openai::chat::{COPIES, ChatOptions, MessagePart, MessageReader, WholeCall, WholeMessage};
use crate::server::http::{FinishedSamples, HttpError, Outbox, Samples, json, named_event};
use crate::types::TokenLogprobs;

/// Turns the events of one request into its message, or into the events of its stream.
pub(super) struct MessageWriter {
    id: String,
    options: ChatOptions,
    prompt_tokens: u64,
    kept: FinishedSamples,
    reader: MessageReader,
    ending: MessageEnding,
    has_begun: bool,
    /// The block that is being streamed.
    open: Option<OpenBlock>,
    /// Number of blocks that have ended.
    blocks: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    ToolUse,
}

impl MessageWriter {
    pub(super) fn new(request: &ValidRequest, options: ChatOptions, traffic: &Traffic) -> Self {
        let samples = if options.report.is_stream { 0 } else { 1 };
        Self {
            id: format!("msg_{}", request.request_id),
            prompt_tokens: request.prompts.first().map_or(0, |prompt| prompt.tokens.len() as u64),
            kept: FinishedSamples::new(samples, options.sample_bytes(), traffic),
            reader: MessageReader::new(&options, request),
            options,
            ending: MessageEnding::default(),
            has_begun: false,
            open: None,
            blocks: 0,
        }
    }

    /// The reason of the end of a message with or without calls.
    fn ending(&self, completion: &Completion, has_calls: bool) -> MessageEnding {
        let reason = |stop_reason| MessageEnding { stop_reason: Some(stop_reason), stop_sequence: None };
        match (finish_reason(completion.finish_reason), self.options.report.stop_reason(completion)) {
            ("length", _) => reason("max_tokens"),
            // The text of a call that is forced by its name is its arguments, which a stop string cuts off.
            ("stop", Some(StopReason::Text(text))) if !has_calls || self.options.names_call() => {
                MessageEnding { stop_sequence: Some(text), ..reason("stop_sequence") }
            }
            ("stop", _) => reason(if has_calls { "tool_use" } else { "end_turn" }),
            _ => MessageEnding::default(),
        }
    }

    /// The engine's text of a sample that has ended, with the stop string if the request includes it.
    fn whole(&self, completion: &Completion, text: String) -> String {
        text + &self.options.report.ending(completion)
    }

    /// Streams the parts that `text` completes.
    fn stream(&mut self, text: &str, is_last: bool, out: &mut Outbox) {
        self.begin(out);
        for part in self.reader.read(&self.options, text, is_last) {
            match part {
                MessagePart::Reasoning(text) | MessagePart::Content(text) if text.is_empty() => {}
                MessagePart::Reasoning(thinking) => {
                    if self.open != Some(OpenBlock::Thinking) {
                        let block = ContentBlock::Thinking { thinking: String::new(), signature: None };
                        self.open(OpenBlock::Thinking, block, out);
                    }
                    self.delta(ContentDelta::Thinking { thinking }, out);
                }
                MessagePart::Content(text) => {
                    if self.open != Some(OpenBlock::Text) {
                        self.open(OpenBlock::Text, ContentBlock::Text { text: String::new() }, out);
                    }
                    self.delta(ContentDelta::Text { text }, out);
                }
                MessagePart::Call { id, name } => {
                    self.open(OpenBlock::ToolUse, ContentBlock::ToolUse { id, name, input: object() }, out);
                }
                MessagePart::Arguments(partial_json) => self.delta(ContentDelta::InputJson { partial_json }, out),
            }
        }
    }

    /// Sends the first event, before all others.
    fn begin(&mut self, out: &mut Outbox) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let usage = MessageUsage::at_start(self.prompt_tokens);
        let none = RawValue::from_string("[]".into()).expect("it is JSON");
        let message = message(&self.id, &self.options, &self.ending, &none, usage);
        send(&MessageEvent::MessageStart { message: &message }, out);
    }

    fn open(&mut self, kind: OpenBlock, content_block: ContentBlock, out: &mut Outbox) {
        self.close(out);
        send(&MessageEvent::ContentBlockStart { content_block, index: self.blocks }, out);
        self.open = Some(kind);
    }

    fn delta(&self, delta: ContentDelta, out: &mut Outbox) {
        send(&MessageEvent::ContentBlockDelta { delta, index: self.blocks }, out);
    }

    fn close(&mut self, out: &mut Outbox) {
        let open = self.open.take();
        if open == Some(OpenBlock::Thinking) {
            self.delta(ContentDelta::Signature { signature: signature() }, out);
        }
        if open.is_some() {
            send(&MessageEvent::ContentBlockStop { index: self.blocks }, out);
            self.blocks += 1;
        }
    }
}

impl Samples for MessageWriter {
    const DONE: Option<&'static [u8]> = None;

    fn failed(&mut self, error: HttpError) -> Bytes {
        let mut out = Outbox::new();
        self.close(&mut out);
        out.push_back(named_event("error", &MessagesError::from(error)));
        out.into_iter().collect::<Vec<_>>().concat().into()
    }

    fn token(&mut self, _: (u32, u32), _: &TokenLogprobs, text: String, out: &mut Outbox) -> Result<()> {
        self.stream(&text, false, out);
        Ok(())
    }

    fn end_sample(
        &mut self,
        completion: &Completion,
        _: Option<&TokenLogprobs>,
        text: String,
        out: &mut Outbox,
    ) -> Result<()> {
        let text = self.whole(completion, text);
        self.stream(&text, true, out);
        self.ending = self.ending(completion, self.reader.calls() > 0);
        self.close(out);
        Ok(())
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let held = self.kept.hold(COPIES * completion.text.as_ref().map_or(0, String::len))?;
        let text = self.whole(&completion, completion.text.clone().unwrap_or_default());
        let WholeMessage { reasoning, content, calls } = self.reader.clone().read_whole(&self.options, &text);
        let thinking = |thinking| ContentBlock::Thinking { thinking, signature: Some(signature()) };
        let mut blocks = Vec::new();
        blocks.extend(reasoning.filter(|text| !text.is_empty()).map(thinking));
        blocks.extend(content.filter(|text| !text.is_empty()).map(|text| ContentBlock::Text { text }));
        blocks.extend(calls.into_iter().map(block));
        let has_calls = blocks.iter().any(|block| matches!(block, ContentBlock::ToolUse { .. }));
        if blocks.is_empty() {
            blocks.push(ContentBlock::Text { text: String::new() });
        }
        self.ending = self.ending(&completion, has_calls);
        self.kept.push(0, &blocks, held)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox) {
        let usage = MessageUsage::of(summary, self.options.report.chat_prompt_details(summary));
        send(&MessageEvent::MessageDelta { delta: &self.ending, usage }, out);
        send(&MessageEvent::MessageStop, out);
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let (id, options, ending) = (&self.id, &self.options, &self.ending);
        let usage = MessageUsage::of(summary, options.report.chat_prompt_details(summary));
        self.kept.finish(|content| json(&message(id, options, ending, &content[0], usage)))
    }
}

fn message<'a>(
    id: &'a str,
    options: &'a ChatOptions,
    ending: &MessageEnding,
    content: &'a RawValue,
    usage: MessageUsage,
) -> MessageAnswer<'a> {
    MessageAnswer {
        id,
        r#type: "message",
        role: "assistant",
        content,
        model: &options.report.model,
        ending: ending.clone(),
        usage,
    }
}

fn send(event: &MessageEvent<'_>, out: &mut Outbox) {
    out.push_back(named_event(event.name(), event));
}

/// A call as a block. Arguments that are not JSON, because they were cut off, stay text.
fn block(call: WholeCall) -> ContentBlock {
    let WholeCall { id, name, arguments } = call;
    match serde_json::from_str::<&RawValue>(&arguments) {
        Ok(_) => {
            let input = RawValue::from_string(arguments).expect("it has just been parsed");
            ContentBlock::ToolUse { id, name, input }
        }
        Err(_) => ContentBlock::Text { text: arguments },
    }
}

/// A signature of a block of thinking.
fn signature() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn object() -> Box<RawValue> {
    RawValue::from_string("{}".into()).expect("it is JSON")
}
