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
    /// Embeddings of images, which take the place of those of their placeholder tokens.
    pub embeddings: &'a [PlacedEmbeddings],
    /// For each layer with experts those that the rows take, `[rows, top_k]`, or `NOT_FORCED`. Empty if no row is
    /// forced.
    pub forced: &'a [Vec<u16>],
}

/// Embeddings of some tokens of an image, and the rows of the batch that they belong to.
pub struct PlacedEmbeddings {
    /// `[rows, hidden]`.
    pub embeddings: Tensor,
    pub rows: Vec<u32>,
}

impl ForwardContext<'_> {
    /// Puts the embeddings of images into their rows of `hidden`, `[rows, hidden]`.
    pub(super) fn put_embeddings(&self, hidden: &Tensor) -> Result<()> {
        self.embeddings.iter().try_for_each(|placed| Ok(self.ops.put_rows(&placed.embeddings, &placed.rows, hidden)?))
    }

    /// Adds the resident adapters' terms to `out`, the output of the target module called `module` for the input `x`.
    pub(super) fn add_adapters(&self, module: &str, x: &Tensor, out: &Tensor) -> Result<()> {
        self.adapters.map_or(Ok(()), |adapters| adapters.add(self.ops, self.comm, module, x, out))
    }
}
