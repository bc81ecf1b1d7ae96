//! Serves the routes on HTTP/1.1 connections, and limits what each can hold.

use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;

use super::departure::Watch;
use crate::server::connections::{Accepted, Incoming};
use crate::server::socket::Socket;

/// Longest time until the head of a request is complete; also how long a connection without requests is kept.
const HEAD: Duration = Duration::from_secs(30);
/// Most bytes that a connection buffers of a request that is not read yet, and again of an answer that is not sent yet,
/// beside its last part; also the longest head of a request.
const BUFFER_BYTES: usize = 16 << 10;
/// Most header lines of a request.
const MAX_HEADERS: usize = 64;

/// Serves `routes` until `stop` says so, then lets running requests finish.
pub(in crate::server) async fn serve_connections(
    mut incoming: Incoming,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(accepted) = incoming.next() => {
                connections.spawn(serve_connection(accepted, routes.clone(), stop.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = stopped(&mut stop) => break,
        }
    }
    drop(incoming);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection until it ends, or until `stop` says so and its running request is answered.
async fn serve_connection(accepted: Accepted, routes: Router, mut stop: watch::Receiver<bool>) {
    let Accepted { socket, slot: _slot } = accepted;
    let watched = Watch::new(socket.tcp());
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(routes));
    let ended = tokio::select! {
        ended = serve_until_stopped(connection, &mut stop) => ended,
        () = watched.left() => return tracing::debug!("connection closed: its client has left"),
    };
    if let Err(error) = ended {
        tracing::debug!("connection ended: {error}");
    }
}

/// Serves a connection until it ends, or until its running request is answered once `stop` says so.
async fn serve_until_stopped(
    connection: http1::Connection<TokioIo<Socket>, TowerToHyperService<Router>>,
    stop: &mut watch::Receiver<bool>,
) -> hyper::Result<()> {
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    }
}

/// Returns once `stop` is true, or nobody can set it any more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
