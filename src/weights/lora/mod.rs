//! PEFT's LoRA adapters: read and checked here, and merged with the bits of PEFT's `merge_adapter()` by a device's
//! `merge_rows` (`kernels/src/merge.rs`, for the CPU `kernels/src/cpu/merge.rs`).
//!
//! ```text
//! adapter_config.json + names, dtypes, shapes ─ check ─> AdapterSpec ─ build, with the values ─> Adapter ─> merge
//! ```
//!
//! `config` reads the configuration, `patterns` its tables of modules, `names` takes the names of tensors apart, and
//! `check` compares them with the model.

mod check;
mod config;
mod names;
mod patterns;
mod spec;
#[cfg(test)]
mod testing;

use std::borrow::Cow;
use std::collections::BTreeMap;

use rollout_kernels::{LowRank, WeightChange};

use super::parameters::Dtype;
use crate::error::{Error, Result};

pub use spec::AdapterSpec;

/// One tensor of an adapter before its values are there.
#[derive(Clone, Copy, Debug)]
pub struct AdapterTensor<'a> {
    /// As PEFT writes it, for example `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`.
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
}

/// A checked adapter with its values: what it changes of which parameter.
#[derive(Debug, Default)]
pub struct Adapter {
    /// The change of each parameter, by the parameter's name.
    changes: BTreeMap<String, WeightChange>,
}

/// The low-rank factors of one linear layer in float32, whose delta weight is `scaling * b a`.
#[derive(Clone, Debug)]
pub struct Factors<'a> {
    pub rank: usize,
    /// `lora_A`, of shape `[rank, in_features]`.
    pub a: Cow<'a, [f32]>,
    /// `lora_B`, of shape `[out_features, rank]`.
    pub b: Cow<'a, [f32]>,
    pub scaling: f32,
}

impl Adapter {
    /// An adapter that changes nothing: merged, it is the base.
    pub fn none() -> Self {
        Self::default()
    }

    /// Bytes of memory that the adapter's values take.
    pub fn bytes(&self) -> u64 {
        self.changes.values().map(WeightChange::bytes).sum()
    }

    /// Names of the parameters that the adapter changes, ascending.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.changes.keys().map(String::as_str)
    }

    pub fn touches(&self, parameter: &str) -> bool {
        self.changes.contains_key(parameter)
    }

    /// The change of a parameter by the adapter; `None` if it does not touch it.
    pub fn change(&self, parameter: &str) -> Option<&WeightChange> {
        self.changes.get(parameter)
    }

    /// The largest rank among the adapter's factors; 0 if it has none.
    pub fn rank(&self) -> usize {
        self.changes.values().filter_map(WeightChange::low_rank).map(|low_rank| low_rank.rank).max().unwrap_or(0)
    }

    /// The factors of a linear layer's weight, if it has factors and they can be applied unmerged.
    pub fn factors(&self, parameter: &str) -> Option<Factors<'_>> {
        let LowRank { rank, a, b, scaling, .. } = self.low_rank(parameter).filter(|low_rank| low_rank.is_plain())?;
        let [a, b] = [a, b].map(|factor| factor.part_f32(0..factor.len()));
        Some(Factors { rank: *rank, a, b, scaling: *scaling })
    }

    /// Checks that the adapter can serve unmerged, as low-rank factors beside the base.
    ///
    /// # Errors
    /// `InvalidArgument` naming the parameter whose change cannot be applied unmerged: DoRA, embeddings,
    /// `modules_to_save`, biases.
    pub fn check_unmerged(&self) -> Result<()> {
        let other = self.changes.iter().find(|(_, change)| !change.low_rank().is_some_and(LowRank::is_plain));
        let Some((parameter, change)) = other else {
            return Ok(());
        };
        let what = match change.low_rank() {
            Some(low_rank) if low_rank.magnitude.is_some() => "DoRA",
            Some(_) => "an adapter of the embedding",
            None if change.replacement.is_some() => "a parameter of modules_to_save or a trained bias",
            None => "a bias of lora_B",
        };
        Err(Error::invalid(parameter, format!("{what} cannot be applied unmerged; push this adapter to be merged")))
    }

    fn low_rank(&self, parameter: &str) -> Option<&LowRank> {
        self.changes.get(parameter)?.low_rank()
    }
}

#[cfg(test)]
mod tests;
