//! Serves the routes on HTTP/1.1 connections, and limits what each can hold.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;

use super::departure::Watch;
use crate::server::connections::{Accepted, Incoming};

/// Longest time until the head of a request is complete; also how long a connection without requests is kept.
const HEAD: Duration = Duration::from_secs(30);
/// Most bytes that a connection buffers of a request that is not read yet, and again of an answer that is not sent yet,
/// beside its last part; also the longest head of a request.
const BUFFER_BYTES: usize = 16 << 10;
/// Most header lines of a request.
const MAX_HEADERS: usize = 64;

/// Address of a connection's client, among the extensions of its requests.
#[derive(Clone)]
pub(super) struct Peer(pub(super) String);

/// Ends a connection whose client does not read what it has asked for.
#[derive(Clone, Default)]
pub(super) struct HangUp(Arc<Notify>);

impl HangUp {
    pub(super) fn hang_up(&self) {
        self.0.notify_one();
    }

    /// Returns once the connection is to end.
    pub(super) async fn asked(&self) {
        self.0.notified().await;
    }
}

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
    let (watched, hang_up) = (Watch::new(socket.tcp()), HangUp::default());
    let peer = Peer(socket.peer().map_or_else(|| "an unknown address".into(), |peer| peer.to_string()));
    let routes = TowerToHyperService::new(routes);
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
            () = stopped(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    let ended = tokio::select! {
        ended = serve_until_stopped => ended,
        () = watched.left() => return tracing::debug!("connection closed: its client has left"),
        () = hang_up.asked() => return tracing::debug!("connection closed: its client does not read"),
    };
    if let Err(error) = ended {
        tracing::debug!("connection ended: {error}");
    }
}

/// Returns once `stop` is true, or nobody can set it any more.
pub(super) async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
