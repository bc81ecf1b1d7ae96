//! One forward pass.

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
    /// The rows of the batch.
    pub workspace: &'a Workspace,
}

impl Pass<'_> {
    /// Adds what adapters add at `site` to `out`, what the layers there give for `x`.
    pub fn add(&self, site: Site, x: &Tensor, out: &Tensor) -> Result<()> {
        self.input.additions.map_or(Ok(()), |additions| additions.add(self.ops, self.comm, site, x, out))
    }
}
