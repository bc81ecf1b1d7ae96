//! Merging a LoRA adapter into one weight: the change, and the base that it applies to.

use std::ops::Range;

use candle_core::Tensor;

use crate::matrix::Matrix;
use crate::values::{Dtype, TensorData};

/// An adapter's change of one weight: values that replace the base's, then a delta that is added.
#[derive(Debug)]
pub struct WeightChange {
    pub replacement: Option<Replacement>,
    pub delta: Option<LoraDelta>,
}

/// Values that replace the base's, of `modules_to_save` or a trained bias.
#[derive(Debug)]
pub struct Replacement {
    /// `[rows, cols]`, row-major, in the serving precision or in a lower one.
    pub values: TensorData<'static>,
    pub cols: usize,
}

/// The delta that an adapter adds to a weight.
#[derive(Debug)]
pub enum LoraDelta {
    LowRank(LowRank),
    /// `lora_B`'s bias, which is added to the layer's own, `[rows]`.
    Bias(Vec<f32>),
}

/// `scaling * b a`, which is computed in float32.
#[derive(Debug)]
pub struct LowRank {
    pub rank: usize,
    pub cols: usize,
    /// `[rank, cols]`
    pub a: TensorData<'static>,
    /// `[rows, rank]`
    pub b: TensorData<'static>,
    /// The precision that `b a` is rounded to before it is scaled.
    pub product: Dtype,
    pub scaling: f32,
    /// The precisions that the delta is rounded to, one after the other, before it is added.
    pub roundings: Vec<Dtype>,
    pub magnitude: Option<Magnitude>,
    /// Whether the weight is a linear layer's own: not an embedding, nor a head that is tied to it.
    pub linear: bool,
}

/// DoRA: each row of `w + delta` is given this length.
#[derive(Debug)]
pub struct Magnitude {
    /// `[rows]`
    pub lengths: Vec<f32>,
    /// The dtype to which PyTorch rounds `w + delta` and its norm.
    pub sum: Dtype,
    /// The dtype to which it rounds length by norm.
    pub factor: Dtype,
}

impl WeightChange {
    /// Bytes of the values that it holds.
    pub fn bytes(&self) -> u64 {
        let replaced = self.replacement.as_ref().map_or(0, |replacement| replacement.values.bytes());
        let delta = match &self.delta {
            None => 0,
            Some(LoraDelta::Bias(bias)) => size_of_val(bias.as_slice()),
            Some(LoraDelta::LowRank(LowRank { a, b, magnitude, .. })) => {
                let lengths = magnitude.as_ref().map_or(0, |magnitude| size_of_val(magnitude.lengths.as_slice()));
                a.bytes() + b.bytes() + lengths
            }
        };
        (replaced + delta) as u64
    }

    pub fn low_rank(&self) -> Option<&LowRank> {
        match &self.delta {
            Some(LoraDelta::LowRank(low_rank)) => Some(low_rank),
            _ => None,
        }
    }

    /// Whether it can only be applied to whole rows: the norm of DoRA is that of the row.
    pub fn needs_whole_rows(&self) -> bool {
        self.low_rank().is_some_and(|low_rank| low_rank.magnitude.is_some())
    }

    /// Turns the base's values of some rows of a vector into the changed ones, float32 and not yet rounded.
    ///
    /// # Panics
    /// If the rows are outside the vector, or the change is of a matrix.
    pub fn apply_to_vector(&self, rows: Range<usize>, values: &mut [f32]) {
        if let Some(replacement) = &self.replacement {
            assert_eq!(replacement.cols, 1, "columns of a vector");
            replacement.values.read_f32(rows.start, values);
        }
        match &self.delta {
            None => {}
            Some(LoraDelta::Bias(bias)) => {
                values.iter_mut().zip(&bias[rows]).for_each(|(value, delta)| *value += delta)
            }
            Some(LoraDelta::LowRank(_)) => panic!("a vector has no low-rank change"),
        }
    }
}

impl LowRank {
    /// Whether the layer's output for `x` is the base's plus `scaling * b (a x)`, so that the adapter can be applied
    /// unmerged.
    pub fn is_plain(&self) -> bool {
        self.linear && self.magnitude.is_none()
    }
}

/// Called with rows and columns of the whole weight and as many values to be written, row-major: the base's, float32 of
/// serving precision. Called from several threads.
pub type ReadValues<'a> = dyn Fn(Range<usize>, Range<usize>, &mut [f32]) + Sync + 'a;

/// Where the base of a merge is.
pub enum MergeBase<'a> {
    /// The host reads it.
    Read(&'a ReadValues<'a>),
    /// A matrix with the rows and columns that are merged, and no others.
    Matrix(&'a Matrix),
    /// A tensor of the device with the rows that are merged and all columns of the whole weight.
    WholeRows(&'a Tensor),
}

/// Rows of a matrix that become their base with a change applied, rounded to nearest even where the matrix is bfloat16.
pub struct Merge<'a> {
    pub change: &'a WeightChange,
    pub base: MergeBase<'a>,
    /// The rows of the whole weight that are written.
    pub rows: Range<usize>,
    /// The columns of the whole weight that the matrix has.
    pub columns: Range<usize>,
    /// Columns of the whole weight.
    pub width: usize,
}

impl Merge<'_> {
    /// Whether the change must see whole rows of which the matrix has not all columns.
    pub(crate) fn goes_by_whole_rows(&self) -> bool {
        self.change.needs_whole_rows() && self.columns != (0..self.width)
    }
}
