//! The context of one forward pass.

use candle_core::Tensor;
use rollout_kernels::Ops;

use super::input::{Input, Site};
use super::workspace::Workspace;
use crate::comm::Communicator;
use crate::error::Result;

/// What each part of a model is given for one forward pass.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub ops: &'a Ops,
    pub comm: &'a dyn Communicator,
    pub input: Input<'a>,
    /// The activations, cut to the rows of the batch.
    pub workspace: &'a Workspace,
}

impl Pass<'_> {
    /// Adds the resident adapters' terms at `site` to `out`, the output of the layers there for the input `x`.
    pub fn add(&self, site: Site, x: &Tensor, out: &Tensor) -> Result<()> {
        self.input.additions.map_or(Ok(()), |additions| additions.add(self.ops, self.comm, site, x, out))
    }
}
