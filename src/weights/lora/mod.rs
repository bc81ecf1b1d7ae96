//! PEFT adapters: read, checked, and merged as PEFT's `merge_adapter()` does it, bit for bit.

use super::parameters::Parameters;
use super::shard::Slice;
use super::tensor::TensorData;
use super::update::TensorEntry;
use crate::error::Result;
use rollout_kernels::cpu::Isa;

/// A checked adapter, ready to be merged; what it takes beside the staged bytes is [`Adapter::bytes`].
#[derive(Debug, Default)]
pub struct Adapter {}

/// An adapter whose names and shapes fit the model, before its values are there.
#[derive(Debug)]
pub struct AdapterPlan {}

/// `delta = scaling * b a` of one linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    pub rank: usize,
    /// `[rank, in_features]`
    pub a: &'a [f32],
    /// `[out_features, rank]`
    pub b: &'a [f32],
    pub scaling: f32,
}

impl AdapterPlan {
    /// # Errors
    /// `InvalidArgument` naming the tensor or the configuration's field that is unknown, missing, twice, of another
    /// shape, or not supported.
    pub fn new(_config: &str, _tensors: &[TensorEntry], _parameters: &Parameters) -> Result<Self> {
        todo!()
    }

    /// What [`Adapter::bytes`] will be.
    pub fn bytes(&self) -> u64 {
        todo!()
    }

    /// `values(i)` are those of `tensors[i]`, finite.
    pub fn build<'t>(self, _values: &dyn Fn(usize) -> TensorData<'t>) -> Adapter {
        todo!()
    }
}

impl Adapter {
    /// The base itself: changes nothing.
    pub fn none() -> Self {
        Self::default()
    }

    /// Memory it holds.
    pub fn bytes(&self) -> u64 {
        todo!()
    }

    /// Names of the parameters that it changes, ascending.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    pub fn touches(&self, _parameter: &str) -> bool {
        todo!()
    }

    /// Whether `merge` must be given whole rows of this parameter (DoRA: the norm is of the row).
    pub fn needs_whole_rows(&self, _parameter: &str) -> bool {
        todo!()
    }

    /// Turns the base's values of `slice` (row-major float32, of serving precision) into the merged ones, float32 and
    /// not yet rounded. Single-threaded; each element's bits depend on nothing but the base's and the adapter's values
    /// of its row and column. Does nothing for a parameter that the adapter does not touch.
    pub fn merge(&self, _isa: Isa, _parameter: &str, _slice: &Slice, _values: &mut [f32]) {
        todo!()
    }

    /// Largest rank of its factors; 0 if it has none.
    pub fn rank(&self) -> usize {
        todo!()
    }

    /// The factors of a linear layer's weight, if it has some.
    pub fn factors(&self, _parameter: &str) -> Option<Factors<'_>> {
        todo!()
    }

    /// # Errors
    /// `InvalidArgument` naming what cannot be applied unmerged: DoRA, embeddings, `modules_to_save`, biases.
    pub fn check_unmerged(&self) -> Result<()> {
        todo!()
    }
}
