//! Middleware that receives the message of each call before its service sees it. Every byte is counted before it is
//! kept, and so is the memory of the decoded message, before it is decoded: clients of many calls that never end, and
//! messages of a few bytes that decode to many (65,536 prompts of two bytes each), cannot fill the memory. tonic's own
//! decoder would keep any number of messages up to their size limit, and answer malformed ones with INTERNAL.
//!
//! Tests: `test_64_requests_that_never_end` and its neighbours in `clients/python/tests/test_memory_ceiling.py`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::{Buf as _, Bytes};
use tokio_stream::Stream;

use super::decoded_size::Schema;
use super::middleware::role_of;
use super::status::to_status;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::server::calls::{Deadline, STALL_TIMEOUT, receive};
use crate::server::requests::off_thread;
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
pub(super) const PREFIX_BYTES: usize = 5;
/// Messages larger than this are checked on the blocking pool, because it takes about a millisecond.
const INLINE_BYTES: usize = 256 << 10;

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
    /// Fails if the descriptors of the protocol are broken, which tests exclude.
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
        let (framed, mut charge) = gather(body.into_data_stream(), &traffic, max_bytes, STALL_TIMEOUT).await?;
        let message = framed.slice(PREFIX_BYTES..);
        let length = message.len();
        let decoded = off_thread(length > INLINE_BYTES, move || receiver.schema.decoded_bytes(input, &message)).await?;
        // tonic copies the message before it decodes it, and frees this one in between.
        charge.grow(decoded.max(length as u64))?;
        Ok((framed, charge))
    };
    match deadline.limit(message).await {
        Ok((mut framed, charge)) => {
            head.extensions.insert(MessageCharge(Arc::new(charge)));
            // The prefix is a frame of its own, so that tonic makes room for exactly the rest.
            let frames = [framed.split_to(PREFIX_BYTES), framed].map(Ok::<_, Infallible>);
            next.run(Request::from_parts(head, Body::from_stream(tokio_stream::iter(frames)))).await
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

/// Collects the frames of a request into its message, with the prefix.
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
    let (mut charge, mut framed, mut length) = (traffic.charge_always(0), Vec::new(), None);
    let broken = |error| Error::Unavailable(format!("the stream broke: {error}"));
    receive(frames, stall_timeout, broken, |frame| {
        charge.grow(frame.len() as u64)?;
        framed.extend_from_slice(frame);
        let received = framed.len().saturating_sub(PREFIX_BYTES);
        if length.is_none() && framed.len() >= PREFIX_BYTES {
            length = Some(message_bytes(&framed, max_bytes)?);
        }
        if let Some(length) = length {
            if received > length {
                return Err(Error::invalid("request", "is followed by more; a call of this method has one message"));
            }
            // Reserves the whole message; pages are taken only when bytes are written to them.
            framed.reserve_exact(length - received);
        }
        Ok((received, length))
    })
    .await?;
    let received = framed.len().saturating_sub(PREFIX_BYTES);
    match length {
        Some(length) if length == received => Ok((framed.into(), charge)),
        Some(length) => Err(Error::invalid("request", format!("ends after {received} of its {length} bytes"))),
        None => Err(Error::invalid("request", "is missing")),
    }
}

/// Length in bytes of the message that follows `prefix`, gRPC's [`PREFIX_BYTES`].
///
/// # Errors
/// `InvalidArgument` if the message is compressed or longer than `max_bytes`.
pub(super) fn message_bytes(mut prefix: &[u8], max_bytes: usize) -> Result<usize> {
    let (compressed, bytes) = (prefix.get_u8(), prefix.get_u32() as usize);
    if compressed != 0 {
        return Err(Error::invalid("request", format!("has the compression flag {compressed}; send it uncompressed")));
    }
    if bytes > max_bytes {
        return Err(Error::invalid(
            "request",
            format!("{bytes} bytes are more than {max_bytes}; split it over several"),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
