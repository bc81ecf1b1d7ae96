//! The context of one forward pass, which every part of the model takes.

use candle_core::Tensor;
use rollout_kernels::{Ops, Step};

use super::adapters::AdapterDeltas;
use super::workspace::Workspace;
use crate::comm::Communicator;
use crate::error::Result;

/// The operators, the step and the buffers of one forward pass.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    pub ops: &'a Ops,
    pub comm: &'a dyn Communicator,
    /// The rows of all sequences, as the device has prepared them.
    pub step: &'a Step<'a>,
    /// The resident adapters of the rows; `None` if no row uses one.
    pub adapters: Option<&'a dyn AdapterDeltas>,
    pub workspace: &'a Workspace,
}

impl ForwardContext<'_> {
    /// Adds the resident adapters' terms to `out`, the output of the target module called `module` for the input `x`.
    pub(super) fn add_adapters(&self, module: &str, x: &Tensor, out: &Tensor) -> Result<()> {
        self.adapters.map_or(Ok(()), |adapters| adapters.add(self.ops, self.comm, module, x, out))
    }
}
