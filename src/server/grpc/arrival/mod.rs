//! Takes in requests of one message as they arrive. Every byte is counted before it is kept, and so is the memory that
//! the decoded message will take, before it is decoded. tonic's own decoder would keep any number of messages up to
//! their size limit, and answer malformed ones with INTERNAL.

mod schema;
#[cfg(test)]
mod tests;
mod walk;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;
use tonic::{Request, Status};

use self::schema::{Schema, ShapeId};
use super::guard::role_of;
use super::status::to_status;
use super::updates::Frames;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::server::calls::{Deadline, PATIENCE, Pace};
use crate::server::gate::Gate;
use crate::server::pb;
use crate::server::role::Role;

/// Largest message of Generate and Score in bytes. A GRPO batch of 1,024 prompts of 8,192 token ids takes 24 MiB;
/// larger ones are better split over several requests.
pub(super) const MAX_LARGE_BYTES: usize = 64 << 20;
/// Largest message of any other method in bytes: names of parameters, ids of requests.
const MAX_SMALL_BYTES: usize = 4 << 20;
/// Largest message in bytes of a method that needs no token: the name of a service whose health is asked for.
const MAX_OPEN_BYTES: usize = 4 << 10;
/// Limit on the bytes of calls that need no token, so that they take nothing of the others' room, and of all calls
/// while the model loads and there is no ledger yet.
const OPEN_BYTES: u64 = 16 << 20;
/// The methods that take large messages.
const LARGE: [&str; 2] = ["/rollout.v1.Rollout/Generate", "/rollout.v1.Rollout/Score"];
/// Length of gRPC's prefix of each message: a compression flag and four bytes of length.
const PREFIX_BYTES: usize = 5;
/// Messages larger than this are checked on the blocking pool, because it takes about a millisecond.
const INLINE_BYTES: usize = 256 << 10;
/// Wraps a service, so that it gets each request's message whole and counted.
#[derive(Clone)]
pub(in crate::server) struct Gather<S> {
    inner: S,
    gate: Gate,
    open: Traffic,
    schema: Arc<Schema>,
    patience: Duration,
}

/// Makes the [`Gather`] of each service. They share the schema of the protocol.
#[derive(Clone)]
pub(in crate::server) struct Door {
    gate: Gate,
    /// Count of the bytes of calls that need no token, and of all calls while the model loads.
    open: Traffic,
    schema: Arc<Schema>,
}

impl Door {
    /// Reads the schema of the protocol from its descriptors.
    ///
    /// # Errors
    /// `Internal` if the descriptors are broken, which tests exclude.
    pub(in crate::server) fn new(gate: &Gate) -> Result<Self> {
        let schema = Schema::new(&[pb::DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET])?;
        Ok(Self { gate: gate.clone(), open: Traffic::new(OPEN_BYTES), schema: Arc::new(schema) })
    }

    pub(in crate::server) fn before<S>(&self, inner: S) -> Gather<S> {
        let Self { gate, open, schema } = self.clone();
        Gather { inner, gate, open, schema, patience: PATIENCE }
    }
}

impl<S: NamedService> NamedService for Gather<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Gather<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let method = self.schema.method(path);
        // For compressed messages tonic itself answers that it takes no compression, without reading the message.
        let is_encoded = request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity");
        let Some(method) = method.filter(|_| !is_encoded) else {
            return Box::pin(self.inner.call(request));
        };
        let is_open = role_of(path) == Role::Anyone;
        let max_bytes = match path {
            path if LARGE.contains(&path) => MAX_LARGE_BYTES,
            _ if is_open => MAX_OPEN_BYTES,
            _ => MAX_SMALL_BYTES,
        };
        let traffic = self.gate.traffic().ok().filter(|_| !is_open).unwrap_or_else(|| self.open.clone());
        let (schema, patience) = (self.schema.clone(), self.patience);
        let mut inner = self.inner.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let deadline = head.extensions.get::<Deadline>().cloned().unwrap_or_default();
            let arrive = async {
                let message = Arriving::new(&traffic, max_bytes).gather(Frames(body), patience).await?;
                message.read_through(schema, method.input).await
            };
            match deadline.limit(arrive).await {
                Ok(message) => {
                    head.extensions.insert(Arrived(Arc::new(message.charge)));
                    inner.call(http::Request::from_parts(head, Whole::body(message.bytes))).await
                }
                Err(error) => Ok(to_status(error).into_http()),
            }
        })
    }
}

/// The charge of a message that has arrived, kept in its request's extensions.
#[derive(Clone)]
struct Arrived(Arc<Charge>);

/// Takes the charge under which a request's message was received. It must live for as long as the message does.
pub(super) fn charge_of<T>(request: &mut Request<T>, traffic: &Traffic) -> Charge {
    let arrived = request.extensions_mut().remove::<Arrived>();
    // A request that did not come through [`Gather`], as in tests, has no charge.
    arrived.and_then(|arrived| Arc::into_inner(arrived.0)).unwrap_or_else(|| traffic.charge_always(0))
}

/// A message that is still arriving.
struct Arriving {
    charge: Charge,
    max_bytes: usize,
    prefix: Vec<u8>,
    /// Length of the message in bytes, known once its prefix has come.
    length: Option<usize>,
    message: Vec<u8>,
}

/// A message that has arrived completely.
struct Message {
    charge: Charge,
    bytes: Bytes,
}

impl Arriving {
    fn new(traffic: &Traffic, max_bytes: usize) -> Self {
        let charge = traffic.charge_always(0);
        Self { charge, max_bytes, prefix: Vec::new(), length: None, message: Vec::new() }
    }

    /// Collects the frames of a request into its message.
    ///
    /// # Errors
    /// `InvalidArgument` if the frames are not exactly one message within the size limit, `ResourceExhausted` if there
    /// is no room for it, `DeadlineExceeded` if it comes too slowly, `Unavailable` if the stream breaks.
    async fn gather<F>(mut self, mut frames: F, patience: Duration) -> Result<Message>
    where
        F: Stream<Item = std::result::Result<Bytes, Status>> + Unpin,
    {
        let mut pace = Pace::new(patience);
        loop {
            tokio::select! {
                biased;
                frame = frames.next() => match frame {
                    Some(Ok(frame)) => self.take(&frame)?,
                    Some(Err(status)) => {
                        return Err(Error::Unavailable(format!("the stream broke: {}", status.message())));
                    }
                    None => return self.whole(),
                },
                in_time = pace.check(self.message.len(), self.length) => in_time?,
            }
        }
    }

    fn take(&mut self, mut frame: &[u8]) -> Result<()> {
        let length = match self.length {
            Some(length) => length,
            None => {
                let (of_prefix, rest) = frame.split_at(frame.len().min(PREFIX_BYTES - self.prefix.len()));
                self.prefix.extend_from_slice(of_prefix);
                frame = rest;
                if self.prefix.len() < PREFIX_BYTES {
                    return Ok(());
                }
                let length = message_length(&self.prefix, self.max_bytes)?;
                self.length = Some(length);
                length
            }
        };
        if frame.is_empty() {
            return Ok(());
        }
        if self.message.len() + frame.len() > length {
            return Err(Error::invalid("request", "is followed by more; a call of this method has one message"));
        }
        self.charge.grow(frame.len() as u64)?;
        // Reserves the whole message; pages are taken only when bytes are written to them.
        self.message.reserve_exact(length - self.message.len());
        self.message.extend_from_slice(frame);
        Ok(())
    }

    fn whole(self) -> Result<Message> {
        match self.length {
            Some(length) if length == self.message.len() => {
                Ok(Message { charge: self.charge, bytes: self.message.into() })
            }
            Some(length) => {
                let message = format!("ends after {} of its {length} bytes", self.message.len());
                Err(Error::invalid("request", message))
            }
            None => Err(Error::invalid("request", "is missing")),
        }
    }
}

impl Message {
    /// Checks that the message is well formed, and charges the memory that the decoded message will take.
    async fn read_through(mut self, schema: Arc<Schema>, shape: ShapeId) -> Result<Self> {
        let bytes = self.bytes.clone();
        let read = move || walk::decoded_bytes(&schema, shape, &bytes);
        let decoded = if self.bytes.len() <= INLINE_BYTES {
            read()
        } else {
            let read = tokio::task::spawn_blocking(read).await;
            read.unwrap_or_else(|e| Err(Error::Internal(format!("reading the message failed: {e}"))))
        };
        // tonic copies the message before it decodes it, and frees this one in between.
        self.charge.grow(decoded?.max(self.bytes.len() as u64))?;
        Ok(self)
    }
}

/// Length in bytes of the message that follows `prefix`.
fn message_length(prefix: &[u8], max_bytes: usize) -> Result<usize> {
    let [compressed, a, b, c, d] = *prefix else { return Err(Error::invalid("request", "has no prefix")) };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if compressed != 0 {
        return Err(Error::invalid("request", format!("has the compression flag {compressed}; send it uncompressed")));
    }
    if length > max_bytes {
        let message = format!("{length} bytes are more than {max_bytes}; split the request over several");
        return Err(Error::invalid("request", message));
    }
    Ok(length)
}

/// A collected message as a body. Its first frame is the prefix, so that tonic makes room for exactly the rest.
struct Whole {
    prefix: Option<Bytes>,
    message: Option<Bytes>,
}

impl Whole {
    fn body(message: Bytes) -> Body {
        let mut prefix = vec![0];
        prefix.extend_from_slice(&(message.len() as u32).to_be_bytes());
        Body::new(Self { prefix: Some(prefix.into()), message: Some(message).filter(|m| !m.is_empty()) })
    }
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<http_body::Frame<Bytes>, Infallible>>> {
        let next = self.prefix.take().or_else(|| self.message.take());
        Poll::Ready(next.map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}
