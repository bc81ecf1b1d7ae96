//! Segments of shared memory: files below `/dev/shm` that a client on the same machine writes and removes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use super::regular::check_regular;
use crate::error::{Error, Result};
use crate::memory::{BorrowedMap, Identity};

/// The field of the push that errors name.
const FIELD: &str = "source.shared_memory";
/// The beginning of the names that clients give their segments. Other files below `/dev/shm` belong to other programs.
const PREFIX: &str = "rollout-";
/// Most bytes of a segment's name: the system's own limit, checked here because errors repeat the name.
const MAX_NAME_BYTES: usize = 255;

/// A mapped segment.
#[derive(Debug)]
pub(in crate::weights::push) struct Segment {
    file: File,
    metadata: Metadata,
    map: BorrowedMap,
}

impl Segment {
    pub fn map(&self) -> &BorrowedMap {
        &self.map
    }

    fn new(name: &str, file: File, metadata: Metadata) -> Result<Self> {
        let map = BorrowedMap::new(&file).map_err(|e| Error::invalid(FIELD, format!("cannot map {name:?}: {e}")))?;
        Ok(Self { file, metadata, map })
    }

    /// Whether this segment maps the whole of the file that has `metadata`.
    fn is(&self, metadata: &Metadata) -> bool {
        let identity = |metadata: &Metadata| (metadata.dev(), metadata.ino(), metadata.len());
        !self.map.is_lost() && identity(&self.metadata) == identity(metadata)
    }

    /// Whether the segment's owner has removed it, so that only this process keeps its memory in use.
    fn is_removed(&self) -> bool {
        self.file.metadata().map_or(true, |metadata| metadata.nlink() == 0)
    }
}

/// The segments that clients name. That of the last push stays mapped for the next, because page faults on all of a new
/// mapping would cost as much as reading it.
#[derive(Debug, Default)]
pub struct Segments {
    kept: Mutex<Option<Arc<Segment>>>,
}

impl Segments {
    /// Unmaps the segment that is kept, if any.
    pub fn release(&self) {
        self.kept().take();
    }

    /// Unmaps the segment that is kept if its owner has removed it.
    pub fn release_removed(&self) {
        self.kept().take_if(|segment| segment.is_removed());
    }

    /// Opens a segment for reading, and keeps it in place of the last one.
    ///
    /// # Errors
    /// `InvalidArgument` if the name is not one that clients give, or is that of a link or of anything but a regular
    /// file. `NotFound` if there is no such file, or its owner does not let this process's user read it; so a server
    /// that runs as root does not read for a client what the client could not.
    pub(in crate::weights::push) fn open(&self, name: &str) -> Result<Arc<Segment>> {
        let file = open(name)?;
        let metadata = check_regular(FIELD, name, &file)?;
        if !Identity::of_process().is_let_read(&metadata) {
            return Err(not_found(name));
        }
        let mut kept = self.kept();
        let segment = match &*kept {
            Some(segment) if segment.is(&metadata) => segment.clone(),
            _ => Arc::new(Segment::new(name, file, metadata)?),
        };
        *kept = Some(segment.clone());
        Ok(segment)
    }

    #[cfg(test)]
    pub(in crate::weights::push) fn last(&self) -> Option<Arc<Segment>> {
        self.kept().clone()
    }

    fn kept(&self) -> MutexGuard<'_, Option<Arc<Segment>>> {
        self.kept.lock().expect("nobody panics with the segment")
    }
}

fn open(name: &str) -> Result<File> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::invalid(
            FIELD,
            format!("a name of {} bytes; files have at most {MAX_NAME_BYTES}", name.len()),
        ));
    }
    if !name.starts_with(PREFIX) || name.contains(['/', '\0']) {
        let what = format!("{name:?} is not the name of a segment below /dev/shm; those start with {PREFIX:?}");
        return Err(Error::invalid(FIELD, what));
    }
    // A link must not lead elsewhere, and opening a pipe must not wait for its other end.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let path = Path::new("/dev/shm").join(name);
    OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => not_found(name),
        _ => Error::invalid(FIELD, format!("cannot open {}: {e}", path.display())),
    })
}

/// The error for a segment that is not there, and for one that the server may not read: the same, so that nobody learns
/// which it is.
fn not_found(name: &str) -> Error {
    Error::NotFound(format!(
        "/dev/shm/{name} is not there, or not for this server to read; is it on the client's machine, and in the same \
         container? A trainer that is not user {} lets it read: segment_mode=0o644",
        Identity::of_process().user()
    ))
}
