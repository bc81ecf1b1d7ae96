//! The routes by which RL trainers drive vLLM, with its names, defaults and answers.

mod control;
mod facts;
mod generate;
mod lora;
mod transfer;
mod unsupported;
mod weights;

use utoipa_axum::routes;

use super::Route;
use crate::server::role::Role;

/// These routes, with the role that their callers need.
pub(super) fn table() -> Vec<(Role, Route)> {
    let mut table = vec![
        (Role::Generate, routes!(generate::generate)),
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
        (Role::Control, routes!(lora::unload)),
        (Role::Control, routes!(transfer::init_weight_transfer_engine)),
        (Role::Control, routes!(transfer::start_weight_update)),
        (Role::Control, routes!(transfer::update_weights)),
        (Role::Control, routes!(transfer::finish_weight_update)),
        (Role::Control, routes!(transfer::shutdown_weight_transfer_engine)),
        (Role::Control, routes!(weights::update_weight_version)),
        (Role::Control, routes!(weights::weight_checker)),
    ];
    table.extend(unsupported::routes());
    table
}
