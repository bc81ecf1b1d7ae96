//! TLS handshakes in progress. They run while further connections are accepted, and are limited in number and time,
//! because a client is unknown until its handshake is done. Otherwise clients that stall in theirs would keep out all
//! others: `test_clients_that_stall_in_the_handshake_leave_others_served` in `clients/python/tests/test_tls.py`.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::either::Either;

use super::{Accepted, ConnectionPermit, LogLimiter};
use crate::server::security::Tls;

/// Longest time of a handshake: some round trips through a slow network.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Most handshakes in progress. Each may hold the 64 KiB of a long chain of certificates.
const MAX_HANDSHAKES: usize = 256;
/// Handshakes of this age give way to new ones when there are [`MAX_HANDSHAKES`]. Those of honest clients take some
/// milliseconds.
const OLD: Duration = Duration::from_secs(1);
/// Bytes of replies that TLS buffers for a connection: one record, as the transport has buffers of its own.
const SEND_BYTES: usize = 16 << 10;
/// Bytes that are read from a connection at a time: two records. TLS by itself reads a quarter of one.
const READ_BYTES: usize = 32 << 10;

pub(super) struct Handshakes {
    tls: Tls,
    limit: usize,
    running: JoinSet<()>,
    /// When each handshake began, the oldest first. Some may have ended.
    begun: VecDeque<(Instant, AbortHandle)>,
    failed: Arc<Mutex<LogLimiter>>,
}

impl Handshakes {
    /// Handshakes for a port of at most `max_connections`. They take up to a quarter of these.
    pub(super) fn new(tls: Tls, max_connections: usize) -> Self {
        let limit = MAX_HANDSHAKES.min(max_connections.div_ceil(4));
        Self { tls, limit, running: JoinSet::new(), begun: VecDeque::new(), failed: Arc::default() }
    }

    /// Waits until another handshake may begin. If there are too many, the oldest is aborted once it is [`OLD`].
    pub(super) async fn room(&mut self) {
        loop {
            while self.running.try_join_next().is_some() {}
            self.begun.retain(|(_, handshake)| !handshake.is_finished());
            let Some((begun, oldest)) = self.begun.front().filter(|_| self.begun.len() >= self.limit) else { return };
            tokio::select! {
                _ = self.running.join_next() => {}
                () = sleep_until(*begun + OLD) => {
                    oldest.abort();
                    self.begun.pop_front();
                }
            }
        }
    }

    /// Begins a handshake, whose connection takes `permit` and goes to `accepted`.
    pub(super) fn begin(&mut self, stream: TcpStream, permit: ConnectionPermit, accepted: UnboundedSender<Accepted>) {
        let (acceptor, failed) = (self.tls.acceptor(), self.failed.clone());
        let handshake = self.running.spawn(async move {
            let peer = stream.peer_addr().ok();
            let stream = BufReader::with_capacity(READ_BYTES, stream);
            let accept = acceptor.accept_with(stream, |connection| connection.set_buffer_limit(Some(SEND_BYTES)));
            match timeout(HANDSHAKE, accept).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                // Sending fails if the port is closed.
                Ok(stream) => drop(accepted.send(Accepted { socket: Either::Right(Box::new(stream)), permit })),
                Err(error) => log(peer, &error, &failed),
            }
        });
        self.begun.push_back((Instant::now(), handshake));
    }
}

/// Logs a failed handshake, at most once in [`super::LOG_INTERVAL`], because the client learns little or nothing from
/// TLS.
fn log(peer: Option<SocketAddr>, error: &io::Error, failed: &Mutex<LogLimiter>) {
    let peer = peer.map_or_else(|| "a client".to_owned(), |peer| peer.to_string());
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) {
        // A probe of the port, or a client that gave up.
        tracing::debug!("TLS handshake with {peer}: the client hung up");
    } else if let Some(times) = failed.lock().unwrap_or_else(PoisonError::into_inner).due(Instant::now()) {
        tracing::warn!(times, "TLS handshake with {peer} failed: {}", reason(error));
    }
}

/// Why a handshake failed, for the log.
fn reason(error: &io::Error) -> String {
    use rustls::{AlertDescription, Error, InvalidMessage};
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match tls {
        None if error.kind() == io::ErrorKind::TimedOut => "it took too long".into(),
        None => error.to_string(),
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => "the client does not speak TLS".into(),
        Some(Error::NoCertificatesPresented) => {
            "the client has no certificate, and --tls-client-ca asks for one".into()
        }
        Some(Error::InvalidCertificate(why)) => format!("the client's certificate is refused: {why:?}"),
        Some(Error::AlertReceived(AlertDescription::UnknownCA)) => {
            "the client does not know the authority of --tls-cert (unknown CA)".into()
        }
        Some(Error::NoApplicationProtocol) => "the client wants another protocol on this port".into(),
        Some(other) => other.to_string(),
    }
}
