//! Files of secrets: read with a limit, and looked at for changes.

use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Largest file in bytes: the certificates of all public authorities take a quarter of it.
const MAX_BYTES: u64 = 1 << 20;

/// A file that a flag names.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) flag: &'static str,
    pub(super) path: PathBuf,
}

/// Which file a path leads to, and when it was changed last. Following links, so that a link that is turned to another
/// file is a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp(Option<[i64; 7]>);

impl Named {
    pub(super) fn new(flag: &'static str, path: &Path) -> Self {
        Self { flag, path: path.to_owned() }
    }

    /// An error about this file.
    pub(super) fn wrong(&self, what: &str) -> Error {
        Error::Config(format!("{} {}: {what}", self.flag, self.path.display()))
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// `Config` if it is no file, cannot be read, or is too large.
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        let failed = |e: std::io::Error| self.wrong(&format!("cannot be read: {e}"));
        // Looked at first: to open a pipe would wait for its writer.
        if !self.path.metadata().map_err(failed)?.is_file() {
            return Err(self.wrong("is not a file"));
        }
        let mut bytes = Vec::new();
        File::open(&self.path).map_err(failed)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(self.wrong("has more than 1 MiB"));
        }
        Ok(bytes)
    }

    /// Warns if others than the owner may read the file, which has secrets.
    pub(super) fn warn_if_open(&self) {
        const OTHERS: u32 = 0o077;
        if let Ok(mode) = self.path.metadata().map(|metadata| metadata.mode() & 0o777)
            && mode & OTHERS != 0
        {
            let path = self.path.display();
            tracing::warn!("{} {path}: others may open it (mode {mode:03o}); `chmod 600` it", self.flag);
        }
    }

    pub(super) fn stamp(&self) -> Stamp {
        let facts = |m: Metadata| {
            let (device, inode, length) = (m.dev() as i64, m.ino() as i64, m.len() as i64);
            [device, inode, length, m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()]
        };
        Stamp(self.path.metadata().ok().map(facts))
    }
}
