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

/// The activations that a step computes, float32, one row per token. `StepBuffers<usize>` is their plan: the width of
/// each.
#[derive(Clone)]
pub struct StepBuffers<T> {
    /// The residual stream.
    pub hidden: T,
    pub normed: T,
    pub qkv: T,
    pub attention: T,
    /// The term that attention or MLP adds to the residual stream.
    pub delta: T,
    pub gate_up: T,
    pub activation: T,
}

/// The activations of the head, float32, one row per row of logits. `HeadBuffers<usize>` is their plan: the width of
/// each.
#[derive(Clone)]
pub struct HeadBuffers<T> {
    pub selected: T,
    pub local_logits: T,
    /// The logits of all ranks. `None` on a single rank, whose local logits are all logits.
    gathered_logits: Option<T>,
}

/// A rank's activations: [`StepBuffers`] of `max_batch_tokens` rows and [`HeadBuffers`] of [`LOGITS_ROWS`] rows.
#[derive(Clone)]
pub struct Workspace {
    pub step: StepBuffers<Tensor>,
    head: HeadBuffers<Tensor>,
    /// The buffers that the tensors are views of. The device's memory is freed with the last clone.
    _memory: Arc<[Activations]>,
}

impl StepBuffers<usize> {
    fn plan(config: &ModelConfig, build: &Build) -> Self {
        let HeadDims { heads, kv_heads, head_dim } = HeadDims::local(config, build);
        let (hidden, intermediate) = (config.hidden_size, build.partition.share(config.intermediate_size));
        Self {
            hidden,
            normed: hidden,
            qkv: (heads + 2 * kv_heads) * head_dim,
            attention: heads * head_dim,
            delta: hidden,
            gate_up: 2 * intermediate,
            activation: intermediate,
        }
    }

    /// Width of all buffers together.
    fn width(&self) -> usize {
        let Self { hidden, normed, qkv, attention, delta, gate_up, activation } = self;
        hidden + normed + qkv + attention + delta + gate_up + activation
    }

    /// Width of the widest input of a linear layer.
    fn widest_input(&self) -> usize {
        self.normed.max(self.attention).max(self.activation)
    }
}

impl<T> StepBuffers<T> {
    fn map<U>(&self, mut make: impl FnMut(&T) -> Result<U>) -> Result<StepBuffers<U>> {
        Ok(StepBuffers {
            hidden: make(&self.hidden)?,
            normed: make(&self.normed)?,
            qkv: make(&self.qkv)?,
            attention: make(&self.attention)?,
            delta: make(&self.delta)?,
            gate_up: make(&self.gate_up)?,
            activation: make(&self.activation)?,
        })
    }
}

impl HeadBuffers<usize> {
    fn plan(config: &ModelConfig, build: &Build) -> Self {
        let local_vocab = build.partition.padded_share(config.vocab_size);
        Self {
            selected: config.hidden_size,
            local_logits: local_vocab,
            gathered_logits: (local_vocab < config.vocab_size).then_some(config.vocab_size),
        }
    }

    /// Width of all buffers together.
    fn width(&self) -> usize {
        let Self { selected, local_logits, gathered_logits } = self;
        selected + local_logits + gathered_logits.unwrap_or(0)
    }
}

impl<T> HeadBuffers<T> {
    pub fn logits(&self) -> &T {
        self.gathered_logits.as_ref().unwrap_or(&self.local_logits)
    }

    fn map<U>(&self, mut make: impl FnMut(&T) -> Result<U>) -> Result<HeadBuffers<U>> {
        Ok(HeadBuffers {
            selected: make(&self.selected)?,
            local_logits: make(&self.local_logits)?,
            gathered_logits: self.gathered_logits.as_ref().map(make).transpose()?,
        })
    }
}

impl Workspace {
    pub fn new(shape: &WorkspaceShape) -> Result<Self> {
        let WorkspaceShape { config, build, max_batch_tokens } = shape;
        let mut memory = Vec::new();
        let mut make = |rows: usize, width: usize| -> Result<Tensor> {
            let activations = build.device.activations(rows, width)?;
            let tensor = Tensor::clone(&activations);
            memory.push(activations);
            Ok(tensor)
        };
        let head = HeadBuffers::plan(config, build).map(|&width| make(LOGITS_ROWS, width))?;
        let step = StepBuffers::plan(config, build).map(|&width| make(*max_batch_tokens, width))?;
        Ok(Self { step, head, _memory: memory.into() })
    }

    /// Bytes that one rank's workspace takes, with the packed copy of its input that a linear layer's kernel makes, and
    /// the buffers for its exchange with other ranks.
    pub fn bytes(config: &ModelConfig, build: &Build, max_batch_tokens: usize) -> u64 {
        let (step, head) = (StepBuffers::plan(config, build), HeadBuffers::plan(config, build));
        let values = max_batch_tokens * (step.width() + step.widest_input()) + LOGITS_ROWS * head.width();
        let exchanged = if build.partition.is_whole() { 0 } else { build.device.exchange_bytes() };
        (size_of::<f32>() * values + exchanged) as u64
    }

    /// The first `rows` rows of the step's buffers.
    pub fn rows(&self, rows: usize) -> Result<Self> {
        let step = self.step.map(|buffer| buffer.narrow(0, 0, rows))?;
        Ok(Self { step, ..self.clone() })
    }

    /// The first `rows` rows of the head's buffers.
    pub fn head_rows(&self, rows: usize) -> Result<HeadBuffers<Tensor>> {
        self.head.map(|buffer| buffer.narrow(0, 0, rows))
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
