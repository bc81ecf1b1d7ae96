//! The paged key-value cache of one layer, as a handle of a device's storage.

use std::any::Any;
use std::sync::Arc;

use crate::backend::storage::{KvCacheImpl, MemoryImpl};
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;

/// Keys and values of one layer, in blocks of tokens, as the device stores them.
pub struct KvCache {
    memory: Arc<dyn MemoryImpl>,
    layout: KvLayout,
    /// `None` while it is released.
    storage: Option<Box<dyn KvCacheImpl>>,
    /// Storage without memory, whose address is kept while it is released.
    released: Option<Box<dyn KvCacheImpl>>,
}

impl KvCache {
    pub(crate) fn new(memory: Arc<dyn MemoryImpl>, layout: KvLayout) -> Self {
        Self { memory, layout, storage: None, released: None }
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Allocates its memory, if it has none; the content is unspecified.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn restore(&mut self) -> Result<(), DeviceError> {
        if let Some(released) = &mut self.released {
            released.restore()?;
            self.storage = self.released.take();
        }
        if self.storage.is_none() {
            self.storage = Some(self.memory.kv_cache(self.layout)?);
        }
        Ok(())
    }

    /// Gives its memory back to the system. On devices whose memory has addresses of its own, it gets the same address
    /// again.
    pub fn release(&mut self) {
        if let Some(mut storage) = self.storage.take() {
            self.released = storage.release().then_some(storage);
        }
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
