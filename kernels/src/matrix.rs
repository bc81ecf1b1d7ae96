//! Weight matrices as handles of a device's storage.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::storage::{BorrowedRows, MatrixImpl, MemoryImpl};
use crate::error::DeviceError;
use crate::values::{TensorData, TensorView};
use crate::weights::MatrixShape;

/// Weights `[n, k]` of a linear layer or an embedding, as the device stores them.
pub struct Matrix {
    memory: Arc<dyn MemoryImpl>,
    shape: MatrixShape,
    /// `None` while it is released.
    storage: Option<Box<dyn MatrixImpl>>,
    /// Storage without memory, whose address is kept while it is released.
    released: Option<Box<dyn MatrixImpl>>,
}

impl Matrix {
    pub(crate) fn new(memory: Arc<dyn MemoryImpl>, shape: MatrixShape) -> Self {
        Self { memory, shape, storage: None, released: None }
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
        self.memory.matrix_bytes(self.shape)
    }

    /// Takes its memory, if it has none; all values are zero then.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn restore(&mut self) -> Result<(), DeviceError> {
        if let Some(released) = &mut self.released {
            released.restore()?;
            self.storage = self.released.take();
        }
        if self.storage.is_none() {
            self.storage = Some(self.memory.matrix(self.shape)?);
        }
        Ok(())
    }

    /// Gives its memory back to the system; its values are lost. On devices whose memory has addresses of its own, it
    /// gets the same address again.
    pub fn release(&mut self) {
        if let Some(mut storage) = self.storage.take() {
            self.released = storage.release().then_some(storage);
        }
    }

    /// A matrix of zeros with the same shape on the same device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros_like(&self) -> Result<Matrix, DeviceError> {
        let mut zeros = Matrix::new(self.memory.clone(), self.shape);
        zeros.restore()?;
        Ok(zeros)
    }

    /// Writes rows from `row0` on, rounding to nearest even where the matrix is bfloat16. One thread.
    ///
    /// # Panics
    /// If it is released, these are not whole rows, or they pass the end.
    pub fn write_rows(&mut self, row0: usize, rows: TensorView<'_>) {
        let k = self.k();
        self.write_columns(row0, rows, k, 0);
    }

    /// As [`Matrix::write_rows`], from rows of `width` values of which the matrix has those from `first_column` on.
    ///
    /// # Panics
    /// If it is released, these are not whole rows, they pass the end, or have fewer columns than the matrix from
    /// `first_column` on.
    pub fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) {
        self.storage.as_deref_mut().expect(RELEASED).write_columns(row0, rows, width, first_column);
    }

    /// Whether [`Matrix::copy_columns`] takes these rows: they are in memory of a device of the same kind, and aligned
    /// there.
    ///
    /// # Panics
    /// If it is released.
    pub fn can_copy(&self, from: &BorrowedRows<'_>) -> bool {
        self.storage.as_deref().expect(RELEASED).can_copy(from)
    }

    /// As [`Matrix::write_columns`], of rows that devices copy; only if [`Matrix::can_copy`]. They are copied when it
    /// returns. Those of another device come through [`Device::arriving_bytes`](crate::Device::arriving_bytes) of this
    /// one's memory.
    ///
    /// # Errors
    /// If a device cannot copy them, or there is no memory through which they come.
    ///
    /// # Panics
    /// As [`Matrix::write_columns`].
    pub fn copy_columns(
        &mut self,
        row0: usize,
        from: &BorrowedRows<'_>,
        first_column: usize,
    ) -> candle_core::Result<()> {
        self.storage.as_deref_mut().expect(RELEASED).copy_columns(row0, from, first_column)
    }

    /// The stored values of whole rows.
    ///
    /// # Panics
    /// If it is released, or the rows pass the end.
    pub fn read_rows(&self, rows: Range<usize>) -> TensorData<'static> {
        self.storage.as_deref().expect(RELEASED).read_rows(rows)
    }

    /// Copies whole rows from `row0` on as float32, which is exact.
    ///
    /// # Panics
    /// If it is released, or `out` is not of whole rows or passes the end.
    pub fn read_f32(&self, row0: usize, out: &mut [f32]) {
        self.storage.as_deref().expect(RELEASED).read_f32(row0, out);
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
    use crate::StorageDtype;
    use crate::{Backend, DeviceOptions};

    #[test]
    fn a_released_matrix_comes_back_as_zeros_and_can_be_written_again() {
        let options = DeviceOptions::default();
        for backend in Backend::ALL {
            let device = backend.open(&options).unwrap();
            let shape = MatrixShape { dtype: StorageDtype::F32, n: 20, k: 9, leaves: 1 };
            let mut matrix = device.matrix(shape);
            matrix.restore().unwrap();
            matrix.write_rows(0, TensorView::F32(&[1.5; 180]));
            matrix.restore().unwrap();
            let read = |matrix: &Matrix| {
                let mut values = [f32::NAN; 180];
                matrix.read_f32(0, &mut values);
                values
            };
            assert_eq!(read(&matrix), [1.5; 180]);
            matrix.release();
            matrix.restore().unwrap();
            assert_eq!(read(&matrix), [0.0; 180]);
            matrix.write_rows(19, TensorView::F32(&[2.5; 9]));
            assert_eq!(read(&matrix)[171..], [2.5; 9]);
            let like = matrix.zeros_like().unwrap();
            assert_eq!((read(&like), like.shape(), like.bytes()), ([0.0; 180], shape, matrix.bytes()));
        }
    }
}
