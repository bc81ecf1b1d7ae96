//! What the server must be given: facts of the model, facts of the process, the way into the engine.

use std::sync::Arc;
use std::time::Duration;

use super::encoder::PromptEncoder;
use crate::engine::EngineHandle;
use crate::memory::Traffic;
use crate::types::TokenId;
use crate::weights::{Parameters, Sources};

/// Everything the services need once the model is loaded.
pub struct Parts {
    pub model: Arc<ModelFacts>,
    pub info: ServerInfo,
    pub engine: EngineHandle,
    /// What requests and replies under way take.
    pub traffic: Traffic,
    /// What pushes are checked against.
    pub parameters: Arc<Parameters>,
    /// What pushes may be read from.
    pub sources: Arc<Sources>,
    /// A push that sends nothing for this long is ended.
    pub update_idle: Duration,
}

/// What a request is checked against.
pub struct ModelFacts {
    pub vocab_size: usize,
    /// Most tokens of prompt and completion together.
    pub max_model_len: usize,
    /// Ascending.
    pub eos_token_ids: Vec<TokenId>,
    /// For prompts of text; `None` for a model without a tokenizer, which takes and gives token ids only.
    pub encoder: Option<Arc<PromptEncoder>>,
}

/// Facts that `GetInfo` reports and that are not in [`ModelFacts`].
#[derive(Clone, Debug, Default)]
pub struct ServerInfo {
    pub model: String,
    pub architecture: String,
    /// `bfloat16` or `float32`.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    pub tensor_parallel_size: usize,
    pub max_num_seqs: usize,
    pub max_batch_tokens: usize,
    pub block_size: usize,
    /// Number of weights, tied ones counted once.
    pub parameters: u64,
    /// Instruction set of the kernels.
    pub kernel: String,
    pub max_adapters: usize,
    pub max_lora_rank: usize,
}
