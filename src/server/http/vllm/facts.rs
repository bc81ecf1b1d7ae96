//! Questions about the server, answered with the members of vLLM's answers that trainers read.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::engine::{Command, EngineStatus, LifecycleStatus};
use crate::server::calls::ask;
use crate::server::context::ServingContext;
use crate::server::convert;
use crate::server::http::Door;
use crate::server::http::error::{ErrorBody, HttpError};
use crate::server::http::query::Query;

/// Whether requests wait.
#[derive(Serialize, ToSchema)]
pub(super) struct IsPaused {
    /// True while the server is paused or asleep.
    is_paused: bool,
}

/// Whether nothing steps because somebody has said so.
#[utoipa::path(get, path = "/is_paused", responses((status = 200, body = IsPaused)))]
pub(super) async fn is_paused(State(door): State<Door>) -> Result<Json<IsPaused>, HttpError> {
    Ok(Json(IsPaused { is_paused: stands_still(&status(&door).await?) }))
}

/// Whether the server sleeps.
#[derive(Serialize, ToSchema)]
pub(super) struct IsSleeping {
    /// True while the server is asleep or paused, because a sleep at level 0 is a pause.
    is_sleeping: bool,
}

/// Whether the server sleeps, at any level.
#[utoipa::path(get, path = "/is_sleeping", responses((status = 200, body = IsSleeping)))]
pub(super) async fn is_sleeping(State(door): State<Door>) -> Result<Json<IsSleeping>, HttpError> {
    Ok(Json(IsSleeping { is_sleeping: stands_still(&status(&door).await?) }))
}

fn stands_still(status: &EngineStatus) -> bool {
    matches!(status.lifecycle, LifecycleStatus::Paused | LifecycleStatus::Asleep { .. })
}

/// The policy's version.
#[derive(Serialize, ToSchema)]
pub(super) struct WeightInfo {
    /// A decimal number; 0 is the checkpoint.
    weight_version: String,
}

/// The version of the policy that serves.
#[utoipa::path(get, path = "/weight_info", responses((status = 200, body = WeightInfo)))]
pub(super) async fn weight_info(State(door): State<Door>) -> Result<Json<WeightInfo>, HttpError> {
    Ok(Json(WeightInfo { weight_version: status(&door).await?.stats.weight_version.to_string() }))
}

/// How busy the server is.
#[derive(Serialize, ToSchema)]
pub(super) struct Load {
    /// Requests that run or wait.
    server_load: usize,
}

/// How many requests run or wait.
#[utoipa::path(get, path = "/load", responses((status = 200, body = Load)))]
pub(super) async fn load(State(door): State<Door>) -> Result<Json<Load>, HttpError> {
    let stats = status(&door).await?.stats;
    Ok(Json(Load { server_load: (stats.accepted_requests + stats.held_requests) as usize }))
}

async fn status(door: &Door) -> Result<EngineStatus, HttpError> {
    let context = door.gate.look()?;
    Ok(ask(&context.engine, |reply| Command::Status { reply }).await?)
}

/// The number of ranks.
#[derive(Serialize, ToSchema)]
pub(super) struct WorldSize {
    world_size: usize,
}

/// The number of ranks, `--tp`.
#[utoipa::path(get, path = "/get_world_size",
    params(("include_dp" = Option<bool>, Query, description = "no difference: there is no data parallelism")),
    responses((status = 200, body = WorldSize), (status = 400, body = ErrorBody)),
)]
pub(super) async fn get_world_size(State(door): State<Door>, query: Query) -> Result<Json<WorldSize>, HttpError> {
    query.flag("include_dp", true)?;
    Ok(Json(WorldSize { world_size: door.gate.look()?.info.tensor_parallel_size }))
}

/// The configuration.
#[derive(Serialize, ToSchema)]
pub(super) struct ServerInfo {
    /// The members that trainers read of vLLM's.
    vllm_config: Config,
    /// Always empty: the server does not report its environment.
    vllm_env: Empty,
    /// Empty.
    system_env: Empty,
}

#[derive(Serialize, ToSchema)]
struct Empty {}

/// The configuration, as an object or as its text.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Config {
    Json(Box<VllmConfig>),
    Text(String),
}

#[derive(Serialize, ToSchema)]
struct VllmConfig {
    model_config: ModelConfig,
    /// Null without `--max-adapters`.
    lora_config: Option<LoraConfig>,
    parallel_config: ParallelConfig,
    /// Null on devices to which no trainer can broadcast weights; they come over gRPC, in shared memory or from files.
    weight_transfer_config: Option<WeightTransferConfig>,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
}

#[derive(Serialize, ToSchema)]
struct WeightTransferConfig {
    /// The library by which trainers broadcast.
    backend: &'static str,
}

#[derive(Serialize, ToSchema)]
struct ModelConfig {
    model: String,
    /// `torch.bfloat16` or `torch.float32`.
    dtype: String,
    /// Always `processed_logprobs`: of the distribution that the token was drawn from.
    logprobs_mode: &'static str,
    max_logprobs: u32,
    max_model_len: usize,
    served_model_name: String,
    enable_sleep_mode: bool,
}

#[derive(Serialize, ToSchema)]
struct LoraConfig {
    /// `--max-lora-rank`
    max_lora_rank: usize,
    /// `--max-adapters`
    max_loras: usize,
}

#[derive(Serialize, ToSchema)]
struct ParallelConfig {
    data_parallel_size: usize,
    /// `--tp`
    tensor_parallel_size: usize,
    pipeline_parallel_size: usize,
    world_size: usize,
}

#[derive(Serialize, ToSchema)]
struct CacheConfig {
    block_size: usize,
    enable_prefix_caching: bool,
}

#[derive(Serialize, ToSchema)]
struct SchedulerConfig {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

/// The configuration, in the shape of vLLM's.
#[utoipa::path(get, path = "/server_info",
    params(("config_format" = Option<String>, Query, pattern = "^(json|text)$",
        description = "`json`, or `text` (the default) for a text")),
    responses((status = 200, body = ServerInfo), (status = 400, body = ErrorBody)),
)]
pub(super) async fn server_info(State(door): State<Door>, query: Query) -> Result<Json<ServerInfo>, HttpError> {
    let is_json = query.choice("config_format", &[("text", false), ("json", true)])?;
    let config = config(&*door.gate.look()?);
    let vllm_config = match is_json {
        true => Config::Json(Box::new(config)),
        false => Config::Text(serde_json::to_string(&config).expect("names and numbers")),
    };
    Ok(Json(ServerInfo { vllm_config, vllm_env: Empty {}, system_env: Empty {} }))
}

fn config(context: &ServingContext) -> VllmConfig {
    let info = &context.info;
    let lora = LoraConfig { max_lora_rank: info.max_lora_rank, max_loras: info.max_adapters };
    VllmConfig {
        model_config: ModelConfig {
            model: info.model.clone(),
            dtype: format!("torch.{}", info.dtype),
            logprobs_mode: "processed_logprobs",
            max_logprobs: convert::MAX_TOP_LOGPROBS,
            max_model_len: context.model.max_model_len,
            served_model_name: info.model.clone(),
            enable_sleep_mode: true,
        },
        lora_config: (info.max_adapters > 0).then_some(lora),
        parallel_config: ParallelConfig {
            data_parallel_size: 1,
            tensor_parallel_size: info.tensor_parallel_size,
            pipeline_parallel_size: 1,
            world_size: info.tensor_parallel_size,
        },
        cache_config: CacheConfig { block_size: info.block_size, enable_prefix_caching: true },
        scheduler_config: SchedulerConfig {
            max_num_seqs: info.max_num_seqs,
            max_num_batched_tokens: info.max_batch_tokens,
        },
        weight_transfer_config: context.trainers.library().map(|backend| WeightTransferConfig { backend }),
    }
}
