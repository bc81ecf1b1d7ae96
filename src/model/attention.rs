//! The attention block of one layer: from the normalised hidden state to its term of the residual stream.

use rollout_kernels::{AttentionShape, DeviceBuffer, KvCache};

use super::config::ModelConfig;
use super::context::ForwardContext;
use super::layers::{Build, HeadDims, Linear, Norm, Projection};
use super::parameterized::Parameterized;
use super::rope::RopeTables;
use crate::error::Result;
use crate::weights::ShardRule;

/// Query, key and value projections, rotary embedding where the layer has one, paged attention, output projection.
pub(super) struct Attention {
    dims: HeadDims,
    qkv: Linear,
    /// Norm of each query head before the rotary embedding; only some families have it (Qwen3).
    q_norm: Option<Norm>,
    /// Norm of each key head, where there is one of the query heads.
    k_norm: Option<Norm>,
    output: Linear,
    /// Whether queries and keys are rotated by their positions.
    has_rope: bool,
    /// Number of positions that a token attends to, its own included; `None` for all before it.
    sliding_window: Option<usize>,
}

impl Attention {
    /// The attention block of layer `layer`. Its matrices have no memory yet.
    pub fn new(config: &ModelConfig, build: &Build, layer: usize) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let by_heads = |part: &str, heads: usize| Projection {
            name: name(part),
            rows: heads * head_dim,
            rule: ShardRule::Heads { heads, head_dim },
            bias: config.qkv_bias,
        };
        let head_norm = |part: &str| match config.qk_norm {
            true => Norm::new(build, name(&format!("{part}.weight")), head_dim, config.rms_norm_eps as f32).map(Some),
            false => Ok(None),
        };
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        let qkv = vec![by_heads("q_proj", heads), by_heads("k_proj", kv_heads), by_heads("v_proj", kv_heads)];
        let output = Projection { name: name("o_proj"), rows: hidden, rule: ShardRule::Columns, bias: config.o_bias };
        Ok(Self {
            dims: HeadDims::local(config, build),
            qkv: Linear::by_rows(build, qkv, &[hidden])?,
            q_norm: head_norm("q_norm")?,
            k_norm: head_norm("k_norm")?,
            output: Linear::by_columns(build, output, heads * head_dim)?,
            has_rope: config.has_rope[layer],
            sliding_window: config.sliding_window[layer],
        })
    }

    /// Reads the workspace's `normed`, writes the batch's keys and values to `kv`, and leaves its term of the residual
    /// stream in `delta`, without [`Attention::bias`].
    pub fn forward(&self, context: &ForwardContext<'_>, rope: &RopeTables, kv: &mut KvCache) -> Result<()> {
        let (ops, w) = (context.ops, &context.workspace.step);
        self.qkv.forward(ops, &w.normed, &w.qkv)?;
        context.add_adapters(self.qkv.name(), &w.normed, &w.qkv)?;
        self.attend(context, rope, kv)?;
        self.output.forward_partial(ops, &w.attention, &w.delta)?;
        context.comm.all_reduce_sum(&w.delta)?;
        context.add_adapters(self.output.name(), &w.attention, &w.delta)
    }

    /// The bias of the output projection.
    pub fn bias(&self) -> Option<&DeviceBuffer> {
        self.output.bias()
    }

    /// Rotary embedding, KV write and paged attention: reads the workspace's `qkv`, writes its `attention`.
    fn attend(&self, context: &ForwardContext<'_>, rope: &RopeTables, kv: &mut KvCache) -> Result<()> {
        let (ops, step, w) = (context.ops, context.step, &context.workspace.step);
        let HeadDims { heads, kv_heads, head_dim } = self.dims;
        let q = w.qkv.narrow(1, 0, heads * head_dim)?;
        let k = w.qkv.narrow(1, heads * head_dim, kv_heads * head_dim)?;
        let v = w.qkv.narrow(1, (heads + kv_heads) * head_dim, kv_heads * head_dim)?;
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            q_norm.forward_heads(ops, &q)?;
            k_norm.forward_heads(ops, &k)?;
        }
        if self.has_rope {
            rope.rotate(ops, step, &q, head_dim)?;
            rope.rotate(ops, step, &k, head_dim)?;
        }
        ops.write_kv(&k, &v, step, kv)?;
        let scale = (head_dim as f32).sqrt().recip();
        let shape = AttentionShape { heads, scale, sliding_window: self.sliding_window };
        Ok(ops.paged_attention(&q, &shape, step, kv, &w.attention)?)
    }
}

impl Parameterized for Attention {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let norms = [&self.q_norm, &self.k_norm].into_iter().flatten().map(|norm| norm as &dyn Parameterized);
        [&self.qkv as &dyn Parameterized].into_iter().chain(norms).chain([&self.output as _]).collect()
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let norms = [&mut self.q_norm, &mut self.k_norm].into_iter().flatten();
        let norms = norms.map(|norm| norm as &mut dyn Parameterized);
        [&mut self.qkv as &mut dyn Parameterized].into_iter().chain(norms).chain([&mut self.output as _]).collect()
    }
}
