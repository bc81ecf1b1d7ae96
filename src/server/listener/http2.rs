//! Bounds the memory and the time that a client can take before the HTTP/2 transport has a whole frame. No service and
//! no charge sees these bytes: the transport keeps a frame until it is whole, and a header list until it ends.
//!
//! The attacks, all by clients without a token: frames of 1 MiB without their last byte on every connection (1 GiB of
//! 1,000 connections), headers without an end (six frames on each), and connections that never begin. The protocol's
//! own limit of 16 KiB for each frame would do too, but then a push takes three to four times as long
//! (benches/RESULTS.md). Tests: `test_300_frames_that_never_end` in `clients/python/tests/test_memory_ceiling.py`, and
//! those below.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, Take};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::PollSemaphore;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::{Accepted, ConnectionPermit, Socket};

/// Longest frame that clients may send: large enough that a chunk of a push takes four frames instead of 256.
pub(in crate::server) const FRAME_BYTES: u32 = 1 << 20;
/// Longest time from accepting a connection to the head of its first frame. Keepalive finds connections that fall
/// silent later.
const FIRST_FRAME: Duration = Duration::from_secs(10);
/// Length of the connection preface that a client sends before its first frame.
const PREFACE_BYTES: usize = 24;
/// Length of a frame's head: length of the payload (3 bytes), type (1), flags (1), stream (4).
const HEAD_BYTES: usize = 9;
/// Type of the frames that carry messages.
const DATA: u8 = 0;
/// Bytes of an incomplete frame that every connection may hold, and the longest frame that carries no message: the
/// protocol's default limit.
const SMALL_BYTES: usize = 16 << 10;
/// Most bytes that the transport keeps of one connection's frames without messages: it joins six frames of headers
/// before it rejects them.
const CONNECTION_BYTES: u64 = 6 * SMALL_BYTES as u64;
/// Bytes of incomplete longer frames that all connections together may hold: 32 chunks at once keep any network busy.
const LARGE_BYTES: usize = 32 << 20;

/// Room for the longer frames, shared by all connections.
#[derive(Clone)]
pub(in crate::server) struct FrameRoom {
    permits: Arc<Semaphore>,
    /// Sum that [`FrameRoom::take_dropped`] returns and resets.
    dropped: Arc<AtomicU64>,
}

impl FrameRoom {
    pub(in crate::server) fn new() -> Self {
        Self { permits: Arc::new(Semaphore::new(LARGE_BYTES)), dropped: Arc::default() }
    }

    /// Upper bound on the bytes that connections have left to the allocator by ending since the last call.
    pub(in crate::server) fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::SeqCst)
    }
}

/// Position of one connection's bytes in their frame.
struct FrameReader {
    room: PollSemaphore,
    dropped: Arc<AtomicU64>,
    /// Head of the incoming frame, as far as it is here.
    head: Vec<u8>,
    /// Bytes of the payload (before the first frame: of the preface) that are not here yet.
    missing: usize,
    /// Permit for the missing bytes of a longer frame, held until it is whole.
    permit: Option<OwnedSemaphorePermit>,
    /// Whether the head of the first frame is here.
    has_begun: bool,
}

impl FrameReader {
    fn new(room: &FrameRoom) -> Self {
        Self {
            room: PollSemaphore::new(room.permits.clone()),
            dropped: room.dropped.clone(),
            head: Vec::with_capacity(HEAD_BYTES),
            missing: PREFACE_BYTES,
            permit: None,
            has_begun: false,
        }
    }

    /// How many bytes may be read next, at least one. Waits for room if a longer frame is coming. A frame that has its
    /// room can always become whole, so no two frames wait for each other.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        if self.permit.is_none() && self.missing > SMALL_BYTES {
            self.permit = ready!(self.room.poll_acquire_many(cx, self.missing as u32));
        }
        Poll::Ready(if self.permit.is_some() { self.missing } else { SMALL_BYTES })
    }

    /// Advances by bytes that were read, at most as many as [`FrameReader::poll_room`] allowed.
    ///
    /// # Errors
    /// `InvalidData` at the head of a frame that no client has reason to send.
    fn read(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            let payload = self.missing.min(bytes.len());
            self.missing -= payload;
            bytes = &bytes[payload..];
            if self.missing == 0 {
                self.permit = None;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let (head, rest) = bytes.split_at(bytes.len().min(HEAD_BYTES - self.head.len()));
            self.head.extend_from_slice(head);
            bytes = rest;
            if self.head.len() == HEAD_BYTES {
                self.has_begun = true;
                self.missing = payload_bytes(&self.head)?;
                self.head.clear();
            }
        }
    }
}

impl Drop for FrameReader {
    fn drop(&mut self) {
        let long = self.permit.as_ref().map_or(0, |permit| permit.num_permits() as u64);
        self.dropped.fetch_add(CONNECTION_BYTES + long, Ordering::SeqCst);
    }
}

/// Length of the payload that a frame's head announces; fails if no client has reason to send so long a frame.
fn payload_bytes(head: &[u8]) -> io::Result<usize> {
    let (length, kind) = (u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize, head[3]);
    let limit = if kind == DATA { FRAME_BYTES as usize } else { SMALL_BYTES };
    if length > limit {
        let error = format!("a frame of type {kind} with {length} bytes; the limit is {limit}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(length)
}

/// A connection to the gRPC port.
pub(in crate::server) struct Http2Connection {
    /// Returns no more bytes at a time than the frame reader has room for.
    stream: Take<Socket>,
    info: TcpConnectInfo,
    frames: FrameReader,
    /// Fires when the first frame is overdue; None once it is here.
    deadline: Option<Pin<Box<Sleep>>>,
    _permit: ConnectionPermit,
}

impl Http2Connection {
    pub(in crate::server) fn new(accepted: Accepted, room: &FrameRoom) -> Self {
        let info = accepted.tcp().connect_info();
        let Accepted { socket, permit } = accepted;
        let (frames, deadline) = (FrameReader::new(room), Some(Box::pin(sleep(FIRST_FRAME))));
        Self { stream: socket.take(0), info, frames, deadline, _permit: permit }
    }

    /// The stream, for writing.
    fn writer(self: Pin<&mut Self>) -> Pin<&mut Socket> {
        Pin::new(self.get_mut().stream.get_mut())
    }
}

impl Connected for Http2Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.info.clone()
    }
}

impl AsyncRead for Http2Connection {
    /// Fails when the first frame is overdue, and at a frame that no client has reason to send. The transport then
    /// closes the connection.
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            tracing::debug!(peer = ?this.info.remote_addr(), "connection closed: it did not begin HTTP/2 in time");
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let room = ready!(this.frames.poll_room(cx));
        this.stream.set_limit(room as u64);
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        if let Err(error) = this.frames.read(&buf.filled()[before..]) {
            tracing::debug!(peer = ?this.info.remote_addr(), "connection closed: {error}");
            return Poll::Ready(Err(error));
        }
        if this.frames.has_begun {
            this.deadline = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Http2Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.writer().poll_write(cx, data)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writer().poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const HEADERS: u8 = 1;

    fn frame(kind: u8, length: usize) -> Vec<u8> {
        let mut frame = (length as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 1]);
        frame.resize(HEAD_BYTES + length, 7);
        frame
    }

    fn room(reader: &mut FrameReader) -> Poll<usize> {
        reader.poll_room(&mut Context::from_waker(std::task::Waker::noop()))
    }

    /// A connection that has sent its preface.
    fn begun(room: &FrameRoom) -> FrameReader {
        let mut reader = FrameReader::new(room);
        reader.read(&[0; PREFACE_BYTES]).unwrap();
        reader
    }

    #[test]
    fn frames_cut_anywhere_hold_room_while_a_longer_one_arrives() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..50 {
            let all = FrameRoom::new();
            let mut reader = FrameReader::new(&all);
            let mut bytes = vec![0; PREFACE_BYTES];
            let mut longer = 0;
            for _ in 0..20 {
                let (kind, most) = if rng.random() { (DATA, FRAME_BYTES as usize) } else { (HEADERS, SMALL_BYTES) };
                let length = if rng.random() { most } else { rng.random_range(0..=most) };
                bytes.extend(frame(kind, length));
                longer += usize::from(length > 2 * SMALL_BYTES);
            }
            let (mut rest, mut held) = (&bytes[..], 0);
            while !rest.is_empty() {
                let Poll::Ready(room) = room(&mut reader) else { panic!("no other connection takes room") };
                let free = all.permits.available_permits();
                held = held.max(LARGE_BYTES - free);
                assert!(room > 0 && room <= SMALL_BYTES.max(LARGE_BYTES - free), "{room} without room");
                let (read, later) = rest.split_at(rng.random_range(1..=room).min(rest.len()));
                reader.read(read).unwrap();
                rest = later;
            }
            assert_eq!((reader.missing, reader.head.len(), all.permits.available_permits()), (0, 0, LARGE_BYTES));
            assert!(longer == 0 || held > SMALL_BYTES, "{longer} longer frames held {held} bytes");
        }
    }

    #[test]
    fn longer_frames_wait_for_each_other_and_small_ones_for_none() {
        let (all, long) = (FrameRoom::new(), frame(DATA, FRAME_BYTES as usize));
        let mut readers: Vec<_> = (0..LARGE_BYTES / FRAME_BYTES as usize + 1).map(|_| begun(&all)).collect();
        for reader in &mut readers {
            reader.read(&long[..HEAD_BYTES]).unwrap();
        }
        let waiting: Vec<bool> = readers.iter_mut().map(|reader| room(reader).is_pending()).collect();
        assert_eq!(waiting.iter().filter(|waits| **waits).count(), 1);
        let mut last = readers.pop().unwrap();
        assert!(waiting[readers.len()] && room(&mut last).is_pending());
        let mut small = begun(&all);
        small.read(&frame(DATA, SMALL_BYTES)[..100]).unwrap();
        assert_eq!(room(&mut small), Poll::Ready(SMALL_BYTES));
        readers[0].read(&long[HEAD_BYTES..]).unwrap();
        assert_eq!(room(&mut last), Poll::Ready(FRAME_BYTES as usize));
        drop((readers, last));
        assert_eq!(all.permits.available_permits(), LARGE_BYTES, "connections that end give their room back");
        let ended = waiting.len() as u64;
        let unfinished = (LARGE_BYTES as u64).next_multiple_of(u64::from(FRAME_BYTES));
        assert_eq!(all.take_dropped(), ended * CONNECTION_BYTES + unfinished);
        assert_eq!(all.take_dropped(), 0);
    }

    #[test]
    fn frames_that_no_client_needs_end_the_connection() {
        for (kind, length, allowed) in [
            (DATA, FRAME_BYTES as usize, true),
            (DATA, FRAME_BYTES as usize + 1, false),
            (HEADERS, SMALL_BYTES, true),
            (HEADERS, SMALL_BYTES + 1, false),
            (9, SMALL_BYTES + 1, false),
            (0x77, SMALL_BYTES + 1, false),
        ] {
            let head = &frame(kind, length)[..HEAD_BYTES];
            let read = begun(&FrameRoom::new()).read(head);
            assert_eq!(read.is_ok(), allowed, "{length} bytes of type {kind}: {read:?}");
        }
    }
}
