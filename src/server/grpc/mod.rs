//! The gRPC services: each call is parsed, sent to the engine as a command, and answered from the engine's events.

mod arrival;
mod control;
mod counts;
mod deadline;
mod guard;
mod isolation;
mod messages;
mod reply;
mod rollout;
mod status;
#[cfg(test)]
mod tests;
mod updates;
mod weights;

use tonic::service::Routes;

pub(super) use arrival::Door;
pub(super) use counts::counted;
pub(super) use deadline::note_call;
pub(super) use guard::guarded;

use self::arrival::MAX_LARGE_BYTES;
use self::isolation::Isolated;
use self::updates::DirectUpdates;
use super::gate::Gate;
use super::pb::control_server::ControlServer;
use super::pb::rollout_server::RolloutServer;

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
