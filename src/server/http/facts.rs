//! What a client asks before anything else: whether the server lives, its version, its models.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::Door;
use super::error::{ErrorBody, HttpError};
use crate::engine::Command;
use crate::server::calls::ask;

/// Liveness: 200 with an empty body once the model is loaded, 503 before.
#[utoipa::path(get, path = "/health", responses(
    (status = 200, description = "the server serves"),
    (status = 503, description = "the model is being loaded, or the server ends", body = ErrorBody),
))]
pub(super) async fn health(State(door): State<Door>) -> Result<StatusCode, HttpError> {
    door.gate.admit()?;
    Ok(StatusCode::OK)
}

/// Liveness under the name that some orchestrators use.
#[utoipa::path(get, path = "/ping", responses(
    (status = 200, description = "the server serves"),
    (status = 503, description = "the model is being loaded, or the server ends", body = ErrorBody),
))]
pub(super) async fn ping(door: State<Door>) -> Result<StatusCode, HttpError> {
    health(door).await
}

/// The version of the server.
#[derive(Serialize, ToSchema)]
pub(super) struct Version {
    version: &'static str,
}

/// The server's version.
#[utoipa::path(get, path = "/version", responses((status = 200, body = Version)))]
pub(super) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// The list of what `model` may be in a request.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// The policy, or a resident adapter.
#[derive(Serialize, ToSchema)]
struct Model {
    id: String,
    object: &'static str,
    /// When the server started, or for an adapter too, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    root: String,
    /// The policy's name, for an adapter.
    parent: Option<String>,
    /// Most tokens of prompt and completion together; null for an adapter.
    max_model_len: Option<usize>,
    permission: Vec<String>,
}

/// The policy and the resident adapters, each of which can be the `model` of a request.
#[utoipa::path(get, path = "/v1/models", responses(
    (status = 200, body = ModelList),
    (status = 503, body = ErrorBody),
))]
pub(super) async fn models(State(door): State<Door>) -> Result<Json<ModelList>, HttpError> {
    let context = door.gate.look()?;
    let adapters = ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
    let name = &context.info.model;
    let model = |id: &str, parent: Option<String>, max_model_len| Model {
        id: id.to_owned(),
        object: "model",
        created: door.created,
        owned_by: "rollout-server",
        root: id.to_owned(),
        parent,
        max_model_len,
        permission: Vec::new(),
    };
    let policy = std::iter::once(model(name, None, Some(context.model.max_model_len)));
    let resident = adapters.iter().filter(|a| !a.retired).map(|a| model(&a.name, Some(name.clone()), None));
    Ok(Json(ModelList { object: "list", data: policy.chain(resident).collect() }))
}
