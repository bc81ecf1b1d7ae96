//! Notices clients that have left while their request runs. Those that vanish without a word (a machine that was
//! switched off, a network that broke) are noticed by what their machine does not answer: the system's own limit for
//! bytes that are not acknowledged (TCP_USER_TIMEOUT) also ends the connections of clients that are there and do not
//! read, whose requests are held back instead. A client that had stopped reading before it vanished is not noticed by
//! this yet on some machines: its request stays suspended. Those that hang up are noticed here too, because the
//! transport does not see that behind bytes that it has not read yet, such as another request.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Silence after which a client that has nothing to acknowledge is asked for a sign of life, the time between two such
/// questions, and how many stay without an answer before its connection is closed: after 20 s.
const SILENCE: Duration = Duration::from_secs(10);
const QUESTION: Duration = Duration::from_secs(5);
const QUESTIONS: u32 = 2;
/// How often to look at a connection.
const LOOK: Duration = Duration::from_secs(2);
/// Silence in milliseconds after which bytes that were sent are taken as lost, if they were sent again as often as
/// this.
const LOST_MS: u32 = 15_000;
const RETRIES: u8 = 3;
/// States of a connection whose client has closed it, or whose system has: TCP_CLOSE and TCP_CLOSE_WAIT of Linux.
const CLOSED: [u8; 2] = [7, 8];

/// A connection as it is watched. Its socket must be open for as long as this is used.
pub(super) struct Watch(RawFd);

impl Watch {
    /// Lets the system close the connection of a client that vanishes while it waits.
    pub(super) fn new(stream: &TcpStream) -> Self {
        let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(QUESTION).with_retries(QUESTIONS);
        // Fails only for a connection that has already broken, which its first read reports.
        let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
        Self(stream.as_raw_fd())
    }

    /// Waits until the client has hung up, or has vanished while it should have acknowledged something.
    pub(super) async fn left(self) {
        let mut looks = tokio::time::interval(LOOK);
        loop {
            looks.tick().await;
            // Fails only for a connection that has ended.
            if let Ok(info) = info(self.0)
                && (CLOSED.contains(&info.tcpi_state)
                    || is_lost(info.tcpi_retransmits.max(info.tcpi_probes), info.tcpi_last_ack_recv))
            {
                return;
            }
        }
    }
}

/// Whether bytes, or questions whether the client has room for more, were sent again so many times without an answer in
/// so many milliseconds. A client that is there and does not read answers each.
fn is_lost(retries: u8, silence_ms: u32) -> bool {
    retries >= RETRIES && silence_ms >= LOST_MS
}

/// What the system knows of a connection.
fn info(socket: RawFd) -> io::Result<libc::tcp_info> {
    // SAFETY: all of its fields are numbers, for which zeros are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the system writes at most `length` bytes to `info`, whatever the descriptor is.
    let failed = unsafe {
        libc::getsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &raw mut length,
        )
    };
    if failed == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_is_watched_as_it_is_meant() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("it has one")).await.expect("it listens");
        let (stream, _) = listener.accept().await.expect("a client has come");
        let watch = Watch::new(&stream);
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().expect("an option"));
        assert_eq!(socket.tcp_keepalive_time().expect("an option"), SILENCE);
        assert_eq!(socket.tcp_keepalive_interval().expect("an option"), QUESTION);
        assert_eq!(socket.tcp_keepalive_retries().expect("an option"), QUESTIONS);
        let state = || info(watch.0).map(|info| (CLOSED.contains(&info.tcpi_state), info.tcpi_retransmits));
        assert_eq!(state().expect("it is open"), (false, 0));
        drop(client);
        while !state().expect("it is open").0 {
            tokio::task::yield_now().await;
        }
        drop(stream);
        assert!(state().is_err());
    }

    #[test]
    fn only_silence_with_retries_is_a_loss() {
        assert!(is_lost(RETRIES, LOST_MS));
        assert!(!is_lost(0, u32::MAX), "there was nothing to acknowledge");
        assert!(!is_lost(u8::MAX, LOST_MS - 1), "it answers the last one soon");
    }
}
