//! The reply of one request: takes the engine's events, gives what the door sends.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio_stream::Stream;

use super::ask::engine_gone;
use super::deadline::{Deadline, exceeded};
use super::events::{CancelOnDrop, Events, TimeLimit};
use crate::engine::{Event, Summary};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::server::gate::{Gate, Running};

/// What an event means for the progress of its request.
#[derive(Debug)]
pub(in crate::server) enum Progress {
    More,
    /// The reply is complete.
    Done,
    /// The reply ends here, with this error as its status.
    Failed(Error),
}

/// Turns the events of one request into the messages of its reply.
pub(in crate::server) trait Writer: Send + Unpin {
    type Message: Send + Unpin;

    fn request_id(&self) -> &str;

    /// Appends the messages for `event` to `out`.
    fn write(&mut self, event: Event, out: &mut VecDeque<Self::Message>) -> Progress;
}

/// The reply of one request. It ends after the last message, or with an error.
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
    _prompts: Charge,
    _time_limit: Option<TimeLimit>,
}

/// Guards that a reply stream holds until it ends.
pub(in crate::server) struct StreamGuards {
    pub(in crate::server) cancel: CancelOnDrop,
    pub(in crate::server) running: Running,
    pub(in crate::server) deadline: Deadline,
    pub(in crate::server) gate: Gate,
    /// Counts the prompts, which the writer may hold to the end.
    pub(in crate::server) prompts: Charge,
    pub(in crate::server) time_limit: Option<TimeLimit>,
}

impl<W: Writer> ReplyStream<W> {
    pub(in crate::server) fn new(
        events: Events,
        writer: W,
        (prompts, samples): (usize, usize),
        guards: StreamGuards,
    ) -> Self {
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
            _prompts: guards.prompts,
            _time_limit: guards.time_limit,
        }
    }

    fn fail(&mut self, error: Error) -> Poll<Option<Result<W::Message>>> {
        self.ended = true;
        self.messages.clear();
        self.gate.observer.journal.error(&error, Some(self.writer.request_id()));
        tracing::info!(
            request_id = self.writer.request_id(),
            prompts = self.prompts,
            samples = self.samples,
            "request failed: {error}",
        );
        Poll::Ready(Some(Err(error)))
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
            // The deadline is polled before the events, because a busy stream would never come to it.
            if this.deadline.as_mut().poll(cx).is_ready() {
                return this.fail(exceeded());
            }
            let Some(event) = ready!(this.events.poll_next(cx)) else {
                return this.fail(engine_gone());
            };
            let summary = if let Event::Done(summary) = &event { Some(summary.clone()) } else { None };
            match this.writer.write(event, &mut this.messages) {
                Progress::More => {}
                Progress::Done => {
                    this.ended = true;
                    summary.iter().for_each(|summary| this.log_summary(summary));
                }
                Progress::Failed(Error::Aborted(_)) if this.gate.is_ending() => {
                    return this.fail(Error::Unavailable("the server is shutting down".into()));
                }
                Progress::Failed(error) => return this.fail(error),
            }
        }
    }
}
