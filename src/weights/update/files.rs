//! Files that tensors are read from.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Error, Result};

/// An open file of tensors. It is read, never mapped: whoever owns it may cut it short at any time, and a mapped page
/// that is no longer there would end the server with SIGBUS.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// As the sender names it.
    name: String,
    file: File,
    bytes: u64,
}

impl SourceFile {
    /// # Errors
    /// `InvalidArgument` on `field` unless it is a regular file.
    pub fn new(field: &str, name: &str, file: File) -> Result<Self> {
        let refuse = |what: String| Error::invalid(field, format!("{name:?} {what}"));
        let metadata = file.metadata().map_err(|e| refuse(format!("cannot be read: {e}")))?;
        if !metadata.is_file() {
            return Err(refuse("is not a regular file".into()));
        }
        Ok(Self { name: name.into(), file, bytes: metadata.len() })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// # Errors
    /// `InvalidArgument` if `bytes` of `tensor` from `offset` on are not inside.
    pub fn check(&self, tensor: &str, offset: u64, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(Error::invalid(
            "tensors",
            format!(
                "tensor {tensor:?}: its {bytes} bytes from {offset} are outside {:?}, which has {}",
                self.name, self.bytes
            ),
        ))
    }

    /// Fills `out` with what is at `offset`.
    ///
    /// # Errors
    /// `DataLoss` naming `what` if the file cannot give it any more.
    pub fn read(&self, what: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| {
            Error::DataLoss(format!(
                "{what:?}: cannot read {} bytes at {offset} of {:?}: {e}; was it changed during the push?",
                out.len(),
                self.name
            ))
        })
    }
}
