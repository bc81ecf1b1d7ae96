//! The parameters of a model: their names and shapes ([`ParamSpec`]), how they are divided among ranks ([`ShardRule`]),
//! values of them ([`TensorData`]), and the names under which trainers send them ([`ParameterMapping`]).

mod names;
mod partition;
mod shard;
mod tensor;

use std::collections::HashMap;

use crate::error::Result;

use names::{VisionNames, largest_tensor_bytes};

pub use names::is_of_tower;
pub(in crate::weights) use names::{
    EMBEDDING, HeadCounts, ParameterMapping, all_names, canonical, expert_tensors, is_of_experts, nearest,
    parameters_of, resolve, stored_parameters, stored_with,
};
pub use partition::Partition;
pub use shard::{ParamSpec, ShardRule, Slice, head_range, matrix_shape, padded_share};
pub use tensor::{Dtype, TensorData};
pub(in crate::weights) use tensor::{slice_of_bytes, tensor_of_bytes};

/// All parameters of a model in the model's order, and how they serve. Pushes are checked against them.
#[derive(Clone, Debug)]
pub struct Parameters {
    specs: Vec<ParamSpec>,
    /// The index in `specs` by the parameter's name.
    index: HashMap<String, usize>,
    dtype: Dtype,
    world: usize,
    tied_head: bool,
    /// Parameters that the model has but does not serve, by their names: pushes may bring them, and they are ignored.
    ignored: HashMap<String, ParamSpec>,
    /// `None` for a model of text alone.
    vision_names: Option<&'static VisionNames>,
    largest_tensor_bytes: u64,
}

impl Parameters {
    /// Parameters that serve in `dtype`, which is `F32` or `Bf16` (buffers always in `F32`), on `world` ranks. With
    /// `tied_head` the head is the embedding: `lm_head.weight` is another name of `model.embed_tokens.weight`, and no
    /// parameter of its own.
    pub fn new(specs: Vec<ParamSpec>, dtype: Dtype, world: usize, tied_head: bool) -> Self {
        let index = specs.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        let (vision_names, ignored) = (VisionNames::of_parameters(&specs), HashMap::new());
        let this = Self { specs, index, dtype, world, tied_head, ignored, vision_names, largest_tensor_bytes: 0 };
        this.measured()
    }

    /// The same with further parameters, of a vision tower that is not served.
    pub fn with_ignored(self, specs: Vec<ParamSpec>) -> Self {
        let vision_names = self.vision_names.or(VisionNames::of_parameters(&specs));
        let ignored = specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        Self { ignored, vision_names, ..self }.measured()
    }

    /// The same, with the bytes of its largest tensor: too many names would be looked up for each push.
    fn measured(self) -> Self {
        Self { largest_tensor_bytes: largest_tensor_bytes(&self), ..self }
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

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&ParamSpec> {
        self.index.get(name).map(|&i| &self.specs[i])
    }

    /// Whether the model has a parameter of this name that it does not serve.
    pub fn is_ignored(&self, name: &str) -> bool {
        self.ignored.contains_key(name)
    }

    /// The parameter of this name, whether it serves or is ignored.
    fn find(&self, name: &str) -> Option<&ParamSpec> {
        self.get(name).or_else(|| self.ignored.get(name))
    }

    /// All parameters that a push may bring: those that serve, and those that are ignored.
    pub(in crate::weights) fn pushable(&self) -> impl Iterator<Item = &ParamSpec> {
        self.specs.iter().chain(self.ignored.values())
    }

    /// The dtype in which the parameters serve, except for buffers: `F32` or `Bf16`.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How many tensor-parallel ranks share the parameters.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Whether the head is the embedding.
    pub fn tied_head(&self) -> bool {
        self.tied_head
    }

    /// Bytes in float32 of the largest tensor that can be pushed, fused ones among them.
    pub(in crate::weights) fn largest_tensor_bytes(&self) -> u64 {
        self.largest_tensor_bytes
    }

    /// Whether some are of a vision tower, which serves or is ignored.
    pub(in crate::weights) fn have_tower(&self) -> bool {
        self.vision_names.is_some()
    }

    /// The names of a model with a vision tower; `None` for a model of text alone.
    fn vision_names(&self) -> Option<&'static VisionNames> {
        self.vision_names
    }

    /// Bytes that a parameter takes as it serves on all ranks together. Parts that several ranks hold count for
    /// each.
    ///
    /// # Errors
    /// `Config` if the parameter cannot be divided among the ranks.
    pub fn bytes_on_ranks(&self, spec: &ParamSpec) -> Result<u64> {
        let slices = (0..self.world).map(|rank| Partition::new(rank, self.world).slice(spec));
        slices.map(|slice| Ok((slice?.len() * spec.dtype(self.dtype).size()) as u64)).sum()
    }
}

#[cfg(test)]
mod tests;
