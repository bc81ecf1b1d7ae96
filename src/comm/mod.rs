//! Communication between tensor-parallel ranks.
//!
//! Sums are added in a fixed binary tree of ranks. Together with the leaves in each rank's linear layer they form the
//! same tree for every number of ranks that is a power of two.

mod device;
mod host;
mod local;
mod trainer;

use candle_core::Tensor;
use rollout_kernels::HostCollective;

use crate::error::Result;

pub use device::DeviceGroup;
pub use host::HostGroup;
pub use local::LocalGroup;
pub use trainer::{ByteSink, RankRange, Rendezvous, TrainerGroup, TrainerTimeout, Trainers};

/// The collective operations of the ranks of one model. All ranks make the same calls in the same order.
pub trait Communicator: HostCollective + Send {
    fn rank(&self) -> usize;
    /// Replaces `x` by its sum over all ranks. `x` is contiguous float32 and has the same shape on every rank.
    fn all_reduce_sum(&self, x: &Tensor) -> Result<()>;
    /// Gathers the columns of all ranks: `local` is this rank's `[rows, n]`, and `out` becomes `[rows, columns]` with
    /// rank 0's first. If `columns` is less than `n * world`, the last rank's columns beyond it are left out. With one
    /// rank both are the same tensor, and nothing happens.
    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()>;
    /// Allocates the memory that calls reuse, if it is not there yet: a rank that ran out of memory in a call would
    /// leave the others waiting.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    fn restore(&self) -> Result<()> {
        Ok(())
    }
    /// Frees the memory that calls reuse.
    fn release(&self) {}
}

/// A single rank, which has nothing to exchange.
pub struct SingleRank;

impl HostCollective for SingleRank {
    fn world(&self) -> usize {
        1
    }

    fn all_reduce_min(&self, mine: u32) -> u32 {
        mine
    }
}

impl Communicator for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn all_reduce_sum(&self, _x: &Tensor) -> Result<()> {
        Ok(())
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        assert_eq!(local.shape(), out.shape(), "one rank's columns are all columns");
        Ok(())
    }
}
