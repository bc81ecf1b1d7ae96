//! Read-only mapped files, whose pages can be given back, and which may be cut short or written to while they are
//! mapped.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::memory::BorrowedMap;

/// A whole file mapped for reading.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    map: BorrowedMap,
    opened: Stamp,
}

/// What the system says of a file's content: where it is the same, nobody has written to the file, as far as its clock
/// can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    file: (u64, u64),
    bytes: u64,
    modified: (i64, i64),
    /// When the inode last changed (seconds, nanoseconds); nobody can set it.
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &Metadata) -> Self {
        Self {
            file: (file.dev(), file.ino()),
            bytes: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

impl MappedFile {
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |e: std::io::Error| Error::Config(format!("cannot read {}: {e}", path.display()));
        let file = File::open(path).map_err(fail)?;
        let map = BorrowedMap::new(&file).map_err(fail)?;
        let opened = Stamp::of(&file.metadata().map_err(fail)?);
        Ok(Self { path: path.into(), file, map, opened })
    }

    /// The file that has this one's path now, which must have as many bytes.
    ///
    /// # Errors
    /// `DataLoss` if there is none.
    pub fn reopened(&self) -> Result<Self> {
        let again = Self::open(&self.path).map_err(|e| Error::DataLoss(e.to_string()))?;
        if again.bytes() != self.bytes() {
            return Err(again.lost(&format!("has {} bytes and had {}", again.bytes(), self.bytes())));
        }
        Ok(again)
    }

    pub fn bytes(&self) -> usize {
        self.map.bytes()
    }

    /// Hands a part of it on to `use_bytes`, which finds zeros where the file was cut short.
    ///
    /// # Errors
    /// `DataLoss` if it was.
    pub fn read<T>(&self, part: Range<usize>, use_bytes: impl FnOnce(&[u8]) -> T) -> Result<T> {
        self.map.read(part, use_bytes).ok_or_else(|| self.lost("was cut short while it served"))
    }

    /// As it was when it was opened.
    pub fn opened(&self) -> Stamp {
        self.opened
    }

    /// As it is now.
    ///
    /// # Errors
    /// `DataLoss` if it is shorter than what is mapped, or was when it was read.
    pub fn stamp(&self) -> Result<Stamp> {
        let now = self.file.metadata().map_err(|e| self.lost(&format!("cannot be read: {e}")))?;
        if self.map.is_lost() || now.len() < self.bytes() as u64 {
            let what = format!("was cut short while it served: it has {} bytes and had {}", now.len(), self.bytes());
            return Err(self.lost(&what));
        }
        Ok(Stamp::of(&now))
    }

    /// What to say of a file of which `what` is wrong. Its directory is no client's business.
    pub fn lost(&self, what: &str) -> Error {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        Error::DataLoss(format!("the checkpoint's file {name} {what}"))
    }

    /// Gives the pages of this byte range back to the system. They stay in the page cache while there is room, and are
    /// read again if they are used again.
    pub fn release(&self, range: Range<usize>) {
        self.map.release(range);
    }
}
