//! The method Update: decodes its messages from frames that may end anywhere. tonic's decoder would first gather each
//! message, which copies every chunk of weights into fresh pages. Here the data of a chunk is passed on in the pieces
//! in which it arrived. An incomplete message is charged, and the number of updates at once is limited:
//! `test_500_pushes_that_never_end` in `clients/python/tests/test_memory_ceiling.py`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::{Buf, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::decode_varint;
use sync_wrapper::SyncWrapper;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

use super::middleware::{Answer, answer, caller_of, deadline_of};
use super::receive::{PREFIX_BYTES, message_bytes};
use super::status::to_status;
use crate::engine::{Activity, UpdateSender};
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::observe::PushGuard;
use crate::server::pb::update_request::Kind;
use crate::server::pushes::{self, PushThread, StagedUpdate};
use crate::server::{ServerState, ServingContext, convert, pb};
use crate::types::Tenant;
use crate::weights::UpdateHeader;

/// Largest chunk of a tensor in bytes: how much room a client must have for one, and how much it loses with a bad
/// message.
const MAX_CHUNK_BYTES: usize = 4 << 20;
/// Largest message of an update in bytes: a chunk, or a header with the manifest of a model of 50,000 tensors.
const MAX_MESSAGE_BYTES: usize = 8 << 20;
/// Most chunks that are passed on together. A frame has 16 of tensors of 64 KiB; the number is a bound for tiny ones.
const MAX_TOGETHER: usize = 64;
/// Most bytes that precede the data in an encoded chunk: four keys, two lengths below 2^28, a u32 and a u64.
const HEAD_BYTES: usize = 4 + 2 * 4 + 5 + 10;

/// The body of an update, among its request's extensions, which threads share.
#[derive(Clone)]
struct UpdateBody(Arc<SyncWrapper<Body>>);

/// Sets the body of an update aside, where tonic's decoder does not see it.
pub(super) async fn set_body_aside(mut request: Request, next: Next) -> Response {
    if request.uri().path() == "/rollout.v1.Weights/Update" {
        let body = std::mem::take(request.body_mut());
        request.extensions_mut().insert(UpdateBody(Arc::new(SyncWrapper::new(body))));
    }
    next.run(request).await
}

/// One transaction, within the deadline of its call.
pub(super) async fn receive<T>(server: &ServerState, mut request: tonic::Request<T>) -> Answer<pb::UpdateResponse> {
    let (deadline, tenant) = (deadline_of(&request), caller_of(&request).tenant);
    let peer = request.remote_addr().map_or_else(|| "an unknown address".into(), |peer| peer.to_string());
    let body = request.extensions_mut().remove::<UpdateBody>();
    let body = body.and_then(|body| Arc::into_inner(body.0)).map(SyncWrapper::into_inner);
    let body = body.ok_or_else(|| Status::internal("the body of an update was not set aside"))?;
    let traffic = server.traffic().map_err(to_status)?;
    let receive = |context: Arc<ServingContext>, sender: UpdateSender, noted| async move {
        let (frames, activity) = (body.into_data_stream(), sender.activity.clone());
        let messages = UpdateMessages::new(frames, &traffic, activity, context.update_idle);
        receive_push(&context, messages, tenant, sender, noted).await
    };
    answer(deadline, pushes::transact(server, peer, receive)).await
}

/// Receives and verifies a push up to its commit.
async fn receive_push(
    context: &Arc<ServingContext>,
    mut messages: UpdateMessages,
    tenant: Tenant,
    sender: UpdateSender,
    noted: PushGuard,
) -> Result<StagedUpdate> {
    let Some(Kind::Header(header)) = messages.next().await? else {
        return Err(Error::invalid("header", "is missing; it is the first message of an update"));
    };
    let (header, tensors) = convert::header(header)?;
    let header = UpdateHeader { tenant, ..header };
    let mut declared = tensors.len();
    let mut push = PushThread::open(context, header, tensors, sender, noted).await?;
    loop {
        match messages.next().await? {
            Some(Kind::Chunk(chunk)) => push.chunks(messages.with_those_here(chunk)).await?,
            Some(Kind::Manifest(manifest)) => {
                let tensors = convert::tensors(manifest.tensors, declared)?;
                declared += tensors.len();
                push.declare(tensors).await?;
            }
            Some(Kind::Commit(pb::Commit {})) => return push.finish().await,
            Some(Kind::Header(_)) => return Err(Error::invalid("header", "comes once, at the start")),
            None => {
                return Err(Error::invalid("commit", "is missing: the stream ended without; nothing is changed"));
            }
        }
    }
}

/// Decoder of an update's messages from frames that may end anywhere.
struct UpdateMessages {
    frames: Pin<Box<dyn Stream<Item = std::result::Result<Bytes, axum::Error>> + Send>>,
    activity: Activity,
    /// Longest time to wait for the next byte.
    idle_limit: Duration,
    /// The next bytes, and the frame that follows them. All bytes received and not yet decoded are in `front`.
    front: Bytes,
    rest: Bytes,
    chunk: Option<OpenChunk>,
    /// Charge of the bytes that are held: an incomplete message may be as large as a manifest, and never end.
    charge: Charge,
}

/// A chunk whose data is incomplete.
#[derive(Debug, PartialEq)]
struct OpenChunk {
    tensor: u32,
    /// Offset in the tensor of the chunk's next byte.
    offset: u64,
    left: usize,
}

impl UpdateMessages {
    /// A decoder that ends the push after `idle_limit` without a byte.
    fn new(
        frames: impl Stream<Item = std::result::Result<Bytes, axum::Error>> + Send + 'static,
        traffic: &Traffic,
        activity: Activity,
        idle_limit: Duration,
    ) -> Self {
        let (front, rest, charge) = (Bytes::new(), Bytes::new(), traffic.charge_always(0));
        Self { frames: Box::pin(frames), activity, idle_limit, front, rest, chunk: None, charge }
    }

    /// The next message; None at the end of the stream. A chunk may be returned as several chunks of consecutive
    /// offsets.
    ///
    /// # Errors
    /// `InvalidArgument` for a message that is malformed, cut off, too long, compressed or empty; `ResourceExhausted`
    /// if there is no room for it; `Aborted` if the stream breaks or is idle for too long.
    async fn next(&mut self) -> Result<Option<Kind>> {
        // The caller has handled the message before, which counts as activity.
        self.activity.touch();
        if let Some(chunk) = self.chunk_here() {
            return Ok(Some(Kind::Chunk(chunk)));
        }
        if let Some(chunk) = self.chunk.take() {
            return self.piece(chunk).await.map(Some);
        }
        if !self.gather(PREFIX_BYTES).await? {
            return if self.front.is_empty() { Ok(None) } else { Err(cut()) };
        }
        let bytes = message_bytes(&self.front.split_to(PREFIX_BYTES), MAX_MESSAGE_BYTES)?;
        let head = bytes.min(HEAD_BYTES);
        self.need(head).await?;
        if let Some((head, chunk)) = chunk_head(&self.front[..head], bytes) {
            check_chunk(chunk.left)?;
            self.front.advance(head);
            return self.piece(chunk).await.map(Some);
        }
        self.need(bytes).await?;
        let message = pb::UpdateRequest::decode(self.front.split_to(bytes))
            .map_err(|e| Error::invalid("message", format!("is not an UpdateRequest: {e}")))?;
        match message.kind {
            None => Err(Error::invalid("kind", "is empty; send a header, manifests and chunks, and a commit")),
            Some(Kind::Chunk(chunk)) => check_chunk(chunk.data.len()).map(|()| Some(Kind::Chunk(chunk))),
            kind => Ok(kind),
        }
    }

    /// A chunk and those behind it whose data, or a part of it, is in the same frame: tensors of a few KiB would
    /// otherwise each wake the thread that receives the push.
    fn with_those_here(&mut self, first: pb::Chunk) -> Vec<pb::Chunk> {
        let mut chunks = vec![first];
        while chunks.len() < MAX_TOGETHER
            && let Some(chunk) = self.chunk_here()
        {
            chunks.push(chunk);
        }
        chunks
    }

    /// The next message, if it is a chunk of which some data is in `front`. An invalid message is left for
    /// [`UpdateMessages::next`] to refuse.
    fn chunk_here(&mut self) -> Option<pb::Chunk> {
        let chunk = if self.chunk.is_some() {
            self.chunk.take_if(|_| !self.front.is_empty())?
        } else {
            let (prefix, rest) = self.front.split_at_checked(PREFIX_BYTES)?;
            let bytes = message_bytes(prefix, MAX_MESSAGE_BYTES).ok()?;
            let (head, chunk) = chunk_head(rest.get(..bytes.min(HEAD_BYTES))?, bytes)?;
            check_chunk(chunk.left).ok().filter(|()| rest.len() > head)?;
            self.front.advance(PREFIX_BYTES + head);
            chunk
        };
        Some(self.split_front(chunk))
    }

    /// The part of a chunk's data that has arrived, as a chunk of its own.
    async fn piece(&mut self, chunk: OpenChunk) -> Result<Kind> {
        self.need(1).await?;
        Ok(Kind::Chunk(self.split_front(chunk)))
    }

    /// The part of a chunk's data that is in `front`, as a chunk of its own.
    fn split_front(&mut self, chunk: OpenChunk) -> pb::Chunk {
        let OpenChunk { tensor, offset, left } = chunk;
        let data = self.front.split_to(left.min(self.front.len()));
        let left = left - data.len();
        if left > 0 {
            // An offset that is too large is rejected when its first piece is handled.
            self.chunk = Some(OpenChunk { tensor, offset: offset.saturating_add(data.len() as u64), left });
        }
        pb::Chunk { tensor, offset, data }
    }

    async fn need(&mut self, bytes: usize) -> Result<()> {
        if self.gather(bytes).await? { Ok(()) } else { Err(cut()) }
    }

    /// Waits until `front` has at least `bytes` bytes; false if the stream ends before. Copies only bytes that are
    /// spread over several frames.
    async fn gather(&mut self, bytes: usize) -> Result<bool> {
        loop {
            if self.front.is_empty() {
                self.front = std::mem::take(&mut self.rest);
            }
            self.charge.set((self.front.len() + self.rest.len()) as u64)?;
            if self.front.len() >= bytes {
                return Ok(true);
            }
            if self.rest.is_empty() {
                let Some(frame) = self.frame().await? else { return Ok(false) };
                self.rest = frame;
                continue;
            }
            let missing = bytes - self.front.len();
            // Takes `front` over without a copy, so that bytes that were joined before are not copied again.
            let mut joined = BytesMut::from(std::mem::take(&mut self.front));
            joined.extend_from_slice(&self.rest.split_to(missing.min(self.rest.len())));
            self.front = joined.freeze();
        }
    }

    /// Waits for the next frame with bytes; None at the end. Neither the time that the server spends on earlier
    /// messages nor an empty frame counts as activity.
    async fn frame(&mut self) -> Result<Option<Bytes>> {
        let Self { frames, activity, idle_limit, .. } = self;
        loop {
            let left = idle_limit.saturating_sub(activity.idle());
            match tokio::time::timeout(left, frames.next()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) if !frame.is_empty() => {
                    activity.touch();
                    return Ok(Some(frame));
                }
                Ok(Some(Err(error))) => return Err(Error::Aborted(format!("the stream broke: {error}"))),
                _ if activity.idle() < *idle_limit => {}
                _ => {
                    let seconds = idle_limit.as_secs();
                    return Err(Error::Aborted(format!(
                        "the update has sent nothing for {seconds} s (--update-idle-seconds) and is ended: nothing it \
                         sent is kept"
                    )));
                }
            }
        }
    }
}

/// Reads the head of an encoded message of `bytes` bytes that is a chunk whose data comes last, as encoders write it.
/// Returns the number of bytes before the data, and the chunk; None for any other message, and for a malformed one.
fn chunk_head(head: &[u8], bytes: usize) -> Option<(usize, OpenChunk)> {
    // Keys of UpdateRequest.chunk, and of Chunk's fields tensor, offset and data.
    const CHUNK: u8 = 0x1a;
    const TENSOR: u8 = 0x08;
    const OFFSET: u8 = 0x10;
    const DATA: u8 = 0x1a;

    fn field(rest: &mut &[u8], key: u8) -> Option<u64> {
        *rest = rest.strip_prefix(&[key])?;
        decode_varint(rest).ok()
    }
    fn optional(rest: &mut &[u8], key: u8) -> Option<u64> {
        if rest.first() == Some(&key) { field(rest, key) } else { Some(0) }
    }
    let used = |rest: &[u8]| head.len() - rest.len();
    let mut rest = head;
    if field(&mut rest, CHUNK)? != (bytes - used(rest)) as u64 {
        return None;
    }
    let tensor = u32::try_from(optional(&mut rest, TENSOR)?).ok()?;
    let offset = optional(&mut rest, OFFSET)?;
    let data = field(&mut rest, DATA)?;
    let left = bytes - used(rest);
    (left > 0 && data == left as u64).then_some((used(rest), OpenChunk { tensor, offset, left }))
}

fn check_chunk(bytes: usize) -> Result<()> {
    if bytes > MAX_CHUNK_BYTES {
        return Err(Error::invalid("chunk.data", format!("{bytes} bytes; a chunk has at most {MAX_CHUNK_BYTES}")));
    }
    Ok(())
}

fn cut() -> Error {
    Error::invalid("message", "the stream ended in the middle of one")
}

#[cfg(test)]
mod tests;
