//! Makes responses, or the events of their streams, from the events of a request.

use bytes::Bytes;

use super::answers::{
    EventBody, IncompleteDetails, OutputItem, OutputKind, ResponseAnswer, ResponseEvent, ResponseUsage, item_id,
};
use super::request::Echo;
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::answers::{Null, finish_reason};
use crate::server::http::openai::chat::{COPIES, ChatOptions, MessagePart, MessageReader};
use crate::server::http::{FinishedSamples, HttpError, Outbox, Samples, json, named_event};
use crate::types::TokenLogprobs;

/// Bytes that an item takes besides its text.
const ITEM: usize = 512;

/// Turns the events of one request into its response, or into the events of its stream.
pub(super) struct ResponseWriter {
    id: String,
    options: ChatOptions,
    echo: Echo,
    kept: FinishedSamples,
    reader: MessageReader,
    reasoning_tokens: u64,
    output: Vec<OutputItem>,
    /// Whether the last item can take more text.
    is_open: bool,
    status: &'static str,
    sequence: Sequence,
}

/// Number of the next event of a stream.
#[derive(Default)]
struct Sequence(u64);

impl Sequence {
    /// Sends an event; nothing if there is no stream.
    fn send(&mut self, kind: &'static str, body: EventBody<'_>, out: &mut Option<&mut Outbox>) {
        if let Some(out) = out {
            out.push_back(named_event(kind, &ResponseEvent { r#type: kind, sequence_number: self.0, body }));
            self.0 += 1;
        }
    }
}

impl ResponseWriter {
    pub(super) fn new(request: &ValidRequest, options: ChatOptions, echo: Echo, traffic: &Traffic) -> Self {
        Self {
            id: format!("resp_{}", request.request_id),
            kept: FinishedSamples::new(0, options.sample_bytes() + echo.bytes(), traffic),
            reader: MessageReader::new(&options, request),
            options,
            echo,
            reasoning_tokens: 0,
            output: Vec::new(),
            is_open: false,
            status: "in_progress",
            sequence: Sequence::default(),
        }
    }

    /// Appends the parts that `text` completes to the output, and sends their events.
    fn add(&mut self, text: &str, is_last: bool, mut out: Option<&mut Outbox>) -> Result<()> {
        for part in self.reader.read(&self.options, text, is_last) {
            match part {
                MessagePart::Reasoning(_) if !self.options.includes_reasoning => {}
                MessagePart::Reasoning(text) => self.add_text(OutputKind::Reasoning, &text, &mut out)?,
                MessagePart::Content(text) => self.add_text(OutputKind::Message, &text, &mut out)?,
                MessagePart::Call { id: call_id, name } => {
                    let (id, arguments) = (item_id("fc"), String::new());
                    let item = OutputItem::FunctionCall { id, call_id, name, arguments, status: "in_progress" };
                    self.open(item, &mut out)?;
                }
                MessagePart::Arguments(text) => {
                    self.kept.hold(COPIES * text.len())?;
                    self.add_arguments(&text, &mut out);
                }
            }
        }
        Ok(())
    }

    /// Begins an item, after the end of the last one.
    fn open(&mut self, item: OutputItem, out: &mut Option<&mut Outbox>) -> Result<()> {
        self.close("completed", out);
        self.kept.hold(ITEM)?;
        let output_index = self.output.len();
        self.sequence.send("response.output_item.added", EventBody::Item { output_index, item: &item }, out);
        self.output.push(item);
        self.is_open = true;
        Ok(())
    }

    /// Appends `delta` to the last item if it has a text of this kind, else to a new one.
    fn add_text(&mut self, kind: OutputKind, delta: &str, out: &mut Option<&mut Outbox>) -> Result<()> {
        if delta.is_empty() {
            return Ok(());
        }
        self.kept.hold(COPIES * delta.len())?;
        if !self.is_open || self.output.last().and_then(OutputItem::kind) != Some(kind) {
            self.open(kind.item(), out)?;
        }
        let (output_index, content_index) = (self.output.len() - 1, 0);
        let Some((item_id, content)) = self.output.last_mut().and_then(OutputItem::text_mut) else { return Ok(()) };
        if content.is_empty() {
            content.push(kind.text());
            let body = EventBody::Part { item_id, output_index, content_index, part: &content[0] };
            self.sequence.send("response.content_part.added", body, out);
        }
        content[0].text.push_str(delta);
        let logprobs = content[0].logprobs;
        let body = EventBody::TextDelta { item_id, output_index, content_index, delta, logprobs };
        self.sequence.send(kind.events().0, body, out);
        Ok(())
    }

    fn add_arguments(&mut self, delta: &str, out: &mut Option<&mut Outbox>) {
        let output_index = self.output.len() - 1;
        if let Some(OutputItem::FunctionCall { id: item_id, arguments, .. }) = self.output.last_mut() {
            arguments.push_str(delta);
            let body = EventBody::ArgumentsDelta { item_id, output_index, delta };
            self.sequence.send("response.function_call_arguments.delta", body, out);
        }
    }

    /// Ends the last item, unless it has ended.
    fn close(&mut self, status: &'static str, out: &mut Option<&mut Outbox>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let (output_index, content_index) = (self.output.len() - 1, 0);
        let Some(item) = self.output.last_mut() else { return };
        match item {
            OutputItem::Reasoning { id: item_id, content, .. } | OutputItem::Message { id: item_id, content, .. } => {
                let (text, logprobs, part) = (&content[0].text, content[0].logprobs, &content[0]);
                let done = EventBody::TextDone { item_id, output_index, content_index, text, logprobs };
                self.sequence.send(part.r#type.events().1, done, out);
                let done = EventBody::Part { item_id, output_index, content_index, part };
                self.sequence.send("response.content_part.done", done, out);
            }
            OutputItem::FunctionCall { id: item_id, name, arguments, .. } => {
                let done = EventBody::ArgumentsDone { item_id, output_index, name, arguments };
                self.sequence.send("response.function_call_arguments.done", done, out);
            }
        }
        item.end(status);
        self.sequence.send("response.output_item.done", EventBody::Item { output_index, item }, out);
    }

    /// Takes the end of the sample.
    fn end(&mut self, completion: &Completion, mut text: String, mut out: Option<&mut Outbox>) -> Result<()> {
        self.reasoning_tokens = self.reader.reasoning_tokens(&completion.tokens).unwrap_or(0);
        text.push_str(&self.options.report.ending(completion));
        self.add(&text, true, out.as_deref_mut())?;
        self.status = match finish_reason(completion.finish_reason) {
            "stop" => "completed",
            "length" => "incomplete",
            _ => "cancelled",
        };
        self.close(if self.status == "completed" { "completed" } else { "incomplete" }, &mut out);
        Ok(())
    }

    /// Sends the first events of the stream, before all others.
    fn begin(&mut self, out: &mut Outbox) {
        if self.sequence.0 == 0 {
            self.send_response("response.created", None, out);
            self.send_response("response.in_progress", None, out);
        }
    }

    fn send_response(&mut self, kind: &'static str, usage: Option<ResponseUsage>, out: &mut Outbox) {
        let mut sequence = std::mem::take(&mut self.sequence);
        sequence.send(kind, EventBody::Response { response: &self.response(usage) }, &mut Some(out));
        self.sequence = sequence;
    }

    fn response(&self, usage: Option<ResponseUsage>) -> ResponseAnswer<'_> {
        ResponseAnswer {
            id: &self.id,
            object: "response",
            created_at: self.options.report.created,
            status: self.status,
            error: Null::default(),
            incomplete_details: (self.status == "incomplete")
                .then_some(IncompleteDetails { reason: "max_output_tokens" }),
            model: &self.options.report.model,
            output: &self.output,
            echo: &self.echo,
            background: false,
            store: false,
            previous_response_id: Null::default(),
            service_tier: "auto",
            truncation: "disabled",
            usage,
        }
    }
}

impl Samples for ResponseWriter {
    const DONE: Option<&'static [u8]> = None;

    fn failed(&mut self, error: HttpError) -> Bytes {
        let mut out = Outbox::new();
        let body = EventBody::Failed { code: error.kind, message: &error.message, param: error.param.as_deref() };
        self.sequence.send("error", body, &mut Some(&mut out));
        out.pop_back().unwrap_or_default()
    }

    fn token(&mut self, _: (u32, u32), _: &TokenLogprobs, text: String, out: &mut Outbox) -> Result<()> {
        self.begin(out);
        self.add(&text, false, Some(out))
    }

    fn end_sample(
        &mut self,
        completion: &Completion,
        _: Option<&TokenLogprobs>,
        text: String,
        out: &mut Outbox,
    ) -> Result<()> {
        self.begin(out);
        self.end(completion, text, Some(out))
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let text = completion.text.clone().unwrap_or_default();
        let held = self.kept.hold(COPIES * text.len())?;
        self.end(&completion, text, None)?;
        self.kept.release(held);
        Ok(())
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox) {
        let kind = if self.status == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.send_response(kind, Some(ResponseUsage::of(summary, self.reasoning_tokens)), out);
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let answer = json(&self.response(Some(ResponseUsage::of(summary, self.reasoning_tokens))));
        self.kept.finish(|_| answer)
    }
}
