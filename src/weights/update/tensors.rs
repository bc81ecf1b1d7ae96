//! Verified tensors of a FULL push, as new values of whole parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::shadow::RowLayout;
use super::tensor_buffer::TensorBuffer;
use crate::weights::parameters::{Slice, TensorData, tensor_of_bytes};

/// New values of whole parameters, by the model's names (unfused, unprefixed).
#[derive(Debug, Default)]
pub struct Tensors {
    /// A parameter's tensor and the row of the tensor that the parameter begins with, by the parameter's name.
    parameters: BTreeMap<String, (Arc<ReceivedTensor>, usize)>,
}

/// A verified tensor. A fused one holds several parameters.
#[derive(Debug)]
pub(in crate::weights) struct ReceivedTensor {
    pub layout: RowLayout,
    pub bytes: TensorBuffer,
}

impl Tensors {
    /// Names of the parameters that have new values, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The values of a slice of a parameter; `None` if the parameter has no new values.
    ///
    /// # Panics
    /// If the slice is not inside the parameter.
    pub fn read(&self, parameter: &str, slice: &Slice) -> Option<TensorData<'_>> {
        let (tensor, first_row) = self.parameters.get(parameter)?;
        let rows = first_row + slice.rows.start..first_row + slice.rows.end;
        let slice = Slice { rows, cols: slice.cols.clone() };
        Some(tensor_of_bytes(tensor.layout.dtype, &tensor.bytes, tensor.layout.columns, &slice))
    }

    pub(in crate::weights) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Adds the parameters of `others`.
    #[cfg(test)]
    pub(crate) fn extend(&mut self, others: Self) {
        self.parameters.extend(others.parameters);
    }

    /// Adds a parameter that begins with row `first_row` of `tensor`.
    pub(in crate::weights) fn insert(&mut self, parameter: String, tensor: Arc<ReceivedTensor>, first_row: usize) {
        self.parameters.insert(parameter, (tensor, first_row));
    }
}
