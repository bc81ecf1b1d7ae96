//! What the server is given once the model is loaded: facts of the model and of the process, and the handle of the
//! engine.

use std::sync::Arc;
use std::time::Duration;

use super::encoder::PromptEncoder;
use crate::comm::Trainers;
use crate::engine::EngineHandle;
use crate::memory::Traffic;
use crate::types::TokenId;
use crate::weights::{Parameters, Sources};

/// Everything the services need once the model is loaded.
pub struct ServingContext {
    pub model: Arc<ModelFacts>,
    pub info: ServerInfo,
    pub engine: EngineHandle,
    /// Count of the bytes of requests and replies under way.
    pub traffic: Traffic,
    /// The model's parameters, against which pushes are checked.
    pub parameters: Arc<Parameters>,
    /// The directory and segments that pushes may be read from.
    pub sources: Arc<Sources>,
    /// Time without a message after which a push is ended.
    pub update_idle: Duration,
    /// Joins groups of trainers that broadcast their weights.
    pub trainers: Trainers,
}

/// Facts of the model that requests are checked against.
pub struct ModelFacts {
    pub vocab_size: usize,
    /// Most tokens that a prompt and its completion may have together.
    pub max_model_len: usize,
    /// The model's end-of-sequence tokens, ascending.
    pub eos_token_ids: Vec<TokenId>,
    /// Encodes prompts of text; None if the model has no tokenizer, so that requests must use token ids.
    pub encoder: Option<Arc<PromptEncoder>>,
}

/// Facts that `GetInfo` reports and that are not in [`ModelFacts`].
#[derive(Clone, Debug, Default)]
pub struct ServerInfo {
    pub model: String,
    pub architecture: String,
    /// Data type of weights and KV cache: `bfloat16` or `float32`.
    pub dtype: String,
    /// Device of the model: `cpu` or `cuda`.
    pub device: String,
    pub tensor_parallel_size: usize,
    pub max_num_seqs: usize,
    pub max_batch_tokens: usize,
    pub block_size: usize,
    /// Number of weights in the model; tied ones count once.
    pub parameters: u64,
    /// Instruction set that the kernels use.
    pub kernel: String,
    pub max_adapters: usize,
    pub max_lora_rank: usize,
    /// UUIDs of the devices in whose memory pushes may lie.
    pub device_uuids: Vec<String>,
    /// Whether a result is the same bits whatever is computed beside it.
    pub batch_invariant: bool,
}
