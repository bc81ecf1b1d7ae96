//! The connections of the gRPC door: limits the time until a client sends the beginning of HTTP/2, and the bytes that
//! it can send before the transport has a whole frame.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, Take};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::connections::Accepted;
use super::frames::{FrameReader, FrameRoom, HEAD_BYTES, PREFACE_BYTES};
use super::slot::Slot;
use super::socket::Socket;

/// Longest time from accepting a connection to the beginning of HTTP/2. Keepalive notices connections that fall silent
/// later.
const GREETING: Duration = Duration::from_secs(10);
const GREETING_BYTES: usize = PREFACE_BYTES + HEAD_BYTES;

/// A connection to the gRPC door.
pub(super) struct Connection {
    /// Hands out no more bytes at a time than the frame reader has room for.
    stream: Take<Socket>,
    frames: FrameReader,
    /// Wait for the client's greeting; None once it has come.
    greeting: Option<Greeting>,
    _slot: Slot,
}

struct Greeting {
    missing_bytes: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    pub(super) fn new(accepted: Accepted, room: FrameRoom) -> Self {
        let Accepted { socket, slot } = accepted;
        let greeting = Greeting { missing_bytes: GREETING_BYTES, deadline: Box::pin(sleep(GREETING)) };
        Self { stream: socket.take(0), frames: FrameReader::new(room), greeting: Some(greeting), _slot: slot }
    }

    fn peer(&self) -> Option<SocketAddr> {
        self.stream.get_ref().peer()
    }

    /// The stream, for writing.
    fn writer(self: Pin<&mut Self>) -> Pin<&mut Socket> {
        Pin::new(self.get_mut().stream.get_mut())
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.get_ref().tcp().connect_info()
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
