//! A device as everything above this crate sees it.

use std::sync::Arc;

use crate::Backend;
use crate::activations::Activations;
use crate::backend::device::{DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::storage::MemoryImpl;
use crate::buffer::Buffer;
use crate::error::DeviceError;
use crate::kv_cache::KvCache;
use crate::kv_layout::KvLayout;
use crate::matrix::Matrix;
use crate::ops::Ops;
use crate::weights::MatrixShape;

/// The device of one rank: what it can take, its memory and its operators. Clones are handles of the same device.
#[derive(Clone)]
pub struct Device(Arc<dyn DeviceImpl>);

impl Device {
    pub(crate) fn new(device: impl DeviceImpl) -> Self {
        Self(Arc::new(device))
    }

    /// Name of the variant of its operators, such as the instruction set.
    pub fn kernel(&self) -> &'static str {
        self.0.kernel()
    }

    /// Whether it can run a model of this shape.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] naming the value that it cannot take.
    pub fn check(&self, model: &ModelShape) -> Result<(), DeviceError> {
        self.0.check(model)
    }

    /// Starts the operators of the rank.
    pub fn ops(&self) -> Ops {
        Ops::new(self.0.ops())
    }

    /// A matrix that has no memory until [`Matrix::restore`].
    pub fn matrix(&self, shape: MatrixShape) -> Matrix {
        Matrix::new(self.memory(), shape)
    }

    /// A matrix of zeros.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros(&self, shape: MatrixShape) -> Result<Matrix, DeviceError> {
        let mut matrix = self.matrix(shape);
        matrix.restore()?;
        Ok(matrix)
    }

    /// A paged cache for the keys and values of one layer, which has no memory until [`KvCache::restore`].
    pub fn kv_cache(&self, layout: KvLayout) -> KvCache {
        KvCache::new(self.memory(), layout)
    }

    /// A buffer of zeros.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn buffer(&self, len: usize) -> candle_core::Result<Buffer> {
        Ok(Buffer::new(self.memory(), self.0.zeros(len)?))
    }

    /// A buffer with these values.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn upload(&self, values: &[f32]) -> candle_core::Result<Buffer> {
        let buffer = self.buffer(values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Zeros for activations, `[rows, width]` float32, aligned as the operators read them fastest.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn activations(&self, rows: usize, width: usize) -> candle_core::Result<Activations> {
        self.0.activations(rows, width)
    }

    fn memory(&self) -> Arc<dyn MemoryImpl> {
        self.0.clone()
    }
}

/// The devices of all ranks, and the memory that they have together.
#[derive(Clone)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Opens a device for each of `ranks`, each with `threads` threads of the host; see [`DeviceOptions`].
    ///
    /// # Errors
    /// As for [`Backend::open`].
    pub fn open(backend: Backend, ranks: usize, threads: usize, kernel: &str) -> Result<Self, DeviceError> {
        (0..ranks)
            .map(|rank| backend.open(&DeviceOptions { rank, threads, kernel }))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The device of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn of_rank(&self, rank: usize) -> &Device {
        &self.0[rank]
    }

    /// The devices in the order of the ranks.
    pub fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter()
    }

    /// Bytes of memory that the process may use of them at most, before any share is applied.
    pub fn total_bytes(&self) -> u64 {
        self.memories().map(|device| device.0.total_bytes()).sum()
    }

    /// Bytes of their memory that the process takes now.
    pub fn used_bytes(&self) -> u64 {
        self.memories().map(|device| device.0.used_bytes()).sum()
    }

    /// Gives what allocators keep of freed memory back to the system.
    pub fn trim(&self) {
        self.memories().for_each(|device| device.0.trim());
    }

    /// One device for each memory: some share one.
    fn memories(&self) -> impl Iterator<Item = &Device> {
        let is_first = |i: usize| self.0[..i].iter().all(|other| other.0.memory() != self.0[i].0.memory());
        self.0.iter().enumerate().filter(move |(i, _)| is_first(*i)).map(|(_, device)| device)
    }
}
