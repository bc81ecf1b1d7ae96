//! Accepts connections: limits how many there are, turns away those beyond the limit, limits the time until a client
//! sends the beginning of HTTP/2, and limits the bytes that a client can send before the transport has a whole frame.

use std::fs::File;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::frames::{FrameReader, FrameRoom, HEAD_BYTES, PREFACE_BYTES};

/// File descriptors that connections leave to the rest of the process: the runtime's own, and the files and segments of
/// pushes that are read at the same time.
const OTHER_FILES: usize = 64;
/// Longest time from accepting a connection to the beginning of HTTP/2. Keepalive notices connections that fall silent
/// later.
const GREETING: Duration = Duration::from_secs(10);
const GREETING_BYTES: usize = PREFACE_BYTES + HEAD_BYTES;
/// Pause after a connection that could not be accepted: 20 connections a second can still be turned away, without
/// keeping a core busy.
const BACK_OFF: Duration = Duration::from_millis(50);
/// Shortest time between two log lines about connections that were turned away.
const NOTICE: Duration = Duration::from_secs(10);

/// Number of connections, at most `asked`, that a process which may open `open_files` files can have.
pub fn connection_limit(asked: usize, open_files: u64) -> usize {
    let open_files = usize::try_from(open_files).unwrap_or(usize::MAX);
    // With very few descriptors, connections may take half of them.
    asked.min(open_files - OTHER_FILES.min(open_files / 2)).max(1)
}

/// Stream of accepted connections, as tonic takes it.
pub(super) struct Incoming {
    listener: tokio::net::TcpListener,
    free: Arc<Semaphore>,
    limit: usize,
    frame_room: FrameRoom,
    /// A spare descriptor. It is closed to accept and drop a connection when no descriptor is left, so that the client
    /// learns it at once instead of waiting in the listener's queue.
    reserve: Option<File>,
    back_off: Option<Pin<Box<Sleep>>>,
    beyond_limit: Notice,
    no_descriptor: Notice,
}

impl Incoming {
    /// Starts to accept. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the listener cannot be watched.
    pub(super) fn new(listener: TcpListener, limit: usize, frame_room: FrameRoom) -> io::Result<Self> {
        Ok(Self {
            listener: tokio::net::TcpListener::from_std(listener)?,
            free: Arc::new(Semaphore::new(limit)),
            limit,
            frame_room,
            reserve: reserve(),
            back_off: None,
            beyond_limit: Notice::default(),
            no_descriptor: Notice::default(),
        })
    }

    /// Handles an accept that failed for lack of descriptors or memory: drops one waiting connection, then pauses.
    fn turn_away(&mut self, error: &io::Error, cx: &mut Context<'_>) {
        if self.reserve.take().is_some() {
            // Accepts a waiting connection, if there is one, and closes it by dropping it.
            let _ = self.listener.poll_accept(cx);
        }
        self.reserve = reserve();
        self.back_off = Some(Box::pin(sleep(BACK_OFF)));
        if let Some(times) = self.no_descriptor.due(Instant::now()) {
            tracing::error!(times, "cannot accept connections: {error}; raise `ulimit -n` or lower --max-connections");
        }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(back_off) = &mut this.back_off {
                ready!(back_off.as_mut().poll(cx));
                this.back_off = None;
            }
            let stream = match ready!(this.listener.poll_accept(cx)) {
                Ok((stream, _)) => stream,
                Err(e) if ended_in_the_queue(&e) => continue,
                Err(e) => {
                    this.turn_away(&e, cx);
                    continue;
                }
            };
            if let Ok(slot) = this.free.clone().try_acquire_owned() {
                // Fails only for a connection that has already broken, which its first read reports.
                let _ = stream.set_nodelay(true);
                return Poll::Ready(Some(Ok(Connection::new(stream, slot, this.frame_room.clone()))));
            }
            if let Some(times) = this.beyond_limit.due(Instant::now()) {
                tracing::warn!(times, limit = this.limit, "connections closed: --max-connections are open");
            }
        }
    }
}

fn reserve() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Whether an accept failed because its connection ended in the listener's queue; the next accept may succeed.
fn ended_in_the_queue(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Counts events between two log lines about them.
#[derive(Default)]
struct Notice {
    last: Option<Instant>,
    unsaid: u64,
}

impl Notice {
    /// Counts one event. If it is time for a log line, returns the number of events since the last one.
    fn due(&mut self, now: Instant) -> Option<u64> {
        self.unsaid += 1;
        if self.last.is_some_and(|last| now - last < NOTICE) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

/// An accepted connection, counted against the limit until it is dropped.
pub(super) struct Connection {
    /// Hands out no more bytes at a time than the frame reader has room for.
    stream: Take<TcpStream>,
    frames: FrameReader,
    /// Wait for the client's greeting; None once it has come.
    greeting: Option<Greeting>,
    _slot: OwnedSemaphorePermit,
}

struct Greeting {
    missing_bytes: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(stream: TcpStream, slot: OwnedSemaphorePermit, room: FrameRoom) -> Self {
        let greeting = Greeting { missing_bytes: GREETING_BYTES, deadline: Box::pin(sleep(GREETING)) };
        Self { stream: stream.take(0), frames: FrameReader::new(room), greeting: Some(greeting), _slot: slot }
    }

    fn peer(&self) -> Option<SocketAddr> {
        self.stream.get_ref().peer_addr().ok()
    }

    /// The stream, for writing.
    fn writer(self: Pin<&mut Self>) -> Pin<&mut TcpStream> {
        Pin::new(self.get_mut().stream.get_mut())
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.get_ref().connect_info()
    }
}

impl AsyncRead for Connection {
    /// Fails when the greeting is overdue, and at a frame that no client has reason to send. The transport then closes
    /// the connection.
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(greeting) = &mut this.greeting
            && greeting.deadline.as_mut().poll(cx).is_ready()
        {
            tracing::debug!(peer = ?this.peer(), "connection closed: it did not begin HTTP/2 in time");
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let room = ready!(this.frames.poll_room(cx));
        this.stream.set_limit(room as u64);
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        let read = &buf.filled()[before..];
        if let Err(error) = this.frames.read(read) {
            tracing::debug!(peer = ?this.peer(), "connection closed: {error}");
            return Poll::Ready(Err(error));
        }
        if let Some(greeting) = &mut this.greeting {
            greeting.missing_bytes = greeting.missing_bytes.saturating_sub(read.len());
            if greeting.missing_bytes == 0 {
                this.greeting = None;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
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
    use super::*;

    #[test]
    fn the_limit_leaves_descriptors_to_the_rest_of_the_process() {
        assert_eq!(connection_limit(1024, 1 << 20), 1024);
        assert_eq!(connection_limit(1024, u64::MAX), 1024);
        assert_eq!(connection_limit(1024, 1024), 1024 - 64);
        assert_eq!(connection_limit(1024, 64), 32);
        assert_eq!(connection_limit(1024, 0), 1);
        assert_eq!(connection_limit(3, 1024), 3);
    }

    #[test]
    fn notices_are_rare_and_count_what_they_left_out() {
        let (mut notice, start) = (Notice::default(), Instant::now());
        assert_eq!([start, start, start + NOTICE / 2].map(|now| notice.due(now)), [Some(1), None, None]);
        assert_eq!([start + NOTICE, start + NOTICE].map(|now| notice.due(now)), [Some(3), None]);
    }
}
