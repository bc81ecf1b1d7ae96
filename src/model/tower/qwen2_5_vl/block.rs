//! One block of the vision tower: attention and MLP over rows of patches.

use candle_core::Tensor;
use rollout_kernels::{AttentionShape, KvCache, Ops, Step};

use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::VisionConfig;
use crate::model::layers::{Build, Linear, Norm, Projection};
use crate::model::parameterized::Parameterized;
use crate::model::rope::RopeTables;
use crate::model::tower::workspace::ChunkBuffers;
use crate::weights::ShardRule;

/// Epsilon of the tower's norms, whatever the decoder's is.
pub(super) const NORM_EPS: f32 = 1e-6;

/// The operators and the ranks that a block computes with.
#[derive(Clone, Copy)]
pub(super) struct TowerContext<'a> {
    pub ops: &'a Ops,
    pub comm: &'a dyn Communicator,
    pub rope: &'a RopeTables,
}

/// Attention, and a gated MLP. All projections are divided among the ranks by their outputs, which are then gathered:
/// every sum is whole on one rank, so its bits are the same on any number of ranks, whatever the sizes.
pub(super) struct TowerBlock {
    heads: usize,
    head_dim: usize,
    attention_norm: Norm,
    qkv: Linear,
    output: Linear,
    mlp_norm: Norm,
    gate_up: Linear,
    down: Linear,
}

impl TowerBlock {
    /// Block `index` of the tower. Its matrices have no memory yet.
    pub fn new(config: &VisionConfig, build: &Build, index: usize) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (heads, head_dim) = (config.num_heads, config.head_dim());
        let name = |part: &str| format!("visual.blocks.{index}.{part}");
        let norm = |part: &str| Norm::new(build, name(&format!("{part}.weight")), hidden, NORM_EPS);
        let projection =
            |part: &str, rows: usize, rule: ShardRule| Projection { name: name(part), rows, rule, bias: true };
        let padded = |part: &str, rows: usize| projection(part, rows, ShardRule::PaddedRows);
        let by_heads = |part: &str| projection(part, hidden, ShardRule::Heads { heads, head_dim });
        let qkv = vec![by_heads("attn.q_proj"), by_heads("attn.k_proj"), by_heads("attn.v_proj")];
        let gate_up = vec![padded("mlp.gate_proj", intermediate), padded("mlp.up_proj", intermediate)];
        Ok(Self {
            heads: build.partition.share(heads),
            head_dim,
            attention_norm: norm("norm1")?,
            qkv: Linear::by_rows(build, qkv, &[hidden])?,
            output: Linear::by_rows(build, vec![padded("attn.proj", hidden)], &[hidden])?,
            mlp_norm: norm("norm2")?,
            gate_up: Linear::by_rows(build, gate_up, &[hidden])?,
            down: Linear::by_rows(build, vec![padded("mlp.down_proj", hidden)], &[intermediate])?,
        })
    }

    /// Writes the keys and values of `hidden`'s rows to `kv`. Returns the rotated queries, a view of `chunk.qkv`.
    pub fn project(
        &self,
        context: &TowerContext<'_>,
        step: &Step<'_>,
        hidden: &Tensor,
        chunk: &ChunkBuffers,
        kv: &mut KvCache,
    ) -> Result<Tensor> {
        let TowerContext { ops, rope, .. } = *context;
        self.attention_norm.forward(ops, hidden, &chunk.normed)?;
        self.qkv.forward(ops, &chunk.normed, &chunk.qkv)?;
        let width = self.heads * self.head_dim;
        let [q, k, v] = [0, 1, 2].map(|part| chunk.qkv.narrow(1, part * width, width));
        let (q, k, v) = (q?, k?, v?);
        for x in [&q, &k] {
            rope.rotate(ops, step, x, self.head_dim)?;
        }
        ops.write_kv(&k, &v, step, kv)?;
        Ok(q)
    }

    /// Adds attention and MLP to `hidden`'s rows, whose queries and the keys and values that they see have been
    /// projected.
    pub fn attend(
        &self,
        context: &TowerContext<'_>,
        step: &Step<'_>,
        queries: &Tensor,
        hidden: &Tensor,
        chunk: &ChunkBuffers,
        kv: &KvCache,
    ) -> Result<()> {
        let TowerContext { ops, comm, .. } = *context;
        let scale = (self.head_dim as f32).sqrt().recip();
        let shape = AttentionShape { heads: self.heads, scale, sliding_window: None };
        ops.paged_attention(queries, &shape, step, kv, &chunk.attention.local)?;
        chunk.attention.gather(comm)?;
        self.output.forward(ops, &chunk.attention.whole, &chunk.delta.local)?;
        chunk.delta.gather(comm)?;
        self.mlp_norm.add_forward(ops, hidden, &chunk.delta.whole, None, &chunk.normed)?;
        self.gate_up.forward_silu_mul(ops, &chunk.normed, chunk.gate_up(), &chunk.activation.local)?;
        chunk.activation.gather(comm)?;
        self.down.forward(ops, &chunk.activation.whole, &chunk.delta.local)?;
        chunk.delta.gather(comm)?;
        Ok(ops.add(&chunk.delta.whole, hidden)?)
    }
}

impl Parameterized for TowerBlock {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        vec![&self.attention_norm, &self.qkv, &self.output, &self.mlp_norm, &self.gate_up, &self.down]
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let Self { attention_norm, qkv, output, mlp_norm, gate_up, down, .. } = self;
        vec![attention_norm, qkv, output, mlp_norm, gate_up, down]
    }
}
