//! The decoder: one text for Llama, Qwen2, Qwen3 and Mistral, which differ by configuration.

use candle_core::Tensor;
use rollout_kernels::{AttentionSequence, AttentionShape, KvCache, Ops};

use super::config::ModelConfig;
use super::layers::{Build, Linear, MatrixVisitor, Norm, Projection, Visitor, VocabularyMatrix};
use super::workspace::Workspace;
use crate::comm::Communicator;
use crate::error::Result;
use crate::weights::{ParamSpec, ShardRule};

/// One flat batch: rows of all sequences behind each other.
pub struct Input<'a> {
    /// Token of each row.
    pub tokens: &'a [u32],
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// Where each row's KV goes: `block * block_size + offset`.
    pub slots: &'a [u32],
    pub sequences: &'a [AttentionSequence<'a>],
    /// What is added to the outputs of some rows.
    pub additions: Option<&'a dyn Additions>,
}

/// A linear layer, or several of the same input that are one here: what they give can be added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// Query, key and value of a layer.
    Qkv(usize),
    /// The attention's output projection.
    Output(usize),
    GateUp(usize),
    Down(usize),
    Head,
}

/// Terms that are added to what linear layers give.
pub trait Additions {
    /// Adds to `out`, what the layers at `site` give for `x`: both have the batch's rows, or those of which logits are
    /// wanted at the head, and this rank's columns. Where the input is split over ranks `out` is their sum already, and
    /// all must add the same.
    fn add(&self, ops: &Ops, comm: &dyn Communicator, site: Site, x: &Tensor, out: &Tensor) -> Result<()>;
}

struct Layer {
    attention_norm: Norm,
    qkv: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    output: Linear,
    mlp_norm: Norm,
    gate_up: Linear,
    down: Linear,
    sliding_window: Option<usize>,
}

/// This rank's part of a decoder.
pub struct Decoder {
    dims: HeadDims,
    embedding: VocabularyMatrix,
    layers: Vec<Layer>,
    norm: Norm,
    /// `None` where the embedding is tied.
    head: Option<VocabularyMatrix>,
    rope_cos: Tensor,
    rope_sin: Tensor,
}

/// Heads of this rank.
#[derive(Clone, Copy, Debug)]
pub struct HeadDims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Decoder {
    /// A decoder with all weights zero, to be filled through [`Decoder::visit`]. Positions reach `max_model_len`.
    pub fn new(config: &ModelConfig, build: Build, max_model_len: usize) -> Result<Self> {
        let hidden = config.hidden_size;
        let layers = (0..config.num_layers).map(|i| Layer::new(config, build, i)).collect::<Result<_>>()?;
        let head = if config.tie_word_embeddings {
            None
        } else {
            Some(VocabularyMatrix::new(build, "lm_head.weight", config.vocab_size, hidden)?)
        };
        let (rope_cos, rope_sin) = rope_tables(&config.rope.inv_freq(config.head_dim), max_model_len)?;
        Ok(Self {
            dims: HeadDims::local(config, build),
            embedding: VocabularyMatrix::new(build, "model.embed_tokens.weight", config.vocab_size, hidden)?,
            layers,
            norm: Norm::new("model.norm.weight".into(), hidden, config.rms_norm_eps as f32)?,
            head,
            rope_cos,
            rope_sin,
        })
    }

    /// Runs all layers over a batch, writing its KV. The result, normalised and ready for [`Decoder::logits`], is in
    /// `workspace.normed`, one row per token.
    pub fn forward(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        input: &Input<'_>,
        kv: &mut [KvCache],
        workspace: &Workspace,
    ) -> Result<()> {
        let w = workspace.rows(input.tokens.len())?;
        let add = |site, x, out| input.additions.map_or(Ok(()), |additions| additions.add(ops, comm, site, x, out));
        self.embedding.embed(ops, input.tokens, &w.hidden)?;
        comm.all_reduce_sum(&w.hidden)?;
        self.layers[0].attention_norm.forward(ops, &w.hidden, &w.normed)?;
        for (i, (layer, kv)) in self.layers.iter().zip(kv).enumerate() {
            layer.qkv.forward(ops, &w.normed, &w.qkv)?;
            add(Site::Qkv(i), &w.normed, &w.qkv)?;
            self.attention(ops, layer, input, kv, &w)?;
            layer.output.forward_partial(ops, &w.attention, &w.delta)?;
            comm.all_reduce_sum(&w.delta)?;
            add(Site::Output(i), &w.attention, &w.delta)?;
            layer.mlp_norm.add_forward(ops, &w.hidden, &w.delta, layer.output.bias(), &w.normed)?;
            match input.additions {
                None => layer.gate_up.forward_silu_mul(ops, &w.normed, &w.gate_up, &w.activation)?,
                Some(_) => {
                    layer.gate_up.forward(ops, &w.normed, &w.gate_up)?;
                    add(Site::GateUp(i), &w.normed, &w.gate_up)?;
                    ops.silu_mul(&w.gate_up, &w.activation)?;
                }
            }
            layer.down.forward_partial(ops, &w.activation, &w.delta)?;
            comm.all_reduce_sum(&w.delta)?;
            add(Site::Down(i), &w.activation, &w.delta)?;
            let next_norm = self.layers.get(i + 1).map_or(&self.norm, |next| &next.attention_norm);
            next_norm.add_forward(ops, &w.hidden, &w.delta, layer.down.bias(), &w.normed)?;
        }
        Ok(())
    }

    /// Logits (`workspace.logits`, `[rows.len(), vocabulary]`) of rows of the last forward pass; at most
    /// [`super::LOGITS_ROWS`] at once.
    pub fn logits(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        rows: &[u32],
        workspace: &Workspace,
        additions: Option<&dyn Additions>,
    ) -> Result<Tensor> {
        let w = workspace.logits_rows(rows.len())?;
        ops.select_rows(&workspace.normed, rows, &w.selected)?;
        self.head.as_ref().unwrap_or(&self.embedding).logits(ops, &w.selected, &w.local_logits)?;
        if let Some(additions) = additions {
            additions.add(ops, comm, Site::Head, &w.selected, &w.local_logits)?;
        }
        comm.all_gather_columns(&w.local_logits, &w.logits)?;
        Ok(w.logits)
    }

    /// Shows every parameter to `visitor`.
    pub fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.embedding.visit(visitor)?;
        for layer in &mut self.layers {
            layer.visit(visitor)?;
        }
        self.norm.visit(visitor)?;
        self.head.as_mut().map_or(Ok(()), |head| head.visit(visitor))
    }

    /// Shows every matrix to `visitor`.
    pub fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) {
        self.embedding.visit_matrix(visitor);
        for layer in &mut self.layers {
            for linear in [&mut layer.qkv, &mut layer.output, &mut layer.gate_up, &mut layer.down] {
                linear.visit_matrix(visitor);
            }
        }
        if let Some(head) = &mut self.head {
            head.visit_matrix(visitor);
        }
    }

    /// The parameters at each site with their first local column of what it gives.
    pub fn sites(&self) -> Vec<(Site, Vec<(&ParamSpec, usize)>)> {
        let mut sites = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            sites.push((Site::Qkv(i), layer.qkv.weights()));
            sites.push((Site::Output(i), layer.output.weights()));
            sites.push((Site::GateUp(i), layer.gate_up.weights()));
            sites.push((Site::Down(i), layer.down.weights()));
        }
        sites.extend(self.head.as_ref().map(|head| (Site::Head, vec![(head.spec(), 0)])));
        sites
    }

    /// Bytes of this rank's weights.
    pub fn bytes(&self) -> u64 {
        let layers: u64 = self.layers.iter().map(Layer::bytes).sum();
        self.embedding.bytes() + layers + self.norm.bytes() + self.head.as_ref().map_or(0, VocabularyMatrix::bytes)
    }

    fn attention(&self, ops: &Ops, layer: &Layer, input: &Input<'_>, kv: &mut KvCache, w: &Workspace) -> Result<()> {
        let HeadDims { heads, kv_heads, head_dim } = self.dims;
        let q = w.qkv.narrow(1, 0, heads * head_dim)?;
        let k = w.qkv.narrow(1, heads * head_dim, kv_heads * head_dim)?;
        let v = w.qkv.narrow(1, (heads + kv_heads) * head_dim, kv_heads * head_dim)?;
        if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
            q_norm.forward_heads(ops, &q)?;
            k_norm.forward_heads(ops, &k)?;
        }
        for x in [&q, &k] {
            ops.rope(x, head_dim, input.positions, &self.rope_cos, &self.rope_sin)?;
        }
        ops.write_kv(&k, &v, input.slots, kv)?;
        let shape =
            AttentionShape { heads, scale: (head_dim as f32).sqrt().recip(), sliding_window: layer.sliding_window };
        ops.paged_attention(&q, &shape, input.sequences, kv, &w.attention)?;
        Ok(())
    }
}

/// Cosine and sine of each position's angles, `[positions, head_dim / 2]`: position times frequency in float32, as
/// transformers has it.
fn rope_tables(inv_freq: &[f32], positions: usize) -> Result<(Tensor, Tensor)> {
    let angles: Vec<f32> = (0..positions).flat_map(|p| inv_freq.iter().map(move |f| p as f32 * f)).collect();
    let angles = Tensor::from_vec(angles, (positions, inv_freq.len()), &candle_core::Device::Cpu)?;
    Ok((angles.cos()?, angles.sin()?))
}

impl HeadDims {
    pub fn local(config: &ModelConfig, build: Build) -> Self {
        Self {
            heads: build.partition.share(config.num_heads),
            kv_heads: build.partition.heads(config.num_kv_heads),
            head_dim: config.head_dim,
        }
    }
}

impl Layer {
    fn new(config: &ModelConfig, build: Build, index: usize) -> Result<Self> {
        let prefix = format!("model.layers.{index}");
        let (hidden, head_dim, eps) = (config.hidden_size, config.head_dim, config.rms_norm_eps as f32);
        let attention = |name: &str, heads: usize| Projection {
            name: format!("{prefix}.self_attn.{name}"),
            rows: heads * head_dim,
            rule: ShardRule::Heads { heads, head_dim },
            bias: config.qkv_bias,
        };
        let mlp = |name: &str| Projection {
            name: format!("{prefix}.mlp.{name}"),
            rows: config.intermediate_size,
            rule: ShardRule::Rows,
            bias: config.mlp_bias,
        };
        let head_norm = |name: &str| {
            let name = format!("{prefix}.self_attn.{name}.weight");
            if config.qk_norm { Norm::new(name, head_dim, eps).map(Some) } else { Ok(None) }
        };
        let (q, kv) = (config.num_heads, config.num_kv_heads);
        Ok(Self {
            attention_norm: Norm::new(format!("{prefix}.input_layernorm.weight"), hidden, eps)?,
            qkv: Linear::by_rows(
                build,
                vec![attention("q_proj", q), attention("k_proj", kv), attention("v_proj", kv)],
                hidden,
            )?,
            q_norm: head_norm("q_norm")?,
            k_norm: head_norm("k_norm")?,
            output: Linear::by_columns(
                build,
                &format!("{prefix}.self_attn.o_proj"),
                hidden,
                q * head_dim,
                config.o_bias,
            )?,
            mlp_norm: Norm::new(format!("{prefix}.post_attention_layernorm.weight"), hidden, eps)?,
            gate_up: Linear::by_rows(build, vec![mlp("gate_proj"), mlp("up_proj")], hidden)?,
            down: Linear::by_columns(
                build,
                &format!("{prefix}.mlp.down_proj"),
                hidden,
                config.intermediate_size,
                config.mlp_bias,
            )?,
            sliding_window: config.sliding_window[index],
        })
    }

    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.attention_norm.visit(visitor)?;
        self.qkv.visit(visitor)?;
        for norm in [&mut self.q_norm, &mut self.k_norm].into_iter().flatten() {
            norm.visit(visitor)?;
        }
        self.output.visit(visitor)?;
        self.mlp_norm.visit(visitor)?;
        self.gate_up.visit(visitor)?;
        self.down.visit(visitor)
    }

    fn bytes(&self) -> u64 {
        let norms = [Some(&self.attention_norm), Some(&self.mlp_norm), self.q_norm.as_ref(), self.k_norm.as_ref()];
        let linears = [&self.qkv, &self.output, &self.gate_up, &self.down];
        norms.into_iter().flatten().map(Norm::bytes).sum::<u64>() + linears.map(Linear::bytes).iter().sum::<u64>()
    }
}
