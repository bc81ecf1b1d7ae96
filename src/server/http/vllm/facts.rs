//! Questions about the server, answered with the members of vLLM's answers that trainers read.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::engine::{Command, EngineStatus, LifecycleStatus};
use crate::error::Error;
use crate::server::calls::ask;
use crate::server::http::{AppState, HttpResult, Query};
use crate::server::{ServingContext, convert};

#[derive(Serialize, ToSchema)]
pub(super) struct Live {
    status: &'static str,
}

/// Whether the engine takes orders: 503 if it has not answered one within `--liveness-seconds`, for instance because a
/// step hangs. As in prime-rl, for probes of an orchestrator that restarts the server. `/health` does not ask the
/// engine.
#[utoipa::path(get, path = "/liveness", responses(
    (status = 200, body = Live),
    (status = 503, description = "the engine does not answer, or the server starts or has ended"),
))]
pub(super) async fn liveness(State(app): State<AppState>) -> HttpResult<Json<Live>> {
    let context = app.server.context()?;
    let answered = async {
        // One order at a time, because callers need no token.
        let _turn = app.probes.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
        ask(&context.engine, |reply| Command::Status { reply }).await
    };
    match timeout(context.liveness, answered).await {
        Ok(answer) => answer?,
        Err(_) => {
            let seconds = context.liveness.as_secs();
            let why = format!(
                "the engine has not answered for {seconds} s (--liveness-seconds); the log of the \
                               watchdog says where it is"
            );
            return Err(Error::Unavailable(why).into());
        }
    };
    Ok(Json(Live { status: "ok" }))
}

#[derive(Serialize, ToSchema)]
pub(super) struct IsPaused {
    /// True while the server is paused or asleep.
    is_paused: bool,
}

/// Whether the server is paused or asleep.
#[utoipa::path(get, path = "/is_paused", responses((status = 200, body = IsPaused)))]
pub(super) async fn is_paused(State(app): State<AppState>) -> HttpResult<Json<IsPaused>> {
    Ok(Json(IsPaused { is_paused: is_stopped(&status(&app).await?) }))
}

#[derive(Serialize, ToSchema)]
pub(super) struct IsSleeping {
    /// True while the server is asleep or paused, because a sleep at level 0 is a pause.
    is_sleeping: bool,
}

/// Whether the server sleeps, at any level.
#[utoipa::path(get, path = "/is_sleeping", responses((status = 200, body = IsSleeping)))]
pub(super) async fn is_sleeping(State(app): State<AppState>) -> HttpResult<Json<IsSleeping>> {
    Ok(Json(IsSleeping { is_sleeping: is_stopped(&status(&app).await?) }))
}

fn is_stopped(status: &EngineStatus) -> bool {
    matches!(status.lifecycle, LifecycleStatus::Paused | LifecycleStatus::Asleep { .. })
}

#[derive(Serialize, ToSchema)]
pub(super) struct WeightInfo {
    /// A decimal number; 0 is the checkpoint.
    weight_version: String,
}

/// The version of the policy that serves.
#[utoipa::path(get, path = "/weight_info", responses((status = 200, body = WeightInfo)))]
pub(super) async fn weight_info(State(app): State<AppState>) -> HttpResult<Json<WeightInfo>> {
    Ok(Json(WeightInfo { weight_version: status(&app).await?.stats.weight_version.to_string() }))
}

#[derive(Serialize, ToSchema)]
pub(super) struct Load {
    /// Requests that are running or queued.
    server_load: usize,
}

/// Number of requests that are running or queued.
#[utoipa::path(get, path = "/load", responses((status = 200, body = Load)))]
pub(super) async fn load(State(app): State<AppState>) -> HttpResult<Json<Load>> {
    let stats = status(&app).await?.stats;
    Ok(Json(Load { server_load: (stats.accepted_requests + stats.held_requests) as usize }))
}

pub(super) async fn status(app: &AppState) -> HttpResult<EngineStatus> {
    let context = app.server.context()?;
    Ok(ask(&context.engine, |reply| Command::Status { reply }).await?)
}

#[derive(Serialize, ToSchema)]
pub(super) struct WorldSize {
    world_size: usize,
}

/// The number of ranks, `--tp`.
#[utoipa::path(get, path = "/get_world_size",
    params(("include_dp" = Option<bool>, Query, description = "accepted and without effect: the server has no data \
        parallelism")),
    responses((status = 200, body = WorldSize), (status = 400)),
)]
pub(super) async fn get_world_size(State(app): State<AppState>, query: Query) -> HttpResult<Json<WorldSize>> {
    query.flag("include_dp", true)?;
    Ok(Json(WorldSize { world_size: app.server.context()?.info.tensor_parallel_size as usize }))
}

#[derive(Serialize, ToSchema)]
pub(super) struct ServerInfo {
    /// The members that trainers read of vLLM's: an object, or its text.
    vllm_config: Value,
    /// Always empty, like `system_env`: the server does not report its environment.
    vllm_env: Empty,
    system_env: Empty,
}

#[derive(Serialize, ToSchema)]
struct Empty {}

/// The configuration, in the shape of vLLM's.
#[utoipa::path(get, path = "/server_info",
    params(("config_format" = Option<String>, Query, pattern = "^(json|text)$",
        description = "`json` for an object, `text` (the default) for a string")),
    responses((status = 200, body = ServerInfo), (status = 400)),
)]
pub(super) async fn server_info(State(app): State<AppState>, query: Query) -> HttpResult<Json<ServerInfo>> {
    let is_json = query.choice("config_format", &[("text", false), ("json", true)])?;
    let config = config(&*app.server.context()?);
    let vllm_config = if is_json { config } else { Value::String(config.to_string()) };
    Ok(Json(ServerInfo { vllm_config, vllm_env: Empty {}, system_env: Empty {} }))
}

/// The parts of vLLM's configuration that trainers read.
fn config(context: &ServingContext) -> Value {
    let info = &context.info;
    // Null without `--max-adapters`.
    let lora =
        (info.max_adapters > 0).then(|| json!({ "max_lora_rank": info.max_lora_rank, "max_loras": info.max_adapters }));
    // Null on devices to which no trainer can broadcast weights; pushes use gRPC, shared memory or files there.
    let weight_transfer = context.trainers.library().map(|backend| json!({ "backend": backend }));
    let mut config = json!({
        "model_config": {
            "model": context.model.root,
            "dtype": format!("torch.{}", info.dtype),
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": convert::MAX_TOP_LOGPROBS,
            "max_model_len": context.model.max_model_len,
            "served_model_name": info.model,
            "enable_sleep_mode": true,
        },
        "lora_config": lora,
        "parallel_config": {
            "data_parallel_size": 1,
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": 1,
            "world_size": info.tensor_parallel_size,
        },
        "weight_transfer_config": weight_transfer,
        "cache_config": { "block_size": info.block_size, "enable_prefix_caching": true },
        "scheduler_config": {
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_batch_tokens,
        },
    });
    if let Some(images) = &context.model.images {
        config["model_config"]["multimodal_config"] =
            json!({ "limit_per_prompt": { "image": images.most_per_prompt } });
    }
    config
}
