//! The decoder: one implementation for all families, which differ by configuration only.

use std::ops::Range;

use candle_core::Tensor;
use rollout_kernels::{DeviceBuffer, KvCache, Routing};

use super::attention::Attention;
use super::config::ModelConfig;
use super::context::ForwardContext;
use super::experts::Experts;
use super::layers::{Build, Norm, VocabularyMatrix};
use super::mlp::Mlp;
use super::parameterized::Parameterized;
use super::rope::RopeTables;
use super::workspace::HeadBuffers;
use crate::error::Result;

struct Layer {
    attention_norm: Norm,
    attention: Attention,
    feed_forward_norm: Norm,
    feed_forward: FeedForward,
}

/// The second block of a layer.
enum FeedForward {
    Dense(Box<Mlp>),
    /// A mixture of experts.
    Sparse(Box<Experts>),
}

/// This rank's part of a decoder.
pub struct Decoder {
    embedding: VocabularyMatrix,
    layers: Vec<Layer>,
    norm: Norm,
    /// `None` where the head is tied to the embedding.
    head: Option<VocabularyMatrix>,
    rope: RopeTables,
}

impl Decoder {
    /// A decoder for positions below `max_model_len`. Its matrices have no memory until they are restored; its weights
    /// are set through [`Parameterized::visit`].
    pub fn new(config: &ModelConfig, build: &Build, max_model_len: usize) -> Result<Self> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let layers = (0..config.num_layers).map(|i| Layer::new(config, build, i)).collect::<Result<_>>()?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(VocabularyMatrix::new(build, true, "lm_head.weight", vocab, hidden)?),
        };
        let (rope, inv_freq) = (&config.rope, config.rope.inv_freq(config.rotary_dim));
        Ok(Self {
            embedding: VocabularyMatrix::new(build, false, "model.embed_tokens.weight", vocab, hidden)?,
            layers,
            norm: Norm::new(build, "model.norm.weight".into(), hidden, config.rms_norm_eps as f32)?,
            head,
            rope: RopeTables::new(&build.device, &inv_freq, rope.axis_of(), max_model_len)?,
        })
    }

    /// Runs all layers over a batch and writes its KV. Leaves the final hidden state, normalised for
    /// [`Decoder::logits`], in the workspace's `normed`, one row per token. All layers with experts share `routing`,
    /// which a model without experts has not.
    pub fn forward(
        &self,
        context: &ForwardContext<'_>,
        kv: &mut [KvCache],
        mut routing: Option<&mut Routing>,
    ) -> Result<()> {
        let ForwardContext { ops, comm, step, .. } = *context;
        let workspace = &context.workspace.rows(step.rows())?;
        let context = &ForwardContext { workspace, ..*context };
        let w = &workspace.step;
        self.embedding.embed(ops, step, &w.hidden)?;
        comm.all_reduce_sum(&w.hidden)?;
        context.put_embeddings(&w.hidden)?;
        let mut sparse_layers = 0;
        self.layers[0].attention_norm.forward(ops, &w.hidden, &w.normed)?;
        for (i, (layer, kv)) in self.layers.iter().zip(kv).enumerate() {
            layer.attention.forward(context, &self.rope, kv)?;
            layer.feed_forward_norm.add_forward(ops, &w.hidden, &w.delta, layer.attention.bias(), &w.normed)?;
            layer.feed_forward.forward(context, &mut sparse_layers, routing.as_deref_mut())?;
            let next_norm = self.layers.get(i + 1).map_or(&self.norm, |next| &next.attention_norm);
            next_norm.add_forward(ops, &w.hidden, &w.delta, layer.feed_forward.bias(), &w.normed)?;
        }
        Ok(())
    }

    /// Logits of some of the rows whose logits the step wants, `[rows.len(), vocabulary]`, after the step's
    /// [`Decoder::forward`]. The adapters of `context` are those of `rows`. At most [`super::LOGITS_ROWS`] rows at
    /// once, since all calls share one buffer.
    pub fn logits(&self, context: &ForwardContext<'_>, rows: Range<usize>) -> Result<Tensor> {
        let w = context.workspace.head_rows(0..rows.len())?;
        context.ops.select_logits_rows(&context.workspace.step.normed, context.step, rows, &w.selected)?;
        self.head_logits(context, &w)
    }

    /// Logits of final hidden states of the host, `[rows, hidden size]`, in the last rows of the buffer that
    /// [`Decoder::logits`] uses. The adapters of `context` are those of the rows.
    pub fn logits_of(&self, context: &ForwardContext<'_>, hidden: &[f32], rows: usize) -> Result<Tensor> {
        let w = context.workspace.head_rows(super::LOGITS_ROWS - rows..super::LOGITS_ROWS)?;
        context.ops.write_rows(hidden, &w.selected)?;
        self.head_logits(context, &w)
    }

    /// The logits of the rows that are selected.
    fn head_logits(&self, context: &ForwardContext<'_>, w: &HeadBuffers<Tensor>) -> Result<Tensor> {
        let ForwardContext { ops, comm, .. } = *context;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        head.logits(ops, &w.selected, &w.local_logits)?;
        context.add_adapters(head.name(), &w.selected, &w.local_logits)?;
        comm.all_gather_columns(&w.local_logits, w.logits())?;
        Ok(w.logits().clone())
    }
}

impl Parameterized for Decoder {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let mut parts: Vec<&dyn Parameterized> = vec![&self.embedding];
        parts.extend(self.layers.iter().map(|layer| layer as &dyn Parameterized));
        parts.push(&self.norm);
        parts.extend(self.head.iter().map(|head| head as &dyn Parameterized));
        parts
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let mut parts: Vec<&mut dyn Parameterized> = vec![&mut self.embedding];
        parts.extend(self.layers.iter_mut().map(|layer| layer as &mut dyn Parameterized));
        parts.push(&mut self.norm);
        parts.extend(self.head.iter_mut().map(|head| head as &mut dyn Parameterized));
        parts
    }
}

impl Layer {
    fn new(config: &ModelConfig, build: &Build, index: usize) -> Result<Self> {
        let norm = |name: &str| {
            Norm::new(
                build,
                format!("model.layers.{index}.{name}.weight"),
                config.hidden_size,
                config.rms_norm_eps as f32,
            )
        };
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::new(config, build, index)?,
            feed_forward_norm: norm("post_attention_layernorm")?,
            feed_forward: FeedForward::new(config, build, index)?,
        })
    }
}

impl Parameterized for Layer {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        vec![&self.attention_norm, &self.attention, &self.feed_forward_norm, self.feed_forward.part()]
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let Self { attention_norm, attention, feed_forward_norm, feed_forward } = self;
        vec![attention_norm, attention, feed_forward_norm, feed_forward.part_mut()]
    }
}

impl FeedForward {
    fn new(config: &ModelConfig, build: &Build, layer: usize) -> Result<Self> {
        if let Some(experts) = config.experts.as_ref().filter(|experts| experts.layers[layer]) {
            return Ok(Self::Sparse(Box::new(Experts::new(config, experts, build, layer)?)));
        }
        let name = format!("model.layers.{layer}.mlp");
        let mlp = Mlp::new(build, &name, config.hidden_size, config.intermediate_size, config.mlp_bias)?;
        Ok(Self::Dense(Box::new(mlp)))
    }

    /// Reads the workspace's `normed` and leaves the block's term of the residual stream in `delta`, without
    /// [`FeedForward::bias`]. `sparse_layers` counts the layers with experts so far.
    fn forward(
        &self,
        context: &ForwardContext<'_>,
        sparse_layers: &mut usize,
        routing: Option<&mut Routing>,
    ) -> Result<()> {
        match self {
            Self::Dense(mlp) => mlp.forward(context, &context.workspace.step.delta),
            Self::Sparse(experts) => {
                let index = *sparse_layers;
                *sparse_layers += 1;
                experts.forward(context, index, routing.expect("a model with experts has a routing"))
            }
        }
    }

    /// The bias of the block's output.
    fn bias(&self) -> Option<&DeviceBuffer> {
        match self {
            Self::Dense(mlp) => mlp.bias(),
            Self::Sparse(_) => None,
        }
    }

    fn part(&self) -> &dyn Parameterized {
        match self {
            Self::Dense(mlp) => &**mlp,
            Self::Sparse(experts) => &**experts,
        }
    }

    fn part_mut(&mut self) -> &mut dyn Parameterized {
        match self {
            Self::Dense(mlp) => &mut **mlp,
            Self::Sparse(experts) => &mut **experts,
        }
    }
}
