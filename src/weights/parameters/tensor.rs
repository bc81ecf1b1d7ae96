//! Values of a tensor in the dtype in which they are stored: borrowed from the stored bytes where possible.

use std::borrow::Cow;

use half::{bf16, f16};
/// Element types of stored weights.
pub use rollout_kernels::Dtype;
use rollout_kernels::WeightRows;

use super::shard::Slice;

/// Row-major elements of a [`Slice`] of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    Bf16(Cow<'a, [bf16]>),
}

impl<'a> TensorData<'a> {
    /// The values of a slice of a row-major matrix with `cols` columns, whose elements are stored in `bytes`,
    /// little-endian. They are borrowed if the slice is whole rows and the bytes are aligned, else copied.
    ///
    /// # Panics
    /// If the slice is not inside the matrix.
    pub(in crate::weights) fn of_bytes(dtype: Dtype, bytes: &'a [u8], cols: usize, slice: &Slice) -> Self {
        match dtype {
            Dtype::F32 => f32::data(slice_of_bytes(bytes, cols, slice)),
            Dtype::F16 => f16::data(slice_of_bytes(bytes, cols, slice)),
            Dtype::Bf16 => bf16::data(slice_of_bytes(bytes, cols, slice)),
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::F16(v) => v.len(),
            Self::Bf16(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values as the kernels take them.
    pub fn as_rows(&self) -> WeightRows<'_> {
        match self {
            Self::F32(values) => WeightRows::F32(values),
            Self::F16(values) => WeightRows::F16(values),
            Self::Bf16(values) => WeightRows::Bf16(values),
        }
    }

    /// The values in float32: exact for every dtype, and without a copy for float32.
    pub fn into_f32(self) -> Cow<'a, [f32]> {
        match self {
            Self::F32(v) => v,
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// The values in bfloat16: rounded to nearest, ties to even, as PyTorch does, and without a copy for bfloat16.
    pub fn into_bf16(self) -> Cow<'a, [bf16]> {
        match self {
            Self::F32(v) => v.iter().map(|&x| bf16::from_f32(x)).collect(),
            Self::F16(v) => v.iter().map(|x| bf16::from_f32(x.to_f32())).collect(),
            Self::Bf16(v) => v,
        }
    }
}

/// The Rust type of the elements of a [`Dtype`].
pub(in crate::weights) trait Element: Copy + 'static {
    /// The element that these little-endian bytes are.
    fn from_le(bytes: &[u8]) -> Self;
    fn data(values: Cow<'_, [Self]>) -> TensorData<'_>;
}

impl Element for f32 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("four bytes"))
    }
    fn data(values: Cow<'_, [Self]>) -> TensorData<'_> {
        TensorData::F32(values)
    }
}

impl Element for f16 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("two bytes"))
    }
    fn data(values: Cow<'_, [Self]>) -> TensorData<'_> {
        TensorData::F16(values)
    }
}

impl Element for bf16 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("two bytes"))
    }
    fn data(values: Cow<'_, [Self]>) -> TensorData<'_> {
        TensorData::Bf16(values)
    }
}

/// The elements of a slice of a row-major matrix: [`TensorData::of_bytes`] for a dtype that is known in advance.
pub(in crate::weights) fn slice_of_bytes<'a, T: Element>(bytes: &'a [u8], cols: usize, slice: &Slice) -> Cow<'a, [T]> {
    let row_bytes = cols * size_of::<T>();
    let rows = &bytes[slice.rows.start * row_bytes..slice.rows.end * row_bytes];
    let rows = elements::<T>(rows);
    if slice.cols == (0..cols) {
        return rows;
    }
    let mut out = Vec::with_capacity(slice.len());
    for row in rows.chunks_exact(cols) {
        out.extend_from_slice(&row[slice.cols.clone()]);
    }
    Cow::Owned(out)
}

/// Elements that are stored in little-endian bytes: borrowed where alignment and byte order allow it, else copied.
fn elements<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    // SAFETY: `Element` is implemented for f32, f16 and bf16 only, of which every bit pattern is a valid value.
    let (before, aligned, after) = unsafe { bytes.align_to::<T>() };
    if before.is_empty() && after.is_empty() && cfg!(target_endian = "little") {
        Cow::Borrowed(aligned)
    } else {
        bytes.chunks_exact(size_of::<T>()).map(T::from_le).collect()
    }
}
