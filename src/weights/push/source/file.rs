//! Files that the tensors of a push are read from, and device memory that is read as they are.

use std::fmt::Display;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rollout_kernels::{BorrowedMemory, out_of_memory};

use super::regular::check_regular;
use super::shared_memory::Segment;
use crate::error::{Error, Result};

/// Pieces of a tensor that are copied from a device at once.
const DEVICE_PIECES: usize = 16;

/// An open file with tensors of a push. Its owner may cut it short at any time.
#[derive(Debug)]
pub(in crate::weights::push) struct SourceFile {
    /// The file's name as the sender gives it.
    name: String,
    bytes: u64,
    access: Access,
}

#[derive(Debug)]
enum Access {
    Read(File),
    Mapped(Arc<Segment>),
    Borrowed(BorrowedMemory),
}

impl SourceFile {
    /// A file whose bytes are read.
    ///
    /// # Errors
    /// `InvalidArgument` on `field` unless it is a regular file.
    pub fn new(field: &str, name: &str, file: File) -> Result<Self> {
        let bytes = check_regular(field, name, &file)?.len();
        Ok(Self { name: name.into(), bytes, access: Access::Read(file) })
    }

    /// A file whose bytes are used where they are mapped.
    pub fn mapped(name: &str, segment: Arc<Segment>) -> Self {
        Self { name: name.into(), bytes: segment.map().bytes() as u64, access: Access::Mapped(segment) }
    }

    /// Device memory whose bytes are copied.
    pub fn borrowed(name: &str, memory: BorrowedMemory) -> Self {
        Self { name: name.into(), bytes: memory.bytes(), access: Access::Borrowed(memory) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device memory that it is, if it is such.
    pub fn device_memory(&self) -> Option<&BorrowedMemory> {
        match &self.access {
            Access::Borrowed(memory) => Some(memory),
            Access::Read(_) | Access::Mapped(_) => None,
        }
    }

    /// Checks that a tensor of `bytes` bytes from `offset` on is inside the file.
    ///
    /// # Errors
    /// `InvalidArgument` naming `tensor` if it is not.
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

    /// Fills `out` with the bytes at `offset`, which [`SourceFile::check`] has let pass.
    ///
    /// # Errors
    /// `DataLoss` naming `what` if the file can no longer give them.
    pub fn read(&self, what: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        match &self.access {
            Access::Read(file) => file.read_exact_at(out, offset).map_err(|e| self.lost(what, offset, out.len(), &e)),
            Access::Mapped(segment) => {
                self.look(segment, what, (offset, out.len()), |bytes| out.copy_from_slice(bytes))
            }
            Access::Borrowed(memory) => {
                self.copy(memory, what, (offset, out.len()), |bytes| out.copy_from_slice(bytes))
            }
        }
    }

    /// How many pieces of a tensor are best read at once: a copy from a device wants to be larger than what is hashed
    /// in one go.
    pub fn pieces_at_once(&self) -> usize {
        if let Access::Borrowed(_) = self.access { DEVICE_PIECES } else { 1 }
    }

    /// Calls `use_bytes` with the `bytes` bytes at `offset`, which [`SourceFile::check`] has let pass: where they are
    /// mapped, or else read into `room`.
    ///
    /// # Errors
    /// As for [`SourceFile::read`].
    pub fn with<T>(
        &self,
        what: &str,
        (offset, bytes): (u64, usize),
        room: &mut Vec<u8>,
        use_bytes: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        match &self.access {
            Access::Read(_) => {
                if room.len() < bytes {
                    room.resize(bytes, 0);
                }
                self.read(what, offset, &mut room[..bytes])?;
                Ok(use_bytes(&room[..bytes]))
            }
            Access::Mapped(segment) => self.look(segment, what, (offset, bytes), use_bytes),
            Access::Borrowed(memory) => self.copy(memory, what, (offset, bytes), use_bytes),
        }
    }

    /// Calls `use_bytes` with the `bytes` bytes at `offset` of a mapped segment.
    fn look<T>(
        &self,
        segment: &Segment,
        what: &str,
        (offset, bytes): (u64, usize),
        use_bytes: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let start = offset as usize;
        let used = segment.map().read(start..start + bytes, use_bytes);
        used.ok_or_else(|| self.lost(what, offset, bytes, &"it was cut short"))
    }

    /// Calls `use_bytes` with a copy of the `bytes` bytes at `offset` of device memory.
    fn copy<T>(
        &self,
        memory: &BorrowedMemory,
        what: &str,
        (offset, bytes): (u64, usize),
        use_bytes: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        memory.read(offset..offset + bytes as u64, use_bytes).map_err(|error| match out_of_memory(&error) {
            Some(why) => Error::ResourceExhausted(format!("{what:?}: no memory to copy it: {why}")),
            None => self.lost(what, offset, bytes, &error),
        })
    }

    fn lost(&self, what: &str, offset: u64, bytes: usize, why: &dyn Display) -> Error {
        Error::DataLoss(format!(
            "{what:?}: cannot read {bytes} bytes at {offset} of {:?}: {why}; was it changed during the push?",
            self.name
        ))
    }
}
