//! Segments below `/dev/shm`, which a client on the same machine writes and removes.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::files::SourceFile;
use crate::error::{Error, Result};

const FIELD: &str = "source.shared_memory";

/// Opens a segment for reading.
///
/// # Errors
/// `InvalidArgument` for a name with a path in it, a link or what is no regular file; `NotFound`.
pub(super) fn open(name: &str) -> Result<SourceFile> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(Error::invalid(FIELD, format!("{name:?} is not the name of a segment below /dev/shm")));
    }
    // Not to be led elsewhere by a link, nor to wait for the other end of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let path = Path::new("/dev/shm").join(name);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::NotFound(format!(
            "{} does not exist; is the server on the client's machine, and in the same container?",
            path.display()
        )),
        _ => Error::invalid(FIELD, format!("cannot open {}: {e}", path.display())),
    })?;
    SourceFile::new(FIELD, name, file)
}
