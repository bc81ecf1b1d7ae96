//! Layers that only InternViT has. Their parameters are whole on every rank.

use candle_core::Tensor;
use rollout_kernels::{DeviceBuffer, Matrix, Ops, Step};

use crate::error::Result;
use crate::model::adapters::TargetModule;
use crate::model::layers::Build;
use crate::model::parameterized::{MatrixVisitor, ParamSlot, Parameterized, Visitor};
use crate::weights::{ParamSpec, ShardRule};

/// Normalisation by mean and variance.
pub(super) struct LayerNorm {
    weight: Vector,
    bias: Vector,
    eps: f32,
}

/// `x += lambda * y`, with a factor for each column.
pub(super) struct ScaledSum(Vector);

/// A table of rows that are added to those of a tile: the positions, or the class token, a table of one row.
pub(super) struct RowTable {
    matrix: Matrix,
    spec: ParamSpec,
}

struct Vector {
    values: DeviceBuffer,
    spec: ParamSpec,
}

impl Vector {
    fn new(build: &Build, name: String, len: usize) -> Result<Self> {
        let spec = ParamSpec::new(name, vec![len], ShardRule::Replicated);
        Ok(Self { values: build.device.buffer(len)?, spec })
    }

    fn visit(&self, visitor: &mut Visitor<'_>) -> Result<()> {
        visitor(&self.spec, ParamSlot::Vector { vector: &self.values, offset: 0 })
    }
}

impl LayerNorm {
    /// The norm with the parameters `name.weight` and `name.bias`.
    pub fn new(build: &Build, name: &str, len: usize, eps: f32) -> Result<Self> {
        let vector = |part: &str| Vector::new(build, format!("{name}.{part}"), len);
        Ok(Self { weight: vector("weight")?, bias: vector("bias")?, eps })
    }

    /// `out = norm(x)`.
    pub fn forward(&self, ops: &Ops, x: &Tensor, out: &Tensor) -> Result<()> {
        Ok(ops.layer_norm(x, &self.weight.values, &self.bias.values, self.eps, out)?)
    }
}

impl ScaledSum {
    pub fn new(build: &Build, name: String, len: usize) -> Result<Self> {
        Ok(Self(Vector::new(build, name, len)?))
    }

    /// `residual += lambda * delta`.
    pub fn forward(&self, ops: &Ops, delta: &Tensor, residual: &Tensor) -> Result<()> {
        Ok(ops.add_scaled(delta, &self.0.values, residual)?)
    }
}

impl RowTable {
    /// A table of `rows` rows, with the parameter `name` of `[1, rows, width]`.
    pub fn new(build: &Build, name: &str, rows: usize, width: usize) -> Self {
        let spec = ParamSpec::new(name, vec![1, rows, width], ShardRule::Replicated);
        Self { matrix: build.matrix(rows, width, 1), spec }
    }

    /// `out[i]` is the row of the step's token `i`, or zeros where the table has no such row.
    pub fn look_up(&self, ops: &Ops, step: &Step<'_>, out: &Tensor) -> Result<()> {
        Ok(ops.embed(&self.matrix, 0, step, out)?)
    }
}

impl Parameterized for LayerNorm {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.weight.visit(visitor)?;
        self.bias.visit(visitor)
    }

    fn visit_matrices(&mut self, _: &mut MatrixVisitor<'_>) -> Result<()> {
        Ok(())
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        (self.weight.values.bytes() + self.bias.values.bytes()) as u64
    }
}

impl Parameterized for ScaledSum {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.0.visit(visitor)
    }

    fn visit_matrices(&mut self, _: &mut MatrixVisitor<'_>) -> Result<()> {
        Ok(())
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        self.0.values.bytes() as u64
    }
}

impl Parameterized for RowTable {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        visitor(&self.spec, ParamSlot::Matrix { matrix: &mut self.matrix, first_row: 0 })
    }

    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        visitor(&[&self.spec], &mut self.matrix)
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        self.matrix.bytes() as u64
    }
}
