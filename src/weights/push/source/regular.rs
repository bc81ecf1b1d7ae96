//! A check that a file that a client has named is a regular one: no directory, pipe or device.

use std::fs::{File, Metadata};

use crate::error::{Error, Result};

/// The metadata of an open file. `field` of the push has named it `name`.
///
/// # Errors
/// `InvalidArgument` on `field` unless it is a regular file.
pub(super) fn check_regular(field: &str, name: &str, file: &File) -> Result<Metadata> {
    let refuse = |what: String| Error::invalid(field, format!("{name:?} {what}"));
    let metadata = file.metadata().map_err(|e| refuse(format!("cannot be read: {e}")))?;
    if metadata.is_file() { Ok(metadata) } else { Err(refuse("is not a regular file".into())) }
}
