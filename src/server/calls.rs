//! The parts that calls over gRPC and HTTP share: commands to the engine, deadlines, and the receipt of a request's
//! bytes at a minimum pace.

use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_stream::{Stream, StreamExt as _};

use super::state::ServerState;
use crate::engine::{CancelFlag, Command, EngineHandle, Reply};
use crate::error::{Error, Result};
use crate::memory::human_bytes;

/// Time in which an incomplete request must grow by [`PROGRESS`].
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that an incomplete request must grow by within [`STALL_TIMEOUT`]: 35 KB/s, slower than any network through
/// which a rollout server is reached.
const PROGRESS: usize = 1 << 20;

/// A reply for the engine to call, and the receiver on which its value arrives.
pub(super) fn reply_channel<T: Send + 'static>() -> (Reply<T>, oneshot::Receiver<T>) {
    let (sender, answer) = oneshot::channel();
    // Sending fails if the caller has given up.
    (Box::new(move |value| drop(sender.send(value))), answer)
}

/// Sends a command to the engine and waits for its reply.
///
/// # Errors
/// `ResourceExhausted` if the engine's command queue is full, `Unavailable` if the engine has ended.
pub(super) async fn ask<T: Send + 'static>(
    engine: &EngineHandle,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<T> {
    let (reply, answer) = reply_channel();
    engine.send(command(reply))?;
    answer.await.map_err(|_| engine_gone())
}

/// Like [`ask`], for a command that is withdrawn if the caller vanishes before the reply.
pub(super) async fn ask_cancellable<T: Send + 'static>(
    engine: &EngineHandle,
    command: impl FnOnce(CancelFlag, Reply<T>) -> Command,
) -> Result<T> {
    let cancel = CancelOnDrop::new(engine);
    ask(engine, |reply| command(cancel.flag.clone(), reply)).await
}

/// Like [`ask`], but waits while the command queue is full: for commands whose rejection would lose something.
///
/// # Errors
/// `Unavailable` if the engine has ended.
pub(super) async fn ask_blocking<T: Send + 'static>(
    engine: &EngineHandle,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<T> {
    let (reply, answer) = reply_channel();
    let (engine, command) = (engine.clone(), command(reply));
    let sent = tokio::task::spawn_blocking(move || engine.send_blocking(command)).await;
    sent.map_err(|e| Error::Internal(format!("sending to the engine failed: {e}")))??;
    answer.await.map_err(|_| engine_gone())
}

pub(super) fn engine_gone() -> Error {
    Error::Unavailable("the engine has ended".into())
}

/// Cancels the request when dropped. A vanished client, a passed deadline and a handler that tonic drops all reach the
/// engine this way. It has no effect after the terminal event.
pub(super) struct CancelOnDrop {
    pub(super) flag: CancelFlag,
    engine: EngineHandle,
}

impl CancelOnDrop {
    pub(super) fn new(engine: &EngineHandle) -> Self {
        Self { flag: CancelFlag::default(), engine: engine.clone() }
    }

    /// Ends the request at this time with the tokens that it has, unless the returned value is dropped before. In a
    /// task of its own, because a reply whose client reads nothing is not polled.
    pub(super) fn expire_at(&self, at: std::time::Instant) -> JoinSet<()> {
        let (flag, engine) = (self.flag.clone(), self.engine.clone());
        let mut timer = JoinSet::new();
        timer.spawn(async move {
            sleep_until(at.into()).await;
            engine.expire(&flag);
        });
        timer
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.engine.cancel(&self.flag);
    }
}

/// When a call must end: at its own deadline, or with the engine.
#[derive(Clone, Default)]
pub(super) struct Deadline {
    at: Option<Instant>,
    server: Option<ServerState>,
}

impl Deadline {
    /// The deadline `at`, if there is one, of a call that ends with the engine of `server` at the latest.
    pub(super) fn new(at: Option<Instant>, server: &ServerState) -> Self {
        Self { at, server: Some(server.clone()) }
    }

    /// Records the error that the call ends with, for observers.
    pub(super) fn note(&self, error: &Error) {
        self.server.iter().for_each(|server| server.observer.journal.error(error, None));
    }

    /// Waits until the deadline has passed; forever without one.
    pub(super) async fn passed(self) {
        let Some(at) = self.at else { return std::future::pending().await };
        let mut timer = std::pin::pin!(sleep_until(at));
        // The clock is compared as well, because another timer for the same deadline may wake the call just before this
        // one fires.
        std::future::poll_fn(|cx| if Instant::now() >= at { Poll::Ready(()) } else { timer.as_mut().poll(cx) }).await;
    }

    /// The result of `work`.
    ///
    /// # Errors
    /// The error of `work`. `DeadlineExceeded` at the deadline, or `Unavailable` once the engine has ended: `work` is
    /// dropped then.
    pub(super) async fn limit<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let engine_ended = async {
            match &self.server {
                Some(server) => server.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            result = work => result,
            error = engine_ended => Err(error),
            () = self.clone().passed() => Err(deadline_exceeded()),
        }
    }
}

pub(super) fn deadline_exceeded() -> Error {
    Error::DeadlineExceeded("the deadline passed before the work was done; its work is aborted".into())
}

/// Gives each frame of a request's body to `take`, which returns how many bytes are there, and how many will be if that
/// is known. Without a limit on the time an incomplete request could hold its memory forever.
///
/// # Errors
/// Those of `take`; that of `broken` if the stream breaks; `DeadlineExceeded` if fewer than [`PROGRESS`] bytes come in
/// `stall_timeout`.
pub(super) async fn receive<B, E: From<Error>>(
    mut frames: impl Stream<Item = std::result::Result<Bytes, B>> + Unpin,
    stall_timeout: Duration,
    broken: impl FnOnce(B) -> Error,
    mut take: impl FnMut(&[u8]) -> std::result::Result<(usize, Option<usize>), E>,
) -> std::result::Result<(), E> {
    let ((mut received, mut length), mut checked) = ((0, None), 0);
    let mut next_check = Instant::now() + stall_timeout;
    loop {
        tokio::select! {
            biased;
            frame = frames.next() => match frame {
                Some(Ok(frame)) => (received, length) = take(&frame)?,
                Some(Err(error)) => return Err(broken(error).into()),
                None => return Ok(()),
            },
            () = sleep_until(next_check) => {
                if received < checked + PROGRESS {
                    return Err(stalled(received, length, stall_timeout).into());
                }
                (checked, next_check) = (received, Instant::now() + stall_timeout);
            }
        }
    }
}

fn stalled(received: usize, length: Option<usize>, stall_timeout: Duration) -> Error {
    let of = length.map_or_else(String::new, |length| format!(" of {length}"));
    Error::DeadlineExceeded(format!(
        "request: {received}{of} bytes are here, and fewer than {} came in {} s",
        human_bytes(PROGRESS as u64),
        stall_timeout.as_secs_f64(),
    ))
}
