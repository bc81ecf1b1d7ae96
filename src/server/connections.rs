//! Connections: how many there may be, what becomes of those beyond, how long one may take to say what it is, and how
//! much one may send before the transport has a whole frame.

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

/// Descriptors that connections leave to the rest of the process: the runtime's own, and the files and segments of
/// pushes that are read at the same time.
const OTHER_FILES: usize = 64;
/// How long a connection may take to send the beginning of HTTP/2. Later silence is for keepalive to notice.
const GREETING: Duration = Duration::from_secs(10);
const GREETING_BYTES: usize = PREFACE_BYTES + HEAD_BYTES;
/// The pause after a connection that could not be accepted: 20 a second are still turned away, and no core is kept busy.
const BACK_OFF: Duration = Duration::from_millis(50);
/// How often the log speaks of connections that are turned away.
const NOTICE: Duration = Duration::from_secs(10);

/// Most connections, of those asked for, that a process with so many descriptors can have.
pub fn connection_limit(asked: usize, open_files: u64) -> usize {
    let open_files = usize::try_from(open_files).unwrap_or(usize::MAX);
    // Where there are very few descriptors, connections take half of them.
    asked.min(open_files - OTHER_FILES.min(open_files / 2)).max(1)
}

/// The connections that come in.
pub(super) struct Incoming {
    listener: tokio::net::TcpListener,
    free: Arc<Semaphore>,
    limit: usize,
    frame_room: FrameRoom,
    /// Given up to turn a connection away when no descriptor is left: a client then learns at once what it would
    /// otherwise wait for in the listener's queue.
    reserve: Option<File>,
    back_off: Option<Pin<Box<Sleep>>>,
    beyond_limit: Notice,
    no_descriptor: Notice,
}

impl Incoming {
    /// Must be called inside a tokio runtime.
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

    /// After an accept that failed for want of something: lets one connection go that waits, and pauses.
    fn turn_away(&mut self, error: &io::Error, cx: &mut Context<'_>) {
        if self.reserve.take().is_some() {
            // Dropped, and so closed, if one is there.
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
                // A connection that cannot be set so has broken already, which its first reading tells.
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

/// Errors of a connection that ended before it was accepted; the next one may be well.
fn ended_in_the_queue(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Counts events between two lines of the log that speak of them.
#[derive(Default)]
struct Notice {
    last: Option<Instant>,
    unsaid: u64,
}

impl Notice {
    /// Counts one event; how many there were since the last line, if it is time for another.
    fn due(&mut self, now: Instant) -> Option<u64> {
        self.unsaid += 1;
        if self.last.is_some_and(|last| now - last < NOTICE) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

/// An accepted connection, which counts until it is dropped.
pub(super) struct Connection {
    /// Gives no more at once than there is room for.
    stream: Take<TcpStream>,
    frames: FrameReader,
    /// Until it has come.
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

    /// The stream, to be written.
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
    /// Fails once the greeting is overdue, and at frames that no client needs; whoever reads then closes the connection.
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
