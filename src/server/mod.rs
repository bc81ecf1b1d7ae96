//! The edge of the process, where tokio and tonic end: a request is parsed into valid types, goes to the engine as one
//! command, and is answered with messages made of the engine's events. The server owns no serving state.

mod adapters_dir;
mod calls;
mod convert;
mod encoder;
mod grpc;
mod held_pictures;
mod http;
mod lifecycle;
mod listener;
mod pushes;
mod replies;
mod requests;
mod security;
mod shutdown;
mod state;
mod transfer;

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

pub use adapters_dir::AdaptersDir;
pub use encoder::{PromptEncoder, RequestTemplates};
pub use held_pictures::HeldPictures;
pub use listener::connection_limit;
pub use security::{SecurityConfig, TlsFiles};
pub use shutdown::{ShutdownHandle, ShutdownOrders, shutdown_channel, watch_signals};
pub use state::{ImageRules, ModelFacts, RoutingRules, ServingContext};

use crate::config::LoraModule;
use crate::engine::{Command, EngineHandle};
use crate::error::{Error, Result};
use crate::memory::{Traffic, trim};
use crate::observe::{Metrics, Observer};
use crate::weights::Segments;
use http::AllowedHosts;
use listener::{FRAME_BYTES, FrameRoom, Http2Connection, Listener};
use security::Security;
use shutdown::Order;
use state::{ServerState, Stage, StageSetter};

/// Messages and services generated from `proto/`.
#[allow(clippy::all, clippy::too_many_lines, reason = "generated code")]
pub mod pb {
    tonic::include_proto!("rollout.v1");

    /// The encoded descriptor set, for reflection.
    pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rollout_descriptor.bin"));

    /// Whether JSON leaves a member out, as `build.rs` says.
    fn is_default<T: Default + PartialEq>(value: &T) -> bool {
        *value == T::default()
    }
}

/// A connection that is silent for this long is pinged, and closed (which aborts its requests) if it stays silent for
/// the same time again: the blocks of a client whose machine vanished are free within 20 s.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Most concurrent calls per connection. Agents open one call per conversation. Admission is the engine's decision
/// (RESOURCE_EXHAUSTED), so the transport must not queue silently at hyper's default of 200.
const MAX_CONCURRENT_STREAMS: u32 = 4096;
/// Bytes that the client may send on one stream before they are read: two chunks of a push, so that a push never waits
/// for window updates.
const STREAM_WINDOW: u32 = 8 << 20;
/// Bytes that the client may send on all streams of a connection before they are read.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Time between two checks for segments of pushes that their owners have removed, and that are still mapped here.
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
    /// Tokens and TLS.
    pub security: SecurityConfig,
    /// Adapters that are loaded before the first call is admitted.
    pub lora_modules: Vec<LoraModule>,
}

/// The listening ports. They are taken before the model is loaded, so that a wrong one ends the start early.
pub struct Bound {
    config: ServerConfig,
    grpc: BoundPort,
    http: Option<BoundPort>,
    security: Security,
    hosts: AllowedHosts,
}

/// A listening port.
struct BoundPort {
    listener: TcpListener,
    address: SocketAddr,
}

impl BoundPort {
    /// Listens on `host` and `port`, which come from `flag`.
    fn new(host: &str, port: u16, flag: &str) -> Result<Self> {
        let failed = |e: io::Error| {
            let hint = match e.kind() {
                ErrorKind::AddrInUse => "stop the process that uses the port, or choose another",
                _ => "choose another --host or",
            };
            Error::Config(format!("cannot listen on {host}:{port}: {e}; {hint} {flag}"))
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
    /// without a token and `--insecure` is not set.
    pub fn new(config: &ServerConfig) -> Result<Self> {
        let host = &config.host;
        let security = Security::load(&config.security)?;
        let grpc = BoundPort::new(host, config.port, "--port")?;
        security.check_address(host, grpc.address.ip())?;
        let http = config.http_port.map(|port| BoundPort::new(host, port, "--http-port")).transpose()?;
        let mut allowed = config.security.allow_host.clone();
        // A name in --allow-host says that the operator knows all names that clients use.
        let only_these = grpc.address.ip().to_canonical().is_loopback() || !allowed.is_empty();
        allowed.push(host.clone());
        let hosts = AllowedHosts::new(allowed, only_these);
        Ok(Self { config: config.clone(), grpc, http, security, hosts })
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
    /// In-flight requests were cut off: the engine did not stop within the grace period, or the shutdown began while
    /// the model was loading. Do not wait for the engine thread.
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
    let (stage, server) = ServerState::new(observer);
    let (health, health_service) = tonic_health::server::health_reporter();
    report(&health, ServingStatus::NotServing).await;
    let stop = CancellationToken::new();
    let grace = bound.config.shutdown_grace;
    let lora_modules = std::mem::take(&mut bound.config.lora_modules);
    let (address, http) = (bound.address(), bound.http_address());
    let frame_room = FrameRoom::new();
    // A set aborts its task when it is dropped: neither task outlives `serve`.
    let (mut secrets, mut transport) = (JoinSet::new(), JoinSet::new());
    secrets.spawn(bound.security.keep_current());
    transport.spawn(both_ports(bound, frame_room.clone(), &server, health_service, stop.clone())?);

    let context = async {
        let context = context.await?;
        pushes::load_modules(&server, &context, &lora_modules).await.map(|()| Arc::new(context))
    };
    let context = tokio::select! {
        context = context => context?,
        _ = orders.next() => return Ok(Ended::Cut),
    };
    stage.set(Stage::Serving(context.clone()));
    report(&health, ServingStatus::Serving).await;
    tracing::info!(%address, http = http.map(tracing::field::display), "ready");
    let order = tokio::select! {
        order = orders.next() => order,
        ended = transport.join_next() => {
            return Err(Error::Internal(format!("the transport ended by itself: {ended:?}")));
        }
        never = release_removed(context.sources.segments()) => match never {},
        never = trim_heap(&context.traffic, &frame_room, &metrics) => match never {},
    };

    tracing::info!(grace_seconds = grace.as_secs_f64(), "ending: running requests may finish");
    report(&health, ServingStatus::NotServing).await;
    stage.set(Stage::Ending(context.clone()));
    if order == Order::EngineEnded {
        stage.set(Stage::Ended(context.clone()));
    }
    let ended = drain(&stage, &context, grace, &mut orders).await;
    // Ends the streams of health watchers, which would otherwise keep their connections open.
    clear(health).await;
    stop.cancel();
    if timeout(FLUSH, transport.join_next()).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    tracing::info!(?ended, "ended");
    Ok(ended)
}

/// Unmaps segments that their owners have removed; their memory is not free while they are mapped here.
async fn release_removed(segments: &Segments) -> Infallible {
    let mut ticks = tokio::time::interval(SEGMENT_WATCH);
    loop {
        ticks.tick().await;
        segments.release_removed();
    }
}

/// Trims the heap when requests and replies take much less memory than they did, when many connections have ended, and
/// when a push has ended. The allocator keeps what is freed, so that the memory of a burst would stay in the process.
async fn trim_heap(traffic: &Traffic, frame_room: &FrameRoom, metrics: &Metrics) -> Infallible {
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
            let _ = spawn_blocking(trim).await;
        }
    }
}

/// Waits until no request is running; aborts those left after the grace period or at a second order.
async fn drain(
    stage: &StageSetter,
    context: &Arc<ServingContext>,
    grace: Duration,
    orders: &mut ShutdownOrders,
) -> Ended {
    let engine = &context.engine;
    let finish = async {
        order_end(engine, grace).await;
        stage.drained().await;
    };
    let hurry = async {
        // The engine ends when its requests have ended, and pushes that are still open end with it.
        while orders.next().await == Order::EngineEnded {
            stage.set(Stage::Ended(context.clone()));
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

/// Sends the engine the command to end. Tries again while the command queue is full; it empties as the engine steps.
async fn order_end(engine: &EngineHandle, grace: Duration) {
    const RETRY: Duration = Duration::from_millis(10);
    while let Err(Error::ResourceExhausted(_)) = engine.send(Command::Shutdown { grace }) {
        tokio::time::sleep(RETRY).await;
    }
}

/// Both ports, ready to be spawned. They shut down gracefully once `stop` is cancelled.
fn both_ports(
    bound: Bound,
    frame_room: FrameRoom,
    server: &ServerState,
    health: HealthServer<impl Health>,
    stop: CancellationToken,
) -> Result<impl Future<Output = Result<()>> + Send + 'static> {
    let Bound { config, grpc, http, security, hosts } = bound;
    let listen = |port: BoundPort, protocol| {
        let failed = |e| Error::Internal(format!("cannot listen on {}: {e}", port.address));
        let tls = security.tls(protocol);
        Listener::new(port.listener, config.max_connections, tls, &server.observer.metrics).map_err(failed)
    };
    let http = http.map(|port| listen(port, "http/1.1")).transpose()?;
    let routes = http::router(server, &security.access, hosts, stop.clone());
    let http = http.map(|listener| http::serve_connections(listener, routes, stop.clone()));
    let connections = listen(grpc, "h2")?;
    let connections = connections.map(move |accepted| Ok::<_, Infallible>(Http2Connection::new(accepted, &frame_room)));
    let grpc = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(Some(MAX_CONCURRENT_STREAMS))
        .initial_stream_window_size(Some(STREAM_WINDOW))
        .initial_connection_window_size(Some(CONNECTION_WINDOW))
        .max_frame_size(Some(FRAME_BYTES))
        .add_routes(grpc::routes(server, &security.access, health)?)
        .serve_with_incoming_shutdown(connections, stop.cancelled_owned());
    Ok(async {
        let grpc = async { grpc.await.map_err(|e| Error::Internal(format!("the gRPC port: {e}"))) };
        let http = async {
            if let Some(serve) = http {
                serve.await;
            }
            Ok(())
        };
        tokio::try_join!(grpc, http).map(|_| ())
    })
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in grpc::HEALTH_NAMES {
        health.set_service_status(name, status).await;
    }
}

async fn clear(mut health: HealthReporter) {
    for name in grpc::HEALTH_NAMES {
        health.clear_service_status(name).await;
    }
}
