//! How resident adapters change the outputs of linear layers.

use candle_core::Tensor;
use rollout_kernels::Ops;

use crate::comm::Communicator;
use crate::error::Result;
use crate::weights::ParamSpec;

/// A linear layer, or several fused ones of the same input, whose output an adapter can change.
pub struct TargetModule<'a> {
    /// The name of its first weight.
    pub name: &'a str,
    /// The weights of its projections, each with the first column of its output in the module's output on this rank.
    pub weights: Vec<(&'a ParamSpec, usize)>,
}

/// Terms that resident adapters add to the outputs of linear layers.
pub trait AdapterDeltas {
    /// Adds to `out`, the output of the target module called `module` for the input `x`. Both have the batch's rows, or
    /// at the head those whose logits are wanted, and this rank's columns. Where the input is split over ranks, `out`
    /// is already the sum over all ranks, and every rank must add the same.
    fn add(&self, ops: &Ops, comm: &dyn Communicator, module: &str, x: &Tensor, out: &Tensor) -> Result<()>;
}
