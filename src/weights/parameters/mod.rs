//! All parameters of a model: what a push is checked against.

mod partition;
mod shard;
mod tensor;

use std::collections::HashMap;

use crate::error::Result;

pub use partition::Partition;
pub use shard::{ParamSpec, ShardRule, Slice, head_range, matrix_shape};
pub(in crate::weights) use tensor::slice_of_bytes;
pub use tensor::{Dtype, TensorData};

/// The parameters in the model's order, and how they serve.
#[derive(Clone, Debug)]
pub struct Parameters {
    specs: Vec<ParamSpec>,
    index: HashMap<String, usize>,
    dtype: Dtype,
    world: usize,
    tied_head: bool,
}

impl Parameters {
    /// `dtype`: in which they serve, `F32` or `Bf16`. `world`: ranks that share them. `tied_head`: the head is the
    /// embedding, so `lm_head.weight` is another name of `model.embed_tokens.weight`.
    pub fn new(specs: Vec<ParamSpec>, dtype: Dtype, world: usize, tied_head: bool) -> Self {
        let index = specs.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        Self { specs, index, dtype, world, tied_head }
    }

    pub fn iter(&self) -> impl Iterator<Item = &ParamSpec> {
        self.specs.iter()
    }

    pub fn len(&self) -> usize {
        self.specs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    pub fn get(&self, name: &str) -> Option<&ParamSpec> {
        self.index.get(name).map(|&i| &self.specs[i])
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn world(&self) -> usize {
        self.world
    }

    pub fn tied_head(&self) -> bool {
        self.tied_head
    }

    /// Bytes of a parameter in the serving dtype, as all ranks hold it together.
    ///
    /// # Errors
    /// `Config` if the parameter cannot be divided among the ranks.
    pub fn bytes_on_ranks(&self, spec: &ParamSpec) -> Result<u64> {
        let slices = (0..self.world).map(|rank| Partition::new(rank, self.world).slice(spec));
        slices.map(|slice| Ok((slice?.len() * self.dtype.size()) as u64)).sum()
    }
}

#[cfg(test)]
mod tests;
