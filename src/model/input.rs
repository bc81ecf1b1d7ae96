//! What a forward pass is given.

use candle_core::Tensor;
use rollout_kernels::{AttentionSequence, Ops};

use crate::comm::Communicator;
use crate::error::Result;

/// One flat batch: rows of all sequences behind each other.
pub struct Input<'a> {
    /// Token of each row.
    pub tokens: &'a [u32],
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// Where each row's KV goes: `block * block_size + offset`.
    pub slots: &'a [u32],
    pub sequences: &'a [AttentionSequence<'a>],
    /// What is added to the outputs of some rows.
    pub additions: Option<&'a dyn Additions>,
}

/// A linear layer, or several of the same input that are one here: what they give can be added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// Query, key and value of a layer.
    Qkv(usize),
    /// The attention's output projection.
    Output(usize),
    GateUp(usize),
    Down(usize),
    Head,
}

/// Terms that are added to what linear layers give.
pub trait Additions {
    /// Adds to `out`, what the layers at `site` give for `x`: both have the batch's rows, or those of which logits are
    /// wanted at the head, and this rank's columns. Where the input is split over ranks `out` is their sum already, and
    /// all must add the same.
    fn add(&self, ops: &Ops, comm: &dyn Communicator, site: Site, x: &Tensor, out: &Tensor) -> Result<()>;
}
