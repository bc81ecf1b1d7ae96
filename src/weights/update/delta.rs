//! New values of single elements of parameters.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::tensor_buffer::TensorBuffer;
use crate::weights::parameters::{Dtype, Slice, TensorData, tensor_of_bytes};

/// Bytes of the gap between two indices in a payload.
pub(in crate::weights) const GAP_BYTES: usize = size_of::<u32>();

/// New values of single elements of parameters.
#[derive(Debug, Default)]
pub struct Delta {
    /// The changes of a parameter, by its name.
    pub(in crate::weights) parameters: BTreeMap<String, ParameterDelta>,
}

/// The elements of one parameter that change, with their new values.
#[derive(Debug)]
pub struct Changes<'a> {
    /// Flat row-major indices into the whole parameter: ascending, without duplicates.
    pub indices: &'a [u64],
    pub values: TensorData<'a>,
}

/// The decoded payload of one tensor.
#[derive(Debug)]
pub(in crate::weights) struct TensorDelta {
    pub dtype: Dtype,
    /// Flat row-major indices, ascending.
    pub indices: Vec<u64>,
    /// The decompressed payload: the gaps between the indices, then the values.
    pub payload: TensorBuffer,
}

/// The changes of one parameter, which are those of a tensor or a part of them.
#[derive(Debug)]
pub(in crate::weights) struct ParameterDelta {
    tensor: Arc<TensorDelta>,
    /// Its changes among the tensor's.
    range: Range<usize>,
}

impl Delta {
    /// Names of the parameters that have changes, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The changes of a parameter; `None` if it has none.
    pub fn changes(&self, parameter: &str) -> Option<Changes<'_>> {
        self.parameters.get(parameter).map(ParameterDelta::changes)
    }
}

impl TensorDelta {
    /// The changes of the parameters that the tensor has one below the other, each of so many elements. Indices count
    /// from each parameter's first element.
    pub fn divide(mut self, parameters: Vec<(String, u64)>) -> Vec<(String, ParameterDelta)> {
        let (mut first, mut ranges) = (0, Vec::new());
        for (name, elements) in parameters {
            let end = first + elements;
            let range = self.indices.partition_point(|&i| i < first)..self.indices.partition_point(|&i| i < end);
            ranges.push((name, first, range));
            first = end;
        }
        for (_, first, range) in &ranges {
            self.indices[range.clone()].iter_mut().for_each(|index| *index -= first);
        }
        let tensor = Arc::new(self);
        let part = |(name, _, range)| (name, ParameterDelta { tensor: tensor.clone(), range });
        ranges.into_iter().map(part).collect()
    }

    /// The new values of some changes.
    fn values(&self, range: Range<usize>) -> TensorData<'_> {
        let values = &self.payload[self.indices.len() * GAP_BYTES..];
        tensor_of_bytes(self.dtype, values, 1, &Slice { rows: range, cols: 0..1 })
    }
}

impl ParameterDelta {
    pub fn changes(&self) -> Changes<'_> {
        let Self { tensor, range } = self;
        Changes { indices: &tensor.indices[range.clone()], values: tensor.values(range.clone()) }
    }
}
