//! Replies whose parts are made from the events of a request: one JSON value, or server-sent events.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use serde::Serialize;
use tokio_stream::{Stream, StreamExt as _};

use super::{HttpError, Ignored};
use crate::error::Error;
use crate::memory::Charge;
use crate::server::replies::{ReplyStream, Writer};
use crate::server::state::Panics;

/// The last event of OpenAI's streams.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";

/// A writer of HTTP's answers.
pub(super) trait ReplyWriter: Writer<Message = Bytes> {
    /// The last event of a stream, if the protocol has one.
    const DONE: Option<&'static [u8]>;

    /// The events of an error in the middle of a stream, whose status has been sent already.
    fn failed(&mut self, error: HttpError) -> Bytes;
}

/// One server-sent event of the type `name` that carries `value`.
pub(super) fn named_event(name: &str, value: &impl Serialize) -> Bytes {
    let mut named = format!("event: {name}\n").into_bytes();
    named.extend_from_slice(&event(value));
    named.into()
}

/// One server-sent event that carries `value`.
pub(super) fn event(value: &impl Serialize) -> Bytes {
    let mut event = b"data: ".to_vec();
    serde_json::to_writer(&mut event, value).expect("an answer is made of strings and numbers");
    event.extend_from_slice(b"\n\n");
    event.into()
}

/// `value` as the whole body of an answer. It is measured first, because a buffer that grows takes three times as much.
pub(super) fn json(value: &impl Serialize) -> Bytes {
    let mut body = Vec::with_capacity(json_bytes(value));
    serde_json::to_writer(&mut body, value).expect("an answer is made of strings and numbers");
    body.into()
}

/// Length in bytes of `value` as JSON.
pub(super) fn json_bytes(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).expect("an answer is made of strings and numbers");
    count.0
}

/// `answer`, whose body is covered by `charge` until it has been sent.
pub(super) fn counted(answer: Response, mut charge: Charge) -> Response {
    answer.map(|body| {
        let bytes = http_body::Body::size_hint(&body).exact().unwrap_or(0);
        charge.shrink(charge.bytes().saturating_sub(bytes));
        charge.grow_always(bytes - charge.bytes());
        Body::new(CountedBody { body, _charge: charge })
    })
}

/// A body with its charge. It keeps the default `is_end_stream` (false): hyper drops a body that has ended before it
/// has sent the last frame, and the charge would go with it.
struct CountedBody {
    body: Body,
    _charge: Charge,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Answers with the only message of `replies` as JSON, or with all its messages as events if `is_stream`. Waits for the
/// first message, so that a rejected request gets a status of its own.
///
/// # Errors
/// The error of the request, if it ends before its first message.
pub(super) async fn answer<W: ReplyWriter + 'static>(
    mut replies: ReplyStream<W>,
    is_stream: bool,
    ignored: &Ignored,
    panics: &Panics,
) -> Result<Response, Error> {
    let first = replies.next().await.unwrap_or_else(|| Err(Error::Internal("the reply has no message".into())))?;
    let length = if is_stream { SizeHint::default() } else { SizeHint::with_exact(first.len() as u64) };
    let ending = W::DONE.filter(|_| is_stream).map(Bytes::from_static);
    replies.messages.push_front(first);
    let body = Body::new(ReplyBody { replies, ending, length, panics: panics.clone() });
    if !is_stream {
        return Ok(ignored.name_in(([(CONTENT_TYPE, "application/json")], body)));
    }
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    Ok(ignored.name_in((headers, body)))
}

/// The body of a reply. The request's guards live in it, so that dropping it cancels the request.
struct ReplyBody<W: Writer> {
    replies: ReplyStream<W>,
    /// The event after the last message; None once it has been sent, and for a body that is not a stream of events.
    ending: Option<Bytes>,
    length: SizeHint,
    panics: Panics,
}

impl<W: ReplyWriter> http_body::Body for ReplyBody<W> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let message = match this.panics.catch(|| Pin::new(&mut this.replies).poll_next(cx)) {
            Ok(message) => ready!(message),
            Err(error) => {
                // Nothing is sent after this error.
                this.replies.messages.clear();
                this.replies.ended = true;
                this.ending = None;
                Some(Err(error))
            }
        };
        let next = match message {
            Some(message) => Some(message.unwrap_or_else(|error| this.replies.writer.failed(error.into()))),
            None => this.ending.take(),
        };
        Poll::Ready(next.map(|event| Ok(Frame::data(event))))
    }

    fn size_hint(&self) -> SizeHint {
        self.length
    }
}
