//! The routes by which RL trainers drive vLLM, with its names, defaults and answers.

mod control;
mod facts;
mod generate;
mod lora;
mod table;
mod transfer;
mod weights;

use axum::http::StatusCode;
use axum::routing::post;
use utoipa::openapi::path::{HttpMethod, OperationBuilder};
use utoipa::openapi::{PathItem, PathsBuilder, Response};
use utoipa_axum::routes;

use super::query::Query;
use super::{HttpError, Route};
use crate::server::security::Role;

const DRAFT: &str = "this server has no draft model; push_full of rollout_client and POST /start_weight_update push \
                     the policy's weights";
const WORKERS: &str = "vLLM's workers and their methods do not exist here; for reload_weights POST /sleep?level=2 and \
                       /wake_up?reload=true";
const CACHE: &str = "the KV cache is given back by POST /sleep, after which /wake_up?tags=weights brings back the \
                     weights alone";

const BROADCASTER: &str = "prime-rl's broadcasts by NCCL and NIXL need vLLM's workers; set weight_broadcast.type to \
                           \"filesystem\" and start the server with --weights-dir";

/// Routes of vLLM and prime-rl that this server does not have, and what to use instead.
const INSTEAD: [(&str, &str); 4] = [
    ("/start_draft_weight_update", DRAFT),
    ("/collective_rpc", WORKERS),
    ("/release_kv_cache_memory", CACHE),
    ("/init_broadcaster", BROADCASTER),
];

/// These routes, with the role that their callers need.
pub(super) fn table() -> impl Iterator<Item = (Role, Route)> {
    let table = [
        (Role::Generate, routes!(generate::generate)),
        (Role::Anyone, routes!(facts::liveness)),
        (Role::Generate, routes!(facts::server_info)),
        (Role::Generate, routes!(facts::get_world_size)),
        (Role::Generate, routes!(facts::load)),
        (Role::Generate, routes!(facts::is_paused)),
        (Role::Generate, routes!(facts::is_sleeping)),
        (Role::Generate, routes!(facts::weight_info)),
        (Role::Control, routes!(control::pause)),
        (Role::Control, routes!(control::resume)),
        (Role::Control, routes!(control::sleep)),
        (Role::Control, routes!(control::wake_up)),
        (Role::Control, routes!(control::reset_prefix_cache)),
        (Role::Control, routes!(control::reset_mm_cache)),
        (Role::Control, routes!(control::reset_encoder_cache)),
        (Role::Generate, routes!(control::abort_requests)),
        (Role::Generate, routes!(control::abort_requests_by_id)),
        (Role::Control, routes!(lora::load)),
        (Role::Control, routes!(lora::load_in_place)),
        (Role::Control, routes!(lora::unload)),
        (Role::Control, routes!(transfer::init_weight_transfer_engine)),
        (Role::Control, routes!(transfer::start_weight_update)),
        (Role::Control, routes!(transfer::update_weights)),
        (Role::Control, routes!(transfer::finish_weight_update)),
        (Role::Control, routes!(transfer::shutdown_weight_transfer_engine)),
        (Role::Control, routes!(weights::update_weight_version)),
        (Role::Control, routes!(weights::weight_checker)),
    ];
    // Each changes weights or memory in vLLM, so each needs that role.
    table.into_iter().chain(INSTEAD.map(|(path, instead)| (Role::Control, unsupported(path, instead))))
}

/// A route that answers 501 and says what to use instead.
fn unsupported(path: &'static str, instead: &'static str) -> Route {
    let operation = OperationBuilder::new()
        .operation_id(Some(path.trim_start_matches('/')))
        .description(Some("Not here; the answer says what to use instead."))
        .response("501", Response::new(instead));
    let paths = PathsBuilder::new().path(path, PathItem::new(HttpMethod::Post, operation)).build();
    let answer = move |_: Query| async move {
        HttpError::new(StatusCode::NOT_IMPLEMENTED, "NotImplementedError", None, &format!("{path}: {instead}"))
    };
    (Vec::new(), paths, post(answer))
}
