//! The way of a request's events from the engine to the door that its client came through.

use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::engine::{CancelFlag, EngineHandle, Event, Responder};
use crate::memory::Backlog;
use crate::server::context::ServingContext;

/// Cancels the request when dropped. A vanished client, a passed deadline and a handler that tonic drops all reach the
/// engine this way. It has no effect after the terminal event.
pub(in crate::server) struct CancelOnDrop {
    pub(in crate::server) flag: CancelFlag,
    engine: EngineHandle,
}

impl CancelOnDrop {
    pub(in crate::server) fn new(engine: &EngineHandle) -> Self {
        Self { flag: CancelFlag::default(), engine: engine.clone() }
    }

    /// Ends the request at this time with what it has. The task is none of the reply's, because a reply whose client
    /// reads nothing is not polled.
    pub(in crate::server) fn expire_at(&self, at: Instant) -> TimeLimit {
        let (flag, engine) = (self.flag.clone(), self.engine.clone());
        TimeLimit(tokio::spawn(async move {
            tokio::time::sleep_until(at.into()).await;
            engine.expire(&flag);
        }))
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.engine.cancel(&self.flag);
    }
}

/// The end of a request's time, unless it is dropped before.
pub(in crate::server) struct TimeLimit(JoinHandle<()>);

impl Drop for TimeLimit {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What the engine needs to answer a request: where its events go, and the count of those that are not read yet.
pub(in crate::server) struct ReplyEnd {
    pub(in crate::server) responder: Responder,
    pub(in crate::server) backlog: Backlog,
}

/// The engine's end and the reply's end of one request. The channel has no limit of its own, because the engine never
/// waits for a client. Its events are counted in the request's [`Backlog`], and the engine holds back a request whose
/// backlog is full.
pub(in crate::server) fn event_channel(context: &ServingContext) -> (ReplyEnd, Events) {
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
pub(in crate::server) struct Events {
    receiver: mpsc::UnboundedReceiver<Event>,
    backlog: Backlog,
    /// Bytes of the event that was returned last. The backlog counts them until the next event is asked for.
    in_hand: u64,
    engine: EngineHandle,
}

impl Events {
    /// The next event. Asking for it means that the messages made of the last one have been sent.
    pub(in crate::server) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
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
