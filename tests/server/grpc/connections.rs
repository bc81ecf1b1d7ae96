//! Connections beyond the limit, and connections that never begin.

use rollout_server::observe::Observer;
use rollout_server::server::{Bound, ServerConfig, serve, shutdown_channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::harness::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// An empty SETTINGS frame of HTTP/2.
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Starts a server with room for `max_connections`. Returns its address and what keeps it alive.
fn start_with_limit(max_connections: usize) -> (std::net::SocketAddr, impl Sized) {
    let (sender, commands) = std::sync::mpsc::sync_channel(16);
    let (shutdown, orders) = shutdown_channel();
    let bound = Bound::new(&ServerConfig { max_connections, ..config(0) }).expect("a free port");
    let address = bound.address();
    let context = context(rollout_server::engine::EngineHandle::new(sender));
    let server = tokio::spawn(serve(bound, Observer::new().0, std::future::ready(Ok(context)), orders));
    (address, (commands, shutdown, server))
}

async fn connect(address: std::net::SocketAddr, greeting: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("the listener's queue has room");
    // Writing may fail if the server has already closed the connection.
    let _ = stream.write_all(greeting).await;
    stream
}

/// Whether the server answers on this connection: its SETTINGS come at once.
async fn is_served(stream: &mut TcpStream) -> bool {
    let mut frame = [0; 9];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut frame)).await.expect("an answer or the end in time").is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_beyond_the_limit_is_closed_and_its_place_is_free_again() {
    let (address, _alive) = start_with_limit(2);
    let greeting = [PREFACE, SETTINGS].concat();
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(address, &greeting).await;
        assert!(is_served(&mut stream).await);
        open.push(stream);
    }
    for _ in 0..3 {
        assert!(!is_served(&mut connect(address, &greeting).await).await, "one more than the limit");
    }
    drop(open.pop());
    let start = std::time::Instant::now();
    while !is_served(&mut connect(address, &greeting).await).await {
        assert!(start.elapsed() < PATIENCE, "the place of a closed connection stays taken");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_does_not_begin_is_closed() {
    let (address, _alive) = start_with_limit(8);
    let wholes = [&b""[..], &PREFACE[..10], PREFACE, &[PREFACE, &SETTINGS[..8]].concat()];
    let mut streams = Vec::new();
    for greeting in wholes {
        streams.push(connect(address, greeting).await);
    }
    // A single byte now and then does not count as a beginning.
    let mut slow = connect(address, b"").await;
    let trickle = tokio::spawn(async move {
        for byte in PREFACE {
            if slow.write_all(&[*byte]).await.is_err() {
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
        false
    });
    for (mut stream, greeting) in streams.into_iter().zip(wholes) {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(2 * PATIENCE, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{} bytes hold a connection", greeting.len());
    }
    assert!(trickle.await.expect("no panic"), "a slow preface holds a connection");
}
