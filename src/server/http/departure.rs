//! Notices clients that have left while their request runs. Those that vanish without a word (a machine that was
//! switched off, a network that broke) are noticed by what their machine does not answer: the system's own limit for
//! bytes that are not acknowledged (TCP_USER_TIMEOUT) also ends the connections of clients that are there and do not
//! read, whose requests are held back instead. Those that hang up are noticed here too, because the transport does not
//! see that behind bytes that it has not read yet, such as another request.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Silence after which a client that has nothing to acknowledge is asked for a sign of life, the time between two such
/// questions, and how many stay without an answer before its connection is closed: after 20 s.
const SILENCE: Duration = Duration::from_secs(10);
const QUESTION: Duration = Duration::from_secs(5);
const QUESTIONS: u32 = 2;
/// How often to look at a connection.
const LOOK: Duration = Duration::from_secs(2);
/// Silence in milliseconds after which a client is taken as lost, if bytes were sent again, or it was asked whether it
/// has room for more, as often as this since it last answered. The system does either at intervals that double, from
/// 0.2 s to 2 min, for as long as a client does not read: one that had not read for long is noticed after some minutes.
const LOST_MS: u32 = 15_000;
const RETRIES: u32 = 2;
/// Most bytes that the system keeps of an answer while the client's machine has no room for them. By itself it would
/// keep megabytes, and a client that does not read would be noticed only after those.
const UNSENT_BYTES: u32 = 16 << 10;
/// States of a connection whose client has closed it, or whose system has: TCP_CLOSE and TCP_CLOSE_WAIT of Linux.
const CLOSED: [u8; 2] = [7, 8];

/// A connection as it is watched. Its socket must be open for as long as this is used.
pub(super) struct Watch(RawFd);

impl Watch {
    /// Lets the system close the connection of a client that vanishes while it waits.
    pub(super) fn new(stream: &TcpStream) -> Self {
        let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(QUESTION).with_retries(QUESTIONS);
        let socket = SockRef::from(stream);
        // Either fails only for a connection that has already broken, which its first read reports.
        let _ = socket.set_tcp_keepalive(&keepalive);
        let _ = socket.set_tcp_notsent_lowat(UNSENT_BYTES);
        Self(stream.as_raw_fd())
    }

    /// Waits until the client has hung up, or has vanished while it should have acknowledged something.
    pub(super) async fn left(self) {
        let mut looks = tokio::time::interval(LOOK);
        let (mut answers, mut last_look) = (Answers::default(), Instant::now());
        loop {
            looks.tick().await;
            let look = Instant::now();
            let since_look = look.duration_since(std::mem::replace(&mut last_look, look));
            // Fails only for a connection that has ended.
            if let Ok(info) = info(self.0)
                && (CLOSED.contains(&info.tcpi_state) || answers.are_missing(&info, since_look))
            {
                return;
            }
        }
    }
}

/// What a client has answered so far.
#[derive(Default)]
struct Answers {
    /// Segments that had been sent again in all, up to the last look that found an answer.
    resent: u32,
}

impl Answers {
    /// Whether the client should have answered and has not. One that is there and does not read answers each question.
    ///
    /// The system's own count of unanswered segments (`tcpi_retransmits`) stays 0 for a client that had shrunk its
    /// window below what was on its way to it, so those that were sent again are counted here.
    fn are_missing(&mut self, info: &libc::tcp_info, since_look: Duration) -> bool {
        if Duration::from_millis(info.tcpi_last_ack_recv.into()) <= since_look {
            self.resent = info.tcpi_total_retrans;
        }
        let retries = u32::from(info.tcpi_probes).max(info.tcpi_total_retrans - self.resent);
        retries >= RETRIES && info.tcpi_last_ack_recv >= LOST_MS
    }
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
        assert_eq!(socket.tcp_notsent_lowat().expect("an option"), UNSENT_BYTES);
        let state = || info(watch.0).map(|info| (CLOSED.contains(&info.tcpi_state), info.tcpi_retransmits));
        assert_eq!(state().expect("it is open"), (false, 0));
        drop(client);
        while !state().expect("it is open").0 {
            tokio::task::yield_now().await;
        }
        drop(stream);
        assert!(state().is_err());
    }

    /// What the system would say of a connection.
    fn told(probes: u8, total_retrans: u32, last_ack_recv: u32) -> libc::tcp_info {
        // SAFETY: all of its fields are numbers, for which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        (info.tcpi_probes, info.tcpi_total_retrans, info.tcpi_last_ack_recv) = (probes, total_retrans, last_ack_recv);
        info
    }

    #[test]
    fn only_silence_with_retries_is_a_loss() {
        let first = |info| Answers::default().are_missing(&info, LOOK);
        assert!(first(told(2, 0, LOST_MS)), "two questions for room");
        assert!(first(told(0, RETRIES, LOST_MS)), "two segments");
        assert!(!first(told(1, 1, u32::MAX)), "one may have been lost");
        assert!(!first(told(0, 0, u32::MAX)), "there was nothing to acknowledge");
        assert!(!first(told(u8::MAX, u32::MAX, LOST_MS - 1)), "it answers the last one soon");
    }

    #[test]
    fn segments_sent_again_before_an_answer_are_forgotten() {
        let mut answers = Answers::default();
        assert!(!answers.are_missing(&told(0, 7, 1_500), LOOK));
        assert!(!answers.are_missing(&told(0, 8, 400), LOOK), "it has answered since");
        assert!(!answers.are_missing(&told(0, 9, LOST_MS), LOOK), "one may have been lost");
        assert!(answers.are_missing(&told(0, 10, LOST_MS + 1), LOOK));
    }
}
