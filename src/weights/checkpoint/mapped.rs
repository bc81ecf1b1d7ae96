//! Read-only mapped files. Others may cut them short or write to them while they are mapped.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::unreadable;
use crate::error::{Error, Result};
use crate::memory::BorrowedMap;

/// A whole file, mapped for reading.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    map: BorrowedMap,
    opened: FileStamp,
}

/// The system's record of changes to a file. Between two equal stamps no process has written to the file, as far as the
/// resolution of the system's clock can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Device and inode.
    file: (u64, u64),
    bytes: u64,
    /// When the content was last written, in seconds and nanoseconds. The file's owner can set it.
    modified: (i64, i64),
    /// When the inode last changed, in seconds and nanoseconds. Nobody can set it.
    changed: (i64, i64),
}

impl FileStamp {
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
    /// Opens and maps a file.
    ///
    /// # Errors
    /// `Config` naming the file if it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |e: std::io::Error| unreadable(path, &e);
        let file = File::open(path).map_err(fail)?;
        let map = BorrowedMap::new(&file).map_err(fail)?;
        let opened = FileStamp::of(&file.metadata().map_err(fail)?);
        Ok(Self { path: path.into(), file, map, opened })
    }

    /// Opens the file that has this one's path now.
    ///
    /// # Errors
    /// `DataLoss` if there is none, or it has another size.
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

    /// Calls `use_bytes` with a part of the file. Where the file was cut short the bytes are zeros, and the result is
    /// an error.
    ///
    /// # Errors
    /// `DataLoss` if the file was cut short.
    pub fn read<T>(&self, part: Range<usize>, use_bytes: impl FnOnce(&[u8]) -> T) -> Result<T> {
        self.map.read(part, use_bytes).ok_or_else(|| self.lost("was cut short while it served"))
    }

    /// The stamp of the file when it was opened.
    pub fn opened(&self) -> FileStamp {
        self.opened
    }

    /// The stamp of the file now.
    ///
    /// # Errors
    /// `DataLoss` if the file is shorter than what is mapped, or was so when it was read.
    pub fn stamp(&self) -> Result<FileStamp> {
        let now = self.file.metadata().map_err(|e| self.lost(&format!("cannot be read: {e}")))?;
        if self.map.is_lost() || now.len() < self.bytes() as u64 {
            let what = format!("was cut short while it served: it has {} bytes and had {}", now.len(), self.bytes());
            return Err(self.lost(&what));
        }
        Ok(FileStamp::of(&now))
    }

    /// The error for this file, of which `what` is wrong. It has the file's name only, because clients are not to learn
    /// where models are.
    pub fn lost(&self, what: &str) -> Error {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        Error::DataLoss(format!("the checkpoint's file {name} {what}"))
    }

    /// Gives the mapped pages of a byte range back to the system. They stay in the page cache while there is room, and
    /// are read again when they are used again.
    pub fn release(&self, range: Range<usize>) {
        self.map.release(range);
    }
}
