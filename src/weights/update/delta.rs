//! New values of single elements of parameters.

use std::collections::BTreeMap;

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

/// The decoded payload of one parameter.
#[derive(Debug)]
pub(in crate::weights) struct ParameterDelta {
    pub dtype: Dtype,
    pub indices: Vec<u64>,
    /// The decompressed payload: the gaps between the indices, then the values.
    pub payload: TensorBuffer,
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

impl ParameterDelta {
    pub fn changes(&self) -> Changes<'_> {
        let changed = self.indices.len();
        let (values, all) = (&self.payload[changed * GAP_BYTES..], Slice { rows: 0..changed, cols: 0..1 });
        Changes { indices: &self.indices, values: tensor_of_bytes(self.dtype, values, 1, &all) }
    }
}
