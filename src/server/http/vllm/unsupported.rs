//! Routes of vLLM that have no meaning here: each answers 501 and says what to use instead.

use axum::http::StatusCode;
use axum::routing::post;
use utoipa::openapi::path::{HttpMethod, OperationBuilder};
use utoipa::openapi::{PathItem, PathsBuilder, ResponseBuilder};

use crate::server::http::Route;
use crate::server::http::error::HttpError;
use crate::server::http::query::Query;
use crate::server::role::Role;

const DRAFT: &str = "drafts come from the text itself, so there is no draft model whose weights could be pushed; \
                     push_full of rollout_client and POST /start_weight_update push those of the policy";
const WORKERS: &str = "vLLM's workers and their methods do not exist here; for reload_weights POST /sleep?level=2 and \
                       /wake_up?reload=true";
const CACHE: &str = "the KV cache is given back by POST /sleep, after which /wake_up?tags=weights brings back the \
                     weights alone";

/// Paths, and what to use instead.
const INSTEAD: [(&str, &str); 3] =
    [("/start_draft_weight_update", DRAFT), ("/collective_rpc", WORKERS), ("/release_kv_cache_memory", CACHE)];

/// The routes. Each changes weights or memory where vLLM serves it, so each needs that role.
pub(super) fn routes() -> impl Iterator<Item = (Role, Route)> {
    INSTEAD.into_iter().map(|(path, instead)| (Role::Control, route(path, instead)))
}

fn route(path: &'static str, instead: &'static str) -> Route {
    let not_here = ResponseBuilder::new().description(instead);
    let operation = OperationBuilder::new()
        .operation_id(Some(path.trim_start_matches('/')))
        .description(Some("Not here; the answer says what to use instead."))
        .response("501", not_here);
    let paths = PathsBuilder::new().path(path, PathItem::new(HttpMethod::Post, operation)).build();
    let answer = move |_: Query| async move {
        HttpError::new(StatusCode::NOT_IMPLEMENTED, "NotImplementedError", None, &format!("{path}: {instead}"))
    };
    (Vec::new(), paths, post(answer))
}
