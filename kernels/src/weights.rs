//! Shapes of weight matrices, and callbacks that read and write their rows.

use std::ops::Range;

use crate::values::{StorageDtype, TensorView};

/// Rows of a matrix that are written fastest together: runs of whole groups, from the first row on.
pub const ROW_GROUP: usize = 16;

/// The most runs a reduction is cut into, so the most tensor-parallel ranks that give the bits of one.
pub const MAX_LEAVES: usize = 8;

/// Into how many equal runs of whole pairs a row-parallel linear cuts a reduction of length `k`: the largest power of
/// two up to [`MAX_LEAVES`] that divides `k / 2`; 1 if `k` is odd.
pub fn reduction_leaves(k: usize) -> usize {
    let fits = |leaves: &usize| k.is_multiple_of(2 * leaves);
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// The shape of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    pub dtype: StorageDtype,
    /// Output features: rows of the matrix, columns of the product.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Into how many runs the reduction over `k` is cut: 1 for a matrix that is never sharded over `k`,
    /// [`reduction_leaves`] for a whole matrix that may be, and that divided by the number of ranks for a shard.
    pub leaves: usize,
}

/// Called with a range of rows, calls the function it is given with the values of those rows. Called from several
/// threads.
pub type ReadRows<'a> = dyn Fn(Range<usize>, &mut dyn FnMut(TensorView<'_>)) + Sync + 'a;

/// Computes the values of a range of whole rows into a row-major slice, whose content is unspecified before. It is
/// called from several threads.
pub type FillRows<'a> = dyn Fn(Range<usize>, &mut [f32]) + Sync + 'a;

/// Called with a range of rows, calls the function it is given with (row, column, value) of each element of those rows
/// that changes. Called from several threads.
pub type WriteElements<'a> = dyn Fn(Range<usize>, &mut dyn FnMut(usize, usize, f32)) + Sync + 'a;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_the_largest_power_of_two_of_whole_pairs() {
        let cases = [
            (1, 1),
            (2, 1),
            (4, 2),
            (6, 1),
            (8, 4),
            (12, 2),
            (16, 8),
            (576, 8),
            (1536, 8),
            (896, 8),
            (4864, 8),
            (35, 1),
        ];
        assert_eq!(cases.map(|(k, _)| reduction_leaves(k)), cases.map(|(_, leaves)| leaves));
    }
}
