//! Accepts HTTP/1.1 connections, limits how many there are and what each can hold, and serves the routes on them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Longest time until the head of a request is complete; also how long a connection without requests is kept.
const HEAD: Duration = Duration::from_secs(30);
/// Most bytes that a connection buffers of a request that is not read yet, and the longest head of one.
const BUFFER_BYTES: usize = 64 << 10;
/// Most header lines of a request.
const MAX_HEADERS: usize = 64;
/// Pause after a connection that could not be accepted.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Serves `routes` until `stop` says so, then lets running requests finish.
pub(in crate::server) async fn serve_connections(
    listener: std::net::TcpListener,
    max_connections: usize,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(max_connections));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => match free.clone().try_acquire_owned() {
                    Ok(slot) => {
                        connections.spawn(serve_connection(stream, slot, routes.clone(), stop.clone()));
                    }
                    Err(_) => tracing::debug!("connection closed: --max-connections are open"),
                },
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    sleep(BACK_OFF).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = stopped(&mut stop) => break,
        }
    }
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Serves one connection until it ends, or until `stop` says so and its running request is answered.
async fn serve_connection(
    stream: TcpStream,
    slot: OwnedSemaphorePermit,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) {
    let _slot = slot;
    // Fails only for a connection that has already broken, which its first read reports.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!("connection ended: {error}");
    }
}

/// Returns once `stop` is true, or nobody can set it any more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
