//! `GET /liveness`, with an engine that takes no orders.

use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rollout_server::engine::{Command, EngineHandle};
use rollout_server::observe::Observer;
use rollout_server::server::{Bound, ServerConfig, ServingContext, serve, shutdown_channel};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::harness::{PATIENCE, config, context};

async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("the server listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_no_orders_is_not_live() {
    let (sender, commands) = sync_channel(16);
    let (_shutdown, orders) = shutdown_channel();
    let bound = Bound::new(&ServerConfig { http_port: Some(0), ..config(0) }).expect("free ports");
    let address = bound.http_address().expect("HTTP");
    let context = ServingContext { liveness: Duration::from_millis(50), ..context(EngineHandle::new(sender)) };
    let server = tokio::spawn(serve(bound, Observer::new().0, std::future::ready(Ok(context)), orders));
    let begun = std::time::Instant::now();
    while !get(address, "/health").await.starts_with("HTTP/1.1 200") {
        assert!(begun.elapsed() < PATIENCE, "it does not start");
    }
    let answer = get(address, "/liveness").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("--liveness-seconds"), "{answer}");
    assert!(matches!(commands.try_recv(), Ok(Command::Status { .. })), "the order is in the engine's queue");
    drop(commands);
    let answer = get(address, "/liveness").await;
    assert!(answer.starts_with("HTTP/1.1 503") && !answer.contains("--liveness-seconds"), "it has ended: {answer}");
    server.abort();
}
