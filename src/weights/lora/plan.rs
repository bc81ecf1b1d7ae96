//! What an adapter will change, before its values are there.

use std::collections::BTreeMap;

use rollout_kernels::host::round;
use rollout_kernels::{Change, Delta, LowRank, Magnitude, StoredValues, Whole};

use super::Adapter;
use crate::weights::parameters::{Dtype, TensorData};

/// An adapter whose names and shapes fit the model, before its values are there.
#[derive(Debug)]
pub struct AdapterPlan {
    pub(super) changes: BTreeMap<String, PlannedChange>,
    /// The precision of the serving weights.
    pub(super) serving: Dtype,
}

#[derive(Debug, Default)]
pub(super) struct PlannedChange {
    pub whole: Option<PlannedWhole>,
    pub delta: Option<PlannedDelta>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedWhole {
    pub tensor: usize,
    /// As it is held.
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
}

#[derive(Debug)]
pub(super) enum PlannedDelta {
    LowRank(PlannedLowRank),
    Bias { tensor: usize, rows: usize, scaling: f32 },
}

#[derive(Debug)]
pub(super) struct PlannedLowRank {
    pub a: usize,
    pub b: usize,
    /// Its tensor, and the element types of [`Magnitude`].
    pub magnitude: Option<(usize, Dtype, Dtype)>,
    pub rank: usize,
    pub rows: usize,
    pub cols: usize,
    pub scaling: f32,
    pub roundings: Vec<Dtype>,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Linear,
    /// A linear layer whose matrix is the embedding.
    TiedHead,
    /// The factors are of the transposed matrix.
    Embedding,
}

impl AdapterPlan {
    /// What [`Adapter::bytes`] will be.
    pub fn bytes(&self) -> u64 {
        self.changes.values().map(PlannedChange::bytes).sum()
    }

    /// `values(i)` are those of `tensors[i]`, finite.
    pub fn build<'t>(self, values: &dyn Fn(usize) -> TensorData<'t>) -> Adapter {
        let serving = self.serving;
        let changes = self.changes.into_iter().map(|(name, planned)| (name, planned.build(serving, values)));
        Adapter { changes: changes.collect() }
    }
}

impl PlannedChange {
    fn bytes(&self) -> u64 {
        let whole = self.whole.map_or(0, |whole| whole.rows * whole.cols * whole.dtype.size());
        let floats = match &self.delta {
            None => 0,
            Some(PlannedDelta::Bias { rows, .. }) => *rows,
            Some(PlannedDelta::LowRank(PlannedLowRank { rank, rows, cols, magnitude, .. })) => {
                rank * (rows + cols) + magnitude.map_or(0, |_| *rows)
            }
        };
        (whole + size_of::<f32>() * floats) as u64
    }

    fn build<'t>(self, serving: Dtype, values: &dyn Fn(usize) -> TensorData<'t>) -> Change {
        let whole = self.whole.map(|whole| Whole {
            values: match (serving, values(whole.tensor)) {
                (Dtype::Bf16, data) => StoredValues::Bf16(data.into_bf16().into_owned()),
                (_, TensorData::F32(data)) => StoredValues::F32(data.into_owned()),
                (_, TensorData::F16(data)) => StoredValues::F16(data.into_owned()),
                (_, TensorData::Bf16(data)) => StoredValues::Bf16(data.into_owned()),
            },
            cols: whole.cols,
        });
        let delta = self.delta.map(|delta| match delta {
            PlannedDelta::LowRank(low_rank) => Delta::LowRank(low_rank.build(values)),
            PlannedDelta::Bias { tensor, scaling, .. } => {
                let data = values(tensor);
                let dtype = data.dtype();
                let mut bias = data.into_f32().into_owned();
                bias.iter_mut().for_each(|x| *x *= scaling);
                round(dtype, &mut bias);
                Delta::Bias(bias)
            }
        });
        Change { whole, delta }
    }
}

impl PlannedLowRank {
    fn build<'t>(self, values: &dyn Fn(usize) -> TensorData<'t>) -> LowRank {
        let Self { rank, rows, cols, scaling, roundings, kind, .. } = self;
        let (a, b) = (values(self.a).into_f32(), values(self.b).into_f32());
        let (a, b) = match kind {
            Kind::Embedding => (transpose(&b, rank), transpose(&a, rows)),
            Kind::Linear | Kind::TiedHead => (a.into_owned(), b.into_owned()),
        };
        let magnitude = self.magnitude.map(|(tensor, sum, factor)| Magnitude {
            lengths: values(tensor).into_f32().into_owned(),
            sum,
            factor,
        });
        LowRank { rank, cols, a, b, scaling, roundings, magnitude, linear: kind == Kind::Linear }
    }
}

/// The transpose of a matrix with `cols` columns.
fn transpose(matrix: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| matrix.iter().skip(col).step_by(cols).copied()).collect()
}
