//! Adapters from directories below `--weights-dir`: they become resident by the same transaction as a push over gRPC.
//! Those below `--adapters-dir` are loaded by the requests that name them.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::engine::Command;
use crate::error::Error;
use crate::server::calls::{CancelOnDrop, ask, reply_channel};
use crate::server::http::models::adapters;
use crate::server::http::{AppState, HttpError, HttpResult, Ignored, JsonBody, Peer};
use crate::server::pushes::load_adapter;
use crate::server::{ServingContext, convert};

#[derive(Deserialize, ToSchema)]
pub(super) struct LoadAdapter {
    /// The `model` of requests that use it.
    #[schema(min_length = 1)]
    lora_name: String,
    /// A directory below `--weights-dir` with `adapter_config.json` and `adapter_model.safetensors`: relative to it, or
    /// absolute. Or the directory of that name below `--adapters-dir`, as an absolute path.
    #[schema(min_length = 1)]
    lora_path: String,
    /// Whether to replace a resident adapter of the same name. In-flight requests keep using the old one.
    #[serde(default)]
    load_inplace: bool,
}

/// Loads an adapter without merging it, and keeps it resident beside the others. Generation does not pause. Cached
/// prefixes of an earlier adapter with the same name are not reused. If `--max-adapters` are resident, the least
/// recently used one of those that no request uses is unloaded first. The adapter `lora_name` below `--adapters-dir` is
/// only checked: the first request that names it loads it.
#[utoipa::path(post, path = "/v1/load_lora_adapter", request_body = LoadAdapter, responses(
    (status = 200, description = "requests may name the adapter", body = String, content_type = "text/plain"),
    (status = 400, description = "the name is taken, the path leaves `--weights-dir`, or the files are not an \
        adapter of this model"),
    (status = 404, description = "no such directory or file"),
    (status = 409, description = "another push is open, or the server is asleep or without weights"),
    (status = 429, description = "requests use all resident adapters, or there is no room under the memory ceiling"),
))]
pub(super) async fn load(
    State(app): State<AppState>,
    Extension(peer): Extension<Peer>,
    body: JsonBody<LoadAdapter>,
) -> HttpResult<Response> {
    let name = body.value.lora_name.clone();
    let ignored = load_from(&app, peer, body).await?;
    Ok(ignored.name_in(format!("Success: LoRA adapter '{name}' added successfully.")))
}

#[derive(Serialize, ToSchema)]
pub(super) struct Loaded {
    status: &'static str,
}

/// The same as `/v1/load_lora_adapter` with `load_inplace`, as prime-rl calls it: each step's adapter under one name.
#[utoipa::path(post, path = "/load_lora_adapter", request_body = LoadAdapter, responses(
    (status = 200, description = "the adapter is resident", body = Loaded),
    (status = 400, description = "the path leaves `--weights-dir`, or the files are not an adapter of this model"),
    (status = 404, description = "no such directory or file"),
    (status = 409, description = "another push is open, or the server is asleep or without weights"),
    (status = 429, description = "requests use all resident adapters, or there is no room under the memory ceiling"),
))]
pub(super) async fn load_in_place(
    State(app): State<AppState>,
    Extension(peer): Extension<Peer>,
    mut body: JsonBody<LoadAdapter>,
) -> HttpResult<Response> {
    body.value.load_inplace = true;
    let ignored = load_from(&app, peer, body).await?;
    Ok(ignored.name_in(Json(Loaded { status: "ok" })))
}

/// Loads the adapter that `body` names.
async fn load_from(app: &AppState, peer: Peer, body: JsonBody<LoadAdapter>) -> HttpResult<Ignored> {
    let LoadAdapter { lora_name: name, lora_path: path, load_inplace } = body.value;
    if name.is_empty() || path.is_empty() {
        return Err(wrong("Both 'lora_name' and 'lora_path' must be provided."));
    }
    let context = app.server.context()?;
    check_name(&context, &name)?;
    // The engine takes one update at a time, so loads wait for each other instead of being rejected.
    let _turn = app.loads.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
    if !load_inplace && is_resident(&context, &name).await? {
        return Err(taken(&name));
    }
    if let Some(directory) = &context.adapters_dir
        && !load_inplace
        && directory.is_path_of(&name, &path)
    {
        // The first request loads it. Here it would need a slot of its own, and keep it from others.
        let checked = directory.check(&name).await;
        return checked.map(|()| body.ignored).map_err(|error| explain(error, &name, &path));
    }
    match load_adapter(&app.server, (peer.0, body.caller.tenant), &name, &path, load_inplace).await {
        Ok(_) => Ok(body.ignored),
        // A gRPC client has taken the name meanwhile.
        Err(Error::VersionConflict(_)) if !load_inplace && is_resident(&context, &name).await? => Err(taken(&name)),
        Err(error) => Err(explain(error, &name, &path)),
    }
}

#[derive(Deserialize, ToSchema)]
pub(super) struct UnloadAdapter {
    #[schema(min_length = 1)]
    lora_name: String,
}

/// Unloads an adapter. Returns at once; in-flight requests that use it run to their end, and then its memory is freed.
#[utoipa::path(post, path = "/v1/unload_lora_adapter", request_body = UnloadAdapter, responses(
    (status = 200, description = "the name is free; new requests cannot use the adapter", body = String,
        content_type = "text/plain"),
    (status = 404, description = "no resident adapter has this name"),
))]
pub(super) async fn unload(State(app): State<AppState>, body: JsonBody<UnloadAdapter>) -> HttpResult<Response> {
    let name = body.value.lora_name;
    if name.is_empty() {
        return Err(wrong("'lora_name' needs to be provided to unload a LoRA adapter."));
    }
    let removed = convert::adapter_name(name.clone()).map_err(|error| explain(error, &name, ""))?;
    let (context, _in_flight) = app.server.admit()?;
    let cancel = CancelOnDrop::new(&context.engine);
    let (reply, mut refused) = reply_channel();
    let remove =
        Command::RemoveAdapter { name: removed, expected_generation: None, cancel: cancel.flag.clone(), reply };
    context.engine.send(remove)?;
    // Commands are executed in their order. Once this one is answered, the removal has begun or was rejected.
    ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
    match refused.try_recv() {
        Ok(Err(Error::NotFound(_))) => {
            Err(Error::NotFound(format!("The lora adapter '{name}' cannot be found.")).into())
        }
        Ok(Err(error)) => Err(error.into()),
        _ => Ok(body.ignored.name_in(format!("Success: LoRA adapter '{name}' removed successfully."))),
    }
}

/// Checks a name and the server's configuration, before anything is read.
fn check_name(context: &ServingContext, name: &str) -> HttpResult<()> {
    if context.model.is_policy(name) {
        return Err(wrong(&format!("The lora adapter '{name}' conflicts with a served base model.")));
    }
    if context.info.max_adapters == 0 {
        return Err(wrong(
            "This server keeps no adapters, because its --max-adapters is 0. Start it with as many as are to be \
             resident at once; TRL's AsyncGRPOTrainer needs max_staleness + 2",
        ));
    }
    Ok(())
}

async fn is_resident(context: &ServingContext, name: &str) -> HttpResult<bool> {
    Ok(adapters(context).await?.iter().any(|adapter| adapter.name == name))
}

fn taken(name: &str) -> HttpError {
    wrong(&format!(
        "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
         'load_inplace' to True."
    ))
}

fn wrong(message: &str) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, "InvalidUserInput", None, message)
}

/// The error of a push, with the members of this route.
fn explain(error: Error, name: &str, path: &str) -> HttpError {
    match error {
        Error::InvalidArgument { field, message } => {
            let member = if ["name", "header.adapter"].contains(&&*field) { "lora_name" } else { "lora_path" };
            HttpError::invalid(member, &message)
        }
        Error::NotFound(what) => {
            Error::NotFound(format!("Loading lora {name} failed: No adapter found for {path}: {what}")).into()
        }
        error => error.into(),
    }
}
