//! Communication between tensor-parallel ranks.
//!
//! Sums run over a fixed binary tree of ranks, so that with the leaves inside each rank's linear they form the same
//! tree for every number of ranks that is a power of two.

mod local;

use candle_core::Tensor;

use crate::error::Result;

pub use local::LocalGroup;

/// What the ranks of one model do together. All ranks make the same calls in the same order.
pub trait Communicator: Send {
    fn rank(&self) -> usize;
    fn world(&self) -> usize;
    /// Replaces `x` (the same shape on every rank, float32, contiguous) by the sum over ranks.
    fn all_reduce_sum(&self, x: &Tensor) -> Result<()>;
    /// `local` is this rank's `[rows, n]`; `out` becomes `[rows, n * world]`, rank 0's columns first. With one rank
    /// both are the same tensor and nothing happens.
    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()>;
}

/// A single rank: nothing to exchange.
pub struct Solo;

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, _x: &Tensor) -> Result<()> {
        Ok(())
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        assert_eq!(local.shape(), out.shape(), "one rank's columns are all columns");
        Ok(())
    }
}
