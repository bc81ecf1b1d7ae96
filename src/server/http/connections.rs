//! The HTTP/1.1 connections: serves the routes, limits the memory of each connection, and finds clients that have left
//! while their request runs.
//!
//! A client that vanishes without closing (a machine that was switched off, a network that broke) is found by missing
//! acknowledgements. The system's own limit for those (TCP_USER_TIMEOUT) would also close the connections of clients
//! that are there and do not read, whose requests are suspended instead. A client that closes is found here too,
//! because the transport does not see that behind bytes that it has not read yet, such as another request.
//!
//! Tests: `test_300_heads_that_never_end` in `clients/python/tests/test_memory_ceiling_http.py`, and
//! `clients/python/tests/test_http_abuse.py`.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use crate::server::listener::{Accepted, Listener};

/// Longest time until the head of a request is complete; also how long a connection without requests is kept.
const HEAD: Duration = Duration::from_secs(30);
/// Most bytes that a connection buffers of a request that is not read yet, and again of an answer that is not sent yet,
/// beside its last part; also the longest head of a request.
const BUFFER_BYTES: usize = 16 << 10;
/// Most header lines of a request.
const MAX_HEADERS: usize = 64;
/// TCP keepalive: silence before the first probe, time between probes, and unanswered probes before the connection is
/// closed, after 20 s in all.
const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 2;
/// Time between two checks of a connection.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Silence in milliseconds after which a client is taken as lost, if the system has retransmitted, or probed its
/// window, this many times since it last answered. The system does either at intervals that double, from 0.2 s to 2
/// min, for as long as a client does not read: one that had not read for long is found after some minutes.
const LOST_MS: u32 = 15_000;
const RETRIES: u32 = 2;
/// Most bytes that the system keeps of an answer while the client's machine has no room for them. By itself it would
/// keep megabytes, and a client that does not read would be noticed only after those.
const UNSENT_BYTES: u32 = 16 << 10;
/// States of a connection whose client has closed it, or whose system has: TCP_CLOSE and TCP_CLOSE_WAIT of Linux.
const CLOSED: [u8; 2] = [7, 8];

/// Address of a connection's client, among the extensions of its requests.
#[derive(Clone)]
pub(super) struct Peer(pub(super) String);

/// Serves `routes` until `stop` is cancelled, then lets running requests finish.
pub(in crate::server) async fn serve_connections(mut listener: Listener, routes: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(accepted) = listener.next() => {
                connections.spawn(serve_connection(accepted, routes.clone(), stop.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = stop.cancelled() => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection until it ends, or until `stop` is cancelled and its running request is answered.
async fn serve_connection(accepted: Accepted, routes: Router, stop: CancellationToken) {
    let (watch, hang_up, peer) = (ClientWatch::new(accepted.tcp()), CancellationToken::new(), Peer(accepted.peer()));
    let Accepted { socket, permit: _permit } = accepted;
    let routes = TowerToHyperService::new(routes);
    // Handlers find these among the extensions: a cancelled token closes a connection whose client does not read.
    let serve = service_fn(|mut request: Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(hang_up.clone());
        request.extensions_mut().insert(peer.clone());
        routes.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(socket), serve);
    let serve_until_stopped = async {
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    // In this order: what a client sent before it left is read first.
    let ended = tokio::select! {
        biased;
        ended = serve_until_stopped => ended,
        () = watch.left() => return tracing::debug!("connection closed: its client has left"),
        () = hang_up.cancelled() => return tracing::debug!("connection closed: its client does not read"),
    };
    if let Err(error) = ended {
        tracing::debug!("connection ended: {error}");
    }
}

/// Watches a connection for a client that has left. Its socket must be open for as long as this is used.
struct ClientWatch(RawFd);

impl ClientWatch {
    /// Lets the system close the connection of a client that vanishes while it waits.
    fn new(stream: &TcpStream) -> Self {
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_RETRIES);
        let socket = SockRef::from(stream);
        // Either fails only for a connection that has already broken, which its first read reports.
        let _ = socket.set_tcp_keepalive(&keepalive);
        let _ = socket.set_tcp_notsent_lowat(UNSENT_BYTES);
        Self(stream.as_raw_fd())
    }

    /// Waits until the client has hung up, or has vanished while it should have acknowledged something.
    async fn left(self) {
        let (mut answers, mut last_check) = (Answers::default(), Instant::now());
        // Not at once: a client may send a request and hang up before the request is read.
        let mut checks = tokio::time::interval_at(last_check + CHECK_INTERVAL, CHECK_INTERVAL);
        loop {
            checks.tick().await;
            let now = Instant::now();
            let since_check = now.duration_since(std::mem::replace(&mut last_check, now));
            // Fails only for a connection that has ended.
            if let Ok(info) = info(self.0)
                && (CLOSED.contains(&info.tcpi_state) || answers.are_missing(&info, since_check))
            {
                return;
            }
        }
    }
}

/// The acknowledgements of a client so far.
#[derive(Default)]
struct Answers {
    /// Number of retransmitted segments at the last check that found an answer.
    resent: u32,
}

impl Answers {
    /// Whether the client should have answered and has not. One that is there and does not read answers each probe.
    ///
    /// The system's own count of unanswered segments (`tcpi_retransmits`) stays 0 for a client that had shrunk its
    /// window below what was on its way to it, so retransmitted segments are counted here.
    fn are_missing(&mut self, info: &libc::tcp_info, since_check: Duration) -> bool {
        if Duration::from_millis(info.tcpi_last_ack_recv.into()) <= since_check {
            self.resent = info.tcpi_total_retrans;
        }
        let retries = u32::from(info.tcpi_probes).max(info.tcpi_total_retrans - self.resent);
        retries >= RETRIES && info.tcpi_last_ack_recv >= LOST_MS
    }
}

/// The state of a connection, from the system.
fn info(socket: RawFd) -> io::Result<libc::tcp_info> {
    // SAFETY: all of its fields are numbers, for which zeros are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: the system writes at most `length` bytes to `info`, whatever the descriptor is.
    let failed = unsafe { libc::getsockopt(socket, level, name, (&raw mut info).cast(), &raw mut length) };
    if failed == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use axum::routing::post;
    use tokio::net::TcpListener;

    use super::*;
    use crate::observe::Observer;

    /// Its handler must run to the end of what was sent: it may have to end what the client has begun.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_is_read_to_its_end_although_its_client_has_left() {
        const CLIENTS: usize = 300;
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        port.set_nonblocking(true).expect("an option");
        let address = port.local_addr().expect("it has one");
        let listener = Listener::new(port, CLIENTS, None, &Observer::new().0.metrics).expect("it is watched");
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let begin = async move |request: Request<axum::body::Body>| {
            let cut = axum::body::to_bytes(request.into_body(), 10).await;
            begun.send(cut.is_err()).expect("the test listens");
        };
        let server = serve_connections(listener, Router::new().route("/", post(begin)), CancellationToken::new());
        let server = tokio::spawn(server);
        for _ in 0..CLIENTS {
            let mut stream = std::net::TcpStream::connect(address).expect("it listens");
            stream.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nab").expect("it is open");
        }
        for client in 0..CLIENTS {
            let is_cut = tokio::time::timeout(Duration::from_secs(60), begins.recv()).await;
            assert_eq!(is_cut, Ok(Some(true)), "{client} of {CLIENTS} requests are read so far");
        }
        server.abort();
    }

    #[tokio::test]
    async fn a_watched_connection_has_its_options() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("it has one")).await.expect("it listens");
        let (stream, _) = listener.accept().await.expect("a client has come");
        let watch = ClientWatch::new(&stream);
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().expect("an option"));
        assert_eq!(socket.tcp_keepalive_time().expect("an option"), KEEPALIVE_TIME);
        assert_eq!(socket.tcp_keepalive_interval().expect("an option"), KEEPALIVE_INTERVAL);
        assert_eq!(socket.tcp_keepalive_retries().expect("an option"), KEEPALIVE_RETRIES);
        assert_eq!(socket.tcp_notsent_lowat().expect("an option"), UNSENT_BYTES);
        let state = || info(watch.0).map(|info| (CLOSED.contains(&info.tcpi_state), info.tcpi_retransmits));
        assert_eq!(state().expect("it is open"), (false, 0));
        drop(client);
        while !state().expect("it is open").0 {
            tokio::task::yield_now().await;
        }
        drop(stream);
        assert!(state().is_err());
    }

    /// The state of a connection as the system would report it.
    fn info_of(probes: u8, total_retrans: u32, last_ack_recv: u32) -> libc::tcp_info {
        // SAFETY: all of its fields are numbers, for which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        (info.tcpi_probes, info.tcpi_total_retrans, info.tcpi_last_ack_recv) = (probes, total_retrans, last_ack_recv);
        info
    }

    #[test]
    fn only_silence_with_retries_is_a_loss() {
        let first = |info| Answers::default().are_missing(&info, CHECK_INTERVAL);
        assert!(first(info_of(2, 0, LOST_MS)), "two window probes");
        assert!(first(info_of(0, RETRIES, LOST_MS)), "two segments");
        assert!(!first(info_of(1, 1, u32::MAX)), "one may have been lost");
        assert!(!first(info_of(0, 0, u32::MAX)), "there was nothing to acknowledge");
        assert!(!first(info_of(u8::MAX, u32::MAX, LOST_MS - 1)), "it answers the last one soon");
    }

    #[test]
    fn segments_retransmitted_before_an_answer_are_not_counted() {
        let mut answers = Answers::default();
        assert!(!answers.are_missing(&info_of(0, 7, 1_500), CHECK_INTERVAL));
        assert!(!answers.are_missing(&info_of(0, 8, 400), CHECK_INTERVAL), "it has answered since");
        assert!(!answers.are_missing(&info_of(0, 9, LOST_MS), CHECK_INTERVAL), "one may have been lost");
        assert!(answers.are_missing(&info_of(0, 10, LOST_MS + 1), CHECK_INTERVAL));
    }
}
