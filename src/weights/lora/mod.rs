//! PEFT adapters: read and checked. The device's operators merge them as PEFT's `merge_adapter()` does it, bit for bit.

mod check;
mod config;
mod names;
mod plan;
#[cfg(test)]
mod testing;

use std::collections::BTreeMap;

use rollout_kernels::{Change, LowRank};

use crate::error::{Error, Result};

pub use plan::AdapterPlan;

/// A checked adapter, ready to be merged; what it takes beside the staged bytes is [`Adapter::bytes`].
#[derive(Debug, Default)]
pub struct Adapter {
    changes: BTreeMap<String, Change>,
}

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

impl Adapter {
    /// The base itself: changes nothing.
    pub fn none() -> Self {
        Self::default()
    }

    /// Memory it holds.
    pub fn bytes(&self) -> u64 {
        self.changes.values().map(Change::bytes).sum()
    }

    /// Names of the parameters that it changes, ascending.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.changes.keys().map(String::as_str)
    }

    pub fn touches(&self, parameter: &str) -> bool {
        self.changes.contains_key(parameter)
    }

    /// What it does to a parameter, if it touches it.
    pub fn change(&self, parameter: &str) -> Option<&Change> {
        self.changes.get(parameter)
    }

    /// Largest rank of its factors; 0 if it has none.
    pub fn rank(&self) -> usize {
        self.changes.values().filter_map(Change::low_rank).map(|low_rank| low_rank.rank).max().unwrap_or(0)
    }

    /// The factors of a linear layer's weight, if it has some that can be applied unmerged.
    pub fn factors(&self, parameter: &str) -> Option<Factors<'_>> {
        let LowRank { rank, a, b, scaling, .. } = self.low_rank(parameter).filter(|low_rank| low_rank.is_plain())?;
        Some(Factors { rank: *rank, a, b, scaling: *scaling })
    }

    /// # Errors
    /// `InvalidArgument` naming what cannot be applied unmerged: DoRA, embeddings, `modules_to_save`, biases.
    pub fn check_unmerged(&self) -> Result<()> {
        let other = self.changes.iter().find(|(_, change)| !change.low_rank().is_some_and(LowRank::is_plain));
        let Some((parameter, change)) = other else {
            return Ok(());
        };
        let what = match change.low_rank() {
            Some(low_rank) if low_rank.magnitude.is_some() => "DoRA",
            Some(_) => "an adapter of the embedding",
            None if change.whole.is_some() => "a parameter of modules_to_save or a trained bias",
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
