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

/// The id by which the ranks of one group find one another: bytes of the communication library.
#[derive(Clone, Copy)]
pub struct GroupId(pub [u8; 128]);

/// The collective of a group's ranks on the host, by which they agree on steps
/// ([`Ops::capture_or_replay`](crate::Ops::capture_or_replay)).
pub trait HostCollective {
    /// Number of ranks.
    fn world(&self) -> usize;
    /// The minimum of `mine` over all ranks, once all have called it, each on its own thread. No device waits.
    fn all_reduce_min(&self, mine: u32) -> u32;
}

/// A rank's place in a group that it joins.
#[derive(Clone, Copy)]
pub struct Membership {
    pub id: GroupId,
    pub rank: usize,
    /// Number of ranks, those of other processes included.
    pub world: usize,
}

/// The end of one rank in a group. All ranks make the same calls in the same order; each call is started on the rank's
/// stream, and the host does not wait for it.
pub struct RankGroup {
    inner: Box<dyn GroupImpl>,
    rank: usize,
    world: usize,
}

impl RankGroup {
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

    /// Gathers the columns of all ranks: `local` is this rank's `[rows, n]`, and `out` becomes `[rows, columns]` with
    /// rank 0's first. If `columns` is less than `n * world`, the last rank's columns beyond it are left out. Both are
    /// contiguous.
    ///
    /// # Errors
    /// If the device fails.
    pub fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        self.inner.all_gather_columns(local, out)
    }

    /// Allocates the memory that calls reuse, if it is not there yet.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn restore(&self) -> Result<()> {
        self.inner.restore()
    }

    /// Frees the memory that calls reuse; the next one allocates it again.
    pub fn release(&self) {
        self.inner.release();
    }
}
