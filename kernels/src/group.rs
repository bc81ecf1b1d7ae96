//! Groups of ranks whose devices exchange activations among themselves.

use candle_core::{Result, Tensor};

use crate::backend::group::GroupImpl;

/// How the sums over the ranks of a group are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AllReduce {
    /// Each rank gathers the terms of all and adds them in a balanced binary tree, so that the bits are the same on any
    /// number of ranks that is a power of two.
    Tree,
    /// As the devices' communication library adds them: fewer bytes travel, and the bits depend on the number of ranks.
    #[value(name = "nccl")]
    Library,
}

/// By which the ranks of one group find one another: bytes of the communication library.
#[derive(Clone, Copy)]
pub struct GroupId(pub [u8; 128]);

/// What a rank says of itself when it joins a group.
#[derive(Clone, Copy)]
pub struct Membership {
    pub id: GroupId,
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    pub all_reduce: AllReduce,
}

/// The end of one rank in a group. All ranks make the same calls in the same order; each call is started on the rank's
/// stream, and the host does not wait for it.
pub struct Group {
    inner: Box<dyn GroupImpl>,
    rank: usize,
    world: usize,
}

impl Group {
    pub(crate) fn new(inner: Box<dyn GroupImpl>, rank: usize, world: usize) -> Self {
        Self { inner, rank, world }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Replaces `x` by its sum over all ranks. `x` is contiguous float32 and has the same shape on every rank.
    ///
    /// # Errors
    /// If the device fails.
    pub fn all_reduce_sum(&self, x: &Tensor) -> Result<()> {
        self.inner.all_reduce_sum(x)
    }

    /// Gathers the columns of all ranks: `local` is this rank's `[rows, n]`, and `out` becomes `[rows, n * world]` with
    /// rank 0's columns first. Both are contiguous.
    ///
    /// # Errors
    /// If the device fails.
    pub fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        self.inner.all_gather_columns(local, out)
    }

    /// Takes the memory that calls reuse, where it is not there.
    ///
    /// # Errors
    /// If the device has not as much.
    pub fn restore(&self) -> Result<()> {
        self.inner.restore()
    }

    /// Gives the memory back that calls reuse; the next one takes it again.
    pub fn release(&self) {
        self.inner.release();
    }
}
