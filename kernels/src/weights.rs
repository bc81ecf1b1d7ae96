//! Shapes of weight matrices, and their rows in the host's memory.

use std::ops::Range;

use half::{bf16, f16};

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

/// Type of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    Bf16,
    F32,
}

impl WeightDtype {
    /// Bytes of one weight.
    pub fn bytes(self) -> usize {
        match self {
            WeightDtype::Bf16 => 2,
            WeightDtype::F32 => 4,
        }
    }
}

/// A type that values are rounded to or come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The shape of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    pub dtype: WeightDtype,
    /// Output features: rows of the matrix, columns of the product.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Into how many runs the reduction over `k` is cut: 1 for a matrix that is never sharded over `k`,
    /// [`reduction_leaves`] for a whole matrix that may be, and that divided by the number of ranks for a shard.
    pub leaves: usize,
}

/// Whole rows of a matrix in the host's memory, one after the other.
#[derive(Clone, Copy)]
pub enum WeightRows<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    F32(&'a [f32]),
}

impl<'a> WeightRows<'a> {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            WeightRows::Bf16(rows) => rows.len(),
            WeightRows::F16(rows) => rows.len(),
            WeightRows::F32(rows) => rows.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the values.
    ///
    /// # Panics
    /// If `range` passes the end.
    pub fn part(self, range: Range<usize>) -> WeightRows<'a> {
        match self {
            WeightRows::Bf16(values) => WeightRows::Bf16(&values[range]),
            WeightRows::F16(values) => WeightRows::F16(&values[range]),
            WeightRows::F32(values) => WeightRows::F32(&values[range]),
        }
    }
}

/// Where rows of a matrix are copied to, in the host's memory, as they are stored.
pub enum RowBits<'a> {
    Bf16(&'a mut [bf16]),
    F32(&'a mut [f32]),
}

impl RowBits<'_> {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            RowBits::Bf16(rows) => rows.len(),
            RowBits::F32(rows) => rows.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Called with a range of rows, calls the function it is given with the values of those rows. Called from several
/// threads.
pub type ReadRows<'a> = dyn Fn(Range<usize>, &mut dyn FnMut(WeightRows<'_>)) + Sync + 'a;

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
