//! Buffers of a rank that are made once: the activations of one step, and the KV caches.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use rollout_kernels::{Activations, KvCache, KvLayout, StorageDtype};

use super::config::ModelConfig;
use super::layers::{Build, HeadDims};

/// Rows of logits that are computed at once. More rows read the head's weights fewer times, and each takes 0.6 MB at a
/// vocabulary of 152k: 64 rows stay below 40 MB.
pub const LOGITS_ROWS: usize = 64;

/// The values that determine the size of a rank's workspace.
#[derive(Clone)]
pub struct WorkspaceShape {
    pub config: ModelConfig,
    pub build: Build,
    pub max_batch_tokens: usize,
}

/// Activations, float32, `[max_batch_tokens, width]` each. [`Workspace::rows`] gives the part of one step.
#[derive(Clone)]
pub struct Workspace {
    /// The residual stream.
    pub hidden: Tensor,
    pub normed: Tensor,
    pub qkv: Tensor,
    pub attention: Tensor,
    /// The term that attention or MLP adds to the residual stream.
    pub delta: Tensor,
    pub gate_up: Tensor,
    pub activation: Tensor,
    head: LogitsRows,
    /// The buffers that the tensors are views of. The device's memory is freed with the last clone.
    memory: Arc<[Activations]>,
}

/// Buffers of the head, `[LOGITS_ROWS, width]` each.
#[derive(Clone)]
pub struct LogitsRows {
    pub selected: Tensor,
    pub local_logits: Tensor,
    pub logits: Tensor,
}

impl Workspace {
    pub fn new(shape: &WorkspaceShape) -> Result<Self> {
        let WorkspaceShape { config, build, max_batch_tokens } = shape;
        let widths = Widths::new(config, build);
        let mut memory = Vec::new();
        let mut make = |rows: usize, width: usize| -> Result<Tensor> {
            let activations = build.device.activations(rows, width)?;
            let tensor = Tensor::clone(&activations);
            memory.push(activations);
            Ok(tensor)
        };
        let rows = *max_batch_tokens;
        let local_logits = make(LOGITS_ROWS, widths.local_vocab)?;
        // On a single rank the local logits are all logits, and need no second buffer to be gathered into.
        let is_whole = widths.local_vocab == config.vocab_size;
        let logits = if is_whole { local_logits.clone() } else { make(LOGITS_ROWS, config.vocab_size)? };
        Ok(Self {
            hidden: make(rows, widths.hidden)?,
            normed: make(rows, widths.hidden)?,
            qkv: make(rows, widths.qkv)?,
            attention: make(rows, widths.attention)?,
            delta: make(rows, widths.hidden)?,
            gate_up: make(rows, 2 * widths.intermediate)?,
            activation: make(rows, widths.intermediate)?,
            head: LogitsRows { selected: make(LOGITS_ROWS, widths.hidden)?, local_logits, logits },
            memory: memory.into(),
        })
    }

    /// Bytes that one rank's workspace takes, with the packed copy of its input that a linear layer's kernel makes, and
    /// what it exchanges with other ranks through.
    pub fn bytes(config: &ModelConfig, build: &Build, max_batch_tokens: usize) -> u64 {
        let widths = Widths::new(config, build);
        let row = 3 * widths.hidden + widths.qkv + widths.attention + 3 * widths.intermediate;
        let packed_input = widths.hidden.max(widths.attention).max(widths.intermediate);
        let head = config.vocab_size + widths.local_vocab + widths.hidden;
        let exchanged = if build.partition.is_whole() { 0 } else { build.device.exchange_bytes() };
        (4 * (max_batch_tokens * (row + packed_input) + LOGITS_ROWS * head) + exchanged) as u64
    }

    /// The first `rows` rows of each activation.
    pub fn rows(&self, rows: usize) -> Result<Self> {
        let part = |t: &Tensor| t.narrow(0, 0, rows);
        Ok(Self {
            hidden: part(&self.hidden)?,
            normed: part(&self.normed)?,
            qkv: part(&self.qkv)?,
            attention: part(&self.attention)?,
            delta: part(&self.delta)?,
            gate_up: part(&self.gate_up)?,
            activation: part(&self.activation)?,
            head: self.head.clone(),
            memory: self.memory.clone(),
        })
    }

    /// The first `rows` rows of the head's buffers.
    pub fn logits_rows(&self, rows: usize) -> Result<LogitsRows> {
        let LogitsRows { selected, local_logits, logits } = &self.head;
        Ok(LogitsRows {
            selected: selected.narrow(0, 0, rows)?,
            local_logits: local_logits.narrow(0, 0, rows)?,
            logits: logits.narrow(0, 0, rows)?,
        })
    }
}

struct Widths {
    hidden: usize,
    qkv: usize,
    attention: usize,
    intermediate: usize,
    local_vocab: usize,
}

impl Widths {
    fn new(config: &ModelConfig, build: &Build) -> Self {
        let dims = HeadDims::local(config, build);
        Self {
            hidden: config.hidden_size,
            qkv: (dims.heads + 2 * dims.kv_heads) * dims.head_dim,
            attention: dims.heads * dims.head_dim,
            intermediate: build.partition.share(config.intermediate_size),
            local_vocab: build.partition.share(config.vocab_size),
        }
    }
}

/// The paged KV caches of all layers, which have no memory until they are restored.
pub fn kv_caches(
    config: &ModelConfig,
    build: &Build,
    dtype: StorageDtype,
    blocks: usize,
    block_size: usize,
) -> Vec<KvCache> {
    let layout = kv_layout(config, build, dtype, blocks, block_size);
    (0..config.num_layers).map(|_| build.device.kv_cache(layout)).collect()
}

/// Bytes that one block takes on one rank: keys and values of all layers.
pub fn kv_bytes_per_block(config: &ModelConfig, build: &Build, dtype: StorageDtype, block_size: usize) -> u64 {
    (config.num_layers * kv_layout(config, build, dtype, 1, block_size).bytes_per_block()) as u64
}

fn kv_layout(config: &ModelConfig, build: &Build, dtype: StorageDtype, blocks: usize, block_size: usize) -> KvLayout {
    let HeadDims { kv_heads, head_dim, .. } = HeadDims::local(config, build);
    KvLayout { blocks, block_size, kv_heads, head_dim, dtype }
}
