//! The gRPC services: each call is parsed, sent to the engine as a command, and answered from the engine's events.

mod arrival;
mod control;
mod deadline;
mod messages;
mod push_thread;
mod rollout;
mod stream;
#[cfg(test)]
mod tests;
mod updates;
mod weights;

use tokio::sync::oneshot;
use tonic::service::Routes;

pub(super) use arrival::Door;
pub(super) use deadline::note_call;

use self::arrival::MAX_LARGE_BYTES;
use self::updates::DirectUpdates;
use super::gate::Gate;
use super::isolation::Isolated;
use super::pb::control_server::ControlServer;
use super::pb::rollout_server::RolloutServer;
use crate::engine::{Command, EngineHandle, Reply};
use crate::error::{Error, Result};

/// Names under which health is reported: "" for the server as a whole, and each service.
pub(super) const HEALTH_NAMES: [&str; 4] = [
    "",
    super::pb::rollout_server::SERVICE_NAME,
    super::pb::weights_server::SERVICE_NAME,
    super::pb::control_server::SERVICE_NAME,
];

/// The routes of the services Rollout, Weights and Control.
pub(super) fn routes(gate: &Gate, door: &Door) -> Routes {
    let rollout = RolloutServer::new(rollout::RolloutService::new(gate.clone()));
    let control = ControlServer::new(control::ControlService::new(gate.clone()));
    let weights = DirectUpdates::new(weights::WeightsService::new(gate.clone()));
    // tonic's default limit of 4 MiB is enough for the other services.
    Routes::new(Isolated::new(door.before(rollout.max_decoding_message_size(MAX_LARGE_BYTES)), &gate.panics))
        .add_service(Isolated::new(door.before(weights), &gate.panics))
        .add_service(Isolated::new(door.before(control), &gate.panics))
}

/// A reply for the engine to call, and the receiver on which its value arrives.
fn reply_channel<T: Send + 'static>() -> (Reply<T>, oneshot::Receiver<T>) {
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
async fn ask<T: Send + 'static>(engine: &EngineHandle, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
    let (reply, answer) = reply_channel();
    engine.send(command(reply))?;
    answer.await.map_err(|_| engine_gone())
}

/// Like [`ask`], but waits while the command queue is full: for commands whose refusal would lose something.
///
/// # Errors
/// `Unavailable` if the engine has ended.
async fn ask_patiently<T>(engine: &EngineHandle, command: impl FnOnce(Reply<T>) -> Command) -> Result<T>
where
    T: Send + 'static,
{
    let (reply, answer) = reply_channel();
    let (engine, command) = (engine.clone(), command(reply));
    let sent = tokio::task::spawn_blocking(move || engine.send_blocking(command)).await;
    sent.map_err(|e| Error::Internal(format!("sending to the engine failed: {e}")))??;
    answer.await.map_err(|_| engine_gone())
}

fn engine_gone() -> Error {
    Error::Unavailable("the engine has ended".into())
}
