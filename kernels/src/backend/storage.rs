//! The traits of a device's storage. [`Device`](crate::Device), [`Matrix`](crate::Matrix),
//! [`KvCache`](crate::KvCache) and [`DeviceBuffer`](crate::DeviceBuffer) document what each method does.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::activations::Activations;
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;
use crate::routing_shape::RoutingShape;
use crate::values::{Dtype, TensorData, TensorView};
use crate::weights::MatrixShape;

/// The memory of one rank's device.
pub(crate) trait MemoryImpl: Send + Sync + 'static {
    /// Bytes that [`MemoryImpl::matrix`] takes for this shape.
    fn matrix_bytes(&self, shape: MatrixShape) -> usize;
    /// Storage of zeros.
    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError>;
    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError>;
    fn routing(&self, shape: &RoutingShape) -> std::result::Result<Box<dyn RoutingImpl>, DeviceError>;
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
    /// Gives the memory back and keeps its address, for [`MatrixImpl::restore`]. False where a device cannot: then it
    /// is to be dropped.
    fn release(&mut self) -> bool {
        false
    }
    /// Takes memory again after a release, with zeros.
    fn restore(&mut self) -> std::result::Result<(), DeviceError> {
        Ok(())
    }
    fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize);
    /// The stored values of whole rows.
    fn read_rows(&self, rows: Range<usize>) -> TensorData<'static>;
    /// Copies whole rows from `row0` on, as float32.
    fn read_f32(&self, row0: usize, out: &mut [f32]);
    fn can_copy(&self, _from: &BorrowedRows<'_>) -> bool {
        false
    }
    fn copy_columns(&mut self, _row0: usize, _from: &BorrowedRows<'_>, _first_column: usize) -> Result<()> {
        unreachable!("such a matrix copies no borrowed rows")
    }
}

/// An allocation of another process. [`BorrowedMemory`](crate::BorrowedMemory) documents what each method does.
pub(crate) trait BorrowedImpl: Any + Send + Sync {
    fn bytes(&self) -> u64;
    /// Calls `take` once.
    fn read(&self, part: Range<u64>, take: &mut dyn FnMut(&[u8])) -> Result<()>;
    /// Of rows of this memory.
    fn can_digest(&self, rows: &BorrowedRows<'_>) -> bool;
    /// Whether both are of one device.
    fn is_beside(&self, other: &(dyn BorrowedImpl + 'static)) -> bool;
    /// Of rows of this memory and others beside it, all of which can be digested.
    fn digest(&self, all: &[BorrowedRows<'_>]) -> Result<Vec<Digested>>;
}

/// Rows of values in memory of another process, one after the other: of a tensor as it was pushed.
#[derive(Clone, Copy)]
pub struct BorrowedRows<'a> {
    pub(crate) memory: &'a (dyn BorrowedImpl + 'static),
    /// The first value's offset in the allocation, in bytes.
    pub(crate) offset: u64,
    pub(crate) dtype: Dtype,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// Facts that a device has computed about values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digested {
    /// XXH3-128 of their bytes, big-endian.
    pub digest: [u8; 16],
    /// Index of the first value that is not finite.
    pub not_finite: Option<usize>,
}

/// A device's storage of a layer's keys and values.
pub(crate) trait KvCacheImpl: Any + Send {
    /// As [`MatrixImpl::release`].
    fn release(&mut self) -> bool {
        false
    }
    /// As [`MatrixImpl::restore`], with unspecified content.
    fn restore(&mut self) -> std::result::Result<(), DeviceError> {
        Ok(())
    }
}

/// A device's storage of routed rows. `entries` are those of `[rows, top_k]`.
pub(crate) trait RoutingImpl: Any + Send {
    fn read_experts(&self, entries: Range<usize>) -> Result<Vec<u16>>;
    fn read_weights(&self, entries: Range<usize>) -> Result<Vec<f32>>;
}
