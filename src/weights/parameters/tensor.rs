//! Values of tensors that are stored as bytes: borrowed from the bytes where possible.

use std::borrow::Cow;

use half::{bf16, f16};
pub use rollout_kernels::{Dtype, TensorData};

use super::shard::Slice;

/// The values of a slice of a row-major matrix with `cols` columns, whose elements are stored in `bytes`,
/// little-endian. They are borrowed if the slice is whole rows and the bytes are aligned, else copied.
///
/// # Panics
/// If the slice is not inside the matrix.
pub(in crate::weights) fn tensor_of_bytes<'a>(
    dtype: Dtype,
    bytes: &'a [u8],
    cols: usize,
    slice: &Slice,
) -> TensorData<'a> {
    match dtype {
        Dtype::F32 => TensorData::F32(slice_of_bytes(bytes, cols, slice)),
        Dtype::F16 => TensorData::F16(slice_of_bytes(bytes, cols, slice)),
        Dtype::Bf16 => TensorData::Bf16(slice_of_bytes(bytes, cols, slice)),
    }
}

/// The Rust type of the elements of a [`Dtype`].
pub(in crate::weights) trait Element: Copy + 'static {
    /// The element that these little-endian bytes are.
    fn from_le(bytes: &[u8]) -> Self;
}

impl Element for f32 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("four bytes"))
    }
}

impl Element for f16 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("two bytes"))
    }
}

impl Element for bf16 {
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("two bytes"))
    }
}

/// The elements of a slice of a row-major matrix: [`tensor_of_bytes`] for a dtype that is known in advance.
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
