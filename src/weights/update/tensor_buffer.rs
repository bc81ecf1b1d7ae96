//! Memory for the bytes of one pushed tensor.

use std::fmt;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// A buffer of this many bytes or more has its own mapping. Smaller ones come from the heap: rounding them up to pages
/// would cost more memory than the heap may hold on to.
const MAPPED_BYTES: usize = 32 << 10;

/// Zeroed bytes. A mapped buffer goes back to the operating system when it is dropped.
pub(in crate::weights) enum TensorBuffer {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl TensorBuffer {
    /// A buffer of `bytes` zeros.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system does not have enough memory.
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

impl Default for TensorBuffer {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl Deref for TensorBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl DerefMut for TensorBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorBuffer({} bytes)", self.len())
    }
}
