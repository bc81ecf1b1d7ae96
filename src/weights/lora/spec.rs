//! The changes that an adapter will make to each parameter, known before its values are there.

use std::collections::BTreeMap;
use std::ops::Range;

use rollout_kernels::host::round;
use rollout_kernels::{LoraDelta, LowRank, Magnitude, Replacement, WeightChange};

use super::Adapter;
use crate::weights::parameters::{Dtype, TensorData};

/// An adapter whose names and shapes fit the model, before its values are there.
#[derive(Debug)]
pub struct AdapterSpec {
    /// The change of each parameter, by the parameter's name.
    pub(super) changes: BTreeMap<String, ChangeSpec>,
    /// The dtype in which the weights serve.
    pub(super) serving: Dtype,
}

/// A [`WeightChange`] without its values. Tensors are given by their index among the adapter's tensors.
#[derive(Debug, Default)]
pub(super) struct ChangeSpec {
    pub whole: Option<WholeSpec>,
    pub delta: Option<DeltaSpec>,
}

/// A [`Replacement`] without its values.
#[derive(Clone, Copy, Debug)]
pub(super) struct WholeSpec {
    pub tensor: usize,
    /// The dtype in which the adapter keeps the values.
    pub dtype: Dtype,
    /// The row of the tensor that the parameter's rows begin with: not 0 for fused projections.
    pub first_row: usize,
    pub rows: usize,
    pub cols: usize,
}

/// A [`LoraDelta`] without its values.
#[derive(Debug)]
pub(super) enum DeltaSpec {
    LowRank(LowRankSpec),
    Bias { tensor: usize, first_row: usize, rows: usize, scaling: f32 },
}

/// A [`LowRank`] without its values, for a parameter `[rows, cols]`.
#[derive(Debug)]
pub(super) struct LowRankSpec {
    pub a: usize,
    pub b: usize,
    /// The tensor of DoRA's magnitudes, and the dtypes `sum` and `factor` of [`Magnitude`].
    pub magnitude: Option<(usize, Dtype, Dtype)>,
    pub rank: usize,
    /// The row of `b` that the parameter's rows begin with: not 0 for fused projections.
    pub first_row: usize,
    pub rows: usize,
    pub cols: usize,
    /// The dtype of both factors.
    pub dtype: Dtype,
    /// The dtype that the product of the factors is rounded to before it is scaled.
    pub product: Dtype,
    pub scaling: f32,
    pub roundings: Vec<Dtype>,
    pub kind: FactorKind,
    /// The expert that the parameter is of, if the tensors have the factors of all experts of a layer.
    pub expert: Option<ExpertFactors>,
}

/// The factors of one expert among those of all: its rows of `a` (`[experts * rank, cols]`), and its columns of `b`
/// (`[rows, rank * experts]`), where those of the same rank are neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertFactors {
    pub index: usize,
    pub experts: usize,
}

/// How a pair of factors relates to the matrix that it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FactorKind {
    /// The matrix is a linear layer's alone.
    Linear,
    /// The factors are of the head, whose matrix is the embedding.
    TiedHead,
    /// The factors are `lora_embedding_A` and `lora_embedding_B`, which are those of the transposed matrix.
    Embedding,
}

impl AdapterSpec {
    /// Bytes of memory that the adapter will take: [`Adapter::bytes`].
    pub fn bytes(&self) -> u64 {
        self.changes.values().map(ChangeSpec::bytes).sum()
    }

    /// Makes the adapter. `values(i)` gives the values of its tensor `i`, which must be finite.
    pub fn build<'t>(self, values: &dyn Fn(usize) -> TensorData<'t>) -> Adapter {
        let serving = self.serving;
        let changes = self.changes.into_iter().map(|(name, change)| (name, change.build(serving, values)));
        Adapter { changes: changes.collect() }
    }
}

impl WholeSpec {
    /// The parameter's values in the tensor.
    fn elements(&self) -> Range<usize> {
        self.first_row * self.cols..(self.first_row + self.rows) * self.cols
    }
}

impl ChangeSpec {
    fn bytes(&self) -> u64 {
        let whole = self.whole.map_or(0, |whole| whole.rows * whole.cols * whole.dtype.size());
        let delta = match &self.delta {
            None => 0,
            Some(DeltaSpec::Bias { rows, .. }) => rows * size_of::<f32>(),
            Some(DeltaSpec::LowRank(LowRankSpec { rank, rows, cols, dtype, magnitude, .. })) => {
                rank * (rows + cols) * dtype.size() + magnitude.map_or(0, |_| rows * size_of::<f32>())
            }
        };
        (whole + delta) as u64
    }

    fn build<'t>(self, serving: Dtype, values: &dyn Fn(usize) -> TensorData<'t>) -> WeightChange {
        let replacement = self.whole.map(|whole| Replacement {
            values: match (serving, values(whole.tensor).part(whole.elements())) {
                (Dtype::Bf16, data) => TensorData::Bf16(data.into_bf16()).into_owned(),
                (_, data) => data.into_owned(),
            },
            cols: whole.cols,
        });
        let delta = self.delta.map(|delta| match delta {
            DeltaSpec::LowRank(low_rank) => LoraDelta::LowRank(low_rank.build(values)),
            DeltaSpec::Bias { tensor, first_row, rows, scaling } => {
                let data = values(tensor).part(first_row..first_row + rows);
                let dtype = data.dtype();
                let mut bias = data.into_f32().into_owned();
                bias.iter_mut().for_each(|x| *x *= scaling);
                round(dtype, &mut bias);
                LoraDelta::Bias(bias)
            }
        });
        WeightChange { replacement, delta }
    }
}

impl LowRankSpec {
    fn build<'t>(self, values: &dyn Fn(usize) -> TensorData<'t>) -> LowRank {
        let Self { rank, first_row, rows, cols, product, scaling, roundings, kind, .. } = self;
        let (a, b) = (values(self.a), values(self.b));
        let (a, b) = match (kind, self.expert) {
            (FactorKind::Embedding, _) => (transpose(&b, rank), transpose(&a, rows)),
            (_, Some(ExpertFactors { index, experts })) => {
                let columns = |row| (0..rank).map(move |r| (row * rank + r) * experts + index);
                let b = b.gather((first_row..first_row + rows).flat_map(columns));
                (a.part(index * rank * cols..(index + 1) * rank * cols).into_owned(), b)
            }
            (_, None) => (a.into_owned(), b.part(first_row * rank..(first_row + rows) * rank).into_owned()),
        };
        let magnitude = self.magnitude.map(|(tensor, sum, factor)| Magnitude {
            lengths: values(tensor).into_f32()[first_row..first_row + rows].to_vec(),
            sum,
            factor,
        });
        LowRank { rank, cols, a, b, product, scaling, roundings, magnitude, linear: kind == FactorKind::Linear }
    }
}

/// The transpose of a matrix with `cols` columns.
fn transpose(matrix: &TensorData<'_>, cols: usize) -> TensorData<'static> {
    matrix.gather((0..cols).flat_map(|col| (col..matrix.len()).step_by(cols)))
}
