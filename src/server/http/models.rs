//! The names that a request may give as its `model`: those of the policy, and those of resident adapters.

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::{AppState, HttpError, HttpResult};
use crate::engine::{AdapterStatus, Command};
use crate::error::{Result, shown};
use crate::server::ServingContext;
use crate::server::calls::ask;

/// Longest name of a model in a message.
const MAX_NAME_BYTES: usize = 256;

/// The models that a request may name.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ListedModel>,
}

/// The policy, or a resident adapter.
#[derive(Serialize, ToSchema)]
#[schema(as = Model)]
pub(super) struct ListedModel {
    id: String,
    object: &'static str,
    /// When the server started, or for an adapter too, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    /// The model's path or name as the server was started with it; for an adapter the directory that it was read from,
    /// or its name if a client sent it.
    root: String,
    /// The policy's name, for an adapter.
    parent: Option<String>,
    /// Most tokens of prompt and completion together; null for an adapter.
    max_model_len: Option<usize>,
    permission: Vec<String>,
}

/// The policy under each of its names, and the resident adapters.
#[utoipa::path(get, path = "/v1/models", responses((status = 200, body = ModelList), (status = 503)))]
pub(super) async fn models(State(app): State<AppState>) -> HttpResult<Json<ModelList>> {
    let context = app.server.context()?;
    Ok(Json(ModelList { object: "list", data: list(&app, &context).await? }))
}

/// One of the models.
#[utoipa::path(get, path = "/v1/models/{*id}", params(("id" = String, Path, description = "an id of `/v1/models`")),
    responses((status = 200, body = ListedModel), (status = 404, description = "no model has this id"), (status = 503)))]
pub(super) async fn model(State(app): State<AppState>, Path(id): Path<String>) -> HttpResult<Json<ListedModel>> {
    let context = app.server.context()?;
    let found = list(&app, &context).await?.into_iter().find(|model| model.id == id || model.id == format!("/{id}"));
    match found {
        Some(model) => Ok(Json(model)),
        None => Err(unknown_model(&context, &id).await),
    }
}

async fn list(app: &AppState, context: &ServingContext) -> Result<Vec<ListedModel>> {
    let model = |id: &str, root: &str, parent: Option<String>, max_model_len| ListedModel {
        id: id.to_owned(),
        object: "model",
        created: app.server.observer.timeline.origin_unix() / 1_000_000_000,
        owned_by: "rollout-server",
        root: root.to_owned(),
        parent,
        max_model_len,
        permission: Vec::new(),
    };
    let policy = context
        .model
        .names
        .iter()
        .map(|name| model(name, &context.model.root, None, Some(context.model.max_model_len)));
    let adapters = adapters(context).await?;
    let adapter = |adapter: &AdapterStatus| {
        let root = adapter.directory.as_deref().unwrap_or(&adapter.name);
        model(&adapter.name, root, Some(context.model.name().to_owned()), None)
    };
    Ok(policy.chain(adapters.iter().map(adapter)).collect())
}

/// The resident adapters that a request may name.
pub(super) async fn adapters(context: &ServingContext) -> Result<Vec<AdapterStatus>> {
    let mut adapters = ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
    adapters.retain(|adapter| !adapter.retired);
    Ok(adapters)
}

/// Checks that a request may name `model`: the policy, a resident adapter, or one below `--adapters-dir`.
///
/// # Errors
/// 404 with the names that there are.
pub(super) async fn check_model(model: Option<&str>, context: &ServingContext) -> HttpResult<()> {
    let Some(name) = model.filter(|name| !context.model.is_policy(name)) else { return Ok(()) };
    let is_resident = adapters(context).await?.iter().any(|adapter| adapter.name == name);
    let is_adapter = match &context.adapters_dir {
        Some(directory) if !is_resident => directory.check(name).await.is_ok(),
        _ => is_resident,
    };
    if is_adapter { Ok(()) } else { Err(unknown_model(context, name).await) }
}

/// The error of a request that names neither the policy nor an adapter that is resident or can be loaded.
pub(super) async fn unknown_model(context: &ServingContext, name: &str) -> HttpError {
    let quoted = |names: &mut dyn Iterator<Item = &String>| {
        names.map(|name| format!("`{}`", shown(name, MAX_NAME_BYTES))).collect::<Vec<_>>().join(", ")
    };
    let served = quoted(&mut context.model.names.iter());
    let adapters = adapters(context).await.unwrap_or_default();
    let resident = match quoted(&mut adapters.iter().map(|adapter| &adapter.name)) {
        _ if context.info.max_adapters == 0 => String::new(),
        names if names.is_empty() => "; no adapter is resident".to_owned(),
        names => format!("; resident adapters: {names}"),
    };
    let name = shown(name, MAX_NAME_BYTES);
    let below = if context.adapters_dir.is_some() { "; --adapters-dir has no adapter of this name" } else { "" };
    HttpError::no_model(&format!("The model `{name}` does not exist. This server serves {served}{resident}{below}"))
}
