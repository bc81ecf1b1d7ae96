//! Calls below the level of a gRPC client: a request is any bytes, cut and ended in any way, and the answer is read as
//! it comes.

use std::fmt::Write as _;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Status};

/// Longer than any call takes on any machine; a call that takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Body of a request. An error in it breaks the stream off.
type Sent = StreamBody<Pin<Box<dyn Stream<Item = std::io::Result<Frame<Bytes>>> + Send>>>;

/// How the client ends its side of the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    /// With END_STREAM, as a good client does.
    Closed,
    /// With a reset of the stream.
    Broken,
    /// Not before the answer has come or the client hangs up.
    Open,
}

/// When the client hangs up before the answer is complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Leave {
    Never,
    AfterMessages(usize),
    After(Duration),
}

type Check = Box<dyn Fn(&[Bytes]) -> Result<(), String> + Send + Sync>;

/// One call, ready to be sent.
pub struct Call {
    /// Service and method as in the path: "rollout.v1.Rollout/Generate".
    pub method: &'static str,
    /// Value of the header grpc-timeout.
    pub timeout: Option<String>,
    /// The request's body, in the pieces in which it is sent.
    pub body: Vec<Bytes>,
    pub end: End,
    pub leave: Leave,
    /// Check of the messages of an answer that ends with OK.
    pub check: Option<Check>,
    /// Whether the bytes differ from those of the message that the call was made from.
    pub is_mutated: bool,
    /// The request as text, for the report of a failure.
    pub what: String,
}

#[derive(Debug)]
pub enum Outcome {
    Answered {
        code: Code,
        message: String,
        messages: Vec<Bytes>,
    },
    /// The client hung up before the end.
    Left,
}

impl Call {
    /// A call with one valid message.
    pub fn of<M: Message + std::fmt::Debug>(method: &'static str, message: &M) -> Self {
        let mut what = Shortened(String::new());
        // Writing fails where the text is cut off.
        let _ = write!(what, "{message:?}");
        Self { what: what.0, ..Self::raw(method, vec![envelope(&message.encode_to_vec())]) }
    }

    pub fn raw(method: &'static str, body: Vec<Bytes>) -> Self {
        let (end, leave) = (End::Closed, Leave::Never);
        Self { method, timeout: None, body, end, leave, check: None, is_mutated: false, what: String::new() }
    }

    /// Adds a check of the answer, which is skipped if the call's bytes were changed.
    pub fn checked(mut self, check: impl Fn(&[Bytes]) -> Result<(), String> + Send + Sync + 'static) -> Self {
        if !self.is_mutated {
            self.check = Some(Box::new(check));
        }
        self
    }

    /// The call as text, for the report of a failure.
    pub fn describe(&self) -> String {
        let bytes: usize = self.body.iter().map(Bytes::len).sum();
        let hex = |bytes: &Bytes| bytes.iter().take(200).map(|b| format!("{b:02x}")).collect::<String>();
        let first = self.body.first().map(hex).unwrap_or_default();
        let Self { method, timeout, body, end, leave, what, .. } = self;
        format!(
            "{method} timeout {timeout:?}, {bytes} bytes in {} pieces, {end:?}, {leave:?}\n    {what}\n    {first}...",
            body.len()
        )
    }
}

/// The beginning of a text. Writing stops with an error when it is long enough, so that the rest is never formatted.
struct Shortened(String);

impl std::fmt::Write for Shortened {
    fn write_str(&mut self, part: &str) -> std::fmt::Result {
        let room = 4_000 - self.0.len();
        self.0.push_str(&part[..part.floor_char_boundary(room)]);
        if part.len() > room { Err(std::fmt::Error) } else { Ok(()) }
    }
}

/// A message behind gRPC's compression flag and length.
pub fn envelope(message: &[u8]) -> Bytes {
    let mut bytes = vec![0];
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.extend(message);
    bytes.into()
}

/// An HTTP/2 connection to the server.
#[derive(Clone)]
pub struct Connection {
    sender: SendRequest<Sent>,
    authority: String,
    /// How the connection ended, once it has.
    end: tokio::sync::watch::Receiver<String>,
}

impl Connection {
    pub async fn open(authority: &str) -> Result<Self, String> {
        let stream = tokio::net::TcpStream::connect(authority).await.map_err(|e| format!("cannot connect: {e}"))?;
        stream.set_nodelay(true).map_err(|e| format!("no TCP_NODELAY: {e}"))?;
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        // Accepts long headers, so that a status that is too long is seen.
        builder.max_header_list_size(16 << 20);
        let (sender, driver) = builder.handshake(TokioIo::new(stream)).await.map_err(|e| format!("no HTTP/2: {e}"))?;
        let (ended, end) = tokio::sync::watch::channel(String::new());
        tokio::spawn(async move {
            let how = driver.await;
            // Sending fails if nobody wants to know.
            let _ = ended.send(format!("; the connection ended: {how:?}"));
        });
        Ok(Self { sender, authority: authority.into(), end })
    }

    /// Makes one call.
    ///
    /// # Errors
    /// A text about what no client should see: a call that does not end, an answer that is not gRPC, a broken
    /// connection.
    pub async fn call(&self, call: &Call) -> Result<Outcome, String> {
        let ending = tokio::time::timeout(PATIENCE, self.answer(call));
        let ended = match call.leave {
            Leave::After(time) => match tokio::time::timeout(time, ending).await {
                Ok(ended) => ended,
                Err(_) => return Ok(Outcome::Left),
            },
            _ => ending.await,
        };
        ended.unwrap_or_else(|_| Err(format!("the call hangs: no end after {PATIENCE:?}")))
    }

    async fn answer(&self, call: &Call) -> Result<Outcome, String> {
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(|e| format!("the connection is closed: {e:?}{}", *self.end.borrow()))?;
        let broke = |e: hyper::Error| match call.end {
            End::Broken => Ok(Outcome::Left),
            _ => Err(format!("the call broke: {e:?}{}", *self.end.borrow())),
        };
        let mut request = Request::post(format!("http://{}/{}", self.authority, call.method))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = &call.timeout {
            request = request.header("grpc-timeout", timeout);
        }
        let request = request.body(sent(call)).map_err(|e| format!("not a request: {e}"))?;
        match sender.send_request(request).await {
            Ok(response) => read(response, call.leave).await.or_else(broke),
            Err(error) => broke(error),
        }
        .and_then(|outcome| match &outcome {
            Outcome::Answered { code: Code::Unknown, message, .. } if message.is_empty() => {
                Err("the answer ended without a status".into())
            }
            _ => Ok(outcome),
        })
    }
}

fn sent(call: &Call) -> Sent {
    let pieces = tokio_stream::iter(call.body.clone()).map(|piece| Ok(Frame::data(piece)));
    let stream: Pin<Box<dyn Stream<Item = _> + Send>> = match call.end {
        End::Closed => Box::pin(pieces),
        End::Broken => Box::pin(pieces.chain(tokio_stream::once(Err(std::io::Error::other("broken off"))))),
        End::Open => Box::pin(pieces.chain(tokio_stream::pending())),
    };
    StreamBody::new(stream)
}

/// Reads the messages and the status of an answer.
async fn read(response: Response<Incoming>, leave: Leave) -> Result<Outcome, hyper::Error> {
    let (head, mut body) = response.into_parts();
    let mut status = status_of(&head.headers);
    let (mut messages, mut rest) = (Vec::new(), BytesMut::new());
    while let Some(frame) = body.frame().await {
        match frame?.into_data() {
            Ok(data) => {
                rest.extend(data);
                take_messages(&mut rest, &mut messages);
                if matches!(leave, Leave::AfterMessages(count) if messages.len() >= count) {
                    return Ok(Outcome::Left);
                }
            }
            Err(frame) => status = frame.trailers_ref().and_then(status_of).or(status),
        }
    }
    let status = status.unwrap_or_else(|| Status::new(Code::Unknown, ""));
    Ok(Outcome::Answered { code: status.code(), message: status.message().into(), messages })
}

fn status_of(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers)
}

fn take_messages(rest: &mut BytesMut, messages: &mut Vec<Bytes>) {
    while let Some(mut prefix) = rest.get(1..5) {
        let end = 5 + prefix.get_u32() as usize;
        if rest.len() < end {
            return;
        }
        messages.push(rest.split_to(end).freeze().slice(5..));
    }
}
