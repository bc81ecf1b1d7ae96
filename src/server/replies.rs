//! The reply of one request: receives the engine's events, and makes the messages that gRPC or HTTP sends. A
//! client that never reads cannot fill the memory: `test_tokens_that_nobody_reads` in
//! `clients/python/tests/test_memory_ceiling.py`.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::Stream;

use super::calls::{CancelOnDrop, deadline_exceeded, engine_gone};
use super::state::{InFlight, ServerState, ServingContext, shutting_down};
use crate::engine::{EngineHandle, Event, Responder, Summary};
use crate::error::{Error, Result};
use crate::memory::{Backlog, Charge};

/// The engine's end and the reply's end of one request's events, and the count of those that are not read yet. The
/// channel has no limit of its own, because the engine never waits for a client: it suspends a request whose
/// [`Backlog`] is full.
pub(super) fn event_channel(context: &ServingContext) -> (Responder, Backlog, Events) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let backlog = Backlog::new(&context.traffic);
    let waiting = backlog.clone();
    let responder = move |event: Event| {
        waiting.add(event.bytes());
        // Sending fails if the client is gone, which the engine knows by the cancel flag.
        let _ = sender.send(event);
    };
    let events = Events { receiver, backlog: backlog.clone(), in_hand: 0, engine: context.engine.clone() };
    (Box::new(responder), backlog, events)
}

/// Receiver of a request's events.
pub(super) struct Events {
    receiver: mpsc::UnboundedReceiver<Event>,
    backlog: Backlog,
    /// Bytes of the event that was returned last. The backlog counts them until the next poll.
    in_hand: u64,
    engine: EngineHandle,
}

impl Events {
    /// The next event. Polling for it means that the messages made of the last one have been sent.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
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

/// Turns the events of one request into the messages of its reply.
pub(super) trait Writer: Send + Unpin {
    type Message: Send + Unpin;

    /// Appends the messages for `event` to `out`. Returns the summary once the reply is complete.
    ///
    /// # Errors
    /// The error that ends the reply, as its status.
    fn write(&mut self, event: Event, out: &mut VecDeque<Self::Message>) -> Result<Option<Summary>>;
}

/// The reply of one request. It ends after the last message, or with an error.
pub(super) struct ReplyStream<W: Writer> {
    pub(super) events: Events,
    pub(super) writer: W,
    pub(super) request_id: String,
    /// Messages that have been made and not yet sent.
    pub(super) messages: VecDeque<W::Message>,
    pub(super) deadline: Pin<Box<dyn Future<Output = ()> + Send>>,
    pub(super) ended: bool,
    pub(super) prompts: usize,
    pub(super) samples: usize,
    pub(super) server: ServerState,
    /// Held until the reply ends: dropping them cancels the request, and gives back the bytes of its prompts, which the
    /// writer may hold to the end.
    pub(super) _guards: (CancelOnDrop, InFlight, Charge, Option<JoinSet<()>>),
}

impl<W: Writer> ReplyStream<W> {
    fn fail(&mut self, error: Error) -> Poll<Option<Result<W::Message>>> {
        self.ended = true;
        self.messages.clear();
        self.server.observer.journal.error(&error, Some(&self.request_id));
        tracing::info!(
            request_id = self.request_id,
            prompts = self.prompts,
            samples = self.samples,
            "request failed: {error}",
        );
        Poll::Ready(Some(Err(error)))
    }

    fn log_summary(&self, s: &Summary) {
        tracing::info!(
            request_id = self.request_id,
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
    type Item = Result<W::Message>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.messages.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            // The deadline is polled before the events, because a busy stream would never reach it.
            if this.deadline.as_mut().poll(cx).is_ready() {
                return this.fail(deadline_exceeded());
            }
            let Some(event) = ready!(this.events.poll_next(cx)) else {
                return this.fail(engine_gone());
            };
            match this.writer.write(event, &mut this.messages) {
                Ok(None) => {}
                Ok(Some(summary)) => {
                    this.ended = true;
                    this.log_summary(&summary);
                }
                Err(Error::Aborted(_)) if this.server.is_ending() => return this.fail(shutting_down()),
                Err(error) => return this.fail(error),
            }
        }
    }
}
