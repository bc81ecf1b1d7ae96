//! The storage that a device's room implements. [`Device`](crate::Device), [`Matrix`](crate::Matrix),
//! [`KvCache`](crate::KvCache) and [`Buffer`](crate::Buffer) document what each method does.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::activations::Activations;
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;
use crate::weights::{MatrixShape, RowBits, WeightRows};

/// The memory of one rank's device.
pub(crate) trait MemoryImpl: Send + Sync + 'static {
    /// Bytes that [`MemoryImpl::matrix`] takes for this shape.
    fn matrix_bytes(&self, shape: MatrixShape) -> usize;
    /// Storage of zeros.
    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError>;
    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError>;
    /// `len` float32 zeros in one dimension.
    fn zeros(&self, len: usize) -> Result<Activations>;
    fn activations(&self, rows: usize, width: usize) -> Result<Activations>;
    /// Writes to a tensor of [`MemoryImpl::zeros`].
    fn write(&self, to: &Tensor, start: usize, values: &[f32]) -> Result<()>;
    /// Reads a tensor of [`MemoryImpl::zeros`].
    fn read(&self, from: &Tensor, range: Range<usize>) -> Result<Vec<f32>>;
}

/// A device's storage of a matrix. Its methods are called from any thread, beside the operators.
pub(crate) trait MatrixImpl: Any + Send + Sync {
    fn write_columns(&mut self, row0: usize, rows: WeightRows<'_>, width: usize, first_column: usize);
    fn read_rows(&self, row0: usize, out: RowBits<'_>);
}

/// A device's storage of a layer's keys and values.
pub(crate) trait KvCacheImpl: Any + Send {}
