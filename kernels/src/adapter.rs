//! The low-rank factors of adapters that stay beside a linear layer.

use crate::matrix::Matrix;

/// The factors of one adapter for a layer, which adds `b (a x)` to outputs of the layer.
pub struct AdapterFactors {
    /// The factors `a` of all adapted projections of the layer, stacked: `[sum of ranks, k]`.
    pub a: Matrix,
    pub up: Vec<UpFactor>,
}

/// The factor `b` of one projection.
pub struct UpFactor {
    /// `[n, rank]`, with the adapter's scaling.
    pub b: Matrix,
    /// Its first column in `a x`.
    pub first_rank: usize,
    /// The first column of its projection in the layer's output.
    pub first_column: usize,
}

/// The rows of a batch that use one adapter.
#[derive(Clone, Copy)]
pub struct AdapterRows<'a> {
    pub factors: &'a AdapterFactors,
    /// Ascending.
    pub rows: &'a [u32],
}
