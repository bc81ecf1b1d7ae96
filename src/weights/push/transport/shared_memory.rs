//! Segments of shared memory: files below `/dev/shm` that a client on the same machine writes and removes. The server
//! removes those of clients that have died.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::check_regular;
use crate::error::{Error, Result};
use crate::memory::{BorrowedMap, Identity};

/// The field of the push that errors name.
const FIELD: &str = "source.shared_memory";
/// The beginning of the names that clients give their segments. Other files below `/dev/shm` belong to other programs.
const PREFIX: &str = "rollout-";
/// Most bytes of a segment's name: the system's own limit, checked here because errors repeat the name.
const MAX_NAME_BYTES: usize = 255;
/// Most segments that are watched at a time: one for each trainer process that has pushed, and an open file each.
const MAX_WATCHED: usize = 64;

/// A mapped segment.
#[derive(Debug)]
pub(in crate::weights::push) struct Segment {
    file: File,
    metadata: Metadata,
    pub map: BorrowedMap,
}

impl Segment {
    fn new(name: &str, file: File, metadata: Metadata) -> Result<Self> {
        let map = BorrowedMap::new(&file).map_err(|e| Error::invalid(FIELD, format!("cannot map {name:?}: {e}")))?;
        Ok(Self { file, metadata, map })
    }

    /// Whether this segment maps the whole of the file that has `metadata`.
    fn is(&self, metadata: &Metadata) -> bool {
        !self.map.is_lost() && is_same(&self.metadata, metadata) && self.metadata.len() == metadata.len()
    }
}

/// A segment that a push has named while its client held the file's lock. The lock ends with the client's process,
/// however that ends and in whichever namespace of process ids it is.
#[derive(Debug)]
struct WatchedSegment {
    file: File,
    path: PathBuf,
}

impl WatchedSegment {
    /// The open file `name`; `None` if no process holds its lock, which then does not show when the client dies.
    fn new(name: &str, file: &File) -> Option<Self> {
        if !is_locked(file) {
            return None;
        }
        Some(Self { file: file.try_clone().ok()?, path: path_of(name) })
    }

    fn is(&self, metadata: &Metadata) -> bool {
        self.file.metadata().is_ok_and(|watched| is_same(&watched, metadata))
    }

    /// Whether the client still has the file. If the client has died without removing it, it is removed.
    fn check_client(&self) -> bool {
        if is_removed(&self.file) {
            return false;
        }
        if is_locked(&self.file) {
            return true;
        }
        // The name may be another file's by now.
        if self.path.symlink_metadata().is_ok_and(|there| self.is(&there)) {
            let path = self.path.display();
            match std::fs::remove_file(&self.path) {
                Ok(()) => tracing::info!("removed {path}, which a dead client has left"),
                Err(e) => tracing::warn!("a dead client has left {path}, which cannot be removed: {e}"),
            }
        }
        false
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Whether the file was removed, so that only processes that have it open keep its memory in use.
fn is_removed(file: &File) -> bool {
    file.metadata().map_or(true, |metadata| metadata.nlink() == 0)
}

/// Whether another process holds the lock of the file (flock), as clients do for as long as they live.
fn is_locked(file: &File) -> bool {
    // A shared lock, so that servers that check at the same time do not take each other for the client.
    match file.try_lock_shared() {
        Ok(()) => {
            // It was locked through this file alone, so that it can be unlocked through it.
            file.unlock().expect("the file is open and locked");
            false
        }
        Err(error) => matches!(error, TryLockError::WouldBlock),
    }
}

/// The segments that clients name. That of the last push stays mapped for the next, because page faults on all of a new
/// mapping would cost as much as reading it.
#[derive(Debug, Default)]
pub struct Segments {
    last: Mutex<Option<Arc<Segment>>>,
    watched: Mutex<Vec<WatchedSegment>>,
}

impl Segments {
    /// Unmaps the segment of the last push, if it is mapped.
    pub fn release(&self) {
        self.last().take();
    }

    /// Removes segments whose clients have died, and unmaps the segment of the last push if it was removed.
    pub fn release_removed(&self) {
        self.watched().retain(WatchedSegment::check_client);
        self.last().take_if(|segment| is_removed(&segment.file));
    }

    /// Opens a segment for reading, and keeps it mapped in place of the last one.
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
        self.watch(name, &file, &metadata);
        let mut last = self.last();
        let segment = match &*last {
            Some(segment) if segment.is(&metadata) => segment.clone(),
            _ => Arc::new(Segment::new(name, file, metadata)?),
        };
        *last = Some(segment.clone());
        Ok(segment)
    }

    /// Watches an open file from now on, if its lock shows whether its client lives.
    fn watch(&self, name: &str, file: &File, metadata: &Metadata) {
        let mut watched = self.watched();
        if watched.len() < MAX_WATCHED && !watched.iter().any(|segment| segment.is(metadata)) {
            watched.extend(WatchedSegment::new(name, file));
        }
    }

    /// The segment of the last push.
    pub(in crate::weights::push) fn last(&self) -> MutexGuard<'_, Option<Arc<Segment>>> {
        self.last.lock().expect("no thread panics with the segment")
    }

    fn watched(&self) -> MutexGuard<'_, Vec<WatchedSegment>> {
        self.watched.lock().expect("no thread panics with the list")
    }
}

fn open(name: &str) -> Result<File> {
    let bytes = name.len();
    if bytes > MAX_NAME_BYTES {
        return Err(Error::invalid(FIELD, format!("a name of {bytes} bytes; files have at most {MAX_NAME_BYTES}")));
    }
    if !name.starts_with(PREFIX) || name.contains(['/', '\0']) {
        let what = format!("{name:?} is not the name of a segment below /dev/shm; those start with {PREFIX:?}");
        return Err(Error::invalid(FIELD, what));
    }
    // A link must not lead elsewhere, and opening a pipe must not wait for its other end.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let path = path_of(name);
    OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => not_found(name),
        _ => Error::invalid(FIELD, format!("cannot open {}: {e}", path.display())),
    })
}

fn path_of(name: &str) -> PathBuf {
    Path::new("/dev/shm").join(name)
}

/// The error for a segment that is not there, and for one that the server may not read: the same, so that a client does
/// not learn which it is.
fn not_found(name: &str) -> Error {
    Error::NotFound(format!(
        "/dev/shm/{name} is not there, or not for this server to read; is it on the client's machine, and in the same \
         container? A trainer that is not user {} lets it read: segment_mode=0o644",
        Identity::of_process().user()
    ))
}
