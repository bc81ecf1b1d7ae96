//! The paged key-value cache of one layer.

use std::any::Any;

use crate::backend::KvCacheImpl;
use crate::device::{Device, DeviceError};

/// Type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    Bf16,
    F32,
}

impl KvDtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }
}

/// The shape of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub blocks: usize,
    /// Tokens in a block; a multiple of 16 is fastest.
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Memory of one block of one layer: keys and values.
    pub fn bytes_per_block(&self) -> usize {
        2 * self.block_len() * self.dtype.bytes()
    }

    /// Elements of a block's keys, or of its values.
    pub(crate) fn block_len(&self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Elements of one head of a block.
    pub(crate) fn head_len(&self) -> usize {
        self.head_dim * self.block_size
    }
}

/// Copies the first `tokens` slots of block `src` to block `dst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub src: u32,
    pub dst: u32,
    pub tokens: usize,
}

/// Keys and values of one layer, in blocks of tokens, as the device stores them.
pub struct KvCache {
    device: Device,
    layout: KvLayout,
    /// None while it is released.
    storage: Option<Box<dyn KvCacheImpl>>,
}

impl KvCache {
    pub(crate) fn new(device: Device, layout: KvLayout) -> Self {
        Self { device, layout, storage: None }
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Takes its memory, if it has none. What it holds then is unspecified.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn restore(&mut self) -> Result<(), DeviceError> {
        if self.storage.is_none() {
            self.storage = Some(self.device.room().kv_cache(self.layout)?);
        }
        Ok(())
    }

    /// Gives its memory back to the system.
    pub fn release(&mut self) {
        self.storage = None;
    }

    /// The device's own storage.
    ///
    /// # Panics
    /// If it is released, or another device's.
    pub(crate) fn storage<S: KvCacheImpl>(&self) -> &S {
        let storage: &dyn Any = self.storage.as_deref().expect(RELEASED);
        storage.downcast_ref().expect("a cache of this device")
    }

    /// As [`KvCache::storage`], to be written.
    pub(crate) fn storage_mut<S: KvCacheImpl>(&mut self) -> &mut S {
        let storage: &mut dyn Any = self.storage.as_deref_mut().expect(RELEASED);
        storage.downcast_mut().expect("a cache of this device")
    }
}

const RELEASED: &str = "a step without a KV cache: it is released";
