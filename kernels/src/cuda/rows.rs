//! Rows that are gathered and scattered.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::context::Context;
use super::matrix::CudaMatrix;
use super::staging::Staging;
use super::tensor::Rows;

/// The kernels that copy rows by their indices.
pub(super) struct RowCopies {
    context: Arc<Context>,
}

impl RowCopies {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { context: context.clone() })
    }

    /// `tokens` is the address of the token of each row of `out`.
    pub fn embed(&self, table: &CudaMatrix, first_token: usize, tokens: u64, out: Rows) -> Result<()> {
        let _ = (&self.context, table, first_token, tokens, out);
        bail!("embed")
    }

    /// `out[i] = x[indices[i]]` for `count` indices at an address.
    pub fn select(&self, x: Rows, indices: u64, count: usize, out: Rows) -> Result<()> {
        let _ = (&self.context, x, indices, count, out);
        bail!("select")
    }

    /// As [`RowCopies::select`], with indices of the host.
    pub fn select_listed(&self, staging: &Staging, x: Rows, indices: &[u32], out: Rows) -> Result<()> {
        let _ = (&self.context, staging, x, indices, out);
        bail!("select_rows")
    }

    /// `out[indices[i]] += x[i]`, with indices of the host, each at most once.
    pub fn add_listed(&self, staging: &Staging, x: Rows, indices: &[u32], out: Rows) -> Result<()> {
        let _ = (&self.context, staging, x, indices, out);
        bail!("add_rows")
    }
}
