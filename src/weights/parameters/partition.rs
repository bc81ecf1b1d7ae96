//! Which share of a tensor-parallel model a rank has, as the model's layers see it.

use std::ops::Range;

use rollout_kernels::reduction_leaves;

use super::{ParamSpec, ShardRule, Slice, padded_share};
use crate::error::Result;

/// One rank among all. Layers hand it to the shard rules, and never look at the rank's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    rank: usize,
    world: usize,
}

impl Partition {
    /// Rank `rank` of `world`.
    ///
    /// # Panics
    /// If `rank >= world`.
    pub fn new(rank: usize, world: usize) -> Self {
        assert!(rank < world, "rank {rank} of {world}");
        Self { rank, world }
    }

    /// Whether the only rank has the whole model.
    pub fn is_whole(self) -> bool {
        self.world == 1
    }

    /// The part of a parameter that this rank holds.
    ///
    /// # Errors
    /// `Config` if the parameter cannot be divided among the ranks.
    pub fn slice(self, spec: &ParamSpec) -> Result<Slice> {
        spec.slice(self.rank, self.world)
    }

    /// How many rows of a parameter this rank has room for: those that it holds, and padding behind those of the last
    /// rank where the rule pads.
    ///
    /// # Errors
    /// `Config` if the parameter cannot be divided among the ranks.
    pub fn stored_rows(self, spec: &ParamSpec) -> Result<usize> {
        let held = self.slice(spec)?.rows.len();
        Ok(if spec.shard == ShardRule::PaddedRows { self.padded_share(spec.shape[0]) } else { held })
    }

    /// Whether no rank with a lower number holds the same part of a parameter.
    ///
    /// # Errors
    /// As for [`Partition::slice`].
    pub fn is_first_with(self, spec: &ParamSpec) -> Result<bool> {
        let part = self.slice(spec)?;
        Ok(self.rank == 0 || spec.slice(self.rank - 1, self.world)? != part)
    }

    /// How many of `len` items this rank has if they are divided evenly.
    ///
    /// # Panics
    /// If `len` is not a multiple of the number of ranks, which the check of the configuration excludes.
    pub fn share(self, len: usize) -> usize {
        assert!(len.is_multiple_of(self.world), "{len} is not divided by {}", self.world);
        len / self.world
    }

    /// Which of `len` items this rank has if they are divided evenly, neighbours together.
    ///
    /// # Panics
    /// If `len` is not a multiple of the number of ranks.
    pub fn even_range(self, len: usize) -> Range<usize> {
        let share = self.share(len);
        self.rank * share..(self.rank + 1) * share
    }

    /// How many of `len` items this rank has room for if the last rank may have fewer.
    pub fn padded_share(self, len: usize) -> usize {
        padded_share(len, self.world)
    }

    /// How many of `heads` attention heads this rank holds: an even part, or one that it shares with other ranks where
    /// there are fewer heads than ranks.
    pub fn heads(self, heads: usize) -> usize {
        (heads / self.world).max(1)
    }

    /// How many leaves of its reduction tree a sum of `len` terms has on this rank, which has an even part of the
    /// terms. If the leaves of the whole sum can be divided among the ranks they are, and the result has the same bits
    /// on any number of ranks; else each rank has a tree of its own.
    pub fn leaves(self, len: usize) -> usize {
        let whole = reduction_leaves(len);
        if whole.is_multiple_of(self.world) { whole / self.world } else { reduction_leaves(self.share(len)) }
    }
}
