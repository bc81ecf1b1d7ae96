//! Routes that sample: the start of their requests, and the gathering of samples into an answer or a stream of events.
//! Kept samples and unsent answers are counted: `test_answers_that_nobody_reads_are_counted_until_they_are_sent` in
//! `clients/python/tests/test_memory_ceiling_http.py`.

use std::collections::VecDeque;

use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::models::unknown_model;
use super::reply::{DONE, ReplyWriter, answer, event, json_bytes};
use super::{AppState, HttpError, HttpResult, JsonBody};
use crate::engine::{Completion, Event, RequestKind, Summary, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::server::calls::Deadline;
use crate::server::replies::Writer;
use crate::server::requests::{ReceivedRequest, start, takes_long};
use crate::server::security::Caller;
use crate::server::{ModelFacts, ServingContext, convert, pb};
use crate::text::ReasoningFormat;
use crate::types::TokenLogprobs;

/// Messages of a reply that are to be sent next.
pub(super) type Outbox = VecDeque<Bytes>;

/// Turns the events of one request into a route's answer. Events of a stream are appended to `out`; so is the answer,
/// once all samples have ended.
pub(super) trait Samples: Send + Unpin + 'static {
    /// See [`ReplyWriter::DONE`].
    const DONE: Option<&'static [u8]> = Some(DONE);

    /// See [`ReplyWriter::failed`].
    fn failed(&mut self, error: HttpError) -> Bytes {
        event(&error.into_body())
    }

    /// Takes the experts of the prompt's tokens, which not every route reports; empty if they are not kept.
    fn prompt_routing(&mut self, _prompt: usize, _routing: Vec<u8>) -> Result<()> {
        Ok(())
    }

    /// Takes the log-probabilities of a prompt, which not every route reports.
    fn prompt_logprobs(&mut self, _prompt: usize, _logprobs: Vec<TokenLogprobs>) -> Result<()> {
        Ok(())
    }

    /// Streams a token of a sample that does not end with it, and the text that it completes.
    fn token(&mut self, index: (u32, u32), token: &TokenLogprobs, text: String, out: &mut Outbox) -> Result<()>;

    /// Streams the end of a sample: its last token, unless it was aborted, and the rest of its text.
    fn end_sample(
        &mut self,
        completion: &Completion,
        last: Option<&TokenLogprobs>,
        text: String,
        out: &mut Outbox,
    ) -> Result<()>;

    /// Keeps a finished sample for the answer.
    fn keep_sample(&mut self, completion: Completion) -> Result<()>;

    /// Sends the last event of a stream.
    fn end_stream(&mut self, summary: &Summary, out: &mut Outbox);

    /// Makes the answer of the samples that were kept.
    fn answer(&mut self, summary: &Summary) -> Bytes;
}

/// Answers a request for samples. `read` returns the message to the engine, the format of the reasoning that a grammar
/// spares, and a function that makes the writer.
pub(super) async fn sample<T, S: Samples, W: FnOnce(&ValidRequest, &Traffic) -> S>(
    app: &AppState,
    body: JsonBody<T>,
    read: impl FnOnce(T, &ServingContext) -> Result<(pb::GenerateRequest, Option<ReasoningFormat>, W)>,
) -> HttpResult<Response> {
    let context = app.server.context()?;
    let JsonBody { value, bytes, charge, ignored, caller } = body;
    let (message, spared, writer) = read(value, &context)?;
    let (takes_long, is_stream) = (takes_long(&message, bytes), message.stream_tokens);
    let adapter = message.adapter.clone();
    let deadline = Deadline::new(None, &app.server);
    // As vLLM since 0.33.
    let waits_for_resume = false;
    let Caller { owner, tenant, .. } = caller;
    let received = ReceivedRequest { message, takes_long, charge, deadline, owner, tenant, waits_for_resume };
    let writer = |request: &ValidRequest| SampleWriter {
        is_stream,
        last: (None, String::new()),
        samples: writer(request, &context.traffic),
        charge: context.traffic.charge_always(0),
    };
    let convert = move |message, model: &ModelFacts, charge: &mut Charge| {
        convert::generate_sparing(message, spared, model, charge)
    };
    let replies = start(&app.server, received, convert, writer).await?;
    match answer(replies, is_stream, &ignored, &app.server.panics).await {
        // Other names that are not found are those of references.
        Err(Error::NotFound(why)) if why.starts_with("adapter:") => Err(unknown_model(&context, &adapter).await),
        answered => Ok(answered?),
    }
}

/// Number of samples that a request makes of each prompt.
pub(super) fn samples_per_prompt(request: &ValidRequest) -> usize {
    match request.kind {
        RequestKind::Generate { n, .. } => n as usize,
        RequestKind::Score => 0,
    }
}

/// Writes the samples of one request. It counts its messages until they have been sent, which can be much larger than
/// the events that they are made of.
struct SampleWriter<S> {
    is_stream: bool,
    /// The last token of a streamed sample, and its last text, until its end follows.
    last: (Option<TokenLogprobs>, String),
    samples: S,
    charge: Charge,
}

impl<S: Samples> SampleWriter<S> {
    fn take(&mut self, event: Event, out: &mut Outbox) -> Result<Option<Summary>> {
        let samples = &mut self.samples;
        match event {
            Event::Token { logprobs, text, is_last: true, .. } => {
                self.last = (Some(logprobs), text.unwrap_or_default())
            }
            Event::Token { prompt_index, sample_index, logprobs, text, is_last: false } => {
                samples.token((prompt_index, sample_index), &logprobs, text.unwrap_or_default(), out)?;
            }
            Event::Text { text, .. } => self.last.1.push_str(&text),
            Event::PromptDone { prompt_index, logprobs, routing, .. } => {
                samples.prompt_routing(prompt_index as usize, routing)?;
                if let Some(logprobs) = logprobs {
                    samples.prompt_logprobs(prompt_index as usize, logprobs)?;
                }
            }
            Event::Completion(completion) if self.is_stream => {
                let (last, text) = std::mem::take(&mut self.last);
                samples.end_sample(&completion, last.as_ref(), text, out)?;
            }
            Event::Completion(completion) => samples.keep_sample(completion)?,
            Event::Done(summary) => {
                match self.is_stream {
                    true => samples.end_stream(&summary, out),
                    false => out.push_back(samples.answer(&summary)),
                }
                return Ok(Some(summary));
            }
            Event::Failed(error) => return Err(error),
        }
        Ok(None)
    }
}

impl<S: Samples> Writer for SampleWriter<S> {
    type Message = Bytes;

    /// Called for the next event when the messages of the last one have been sent.
    fn write(&mut self, event: Event, out: &mut Outbox) -> Result<Option<Summary>> {
        self.charge.shrink(self.charge.bytes());
        let summary = self.take(event, out);
        self.charge.grow_always(out.iter().map(|message| message.len() as u64).sum());
        summary
    }
}

impl<S: Samples> ReplyWriter for SampleWriter<S> {
    const DONE: Option<&'static [u8]> = S::DONE;

    fn failed(&mut self, error: HttpError) -> Bytes {
        self.samples.failed(error)
    }
}

/// Finished samples of an answer, as JSON, and the count of everything that is kept for it.
pub(super) struct FinishedSamples {
    samples: Vec<Option<Box<RawValue>>>,
    charge: Charge,
}

impl FinishedSamples {
    /// Room for `samples` samples, beside `bytes` bytes.
    pub(super) fn new(samples: usize, bytes: usize, traffic: &Traffic) -> Self {
        Self { samples: (0..samples).map(|_| None).collect(), charge: traffic.charge_always(bytes as u64) }
    }

    /// Counts `bytes` more. Returns them, to be passed to [`Self::release`] or [`Self::push`].
    ///
    /// # Errors
    /// `ResourceExhausted` if there is no room.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<u64> {
        self.charge.grow_accepted(bytes as u64)?;
        Ok(bytes as u64)
    }

    pub(super) fn release(&mut self, held: u64) {
        self.charge.shrink(held);
    }

    /// Keeps a finished sample. `held` bytes, which were counted while it was made, are given back.
    ///
    /// # Errors
    /// `ResourceExhausted` if there is no room.
    pub(super) fn push(&mut self, index: usize, sample: &impl Serialize, held: u64) -> Result<()> {
        // Once for the sample, once for its copy in the answer, and once more while it is written.
        let length = json_bytes(sample);
        self.hold(3 * length)?;
        let written = serde_json::value::to_raw_value(sample)
            .map_err(|e| Error::Internal(format!("a sample cannot be written: {e}")))?;
        self.charge.shrink(length as u64 + held);
        self.samples[index] = Some(written);
        Ok(())
    }

    /// The answer that `answer` makes of the samples, which are dropped. The sender of the answer counts it.
    pub(super) fn finish(&mut self, answer: impl FnOnce(Vec<Box<RawValue>>) -> Bytes) -> Bytes {
        let answer = answer(std::mem::take(&mut self.samples).into_iter().flatten().collect());
        self.charge.shrink(self.charge.bytes());
        answer
    }
}
