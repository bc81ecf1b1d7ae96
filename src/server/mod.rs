//! The edge: tokio and tonic end here. A request is parsed into valid types at the door, goes to the engine as one
//! command, and its events come back as messages. The server owns no serving state.

mod connections;
mod convert;
mod encoder;
mod frames;
mod gate;
mod grpc;
mod isolation;
mod parts;
mod shutdown;

use std::convert::Infallible;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

pub use connections::connection_limit;
pub use encoder::PromptEncoder;
pub use parts::{ModelFacts, Parts, ServerInfo};
pub use shutdown::{ShutdownHandle, ShutdownOrders, shutdown_channel, watch_signals};

use crate::engine::{Command, EngineHandle};
use crate::error::{Error, Result};
use crate::memory::{Traffic, trim};
use crate::weights::Segments;
use connections::Incoming;
use frames::FrameRoom;
use gate::{Gate, GateKeeper};
use shutdown::Order;

/// Messages and services generated from `proto/`.
#[allow(clippy::all, clippy::too_many_lines, reason = "generated code")]
pub mod pb {
    tonic::include_proto!("rollout.v1");

    /// The encoded descriptor set, for reflection.
    pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rollout_descriptor.bin"));
}

/// A connection on which nothing was heard for this long is asked for a sign of life, and closed (which aborts its
/// requests) if none comes in the same time again: a client whose machine vanished frees its blocks within 20 s.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Concurrent calls per connection. Agents open one call per conversation; who may wait is for the engine to say
/// (RESOURCE_EXHAUSTED), so the transport must not queue silently at hyper's default of 200.
const MAX_CONCURRENT_STREAMS: u32 = 4096;
/// What a stream may send ahead of being read: two chunks of a push, so that it never waits for a window.
const STREAM_WINDOW: u32 = 8 << 20;
/// What all streams of a connection together may send ahead of being read.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest question about the protocol itself, which is a name: each stream of them may keep one.
const MAX_NAME_BYTES: usize = 4 << 10;
/// How long the segment of a push may stay mapped when its owner has removed it.
const SEGMENT_WATCH: Duration = Duration::from_secs(1);
/// By how much the bytes of requests and connections must fall for a trim, and how often at most: it walks all free memory, and what it
/// gives back is fetched anew by the next burst.
const TRIM_BYTES: u64 = 32 << 20;
const TRIM_INTERVAL: Duration = Duration::from_secs(1);
/// After the work is over, how long slow readers may take to fetch what is left for them.
const FLUSH: Duration = Duration::from_secs(5);

/// Where and how to serve.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// A name or an address.
    pub host: String,
    /// 0 takes any free port.
    pub port: u16,
    /// Most connections at once.
    pub max_connections: usize,
    /// How long running requests may take after an order to end.
    pub shutdown_grace: Duration,
}

/// A port that is taken, so that a wrong one ends the start before the model is loaded.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    max_connections: usize,
    shutdown_grace: Duration,
}

impl Bound {
    /// # Errors
    /// `Config` if the address cannot be listened on.
    pub fn new(config: &ServerConfig) -> Result<Self> {
        let ServerConfig { host, port, max_connections, shutdown_grace } = config;
        let failed = |e: std::io::Error| {
            let hint = match e.kind() {
                std::io::ErrorKind::AddrInUse => "stop the process that uses the port, or choose another --port",
                _ => "choose another --host or --port",
            };
            Error::Config(format!("cannot listen on {host}:{port}: {e}; {hint}"))
        };
        let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, max_connections: *max_connections, shutdown_grace: *shutdown_grace })
    }

    /// The address really taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every request had its end.
    Drained,
    /// Some work was left behind: the grace period is over and the engine did not let go, or the end was ordered
    /// while the model was loading. The engine thread should not be waited for.
    Cut,
}

/// Serves until ordered to end. While `parts` is being made (the model loads), health says NOT_SERVING and calls get
/// UNAVAILABLE. At the first order new requests get UNAVAILABLE, running ones may finish within the grace period, and
/// the engine then aborts the rest, whose partial completions are still delivered. A second order skips the grace
/// period. Must be called inside a tokio runtime.
///
/// # Errors
/// What `parts` fails with; `Internal` if the transport fails.
pub async fn serve(
    bound: Bound,
    parts: impl Future<Output = Result<Parts>>,
    mut orders: ShutdownOrders,
) -> Result<Ended> {
    let (keeper, gate) = gate::gate();
    let (health, health_service) = tonic_health::server::health_reporter();
    report(&health, ServingStatus::NotServing).await;
    let (stop, stopped) = oneshot::channel::<()>();
    let grace = bound.shutdown_grace;
    let address = bound.address;
    let stopped = async move {
        // Either way it is the end.
        let _ = stopped.await;
    };
    let frame_room = FrameRoom::new();
    let mut transport =
        AbortOnDrop(tokio::spawn(transport(bound, frame_room.clone(), &gate, health_service, stopped)?));

    let parts = tokio::select! {
        parts = parts => Arc::new(parts?),
        _ = orders.next() => return Ok(Ended::Cut),
    };
    keeper.serving(parts.clone());
    report(&health, ServingStatus::Serving).await;
    tracing::info!(%address, "ready");
    let order = tokio::select! {
        order = orders.next() => order,
        ended = &mut transport.0 => return Err(Error::Internal(format!("the transport ended by itself: {ended:?}"))),
        never = release_removed(parts.sources.segments()) => match never {},
        never = give_memory_back(&parts.traffic, &frame_room) => match never {},
    };

    tracing::info!(grace_seconds = grace.as_secs_f64(), "ending: running requests may finish");
    report(&health, ServingStatus::NotServing).await;
    keeper.ending(parts.clone());
    if order == Order::EngineEnded {
        keeper.ended(parts.clone());
    }
    let ended = drain(&keeper, &parts, grace, &mut orders).await;
    // Streams of health watchers would otherwise keep their connections open.
    forget(health).await;
    let _ = stop.send(());
    if timeout(FLUSH, &mut transport.0).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    tracing::info!(?ended, "ended");
    Ok(ended)
}

/// Lets go of segments that their owners have removed: their memory would not come back while they are mapped here.
async fn release_removed(segments: &Segments) -> Infallible {
    let mut ticks = tokio::time::interval(SEGMENT_WATCH);
    loop {
        ticks.tick().await;
        segments.release_removed();
    }
}

/// Gives memory back to the system when requests and replies take much less of it than they did, or many connections
/// have ended: the allocator keeps what is freed, and a burst would stay in the process for ever.
async fn give_memory_back(traffic: &Traffic, frame_room: &FrameRoom) -> Infallible {
    let mut ticks = tokio::time::interval(TRIM_INTERVAL);
    let (mut most, mut dropped) = (0, 0);
    loop {
        ticks.tick().await;
        most = traffic.take_high_water().max(most);
        dropped += frame_room.take_dropped();
        if most.saturating_sub(traffic.used()) + dropped >= TRIM_BYTES {
            (most, dropped) = (traffic.used(), 0);
            // It takes the allocator's locks one after the other. If it fails, the next one does its work.
            let _ = tokio::task::spawn_blocking(trim).await;
        }
    }
}

/// Waits until no request runs, aborting what the grace period or a second order leaves.
async fn drain(keeper: &GateKeeper, parts: &Arc<Parts>, grace: Duration, orders: &mut ShutdownOrders) -> Ended {
    let engine = &parts.engine;
    let finish = async {
        order_end(engine, grace).await;
        keeper.drained().await;
    };
    let hurry = async {
        // The engine ends when its requests have: pushes that are still open end with it.
        while orders.next().await == Order::EngineEnded {
            keeper.ended(parts.clone());
        }
        tracing::info!("ending at once: running requests are aborted");
        order_end(engine, Duration::ZERO).await;
        tokio::time::sleep(FLUSH).await;
    };
    tokio::select! {
        () = finish => Ended::Drained,
        () = hurry => Ended::Cut,
        () = tokio::time::sleep(grace + FLUSH) => Ended::Cut,
    }
}

/// Tells the engine to end. A full command queue empties as the engine steps, so this tries again until it fits.
async fn order_end(engine: &EngineHandle, grace: Duration) {
    const RETRY: Duration = Duration::from_millis(10);
    while let Err(Error::ResourceExhausted(_)) = engine.send(Command::Shutdown { grace }) {
        tokio::time::sleep(RETRY).await;
    }
}

/// The transport, ready to be spawned; it ends in good order once `stopped` is ready.
fn transport(
    bound: Bound,
    frame_room: FrameRoom,
    gate: &Gate,
    health: HealthServer<impl Health>,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> Result<impl Future<Output = std::result::Result<(), tonic::transport::Error>> + Send + 'static> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(|e| Error::Internal(format!("reflection: {e}")))?;
    let door = grpc::Door::new(gate)?;
    let router = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(Some(MAX_CONCURRENT_STREAMS))
        .initial_stream_window_size(Some(STREAM_WINDOW))
        .initial_connection_window_size(Some(CONNECTION_WINDOW))
        .max_frame_size(Some(frames::FRAME_BYTES))
        .layer(InterceptorLayer::new(grpc::note_call(gate)))
        .add_routes(grpc::routes(gate, &door))
        .add_service(reflection.max_decoding_message_size(MAX_NAME_BYTES))
        .add_service(door.before(health));
    let incoming = Incoming::new(bound.listener, bound.max_connections, frame_room)
        .map_err(|e| Error::Internal(format!("cannot listen on {}: {e}", bound.address)))?;
    Ok(router.serve_with_incoming_shutdown(incoming, stopped))
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in grpc::HEALTH_NAMES {
        health.set_service_status(name, status).await;
    }
}

async fn forget(mut health: HealthReporter) {
    for name in grpc::HEALTH_NAMES {
        health.clear_service_status(name).await;
    }
}

/// The transport must not outlive `serve`.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
