//! One rank's share of a tensor-parallel model, as layers see it.

use rollout_kernels::reduction_leaves;

use super::{ParamSpec, Slice};
use crate::error::Result;

/// Which rank of how many. Layers hand it to the shard rules and never look inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    rank: usize,
    world: usize,
}

impl Partition {
    /// # Panics
    /// If `rank >= world`.
    pub fn new(rank: usize, world: usize) -> Self {
        assert!(rank < world, "rank {rank} of {world}");
        Self { rank, world }
    }

    /// The part of a parameter that this rank holds.
    ///
    /// # Errors
    /// `Config` if the parameter cannot be divided like this.
    pub fn slice(self, spec: &ParamSpec) -> Result<Slice> {
        spec.slice(self.rank, self.world)
    }

    /// Whether no rank before this one holds the same part of a parameter.
    ///
    /// # Errors
    /// As for [`Partition::slice`].
    pub fn is_first_with(self, spec: &ParamSpec) -> Result<bool> {
        let part = self.slice(spec)?;
        Ok(self.rank == 0 || spec.slice(self.rank - 1, self.world)? != part)
    }

    /// An even part of `len`, which the world divides (the configuration was checked).
    pub fn share(self, len: usize) -> usize {
        assert!(len.is_multiple_of(self.world), "{len} is not divided by {}", self.world);
        len / self.world
    }

    /// How many of `heads` this rank holds: an even part, or one that it shares where there are fewer heads than ranks.
    pub fn heads(self, heads: usize) -> usize {
        (heads / self.world).max(1)
    }

    /// Into how many leaves this rank cuts its part of a reduction of length `len`, which the world divides: its share
    /// of those of the whole. Where the world does not divide them the tree cannot be the same as on a single rank, and
    /// each rank has one of its own.
    pub fn leaves(self, len: usize) -> usize {
        let whole = reduction_leaves(len);
        if whole.is_multiple_of(self.world) { whole / self.world } else { reduction_leaves(self.share(len)) }
    }
}
