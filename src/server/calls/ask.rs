//! Questions to the engine from async code.

use tokio::sync::oneshot;

use crate::engine::{Command, EngineHandle, Reply};
use crate::error::{Error, Result};

/// A reply for the engine to call, and the receiver on which its value arrives.
pub(in crate::server) fn reply_channel<T: Send + 'static>() -> (Reply<T>, oneshot::Receiver<T>) {
    let (sender, answer) = oneshot::channel();
    let reply = move |value| {
        // Sending fails if the caller has given up.
        let _ = sender.send(value);
    };
    (Box::new(reply), answer)
}

/// Sends a command to the engine and waits for its reply.
///
/// # Errors
/// `ResourceExhausted` if the engine's command queue is full, `Unavailable` if the engine has ended.
pub(in crate::server) async fn ask<T: Send + 'static>(
    engine: &EngineHandle,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<T> {
    let (reply, answer) = reply_channel();
    engine.send(command(reply))?;
    answer.await.map_err(|_| engine_gone())
}

/// Like [`ask`], but waits while the command queue is full: for commands whose refusal would lose something.
///
/// # Errors
/// `Unavailable` if the engine has ended.
pub(in crate::server) async fn ask_patiently<T>(
    engine: &EngineHandle,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<T>
where
    T: Send + 'static,
{
    let (reply, answer) = reply_channel();
    let (engine, command) = (engine.clone(), command(reply));
    let sent = tokio::task::spawn_blocking(move || engine.send_blocking(command)).await;
    sent.map_err(|e| Error::Internal(format!("sending to the engine failed: {e}")))??;
    answer.await.map_err(|_| engine_gone())
}

pub(in crate::server) fn engine_gone() -> Error {
    Error::Unavailable("the engine has ended".into())
}
