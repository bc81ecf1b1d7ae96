//! Weight matrices.

use std::any::Any;
use std::ops::Range;

use half::{bf16, f16};

use crate::backend::MatrixImpl;
use crate::device::{Device, DeviceError};

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

/// Called with a range of rows, calls the function it is given with (row, column, value) of each element of those rows
/// that changes. Called from several threads.
pub type WriteElements<'a> = dyn Fn(Range<usize>, &mut dyn FnMut(usize, usize, f32)) + Sync + 'a;

/// Weights `[n, k]` of a linear layer or an embedding, as the device stores them.
pub struct Matrix {
    device: Device,
    shape: MatrixShape,
    /// None while it is released.
    storage: Option<Box<dyn MatrixImpl>>,
}

impl Matrix {
    pub(crate) fn new(device: Device, shape: MatrixShape) -> Self {
        Self { device, shape, storage: None }
    }

    pub fn shape(&self) -> MatrixShape {
        self.shape
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Memory that it takes while it is not released, padding included.
    pub fn bytes(&self) -> usize {
        self.device.room().matrix_bytes(self.shape)
    }

    /// Takes its memory, if it has none; all values are zero then.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn restore(&mut self) -> Result<(), DeviceError> {
        if self.storage.is_none() {
            self.storage = Some(self.device.room().matrix(self.shape)?);
        }
        Ok(())
    }

    /// Gives its memory back to the system; its values are lost.
    pub fn release(&mut self) {
        self.storage = None;
    }

    /// A matrix of zeros with the same shape on the same device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros_like(&self) -> Result<Matrix, DeviceError> {
        self.device.zeros(self.shape)
    }

    /// Writes rows from `row0` on, rounding to nearest even where the matrix is bfloat16. One thread.
    ///
    /// # Panics
    /// If it is released, these are not whole rows, or they pass the end.
    pub fn write_rows(&mut self, row0: usize, rows: WeightRows<'_>) {
        let k = self.k();
        self.write_columns(row0, rows, k, 0);
    }

    /// As [`Matrix::write_rows`], from rows of `width` values of which the matrix has those from `first_column` on.
    ///
    /// # Panics
    /// If it is released, these are not whole rows, they pass the end, or have fewer columns than the matrix from
    /// `first_column` on.
    pub fn write_columns(&mut self, row0: usize, rows: WeightRows<'_>, width: usize, first_column: usize) {
        self.storage.as_deref_mut().expect(RELEASED).write_columns(row0, rows, width, first_column);
    }

    /// Copies whole rows from `row0` on as they are stored; bfloat16 may also be read as float32, which is exact.
    ///
    /// # Panics
    /// If it is released, `out` is not of whole rows, passes the end, or is bfloat16 for a float32 matrix.
    pub fn read_rows(&self, row0: usize, out: RowBits<'_>) {
        self.storage.as_deref().expect(RELEASED).read_rows(row0, out);
    }

    /// The device's own storage.
    ///
    /// # Panics
    /// If it is released, or another device's.
    pub(crate) fn storage<S: MatrixImpl>(&self) -> &S {
        let storage: &dyn Any = self.storage.as_deref().expect(RELEASED);
        storage.downcast_ref().expect("a matrix of this device")
    }

    /// As [`Matrix::storage`], to be written.
    pub(crate) fn storage_mut<S: MatrixImpl>(&mut self) -> &mut S {
        let storage: &mut dyn Any = self.storage.as_deref_mut().expect(RELEASED);
        storage.downcast_mut().expect("a matrix of this device")
    }
}

const RELEASED: &str = "a matrix is used while it is released";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, DeviceOptions};

    #[test]
    fn a_released_matrix_comes_back_as_zeros_and_can_be_written_again() {
        let options = DeviceOptions { rank: 0, threads: 1, kernel: "auto" };
        for backend in Backend::ALL {
            let device = backend.open(&options).unwrap();
            let shape = MatrixShape { dtype: WeightDtype::F32, n: 20, k: 9, leaves: 1 };
            let mut matrix = device.matrix(shape);
            matrix.restore().unwrap();
            matrix.write_rows(0, WeightRows::F32(&[1.5; 180]));
            matrix.restore().unwrap();
            let read = |matrix: &Matrix| {
                let mut values = [f32::NAN; 180];
                matrix.read_rows(0, RowBits::F32(&mut values));
                values
            };
            assert_eq!(read(&matrix), [1.5; 180]);
            matrix.release();
            matrix.restore().unwrap();
            assert_eq!(read(&matrix), [0.0; 180]);
            matrix.write_rows(19, WeightRows::F32(&[2.5; 9]));
            assert_eq!(read(&matrix)[171..], [2.5; 9]);
            let like = matrix.zeros_like().unwrap();
            assert_eq!((read(&like), like.shape(), like.bytes()), ([0.0; 180], shape, matrix.bytes()));
        }
    }

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
