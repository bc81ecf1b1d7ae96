//! Tensor-parallel layers. Each parameter has its name, its whole shape and its shard rule; a layer stores this rank's
//! part of it.

use candle_core::Tensor;
use rollout_kernels::{Device, DeviceBuffer, Matrix, MatrixShape, Ops, Step, StorageDtype};

use super::adapters::TargetModule;
use super::config::ModelConfig;
use super::parameterized::{MatrixVisitor, ParamSlot, Parameterized, Visitor};
use crate::error::Result;
use crate::weights::{ParamSpec, Partition, ShardRule};

/// The device, shard and dtype that a rank builds its layers with.
#[derive(Clone)]
pub struct Build {
    pub device: Device,
    pub partition: Partition,
    pub weights: StorageDtype,
}

impl Build {
    /// A weight matrix that has no memory yet.
    pub fn matrix(&self, n: usize, k: usize, leaves: usize) -> Matrix {
        self.device.matrix(MatrixShape { dtype: self.weights, n, k, leaves })
    }
}

/// Numbers of attention heads on one rank, and their width.
#[derive(Clone, Copy, Debug)]
pub struct HeadDims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl HeadDims {
    pub fn local(config: &ModelConfig, build: &Build) -> Self {
        Self {
            heads: build.partition.share(config.num_heads),
            kv_heads: build.partition.heads(config.num_kv_heads),
            head_dim: config.head_dim,
        }
    }
}

/// One or more projections of the same input, fused by rows: `y = x Wᵀ + b`.
pub struct Linear {
    weight: Matrix,
    bias: Option<DeviceBuffer>,
    /// Each projection's weight, its bias, and the first row of `weight` that it has on this rank.
    parts: Vec<(ParamSpec, Option<ParamSpec>, usize)>,
}

/// A linear layer as the checkpoint stores it, before layers of the same input are fused.
pub struct Projection {
    /// The parameters' common name, without `.weight` and `.bias`.
    pub name: String,
    pub rows: usize,
    pub rule: ShardRule,
    pub bias: bool,
}

impl Linear {
    /// Column-parallel projections: each rank computes some of the outputs (or all, where they are replicated), so that
    /// no communication follows. `columns` are the dimensions of the input features: one, or those of a convolution
    /// whose patches do not overlap.
    pub fn by_rows(build: &Build, projections: Vec<Projection>, columns: &[usize]) -> Result<Self> {
        let mut parts = Vec::new();
        let mut rows = 0;
        for p in projections {
            let weight = ParamSpec::new(format!("{}.weight", p.name), [&[p.rows], columns].concat(), p.rule);
            let bias = p.bias.then(|| ParamSpec::new(format!("{}.bias", p.name), vec![p.rows], p.rule));
            let stored = build.partition.stored_rows(&weight)?;
            parts.push((weight, bias, rows));
            rows += stored;
        }
        let has_bias = parts.iter().any(|p| p.1.is_some());
        let bias = if has_bias { Some(build.device.buffer(rows)?) } else { None };
        // One leaf, because the reduction over the input features is never split over ranks.
        Ok(Self { weight: build.matrix(rows, columns.iter().product(), 1), bias, parts })
    }

    /// A row-parallel projection: each rank has some of the input features, and its outputs are partial sums that an
    /// all-reduce must add up before the bias is added.
    pub fn by_columns(build: &Build, projection: Projection, columns: usize) -> Result<Self> {
        let Projection { name, rows, rule, bias } = projection;
        let weight = ParamSpec::new(format!("{name}.weight"), vec![rows, columns], rule);
        let bias_spec = bias.then(|| ParamSpec::new(format!("{name}.bias"), vec![rows], ShardRule::Replicated));
        let local = build.partition.slice(&weight)?.cols.len();
        let leaves = build.partition.leaves(columns);
        let bias = if bias { Some(build.device.buffer(rows)?) } else { None };
        let weight_matrix = build.matrix(rows, local, leaves);
        Ok(Self { weight: weight_matrix, bias, parts: vec![(weight, bias_spec, 0)] })
    }

    /// `out = x Wᵀ + b`; `x` is `[rows, k]`, `out` `[rows, n]`.
    pub fn forward(&self, ops: &Ops, x: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.linear(x, &self.weight, self.bias.as_ref(), out)?)
    }

    /// `out = silu(gate) * up`, where `x Wᵀ + b` is `[gate, up]` side by side. That product may be written to `gate_up`
    /// on the way.
    pub fn forward_silu_mul(&self, ops: &Ops, x: &Tensor, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.linear_silu_mul(x, &self.weight, self.bias.as_ref(), gate_up, out)?)
    }

    /// `out = x Wᵀ`. The caller adds [`Linear::bias`], after its all-reduce.
    pub fn forward_partial(&self, ops: &Ops, x: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.linear(x, &self.weight, None, out)?)
    }

    pub fn weight(&self) -> &Matrix {
        &self.weight
    }

    pub fn bias(&self) -> Option<&DeviceBuffer> {
        self.bias.as_ref()
    }

    /// The name of the first projection's weight.
    pub fn name(&self) -> &str {
        &self.parts[0].0.name
    }
}

impl Parameterized for Linear {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        for (weight, bias, first_row) in &self.parts {
            visitor(weight, ParamSlot::Matrix { matrix: &mut self.weight, first_row: *first_row })?;
            if let (Some(spec), Some(vector)) = (bias, &self.bias) {
                visitor(spec, ParamSlot::Vector { vector, offset: *first_row })?;
            }
        }
        Ok(())
    }

    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        let specs: Vec<&ParamSpec> = self.parts.iter().map(|(weight, _, _)| weight).collect();
        visitor(&specs, &mut self.weight)
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        let weights = self.parts.iter().map(|(weight, _, first_row)| (weight, *first_row)).collect();
        vec![TargetModule { name: self.name(), weights }]
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes() as u64 + self.bias.as_ref().map_or(0, |bias| bias.bytes() as u64)
    }
}

/// A matrix with one row per token of the vocabulary, split over ranks: the token embedding, the head, or both where
/// they are tied. If the vocabulary is not divided evenly, the last rank's matrix ends with rows of zeros.
pub struct VocabularyMatrix {
    /// Whether adapters can change its output, as they can that of a head which is not tied to the embedding.
    is_target: bool,
    matrix: Matrix,
    spec: ParamSpec,
    first_token: usize,
}

impl VocabularyMatrix {
    pub fn new(build: &Build, is_target: bool, name: &str, vocab: usize, hidden: usize) -> Result<Self> {
        let spec = ParamSpec::new(name, vec![vocab, hidden], ShardRule::PaddedRows);
        let first_token = build.partition.slice(&spec)?.rows.start;
        let matrix = build.matrix(build.partition.padded_share(vocab), hidden, 1);
        Ok(Self { is_target, matrix, spec, first_token })
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Token embedding: `out[i]` is the row of the step's token `i`, or zeros where another rank has that token. An
    /// all-reduce must follow.
    pub fn embed(&self, ops: &Ops, step: &Step<'_>, out: &Tensor) -> Result<()> {
        Ok(ops.embed(&self.matrix, self.first_token, step, out)?)
    }

    /// Logits of this rank's part of the vocabulary, `out = x Wᵀ`. A gather over ranks must follow, which leaves
    /// out the columns beyond the vocabulary.
    pub fn logits(&self, ops: &Ops, x: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.linear(x, &self.matrix, None, out)?)
    }
}

impl Parameterized for VocabularyMatrix {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        visitor(&self.spec, ParamSlot::Matrix { matrix: &mut self.matrix, first_row: 0 })
    }

    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        visitor(&[&self.spec], &mut self.matrix)
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        let module = || TargetModule { name: self.name(), weights: vec![(&self.spec, 0)] };
        self.is_target.then(module).into_iter().collect()
    }

    fn bytes(&self) -> u64 {
        self.matrix.bytes() as u64
    }
}

/// RMS normalisation. Its weights are whole on every rank.
pub struct Norm {
    weight: DeviceBuffer,
    spec: ParamSpec,
    eps: f32,
}

impl Norm {
    pub fn new(build: &Build, name: String, len: usize, eps: f32) -> Result<Self> {
        Ok(Self {
            weight: build.device.buffer(len)?,
            spec: ParamSpec::new(name, vec![len], ShardRule::Replicated),
            eps,
        })
    }

    /// `out = norm(x)`.
    pub fn forward(&self, ops: &Ops, x: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.rms_norm(x, &self.weight, self.eps, out)?)
    }

    /// `residual += delta (+ bias)`, then `out = norm(residual)`.
    pub fn add_forward(
        &self,
        ops: &Ops,
        residual: &Tensor,
        delta: &Tensor,
        bias: Option<&DeviceBuffer>,
        out: &Tensor,
    ) -> Result<()> {
        Ok(ops.add_rms_norm(residual, delta, bias, &self.weight, self.eps, out)?)
    }

    /// Normalises each head of `x` (`[rows, heads * head_dim]`) in place.
    pub fn forward_heads(&self, ops: &Ops, x: &Tensor) -> Result<()> {
        Ok(ops.rms_norm_heads(x, &self.weight, self.eps)?)
    }
}

impl Parameterized for Norm {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        visitor(&self.spec, ParamSlot::Vector { vector: &self.weight, offset: 0 })
    }

    fn visit_matrices(&mut self, _: &mut MatrixVisitor<'_>) -> Result<()> {
        Ok(())
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes() as u64
    }
}
