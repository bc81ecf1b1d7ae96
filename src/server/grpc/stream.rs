//! The reply of one Generate: events of the engine in, messages out.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::deadline::{Deadline, exceeded};
use super::engine_gone;
use crate::engine::{CancelFlag, EngineHandle, Event, Responder};
use crate::server::convert::{Progress, ReplyWriter, to_status};
use crate::server::gate::Running;
use crate::server::pb::{GenerateResponse, generate_response};

/// Cancels the work when dropped, which is how a vanished client, a passed deadline and a handler that tonic drops all
/// reach the engine. After the terminal event it has no effect.
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

/// The engine's end and the reply's end of one request. The channel is unbounded because the engine must never wait
/// for a client; what it can hold is bounded by the request itself, `samples x max_tokens` token events at most.
pub(super) fn event_channel() -> (Responder, mpsc::UnboundedReceiver<Event>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let responder = move |event| {
        // The client may be gone; the cancel flag has told the engine.
        let _ = sender.send(event);
    };
    (Box::new(responder), receiver)
}

/// Ends with exactly one summary or one error status.
pub(in crate::server) struct GenerateStream {
    events: mpsc::UnboundedReceiver<Event>,
    writer: ReplyWriter,
    /// Made from events and not yet sent.
    messages: VecDeque<GenerateResponse>,
    deadline: Pin<Box<dyn Future<Output = ()> + Send>>,
    ended: bool,
    prompts: usize,
    samples: usize,
    _cancel: CancelOnDrop,
    _running: Running,
}

/// What a stream holds on to until it ends.
pub(super) struct StreamGuards {
    pub(super) cancel: CancelOnDrop,
    pub(super) running: Running,
    pub(super) deadline: Deadline,
}

impl GenerateStream {
    pub(super) fn new(
        events: mpsc::UnboundedReceiver<Event>,
        writer: ReplyWriter,
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
            _cancel: guards.cancel,
            _running: guards.running,
        }
    }

    fn fail(&mut self, status: Status) -> Poll<Option<Result<GenerateResponse, Status>>> {
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

    fn log_summary(&self) {
        let Some(generate_response::Event::Summary(s)) = self.messages.back().and_then(|m| m.event.as_ref()) else {
            return;
        };
        tracing::info!(
            request_id = s.request_id,
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

impl Stream for GenerateStream {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.messages.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            // Before the events, or a busy stream would never look at it.
            if this.deadline.as_mut().poll(cx).is_ready() {
                return this.fail(exceeded());
            }
            let Some(event) = ready!(this.events.poll_recv(cx)) else {
                return this.fail(to_status(engine_gone()));
            };
            match this.writer.write(event, &mut this.messages) {
                Progress::More => {}
                Progress::Done => {
                    this.ended = true;
                    this.log_summary();
                }
                Progress::Failed(error) => return this.fail(to_status(error)),
            }
        }
    }
}
