//! Accepts the connections of a port: limits their number, closes those beyond the limit, and does the TLS handshakes.

mod handshakes;
mod http2;

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tokio_util::either::Either;

use super::security::Tls;
use crate::observe::Metrics;
use handshakes::Handshakes;

pub(super) use http2::{FRAME_BYTES, FrameRoom, Http2Connection};

/// File descriptors that connections leave to the rest of the process: the runtime's own, and the files and segments of
/// pushes that are read at the same time.
const OTHER_FILES: usize = 64;
/// Pause after a connection that could not be accepted: 20 connections a second can still be turned away, without
/// keeping a core busy.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Shortest time between two log lines about events that clients can cause at will.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Number of connections, at most `asked`, that each of `ports` ports can have in a process which may open `open_files`
/// files.
pub fn connection_limit(asked: usize, ports: usize, open_files: u64) -> usize {
    let open_files = usize::try_from(open_files).unwrap_or(usize::MAX);
    // With very few descriptors, connections may take half of them.
    asked.min((open_files - OTHER_FILES.min(open_files / 2)) / ports).max(1)
}

/// The bytes of a connection, without TLS or inside it.
pub(super) type Socket = Either<TcpStream, Box<TlsStream<BufReader<TcpStream>>>>;

/// An accepted connection, after its TLS handshake if there is TLS.
pub(super) struct Accepted {
    pub(super) socket: Socket,
    pub(super) permit: ConnectionPermit,
}

impl Accepted {
    /// The connection below any TLS.
    pub(super) fn tcp(&self) -> &TcpStream {
        match &self.socket {
            Either::Left(stream) => stream,
            Either::Right(stream) => stream.get_ref().0.get_ref(),
        }
    }

    /// Address of the client, for logs.
    pub(super) fn peer(&self) -> String {
        self.tcp().peer_addr().map_or_else(|_| "an unknown address".into(), |peer| peer.to_string())
    }
}

/// Counts a connection, against its port's limit and for observers, until it is dropped.
pub(super) struct ConnectionPermit {
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionPermit {
    /// A permit, if fewer connections than the limit are open.
    fn acquire(free: &Arc<Semaphore>, metrics: &Arc<Metrics>) -> Option<Self> {
        let permit = free.clone().try_acquire_owned().ok()?;
        metrics.connections.raise();
        Some(Self { metrics: metrics.clone(), _permit: permit })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.metrics.connections.lower();
    }
}

/// Counts events between two log lines about them.
#[derive(Default)]
struct LogLimiter {
    last: Option<Instant>,
    unlogged: u64,
}

impl LogLimiter {
    /// Counts one event. If a log line is due, returns the number of events since the last one.
    fn due(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        if self.last.is_some_and(|last| now - last < LOG_INTERVAL) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

/// Stream of the accepted connections of a port. It never ends, and accepts only while it is polled.
pub(super) struct Listener {
    accepting: Pin<Box<dyn Future<Output = Infallible> + Send>>,
    accepted: UnboundedReceiver<Accepted>,
}

impl Listener {
    /// Starts to accept up to `limit` connections at a time. Must be called inside a tokio runtime; fails if the
    /// listener cannot be watched.
    pub(super) fn new(
        listener: TcpListener,
        limit: usize,
        tls: Option<Tls>,
        metrics: &Arc<Metrics>,
    ) -> io::Result<Self> {
        let acceptor = Acceptor {
            listener: tokio::net::TcpListener::from_std(listener)?,
            free: Arc::new(Semaphore::new(limit)),
            limit,
            metrics: metrics.clone(),
            handshakes: tls.map(|tls| Handshakes::new(tls, limit)),
            reserve: reserve(),
            beyond_limit: LogLimiter::default(),
            no_descriptor: LogLimiter::default(),
        };
        // Needs no limit of its own, because every connection in it has a permit.
        let (sender, accepted) = mpsc::unbounded_channel();
        Ok(Self { accepting: Box::pin(acceptor.run(sender)), accepted })
    }
}

impl Stream for Listener {
    type Item = Accepted;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Never ready: it sends the connections.
        let _ = self.accepting.as_mut().poll(cx);
        self.accepted.poll_recv(cx)
    }
}

/// Accepts the connections of a port.
struct Acceptor {
    listener: tokio::net::TcpListener,
    free: Arc<Semaphore>,
    limit: usize,
    metrics: Arc<Metrics>,
    /// None without TLS.
    handshakes: Option<Handshakes>,
    /// A spare descriptor. It is closed to accept and drop a connection when no descriptor is left, so that the client
    /// learns it at once instead of waiting in the listener's queue.
    reserve: Option<File>,
    beyond_limit: LogLimiter,
    no_descriptor: LogLimiter,
}

impl Acceptor {
    async fn run(mut self, accepted: UnboundedSender<Accepted>) -> Infallible {
        loop {
            if let Some(handshakes) = &mut self.handshakes {
                handshakes.room().await;
            }
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) if ended_in_the_queue(&e) => continue,
                Err(e) => {
                    self.turn_away(&e).await;
                    continue;
                }
            };
            if let Some(permit) = ConnectionPermit::acquire(&self.free, &self.metrics) {
                // Fails only for a connection that has already broken, which its first read reports.
                let _ = stream.set_nodelay(true);
                match &mut self.handshakes {
                    Some(handshakes) => handshakes.begin(stream, permit, accepted.clone()),
                    None => drop(accepted.send(Accepted { socket: Either::Left(stream), permit })),
                }
            } else if let Some(times) = self.beyond_limit.due(Instant::now()) {
                tracing::warn!(times, limit = self.limit, "connections closed: --max-connections are open");
            }
        }
    }

    /// Handles an accept that failed for lack of descriptors or memory: drops one waiting connection, then pauses.
    async fn turn_away(&mut self, error: &io::Error) {
        if self.reserve.take().is_some() {
            // Accepts a waiting connection, if there is one, and closes it by dropping it.
            let _ = timeout(Duration::ZERO, self.listener.accept()).await;
        }
        self.reserve = reserve();
        if let Some(times) = self.no_descriptor.due(Instant::now()) {
            tracing::error!(times, "cannot accept connections: {error}; raise `ulimit -n` or lower --max-connections");
        }
        sleep(BACK_OFF).await;
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::observe::Observer;

    #[tokio::test]
    async fn a_port_accepts_up_to_its_limit_and_closes_when_it_is_dropped() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        port.set_nonblocking(true).unwrap();
        let address = port.local_addr().unwrap();
        let mut listener = Listener::new(port, 1, None, &Observer::new().0.metrics).unwrap();
        let _client = TcpStream::connect(address).await.unwrap();
        let accepted = listener.next().await;
        let mut beyond = TcpStream::connect(address).await.unwrap();
        let read = tokio::select! {
            read = beyond.read_u8() => read,
            _ = listener.next() => panic!("one connection is open"),
        };
        assert!(read.is_err(), "{read:?}");
        drop(accepted);
        let _client = TcpStream::connect(address).await.unwrap();
        assert!(listener.next().await.is_some(), "there is room again");
        drop(listener);
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    }

    #[test]
    fn the_limit_leaves_descriptors_to_the_rest_of_the_process() {
        assert_eq!(connection_limit(1024, 2, 1 << 20), 1024);
        assert_eq!(connection_limit(1024, 2, u64::MAX), 1024);
        assert_eq!(connection_limit(1024, 1, 1024), 1024 - 64);
        assert_eq!(connection_limit(1024, 2, 1024), (1024 - 64) / 2);
        assert_eq!(connection_limit(1024, 1, 64), 32);
        assert_eq!(connection_limit(1024, 2, 0), 1);
        assert_eq!(connection_limit(3, 2, 1024), 3);
    }

    #[test]
    fn log_lines_are_rare_and_count_the_events_between_them() {
        let (mut limiter, start) = (LogLimiter::default(), Instant::now());
        assert_eq!([start, start, start + LOG_INTERVAL / 2].map(|now| limiter.due(now)), [Some(1), None, None]);
        assert_eq!([start + LOG_INTERVAL, start + LOG_INTERVAL].map(|now| limiter.due(now)), [Some(3), None]);
    }
}
