//! How resident adapters change the outputs of linear layers.

use candle_core::Tensor;
use rollout_kernels::Ops;

use crate::comm::Communicator;
use crate::error::Result;

/// A linear layer, or several fused layers of the same input: the modules whose output an adapter can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TargetModule {
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

/// Terms that resident adapters add to the outputs of linear layers.
pub trait AdapterDeltas {
    /// Adds to `out`, the output of `target` for the input `x`. Both have the batch's rows, or at the head those whose
    /// logits are wanted, and this rank's columns. Where the input is split over ranks, `out` is already the sum over
    /// all ranks, and every rank must add the same.
    fn add(&self, ops: &Ops, comm: &dyn Communicator, target: TargetModule, x: &Tensor, out: &Tensor) -> Result<()>;
}
