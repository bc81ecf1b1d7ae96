//! Buffers of a rank that are made once: the activations of one step, and the KV caches.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use rollout_kernels::{Activations, DeviceError, KvCache, KvLayout, Routing, RoutingShape, StorageDtype};

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
    /// Whether the experts of all layers are kept until the next step.
    pub keeps_routing: bool,
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

/// The activations of mixtures of experts, float32. `ExpertBuffers<Extent>` is their plan: the rows and the width of
/// each.
#[derive(Clone)]
pub struct ExpertBuffers<T> {
    /// The router's, one row per token.
    pub logits: T,
    /// The factor of the shared expert's output, before the sigmoid; one column.
    pub shared_gate: T,
    /// The shared expert's output, one row per token.
    pub shared: T,
    /// One row per pair of a token and an expert of this rank, of as many tokens as the device computes the experts of
    /// at once; so are those below.
    pub gate_up: T,
    pub activation: T,
    pub output: T,
}

/// Rows and width of a buffer.
type Extent = (usize, usize);

/// A rank's activations: [`StepBuffers`] of `max_batch_tokens` rows and [`HeadBuffers`] of [`LOGITS_ROWS`] rows.
#[derive(Clone)]
pub struct Workspace {
    pub step: StepBuffers<Tensor>,
    head: HeadBuffers<Tensor>,
    /// `None` for a model without experts.
    experts: Option<ExpertBuffers<Tensor>>,
    /// The buffers that the tensors are views of. The device's memory is freed with the last clone.
    _memory: Arc<[Activations]>,
}

impl StepBuffers<usize> {
    fn plan(config: &ModelConfig, build: &Build) -> Self {
        let HeadDims { heads, kv_heads, head_dim } = HeadDims::local(config, build);
        let (hidden, intermediate) = (config.hidden_size, build.partition.share(config.widest_mlp()));
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

impl ExpertBuffers<Extent> {
    /// `None` for a model without experts.
    fn plan(workspace: &WorkspaceShape) -> Option<Self> {
        let WorkspaceShape { config, build, max_batch_tokens, .. } = workspace;
        let (experts, max_batch_tokens) = (config.experts.as_ref()?, *max_batch_tokens);
        let shape = routing_shape(workspace)?;
        let (hidden, width) = (config.hidden_size, experts.intermediate_size);
        let pairs = shape.most_pairs(max_batch_tokens.min(build.device.expert_rows()));
        let rows_if = |has: bool| if has { max_batch_tokens } else { 0 };
        let is_gated = experts.shared.as_ref().is_some_and(|shared| shared.is_gated);
        Some(Self {
            logits: (max_batch_tokens, experts.count),
            shared_gate: (rows_if(is_gated), 1),
            shared: (rows_if(experts.shared.is_some()), hidden),
            gate_up: (pairs, 2 * width),
            activation: (pairs, width),
            output: (pairs, hidden),
        })
    }

    /// Elements of all buffers together, and of the packed copy of an input.
    fn elements(&self) -> usize {
        let Self { logits, shared_gate, shared, gate_up, activation, output } = self;
        let buffers = [logits, shared_gate, shared, gate_up, activation, output];
        let packed = output.0 * activation.1.max(output.1);
        buffers.into_iter().map(|(rows, width)| rows * width).sum::<usize>() + packed
    }
}

impl<T> ExpertBuffers<T> {
    fn map<U>(&self, mut make: impl FnMut(&T) -> Result<U>) -> Result<ExpertBuffers<U>> {
        Ok(ExpertBuffers {
            logits: make(&self.logits)?,
            shared_gate: make(&self.shared_gate)?,
            shared: make(&self.shared)?,
            gate_up: make(&self.gate_up)?,
            activation: make(&self.activation)?,
            output: make(&self.output)?,
        })
    }
}

impl Workspace {
    pub fn new(shape: &WorkspaceShape) -> Result<Self> {
        let WorkspaceShape { config, build, max_batch_tokens, .. } = shape;
        let mut memory = Vec::new();
        let mut make = |rows: usize, width: usize| -> Result<Tensor> {
            let activations = build.device.activations(rows, width)?;
            let tensor = Tensor::clone(&activations);
            memory.push(activations);
            Ok(tensor)
        };
        let head = HeadBuffers::plan(config, build).map(|&width| make(LOGITS_ROWS, width))?;
        let step = StepBuffers::plan(config, build).map(|&width| make(*max_batch_tokens, width))?;
        let experts = ExpertBuffers::plan(shape);
        let experts = experts.map(|plan| plan.map(|&(rows, width)| make(rows, width))).transpose()?;
        Ok(Self { step, head, experts, _memory: memory.into() })
    }

    /// Bytes that one rank's workspace takes, with the packed copy of its input that a linear layer's kernel makes, and
    /// the buffers for its exchange with other ranks.
    pub fn bytes(shape: &WorkspaceShape) -> u64 {
        let WorkspaceShape { config, build, max_batch_tokens, .. } = shape;
        let max_batch_tokens = *max_batch_tokens;
        let (step, head) = (StepBuffers::plan(config, build), HeadBuffers::plan(config, build));
        let values = max_batch_tokens * (step.width() + step.widest_input()) + LOGITS_ROWS * head.width();
        let experts = ExpertBuffers::plan(shape).map_or(0, |plan| plan.elements());
        let routing = routing_shape(shape).map_or(0, |shape| shape.bytes());
        let exchanged = if build.partition.is_whole() { 0 } else { build.device.exchange_bytes() };
        (size_of::<f32>() * (values + experts) + routing + exchanged) as u64
    }

    /// The first `rows` rows of the step's buffers.
    pub fn rows(&self, rows: usize) -> Result<Self> {
        let step = self.step.map(|buffer| buffer.narrow(0, 0, rows))?;
        let of_rows = |buffer: &Tensor| buffer.narrow(0, 0, rows.min(buffer.dim(0)?));
        let experts = self.experts.as_ref().map(|experts| -> Result<_> {
            let (logits, shared_gate) = (of_rows(&experts.logits)?, of_rows(&experts.shared_gate)?);
            Ok(ExpertBuffers { logits, shared_gate, shared: of_rows(&experts.shared)?, ..experts.clone() })
        });
        Ok(Self { step, experts: experts.transpose()?, ..self.clone() })
    }

    /// The buffers of mixtures of experts.
    ///
    /// # Panics
    /// If the model has no experts.
    pub fn experts(&self) -> &ExpertBuffers<Tensor> {
        self.experts.as_ref().expect("a model with experts has their buffers")
    }

    /// The logits of all rows of the head's buffers.
    pub fn all_logits(&self) -> &Tensor {
        self.head.logits()
    }

    /// These rows of the head's buffers.
    pub fn head_rows(&self, rows: Range<usize>) -> Result<HeadBuffers<Tensor>> {
        self.head.map(|buffer| buffer.narrow(0, rows.start, rows.len()))
    }
}

/// The same memory as rows of `width` values, which the rows of `buffer` have at least.
pub(super) fn with_width(buffer: &Tensor, width: usize) -> Result<Tensor> {
    match buffer.dims2()? {
        (_, full) if full == width => Ok(buffer.clone()),
        (rows, _) => buffer.flatten_all()?.narrow(0, 0, rows * width)?.reshape((rows, width)),
    }
}

/// Where the experts of a step's rows are written, by one layer after the other. None for a model without experts.
///
/// # Errors
/// If the device has too little memory.
pub fn routing(shape: &WorkspaceShape) -> std::result::Result<Option<Routing>, DeviceError> {
    routing_shape(shape).map(|routing| shape.build.device.routing(routing)).transpose()
}

/// None for a model without experts.
pub fn routing_shape(shape: &WorkspaceShape) -> Option<RoutingShape> {
    let WorkspaceShape { config, build, max_batch_tokens, keeps_routing } = shape;
    let experts = config.experts.as_ref()?;
    let local = build.partition.even_range(experts.count);
    let kept_layers = if *keeps_routing { experts.routing_format().layers } else { 0 };
    Some(RoutingShape { rows: *max_batch_tokens, experts: experts.count, top_k: experts.top_k, local, kept_layers })
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
