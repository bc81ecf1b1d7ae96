//! The edge of the process, where tokio and tonic end: a request is parsed into valid types, goes to the engine as one
//! command, and is answered with messages made of the engine's events. The server owns no serving state.

mod calls;
mod connections;
mod context;
mod convert;
mod encoder;
mod frames;
mod gate;
mod greeting;
mod grpc;
mod handshakes;
mod http;
mod notice;
mod orders;
mod panics;
mod pushes;
mod requests;
mod role;
mod scrape;
mod security;
mod shutdown;
mod slot;
mod socket;
mod transfer;

use std::convert::Infallible;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

pub use connections::connection_limit;
pub use context::{ModelFacts, ServerInfo, ServingContext};
pub use encoder::PromptEncoder;
pub use security::{SecurityConfig, TlsFiles};
pub use shutdown::{ShutdownHandle, ShutdownOrders, shutdown_channel, watch_signals};

use crate::engine::{Command, EngineHandle};
use crate::error::{Error, Result};
use crate::memory::{Traffic, trim};
use crate::observe::{Metrics, Observer};
use crate::weights::Segments;
use connections::Incoming;
use frames::FrameRoom;
use gate::{Gate, GateKeeper};
use greeting::Connection;
use http::AllowedHosts;
use security::{Access, Protocol, Security};
use shutdown::Order;

/// Messages and services generated from `proto/`.
#[allow(clippy::all, clippy::too_many_lines, reason = "generated code")]
pub mod pb {
    tonic::include_proto!("rollout.v1");

    /// The encoded descriptor set, for reflection.
    pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rollout_descriptor.bin"));
}

/// A connection that is silent for this long is pinged, and closed (which aborts its requests) if it stays silent for
/// the same time again: the blocks of a client whose machine vanished are free within 20 s.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Most concurrent calls per connection. Agents open one call per conversation. The engine decides who may wait
/// (RESOURCE_EXHAUSTED), so the transport must not queue silently at hyper's default of 200.
const MAX_CONCURRENT_STREAMS: u32 = 4096;
/// Bytes that the client may send on one stream before they are read: two chunks of a push, so that a push never waits
/// for window updates.
const STREAM_WINDOW: u32 = 8 << 20;
/// Bytes that the client may send on all streams of a connection before they are read.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest message of a reflection or health request in bytes. It is a name, and each open stream may keep one.
const MAX_NAME_BYTES: usize = 4 << 10;
/// How often to look for segments of pushes that their owners have removed, and which are still mapped here.
const SEGMENT_WATCH: Duration = Duration::from_secs(1);
/// Bytes by which requests and connections must shrink for a trim of the heap. A trim walks all free memory, and the
/// next burst fetches again what the trim gave back.
const TRIM_BYTES: u64 = 32 << 20;
/// Shortest time between two trims of the heap.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);
/// How long slow readers may take, after all work is done, to fetch the rest of their replies.
const FLUSH: Duration = Duration::from_secs(5);

/// Where to listen, and the server's limits.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Name or address to listen on.
    pub host: String,
    /// Port of gRPC; 0 takes any free one.
    pub port: u16,
    /// Port of HTTP; 0 takes any free one, None serves no HTTP.
    pub http_port: Option<u16>,
    /// Most connections at the same time, to each port.
    pub max_connections: usize,
    /// How long running requests may take to finish after an order to end.
    pub shutdown_grace: Duration,
    /// Who may call what.
    pub security: SecurityConfig,
}

/// The listening ports. They are taken before the model is loaded, so that a wrong one ends the start early.
pub struct Bound {
    grpc: Listening,
    http: Option<Listening>,
    max_connections: usize,
    shutdown_grace: Duration,
    security: Security,
    hosts: AllowedHosts,
}

/// A listening port.
struct Listening {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listening {
    /// Listens on `host` and `port`, which `flag` has given.
    fn new(host: &str, port: u16, flag: &str) -> Result<Self> {
        let failed = |e: std::io::Error| {
            let hint = match e.kind() {
                std::io::ErrorKind::AddrInUse => {
                    format!("stop the process that uses the port, or choose another {flag}")
                }
                _ => format!("choose another --host or {flag}"),
            };
            Error::Config(format!("cannot listen on {host}:{port}: {e}; {hint}"))
        };
        let listener = TcpListener::bind((host, port)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }
}

impl Bound {
    /// Reads the files of `config.security` and starts to listen.
    ///
    /// # Errors
    /// `Config` if an address cannot be listened on, or a file is wrong, or other machines could reach the server
    /// without a token and nobody has said that they may.
    pub fn new(config: &ServerConfig) -> Result<Self> {
        let ServerConfig { host, port, http_port, max_connections, shutdown_grace, security } = config;
        let mut allowed = security.allow_host.clone();
        let security = Security::load(security)?;
        let grpc = Listening::new(host, *port, "--port")?;
        security.check_address(host, grpc.address.ip())?;
        let http = http_port.map(|port| Listening::new(host, port, "--http-port")).transpose()?;
        // A name in --allow-host says that the operator knows all by which clients come.
        let only_these = grpc.address.ip().to_canonical().is_loopback() || !allowed.is_empty();
        allowed.push(host.clone());
        let hosts = AllowedHosts::new(allowed, only_these);
        Ok(Self { grpc, http, max_connections: *max_connections, shutdown_grace: *shutdown_grace, security, hosts })
    }

    /// The address that gRPC really listens on.
    pub fn address(&self) -> SocketAddr {
        self.grpc.address
    }

    /// The address that HTTP really listens on.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(|http| http.address)
    }
}

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every request ran to its end.
    Drained,
    /// Work was left behind: the engine did not stop within the grace period, or the order to end came while the model
    /// was loading. The engine thread should not be waited for.
    Cut,
}

/// Serves until it is ordered to end. While `context` is being made (the model loads), health says NOT_SERVING and
/// calls get UNAVAILABLE. After the first order to end, new requests get UNAVAILABLE and running ones may finish within
/// the grace period; then the engine aborts the rest, whose partial completions are still delivered. A second order
/// skips the grace period. Must be called inside a tokio runtime.
///
/// # Errors
/// The error of `context` if it fails; `Internal` if the transport fails.
pub async fn serve(
    mut bound: Bound,
    observer: Observer,
    context: impl Future<Output = Result<ServingContext>>,
    mut orders: ShutdownOrders,
) -> Result<Ended> {
    let metrics = observer.metrics.clone();
    let (keeper, gate) = gate::gate(observer);
    let (health, health_service) = tonic_health::server::health_reporter();
    report(&health, ServingStatus::NotServing).await;
    let (stop, stopped) = watch::channel(false);
    let grace = bound.shutdown_grace;
    let (address, http) = (bound.address(), bound.http_address());
    let frame_room = FrameRoom::new();
    let secrets = bound.security.take_secrets();
    let _secrets = AbortOnDrop(tokio::spawn(secrets.keep_current()));
    let mut transport =
        AbortOnDrop(tokio::spawn(transport(bound, frame_room.clone(), &gate, health_service, stopped)?));

    let context = tokio::select! {
        context = context => Arc::new(context?),
        _ = orders.next() => return Ok(Ended::Cut),
    };
    keeper.serving(context.clone());
    report(&health, ServingStatus::Serving).await;
    match http {
        Some(http) => tracing::info!(%address, %http, "ready"),
        None => tracing::info!(%address, "ready"),
    }
    let order = tokio::select! {
        order = orders.next() => order,
        ended = &mut transport.0 => return Err(Error::Internal(format!("the transport ended by itself: {ended:?}"))),
        never = release_removed(context.sources.segments()) => match never {},
        never = give_memory_back(&context.traffic, &frame_room, &metrics) => match never {},
    };

    tracing::info!(grace_seconds = grace.as_secs_f64(), "ending: running requests may finish");
    report(&health, ServingStatus::NotServing).await;
    keeper.ending(context.clone());
    if order == Order::EngineEnded {
        keeper.ended(context.clone());
    }
    let ended = drain(&keeper, &context, grace, &mut orders).await;
    // Ends the streams of health watchers, which would otherwise keep their connections open.
    forget(health).await;
    stop.send_replace(true);
    if timeout(FLUSH, &mut transport.0).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    tracing::info!(?ended, "ended");
    Ok(ended)
}

/// Unmaps segments that their owners have removed; their memory does not come back while they are mapped here.
async fn release_removed(segments: &Segments) -> Infallible {
    let mut ticks = tokio::time::interval(SEGMENT_WATCH);
    loop {
        ticks.tick().await;
        segments.release_removed();
    }
}

/// Trims the heap when requests and replies take much less memory than they did, when many connections have ended, and
/// when a push has ended. The allocator keeps what is freed, so that the memory of a burst would stay in the process.
async fn give_memory_back(traffic: &Traffic, frame_room: &FrameRoom, metrics: &Metrics) -> Infallible {
    let mut ticks = tokio::time::interval(TRIM_INTERVAL);
    let (mut most, mut dropped, mut pushes) = (0, 0, 0);
    loop {
        ticks.tick().await;
        most = traffic.take_high_water().max(most);
        dropped += frame_room.take_dropped();
        let ended = metrics.pushes_ended();
        if ended > pushes || most.saturating_sub(traffic.used()) + dropped >= TRIM_BYTES {
            (most, dropped, pushes) = (traffic.used(), 0, ended);
            // On the blocking pool, because it takes the allocator's locks one after the other. If it fails, the next
            // trim does its work.
            let _ = tokio::task::spawn_blocking(trim).await;
        }
    }
}

/// Waits until no request is running; aborts those left after the grace period or at a second order.
async fn drain(
    keeper: &GateKeeper,
    context: &Arc<ServingContext>,
    grace: Duration,
    orders: &mut ShutdownOrders,
) -> Ended {
    let engine = &context.engine;
    let finish = async {
        order_end(engine, grace).await;
        keeper.drained().await;
    };
    let hurry = async {
        // The engine ends when its requests have ended, and pushes that are still open end with it.
        while orders.next().await == Order::EngineEnded {
            keeper.ended(context.clone());
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

/// Tells the engine to end. Tries again while the command queue is full; it empties as the engine steps.
async fn order_end(engine: &EngineHandle, grace: Duration) {
    const RETRY: Duration = Duration::from_millis(10);
    while let Err(Error::ResourceExhausted(_)) = engine.send(Command::Shutdown { grace }) {
        tokio::time::sleep(RETRY).await;
    }
}

/// Both doors, ready to be spawned. They shut down gracefully once `stopped` is true.
fn transport(
    bound: Bound,
    frame_room: FrameRoom,
    gate: &Gate,
    health: HealthServer<impl Health>,
    stopped: watch::Receiver<bool>,
) -> Result<impl Future<Output = Result<()>> + Send + 'static> {
    let Bound { grpc, http, max_connections, security, hosts, .. } = bound;
    let routes = http::router(gate, &security.access, hosts, stopped.clone());
    let incoming = |door: Listening, protocol| {
        let failed = |e| Error::Internal(format!("cannot listen on {}: {e}", door.address));
        Incoming::new(door.listener, max_connections, security.tls(protocol), &gate.observer.metrics).map_err(failed)
    };
    let http = http.map(|http| incoming(http, Protocol::Http1)).transpose()?;
    let http = http.map(|http| http::serve_connections(http, routes, stopped.clone()));
    let grpc = incoming(grpc, Protocol::Http2)?.map(move |accepted| Connection::new(accepted, frame_room.clone()));
    let grpc = grpc_transport(grpc, gate, &security.access, health, stopped)?;
    let http = async move {
        if let Some(serve) = http {
            serve.await;
        }
        Ok(())
    };
    Ok(async { tokio::try_join!(grpc, http).map(|_| ()) })
}

/// The gRPC door.
fn grpc_transport<C: Stream<Item = Connection> + Send + 'static, H: Health>(
    connections: C,
    gate: &Gate,
    access: &Access,
    health: HealthServer<H>,
    mut stopped: watch::Receiver<bool>,
) -> Result<impl Future<Output = Result<()>> + Send + 'static + use<C, H>> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let cannot_build = |e| Error::Internal(format!("reflection: {e}"));
    let reflection_v1 = reflection().build_v1().map_err(cannot_build)?;
    // Python's reflection client knows no other version.
    let reflection_v1alpha = reflection().build_v1alpha().map_err(cannot_build)?;
    let door = grpc::Door::new(gate)?;
    let routes = grpc::routes(gate, &door)
        .add_service(reflection_v1.max_decoding_message_size(MAX_NAME_BYTES))
        .add_service(reflection_v1alpha.max_decoding_message_size(MAX_NAME_BYTES))
        .add_service(door.before(health));
    let router = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(Some(MAX_CONCURRENT_STREAMS))
        .initial_stream_window_size(Some(STREAM_WINDOW))
        .initial_connection_window_size(Some(CONNECTION_WINDOW))
        .max_frame_size(Some(frames::FRAME_BYTES))
        .layer(InterceptorLayer::new(grpc::note_call(gate)))
        .add_routes(grpc::counted(grpc::guarded(routes, access), &gate.observer.metrics));
    let stopped = async move {
        // A dropped sender means the end just as a message does.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let served = router.serve_with_incoming_shutdown(connections.map(Ok::<_, Infallible>), stopped);
    Ok(async { served.await.map_err(|e| Error::Internal(format!("the gRPC port: {e}"))) })
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

/// Aborts its task on drop: the transport must not outlive `serve`.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
