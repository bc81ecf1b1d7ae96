//! The reply stream of one Generate or Score: takes the engine's events, gives messages.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::deadline::{Deadline, exceeded};
use super::engine_gone;
use crate::engine::{CancelFlag, EngineHandle, Event, Summary};
use crate::error::Error;
use crate::memory::Backlog;
use crate::server::context::ServingContext;
use crate::server::convert::{Progress, ReplyEnd, Writer, to_status};
use crate::server::gate::{Gate, Running};

/// Cancels the request when dropped. A vanished client, a passed deadline and a handler that tonic drops all reach the
/// engine this way. It has no effect after the terminal event.
pub(super) struct CancelOnDrop {
    pub(super) flag: CancelFlag,
    engine: EngineHandle,
}

impl CancelOnDrop {
    pub(super) fn new(engine: &EngineHandle) -> Self {
        Self { flag: CancelFlag::default(), engine: engine.clone() }
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.engine.cancel(&self.flag);
    }
}

/// The engine's end and the reply's end of one request. The channel has no limit of its own, because the engine never
/// waits for a client. Its events are counted in the request's [`Backlog`], and the engine holds back a request whose
/// backlog is full.
pub(super) fn event_channel(context: &ServingContext) -> (ReplyEnd, Events) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let backlog = Backlog::new(&context.traffic);
    let waiting = backlog.clone();
    let responder = move |event: Event| {
        waiting.add(event.bytes());
        // Sending fails if the client is gone; the cancel flag has told the engine.
        let _ = sender.send(event);
    };
    let events = Events { receiver, backlog: backlog.clone(), in_hand: 0, engine: context.engine.clone() };
    (ReplyEnd { responder: Box::new(responder), backlog }, events)
}

/// Receiver of a request's events.
pub(super) struct Events {
    receiver: mpsc::UnboundedReceiver<Event>,
    backlog: Backlog,
    /// Bytes of the event that was returned last. The backlog counts them until the next event is asked for.
    in_hand: u64,
    engine: EngineHandle,
}

impl Events {
    /// The next event. Asking for it means that the messages made of the last one have been sent.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.backlog.take(std::mem::take(&mut self.in_hand)) {
            self.engine.look();
        }
        let event = ready!(self.receiver.poll_recv(cx));
        // The backlog counts the event until its messages have been sent, and as much again for the messages and for
        // their encoded bytes.
        let bytes = event.as_ref().map_or(0, Event::bytes);
        self.backlog.add(2 * bytes);
        self.in_hand = 3 * bytes;
        Poll::Ready(event)
    }
}

/// The reply of one request. It ends after the last message, or with an error status.
pub(in crate::server) struct ReplyStream<W: Writer> {
    events: Events,
    writer: W,
    /// Messages that have been made and not yet sent.
    messages: VecDeque<W::Message>,
    deadline: Pin<Box<dyn Future<Output = ()> + Send>>,
    ended: bool,
    prompts: usize,
    samples: usize,
    gate: Gate,
    _cancel: CancelOnDrop,
    _running: Running,
}

/// Guards that a reply stream holds until it ends.
pub(super) struct StreamGuards {
    pub(super) cancel: CancelOnDrop,
    pub(super) running: Running,
    pub(super) deadline: Deadline,
    pub(super) gate: Gate,
}

impl<W: Writer> ReplyStream<W> {
    pub(super) fn new(events: Events, writer: W, (prompts, samples): (usize, usize), guards: StreamGuards) -> Self {
        Self {
            events,
            writer,
            messages: VecDeque::new(),
            deadline: Box::pin(guards.deadline.passed()),
            ended: false,
            prompts,
            samples,
            gate: guards.gate,
            _cancel: guards.cancel,
            _running: guards.running,
        }
    }

    fn fail(&mut self, status: Status) -> Poll<Option<Result<W::Message, Status>>> {
        self.ended = true;
        self.messages.clear();
        tracing::info!(
            request_id = self.writer.request_id(),
            prompts = self.prompts,
            samples = self.samples,
            code = ?status.code(),
            "request failed: {}",
            status.message()
        );
        Poll::Ready(Some(Err(status)))
    }

    fn log_summary(&self, s: &Summary) {
        tracing::info!(
            request_id = self.writer.request_id(),
            prompts = self.prompts,
            samples = self.samples,
            prompt_tokens = s.prompt_tokens,
            cached_tokens = s.cached_tokens,
            completion_tokens = s.completion_tokens,
            seconds = s.seconds,
            tokens_per_second = if s.seconds > 0.0 { s.completion_tokens as f64 / s.seconds } else { 0.0 },
            "request finished"
        );
    }
}

impl<W: Writer> Stream for ReplyStream<W> {
    type Item = Result<W::Message, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.messages.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            // The deadline is polled before the events, because a busy stream would never come to it.
            if this.deadline.as_mut().poll(cx).is_ready() {
                return this.fail(exceeded());
            }
            let Some(event) = ready!(this.events.poll_next(cx)) else {
                return this.fail(to_status(engine_gone()));
            };
            let summary = if let Event::Done(summary) = &event { Some(summary.clone()) } else { None };
            match this.writer.write(event, &mut this.messages) {
                Progress::More => {}
                Progress::Done => {
                    this.ended = true;
                    summary.iter().for_each(|summary| this.log_summary(summary));
                }
                Progress::Failed(Error::Aborted(_)) if this.gate.is_ending() => {
                    return this.fail(to_status(Error::Unavailable("the server is shutting down".into())));
                }
                Progress::Failed(error) => return this.fail(to_status(error)),
            }
        }
    }
}
