//! New values of whole parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::receipt::Buffer;
use crate::weights::{Dtype, Slice, TensorData};

/// New values of whole parameters, by the model's names (unfused, unprefixed).
#[derive(Debug, Default)]
pub struct Tensors {
    parameters: BTreeMap<String, Part>,
}

/// One parameter inside a tensor.
#[derive(Debug)]
struct Part {
    tensor: Arc<Staged>,
    first_row: usize,
}

/// A verified tensor.
#[derive(Debug)]
pub(super) struct Staged {
    pub dtype: Dtype,
    /// Values in a row of the tensor.
    pub columns: usize,
    pub bytes: Buffer,
}

impl Tensors {
    /// Names of the parameters, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// Values of a slice; None if it has not this parameter.
    ///
    /// # Panics
    /// If the slice is not inside the parameter.
    pub fn read(&self, parameter: &str, slice: &Slice) -> Option<TensorData<'_>> {
        let Part { tensor, first_row } = self.parameters.get(parameter)?;
        let rows = first_row + slice.rows.start..first_row + slice.rows.end;
        let slice = Slice { rows, cols: slice.cols.clone() };
        Some(TensorData::of_bytes(tensor.dtype, &tensor.bytes, tensor.columns, &slice))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    pub(super) fn insert(&mut self, parameter: String, tensor: Arc<Staged>, first_row: usize) {
        self.parameters.insert(parameter, Part { tensor, first_row });
    }
}
