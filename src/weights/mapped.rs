//! Read-only mapped files, whose pages can be given back.

use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A whole file mapped for reading.
#[derive(Debug)]
pub(super) struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |e: std::io::Error| Error::Config(format!("cannot read {}: {e}", path.display()));
        let file = std::fs::File::open(path).map_err(fail)?;
        // SAFETY: the mapping is private and read-only. That nobody truncates or rewrites a checkpoint while it is
        // served is a condition of running the server, as of every program that maps its model.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok(Self { map })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Gives the pages of this byte range back to the system. They stay in the page cache while there is room, and are
    /// read again if they are used again.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if !range.is_empty() {
            // SAFETY: the mapping is file-backed and never written, so a dropped page comes back with the same bytes.
            let advised = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.map.unchecked_advise_range(advice, range.start, range.len())
            };
            // The kernel may refuse (locked pages); the only effect is that the pages stay resident.
            drop(advised);
        }
        #[cfg(not(unix))]
        drop(range);
    }
}
