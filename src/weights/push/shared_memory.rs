//! Segments below `/dev/shm`, which a client on the same machine writes and removes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use super::regular::check_regular;
use crate::error::{Error, Result};
use crate::memory::{BorrowedMap, Identity};

const FIELD: &str = "source.shared_memory";
/// The beginning of the names that clients give their segments. What else lies below `/dev/shm` is other programs'.
const PREFIX: &str = "rollout-";
/// The system's own limit, known before the name is echoed.
const MAX_NAME_BYTES: usize = 255;

/// A segment, mapped.
#[derive(Debug)]
pub(super) struct Segment {
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

    /// Whether it is the whole of the file that has `metadata`.
    fn is(&self, metadata: &Metadata) -> bool {
        let identity = |metadata: &Metadata| (metadata.dev(), metadata.ino(), metadata.len());
        !self.map.is_lost() && identity(&self.metadata) == identity(metadata)
    }

    /// Whether its owner has removed it, so that its memory waits for this process alone.
    fn is_removed(&self) -> bool {
        self.file.metadata().map_or(true, |metadata| metadata.nlink() == 0)
    }
}

/// The segment of the last push, which stays mapped for the next: faults on all its pages would cost what reading them
/// does.
#[derive(Debug, Default)]
pub struct Segments {
    kept: Mutex<Option<Arc<Segment>>>,
}

impl Segments {
    /// Lets go of what is kept.
    pub fn release(&self) {
        self.kept().take();
    }

    /// Lets go of what is kept if its owner has removed it.
    pub fn release_removed(&self) {
        self.kept().take_if(|segment| segment.is_removed());
    }

    /// Opens a segment for reading, and keeps it instead of the one before.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that clients do not give, a link or what is no regular file; `NotFound`, also for a
    /// segment of another user who has not let this process's user read it: root is not to read it for a client.
    pub(super) fn open(&self, name: &str) -> Result<Arc<Segment>> {
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
    pub(super) fn last(&self) -> Option<Arc<Segment>> {
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
    // Not to be led elsewhere by a link, nor to wait for the other end of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let path = Path::new("/dev/shm").join(name);
    OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => not_found(name),
        _ => Error::invalid(FIELD, format!("cannot open {}: {e}", path.display())),
    })
}

/// The same for what is not there and for what is not meant for the server, so that nobody learns which.
fn not_found(name: &str) -> Error {
    Error::NotFound(format!(
        "/dev/shm/{name} is not there, or not for this server to read; is it on the client's machine, and in the same \
         container? A trainer that is not user {} lets it read: segment_mode=0o644",
        Identity::of_process().user()
    ))
}
