//! One block of InternViT: attention and MLP over the rows of whole tiles.

use candle_core::Tensor;
use rollout_kernels::{AttentionShape, KvCache, Ops, Step};

use super::layers::{LayerNorm, ScaledSum};
use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::VisionConfig;
use crate::model::layers::{Build, Linear, Projection};
use crate::model::parameterized::Parameterized;
use crate::model::tower::workspace::ChunkBuffers;
use crate::weights::ShardRule;

/// Attention, and an MLP with GELU; what each adds to the residual stream is scaled by column. All projections are
/// divided among the ranks by their outputs, which are then gathered: every sum is whole on one rank, so its bits are
/// the same on any number of ranks, whatever the sizes.
pub(super) struct InternVitBlock {
    heads: usize,
    head_dim: usize,
    attention_norm: LayerNorm,
    qkv: Linear,
    output: Linear,
    attention_sum: ScaledSum,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
    mlp_sum: ScaledSum,
}

impl InternVitBlock {
    /// Block `index` of the tower. Its matrices have no memory yet.
    pub fn new(config: &VisionConfig, norm_eps: f32, qkv_bias: bool, build: &Build, index: usize) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (heads, head_dim) = (config.num_heads, config.head_dim());
        let name = |part: &str| format!("vision_tower.encoder.layer.{index}.{part}");
        let norm = |part: &str| LayerNorm::new(build, &name(part), hidden, norm_eps);
        let by_heads = |part: &str| Projection {
            name: name(part),
            rows: hidden,
            rule: ShardRule::Heads { heads, head_dim },
            bias: qkv_bias,
        };
        let padded = |part: &str, rows: usize, columns: usize| {
            let projection = Projection { name: name(part), rows, rule: ShardRule::PaddedRows, bias: true };
            Linear::by_rows(build, vec![projection], &[columns])
        };
        let qkv = ["attention.q_proj", "attention.k_proj", "attention.v_proj"].map(by_heads).into();
        Ok(Self {
            heads: build.partition.share(heads),
            head_dim,
            attention_norm: norm("layernorm_before")?,
            qkv: Linear::by_rows(build, qkv, &[hidden])?,
            output: padded("attention.projection_layer", hidden, hidden)?,
            attention_sum: ScaledSum::new(build, name("lambda_1"), hidden)?,
            mlp_norm: norm("layernorm_after")?,
            up: padded("mlp.fc1", intermediate, hidden)?,
            down: padded("mlp.fc2", hidden, intermediate)?,
            mlp_sum: ScaledSum::new(build, name("lambda_2"), hidden)?,
        })
    }

    /// Adds attention and MLP to `hidden`, the rows of whole tiles. `step` has a sequence for each tile.
    pub fn forward(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        step: &Step<'_>,
        hidden: &Tensor,
        chunk: &ChunkBuffers,
        kv: &mut KvCache,
    ) -> Result<()> {
        self.attention_norm.forward(ops, hidden, &chunk.normed)?;
        self.qkv.forward(ops, &chunk.normed, &chunk.qkv)?;
        let width = self.heads * self.head_dim;
        let [q, k, v] = [0, 1, 2].map(|part| chunk.qkv.narrow(1, part * width, width));
        ops.write_kv(&k?, &v?, step, kv)?;
        let shape =
            AttentionShape { heads: self.heads, scale: (self.head_dim as f32).sqrt().recip(), sliding_window: None };
        ops.paged_attention(&q?, &shape, step, kv, &chunk.attention.local)?;
        chunk.attention.gather(comm)?;
        self.output.forward(ops, &chunk.attention.whole, &chunk.delta.local)?;
        chunk.delta.gather(comm)?;
        self.attention_sum.forward(ops, &chunk.delta.whole, hidden)?;
        self.mlp_norm.forward(ops, hidden, &chunk.normed)?;
        self.up.forward(ops, &chunk.normed, &chunk.activation.local)?;
        ops.gelu(&chunk.activation.local)?;
        chunk.activation.gather(comm)?;
        self.down.forward(ops, &chunk.activation.whole, &chunk.delta.local)?;
        chunk.delta.gather(comm)?;
        self.mlp_sum.forward(ops, &chunk.delta.whole, hidden)
    }
}

impl Parameterized for InternVitBlock {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let Self { attention_norm, qkv, output, attention_sum, mlp_norm, up, down, mlp_sum, .. } = self;
        vec![attention_norm, qkv, output, attention_sum, mlp_norm, up, down, mlp_sum]
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let Self { attention_norm, qkv, output, attention_sum, mlp_norm, up, down, mlp_sum, .. } = self;
        vec![attention_norm, qkv, output, attention_sum, mlp_norm, up, down, mlp_sum]
    }
}
