//! Rotary embedding.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::context::Context;
use super::tensor::Rows;

/// The kernel of [`Ops::rope`](crate::Ops::rope).
pub(super) struct Rope {
    context: Arc<Context>,
}

impl Rope {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { context: context.clone() })
    }

    /// Rotates each head of `x` in place; `positions` is the address of the position of each row.
    pub fn rotate(&self, x: Rows, head_dim: usize, positions: u64, cos: u64, sin: u64) -> Result<()> {
        let _ = (&self.context, x, head_dim, positions, cos, sin);
        bail!("rope")
    }
}
