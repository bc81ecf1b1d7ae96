//! Dtypes, and values of them in host memory.

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};

/// The dtype of values in a checkpoint, in a push or in a rounding.
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

/// The dtype in which a device stores weights, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageDtype {
    Bf16,
    F32,
}

impl StorageDtype {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        Dtype::from(self).size()
    }
}

impl From<StorageDtype> for Dtype {
    fn from(dtype: StorageDtype) -> Self {
        match dtype {
            StorageDtype::Bf16 => Self::Bf16,
            StorageDtype::F32 => Self::F32,
        }
    }
}

/// Row-major values of a tensor, or of a part of it: owned, or borrowed where possible.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    Bf16(Cow<'a, [bf16]>),
}

impl<'a> TensorData<'a> {
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    /// The values of a range; a copy if they are owned.
    ///
    /// # Panics
    /// If the range passes the end.
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(part(values, range)),
            Self::F16(values) => Self::F16(part(values, range)),
            Self::Bf16(values) => Self::Bf16(part(values, range)),
        }
    }

    pub fn view(&self) -> TensorView<'_> {
        match self {
            Self::F32(values) => TensorView::F32(values),
            Self::F16(values) => TensorView::F16(values),
            Self::Bf16(values) => TensorView::Bf16(values),
        }
    }

    pub fn into_owned(self) -> TensorData<'static> {
        match self {
            Self::F32(values) => TensorData::F32(values.into_owned().into()),
            Self::F16(values) => TensorData::F16(values.into_owned().into()),
            Self::Bf16(values) => TensorData::Bf16(values.into_owned().into()),
        }
    }

    /// The values in float32: exact for every dtype, and without a copy for float32.
    pub fn into_f32(self) -> Cow<'a, [f32]> {
        match self {
            Self::F32(values) => values,
            values => Cow::Owned(values.part_f32(0..values.len()).into_owned()),
        }
    }

    /// The values of a range in float32: exact for every dtype, and without a copy for float32.
    ///
    /// # Panics
    /// If the range passes the end.
    pub fn part_f32(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        match self {
            Self::F32(values) => Cow::Borrowed(&values[range]),
            Self::F16(values) => values[range].iter().map(|x| x.to_f32()).collect(),
            Self::Bf16(values) => values[range].iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// The values in bfloat16: rounded to nearest, ties to even, as PyTorch does, and without a copy for bfloat16.
    pub fn into_bf16(self) -> Cow<'a, [bf16]> {
        match self {
            Self::F32(values) => values.iter().map(|&x| bf16::from_f32(x)).collect(),
            Self::F16(values) => values.iter().map(|x| bf16::from_f32(x.to_f32())).collect(),
            Self::Bf16(values) => values,
        }
    }

    /// The bytes of the values, little-endian.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::Bf16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// The values at these indices.
    ///
    /// # Panics
    /// If an index passes the end.
    pub fn gather(&self, indices: impl Iterator<Item = usize>) -> TensorData<'static> {
        match self {
            Self::F32(values) => TensorData::F32(indices.map(|i| values[i]).collect()),
            Self::F16(values) => TensorData::F16(indices.map(|i| values[i]).collect()),
            Self::Bf16(values) => TensorData::Bf16(indices.map(|i| values[i]).collect()),
        }
    }

    /// Copies the values from `start` on to `out`, as float32: exact.
    ///
    /// # Panics
    /// If they pass the end.
    pub fn read_f32(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(values) => out.copy_from_slice(&values[range]),
            Self::F16(values) => out.iter_mut().zip(&values[range]).for_each(|(out, x)| *out = x.to_f32()),
            Self::Bf16(values) => out.iter_mut().zip(&values[range]).for_each(|(out, x)| *out = x.to_f32()),
        }
    }
}

fn part<T: Clone>(values: Cow<'_, [T]>, range: Range<usize>) -> Cow<'_, [T]> {
    match values {
        Cow::Borrowed(values) => Cow::Borrowed(&values[range]),
        Cow::Owned(values) if range == (0..values.len()) => Cow::Owned(values),
        Cow::Owned(values) => Cow::Owned(values[range].to_vec()),
    }
}

/// Borrowed row-major values, as matrices and buffers take them.
#[derive(Clone, Copy)]
pub enum TensorView<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> TensorView<'a> {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the values.
    ///
    /// # Panics
    /// If `range` passes the end.
    pub fn part(self, range: Range<usize>) -> TensorView<'a> {
        match self {
            Self::F32(values) => TensorView::F32(&values[range]),
            Self::F16(values) => TensorView::F16(&values[range]),
            Self::Bf16(values) => TensorView::Bf16(&values[range]),
        }
    }
}
