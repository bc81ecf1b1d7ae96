//! Memory for the bytes of one pushed tensor.

use std::fmt;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// A buffer of this many bytes or more has its own mapping. Smaller ones come from the heap: rounding them up to pages
/// would cost more memory than the heap may hold on to.
const MAPPED_BYTES: usize = 32 << 10;

/// Zeroed bytes. A mapped buffer goes back to the operating system when it is dropped.
pub(super) enum Buffer {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl Buffer {
    /// A buffer of `bytes` zeros.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system has not as much memory.
    pub fn zeroed(bytes: usize) -> Result<Self> {
        if bytes < MAPPED_BYTES {
            return Ok(Self::Heap(vec![0; bytes]));
        }
        // No huge pages: for memory that is written once and read once, finding and clearing them takes longer than the
        // faults that they save.
        let map = MmapMut::map_anon(bytes)
            .map_err(|e| Error::ResourceExhausted(format!("cannot map {bytes} bytes to stage a tensor: {e}")))?;
        Ok(Self::Mapped(map))
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}
