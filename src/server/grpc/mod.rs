//! The gRPC services: each call is parsed, sent to the engine as a command, and answered from the engine's events.

mod control;
mod decoded_size;
mod middleware;
mod receive;
mod reply;
mod returned;
mod rollout;
mod status;
#[cfg(test)]
mod tests;
mod update_stream;
mod weights;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use tonic::service::Routes;
use tonic_health::pb::health_server::{Health, HealthServer};

use self::control::ControlService;
use self::receive::{MAX_LARGE_BYTES, MessageReceiver};
use self::rollout::RolloutService;
use self::weights::WeightsService;
use super::pb;
use super::pb::control_server::ControlServer;
use super::pb::rollout_server::RolloutServer;
use super::pb::weights_server::WeightsServer;
use super::security::Access;
use super::state::ServerState;
use crate::error::{Error, Result};

/// Names under which health is reported: "" for the server as a whole, and each service.
pub(super) const HEALTH_NAMES: [&str; 4] =
    ["", pb::rollout_server::SERVICE_NAME, pb::weights_server::SERVICE_NAME, pb::control_server::SERVICE_NAME];
/// Largest message of a reflection or health request in bytes. It is a name, and each open stream may keep one.
const MAX_NAME_BYTES: usize = 4 << 10;

/// All services behind their middleware. The last layer runs first.
pub(super) fn routes(server: &ServerState, access: &Access, health: HealthServer<impl Health>) -> Result<Routes> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let cannot_build = |e| Error::Internal(format!("reflection: {e}"));
    let v1 = reflection().build_v1().map_err(cannot_build)?.max_decoding_message_size(MAX_NAME_BYTES);
    // Python's reflection client knows no other version.
    let v1alpha = reflection().build_v1alpha().map_err(cannot_build)?.max_decoding_message_size(MAX_NAME_BYTES);
    let router = Routes::from(services(server)).add_service(v1).add_service(v1alpha).add_service(health);
    let router = router
        .into_axum_router()
        .layer(from_fn_with_state(MessageReceiver::new(server)?, receive::receive_message))
        .layer(from_fn_with_state(access.clone(), middleware::authenticate))
        .layer(from_fn_with_state(server.clone(), middleware::track_call))
        .layer(from_fn_with_state(server.clone(), middleware::read_deadline));
    Ok(router.into())
}

/// The services Rollout, Weights and Control.
fn services(server: &ServerState) -> Router {
    let rollout = RolloutServer::new(RolloutService::new(server.clone()));
    let weights = WeightsServer::new(WeightsService::new(server.clone()));
    // tonic's default limit of 4 MiB is enough for the other services.
    Routes::new(rollout.max_decoding_message_size(MAX_LARGE_BYTES))
        .add_service(weights)
        .add_service(ControlServer::new(ControlService::new(server.clone())))
        .into_axum_router()
        .layer(from_fn(update_stream::set_body_aside))
}
