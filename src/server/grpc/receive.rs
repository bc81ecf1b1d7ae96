//! Middleware that receives the message of each call before its service sees it. Every byte is counted before it is
//! kept, and so is the memory of the decoded message, before it is decoded: clients of many calls that never end, and
//! messages of a few bytes that decode to many (65,536 prompts of two bytes each), cannot fill the memory. tonic's own
//! decoder would keep any number of messages up to their size limit, and answer malformed ones with INTERNAL.
//!
//! Tests: `test_64_requests_that_never_end` and its neighbours in `clients/python/tests/test_memory_ceiling.py`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use tokio_stream::Stream;

use super::decoded_size::Schema;
use super::middleware::role_of;
use super::status::to_status;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::server::calls::{Deadline, STALL_TIMEOUT, receive};
use crate::server::security::Role;
use crate::server::{ServerState, pb};

/// Largest message of Generate and Score in bytes. A GRPO batch of 1,024 prompts of 8,192 token ids takes 24 MiB;
/// larger ones are better split over several requests.
pub(super) const MAX_LARGE_BYTES: usize = 64 << 20;
/// Largest message of any other method in bytes: names of parameters, ids of requests.
const MAX_SMALL_BYTES: usize = 4 << 20;
/// Largest message in bytes of a method that needs no token: the name of a service in a health check.
const MAX_OPEN_BYTES: usize = 4 << 10;
/// Limit on the bytes of calls that need no token, so that they take no room from the others, and of all calls while
/// the model loads and there is no ledger yet.
const OPEN_BYTES: u64 = 16 << 20;
/// The methods that take large messages.
const LARGE: [&str; 2] = ["/rollout.v1.Rollout/Generate", "/rollout.v1.Rollout/Score"];
/// Length of gRPC's prefix of each message: a compression flag and four bytes of length.
const PREFIX_BYTES: usize = 5;
/// Messages larger than this are checked on the blocking pool, because it takes about a millisecond.
const INLINE_BYTES: usize = 256 << 10;

/// Receives messages. Clones share the schema of the protocol.
#[derive(Clone)]
pub(super) struct MessageReceiver {
    server: ServerState,
    /// Count of the bytes of calls that need no token, and of all calls while the model loads.
    open: Traffic,
    schema: Arc<Schema>,
}

/// The charge of a received message, among its request's extensions.
#[derive(Clone)]
struct MessageCharge(Arc<Charge>);

impl MessageReceiver {
    /// Reads the schema of the protocol from its descriptors.
    ///
    /// # Errors
    /// `Internal` if the descriptors are broken, which tests exclude.
    pub(super) fn new(server: &ServerState) -> Result<Self> {
        let schema = Schema::new(&[pb::DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET])?;
        Ok(Self { server: server.clone(), open: Traffic::new(OPEN_BYTES), schema: Arc::new(schema) })
    }
}

/// Passes a call on with its message whole, well formed and counted, or rejects it.
pub(super) async fn receive_message(State(receiver): State<MessageReceiver>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    // tonic itself rejects compressed messages, without reading them.
    let is_encoded = request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity");
    let Some(input) = receiver.schema.input_of(path).filter(|_| !is_encoded) else { return next.run(request).await };
    let is_open = role_of(path) == Role::Anyone;
    let max_bytes = match path {
        path if LARGE.contains(&path) => MAX_LARGE_BYTES,
        _ if is_open => MAX_OPEN_BYTES,
        _ => MAX_SMALL_BYTES,
    };
    let traffic = receiver.server.traffic().ok().filter(|_| !is_open).unwrap_or_else(|| receiver.open.clone());
    let (mut head, body) = request.into_parts();
    let deadline = head.extensions.get::<Deadline>().cloned().unwrap_or_default();
    let message = async {
        let (message, charge) = gather(body.into_data_stream(), &traffic, max_bytes, STALL_TIMEOUT).await?;
        charge_decoded(&message, charge, receiver.schema, input).await.map(|charge| (message, charge))
    };
    match deadline.limit(message).await {
        Ok((message, charge)) => {
            head.extensions.insert(MessageCharge(Arc::new(charge)));
            next.run(Request::from_parts(head, body_of(message))).await
        }
        Err(error) => to_status(error).into_http(),
    }
}

/// Takes the charge under which a request's message was received. It must live for as long as the message does.
pub(super) fn charge_of<T>(request: &mut tonic::Request<T>, traffic: &Traffic) -> Charge {
    let received = request.extensions_mut().remove::<MessageCharge>();
    // A request that did not come through the middleware, as in tests, has no charge.
    received.and_then(|charge| Arc::into_inner(charge.0)).unwrap_or_else(|| traffic.charge_always(0))
}

/// A message that is not complete yet.
struct IncomingMessage {
    charge: Charge,
    max_bytes: usize,
    prefix: Vec<u8>,
    /// Length of the message in bytes, known once its prefix is complete.
    length: Option<usize>,
    bytes: Vec<u8>,
}

/// Collects the frames of a request into its message.
///
/// # Errors
/// `InvalidArgument` if the frames are not exactly one message within the size limit, `ResourceExhausted` if there is
/// no room for it, `DeadlineExceeded` if it is too slow, `Unavailable` if the stream breaks.
async fn gather<E: std::fmt::Display>(
    frames: impl Stream<Item = std::result::Result<Bytes, E>> + Unpin,
    traffic: &Traffic,
    max_bytes: usize,
    stall_timeout: Duration,
) -> Result<(Bytes, Charge)> {
    let charge = traffic.charge_always(0);
    let mut incoming = IncomingMessage { charge, max_bytes, prefix: Vec::new(), length: None, bytes: Vec::new() };
    let broken = |error| Error::Unavailable(format!("the stream broke: {error}"));
    receive(frames, stall_timeout, broken, |frame| incoming.add(frame)).await?;
    match incoming.length {
        Some(length) if length == incoming.bytes.len() => Ok((incoming.bytes.into(), incoming.charge)),
        Some(length) => {
            let message = format!("ends after {} of its {length} bytes", incoming.bytes.len());
            Err(Error::invalid("request", message))
        }
        None => Err(Error::invalid("request", "is missing")),
    }
}

impl IncomingMessage {
    /// Adds a frame. Returns how many bytes of the message are there, and its length.
    fn add(&mut self, mut frame: &[u8]) -> Result<(usize, Option<usize>)> {
        if self.length.is_none() {
            let (of_prefix, rest) = frame.split_at(frame.len().min(PREFIX_BYTES - self.prefix.len()));
            self.prefix.extend_from_slice(of_prefix);
            frame = rest;
            if self.prefix.len() == PREFIX_BYTES {
                self.length = Some(message_length(&self.prefix, self.max_bytes)?);
            }
        }
        if let Some(length) = self.length.filter(|_| !frame.is_empty()) {
            if self.bytes.len() + frame.len() > length {
                return Err(Error::invalid("request", "is followed by more; a call of this method has one message"));
            }
            self.charge.grow(frame.len() as u64)?;
            // Reserves the whole message; pages are taken only when bytes are written to them.
            self.bytes.reserve_exact(length - self.bytes.len());
            self.bytes.extend_from_slice(frame);
        }
        Ok((self.bytes.len(), self.length))
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

/// Checks that a message is well formed, and charges the memory that the decoded message will take.
async fn charge_decoded(message: &Bytes, mut charge: Charge, schema: Arc<Schema>, input: usize) -> Result<Charge> {
    let bytes = message.clone();
    let measure = move || schema.decoded_bytes(input, &bytes);
    let decoded = if message.len() <= INLINE_BYTES {
        measure()
    } else {
        let measured = tokio::task::spawn_blocking(measure).await;
        measured.unwrap_or_else(|e| Err(Error::Internal(format!("reading the message failed: {e}"))))
    };
    // tonic copies the message before it decodes it, and frees this one in between.
    charge.grow(decoded?.max(message.len() as u64))?;
    Ok(charge)
}

/// A message as a body. Its first frame is the prefix, so that tonic makes room for exactly the rest.
fn body_of(message: Bytes) -> Body {
    let mut prefix = vec![0];
    prefix.extend_from_slice(&(message.len() as u32).to_be_bytes());
    let frames = [prefix.into(), message].map(Ok::<_, std::convert::Infallible>);
    Body::from_stream(tokio_stream::iter(frames))
}

#[cfg(test)]
mod tests;
