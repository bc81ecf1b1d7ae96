//! The tensors of a push that are kept, as new values of whole parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::buffer::Buffer;
use crate::weights::parameters::tensor_of_bytes;
use crate::weights::{Dtype, Slice, TensorData};

/// New values of whole parameters, by the model's names (unfused, unprefixed).
#[derive(Debug, Default)]
pub struct Tensors {
    /// Where the values are, by the parameter's name.
    parameters: BTreeMap<String, Location>,
}

/// Where the values of a parameter are.
#[derive(Debug)]
struct Location {
    tensor: Arc<KeptTensor>,
    /// The row of the tensor that the parameter begins with.
    first_row: usize,
}

/// A verified tensor. A fused one holds several parameters.
#[derive(Debug)]
pub(super) struct KeptTensor {
    pub dtype: Dtype,
    /// How many values a row of the tensor has.
    pub columns: usize,
    pub bytes: Buffer,
}

impl Tensors {
    /// Names of the parameters that these tensors bring, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The values of a slice of a parameter; `None` if these tensors do not bring it.
    ///
    /// # Panics
    /// If the slice is not inside the parameter.
    pub fn read(&self, parameter: &str, slice: &Slice) -> Option<TensorData<'_>> {
        let Location { tensor, first_row } = self.parameters.get(parameter)?;
        let rows = first_row + slice.rows.start..first_row + slice.rows.end;
        let slice = Slice { rows, cols: slice.cols.clone() };
        Some(tensor_of_bytes(tensor.dtype, &tensor.bytes, tensor.columns, &slice))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Adds a parameter that begins with row `first_row` of `tensor`.
    pub(super) fn insert(&mut self, parameter: String, tensor: Arc<KeptTensor>, first_row: usize) {
        self.parameters.insert(parameter, Location { tensor, first_row });
    }
}
