//! What a forward pass is given.

use candle_core::Tensor;
use rollout_kernels::{Ops, Step};

use crate::comm::Communicator;
use crate::error::Result;

/// One step, and what is added to it.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Rows of all sequences behind each other, as the device has prepared them.
    pub step: &'a Step<'a>,
    /// Terms that resident adapters add to the outputs of some rows.
    pub additions: Option<&'a dyn Additions>,
}

/// A linear layer, or several fused layers of the same input: the places where an adapter can add to an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// Query, key and value projections of a layer.
    Qkv(usize),
    /// Output projection of a layer's attention.
    Output(usize),
    /// Gate and up projections of a layer.
    GateUp(usize),
    /// Down projection of a layer.
    Down(usize),
    /// The head.
    Head,
}

/// Terms that are added to the outputs of linear layers.
pub trait Additions {
    /// Adds to `out`, the output of the layers at `site` for the input `x`. Both have the batch's rows, or at the head
    /// those of which logits are wanted, and this rank's columns. Where the input is split over ranks `out` is the sum
    /// over all ranks already, and every rank must add the same.
    fn add(&self, ops: &Ops, comm: &dyn Communicator, site: Site, x: &Tensor, out: &Tensor) -> Result<()>;
}
