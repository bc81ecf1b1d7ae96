//! Files that the tensors of a push are read from: open files, mapped segments, and device memory.

use std::fmt::{Debug, Display};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use rollout_kernels::{BorrowedMemory, out_of_memory};

use super::check_regular;
use super::shared_memory::Segment;
use crate::error::{Error, Result};
use crate::weights::update::TensorBuffer;

/// Bytes of a file that are read, hashed and checked at a time: few enough that the second and third find them in the
/// core's cache.
pub(in crate::weights::push) const PIECE_BYTES: usize = 256 << 10;
/// Pieces of a tensor that are copied from a device at once: a copy costs more than what is hashed in one go.
const DEVICE_PIECES: usize = 16;

/// An open file with tensors of a push. Its owner may cut it short at any time.
#[derive(Debug)]
pub(in crate::weights::push) struct SourceFile {
    /// The file's name as the sender gives it.
    name: String,
    bytes: u64,
    access: FileAccess,
}

#[derive(Debug)]
enum FileAccess {
    Read(File),
    Mapped(Arc<Segment>),
    Device(BorrowedMemory),
    Computed(Box<dyn ComputedBytes>),
}

/// Computes the bytes of one tensor.
pub(in crate::weights::push) trait ComputedBytes: Debug + Send + Sync {
    /// # Errors
    /// Those of a push.
    fn compute(&self) -> Result<TensorBuffer>;
}

impl SourceFile {
    /// A file whose bytes are read.
    ///
    /// # Errors
    /// As for [`check_regular`].
    pub fn new(field: &str, name: &str, file: File) -> Result<Self> {
        let bytes = check_regular(field, name, &file)?.len();
        Ok(Self { name: name.into(), bytes, access: FileAccess::Read(file) })
    }

    /// A segment whose bytes are used where they are mapped.
    pub fn mapped(name: &str, segment: Arc<Segment>) -> Self {
        Self { name: name.into(), bytes: segment.map.bytes() as u64, access: FileAccess::Mapped(segment) }
    }

    /// Device memory whose bytes are copied.
    pub fn on_device(name: &str, memory: BorrowedMemory) -> Self {
        Self { name: name.into(), bytes: memory.bytes(), access: FileAccess::Device(memory) }
    }

    /// A tensor whose bytes are computed.
    pub fn computed(name: &str, bytes: u64, computed: Box<dyn ComputedBytes>) -> Self {
        Self { name: name.into(), bytes, access: FileAccess::Computed(computed) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All bytes of a tensor that is computed; `None` if they are read.
    ///
    /// # Errors
    /// As for [`ComputedBytes::compute`].
    pub fn compute(&self) -> Result<Option<TensorBuffer>> {
        if let FileAccess::Computed(computed) = &self.access { computed.compute().map(Some) } else { Ok(None) }
    }

    /// The time at which the file was changed last, in nanoseconds; 0 if the bytes are not read from a file.
    pub fn changed_at(&self) -> i128 {
        let FileAccess::Read(file) = &self.access else { return 0 };
        file.metadata()
            .map_or(0, |metadata| i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()))
    }

    /// The device memory that the bytes are in, if they are in such.
    pub fn device_memory(&self) -> Option<&BorrowedMemory> {
        if let FileAccess::Device(memory) = &self.access { Some(memory) } else { None }
    }

    /// Checks that a tensor of `bytes` bytes from `offset` on is inside the file.
    ///
    /// # Errors
    /// `InvalidArgument` naming `tensor` if it is not.
    pub fn check(&self, tensor: &str, offset: u64, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let (name, all) = (&self.name, self.bytes);
        let what = format!("tensor {tensor:?}: its {bytes} bytes from {offset} are outside {name:?}, which has {all}");
        Err(Error::invalid("tensors", what))
    }

    /// Bytes that are best read at once, if `piece_bytes` are hashed at a time.
    pub fn read_bytes(&self, piece_bytes: usize) -> usize {
        piece_bytes * if self.device_memory().is_some() { DEVICE_PIECES } else { 1 }
    }

    /// Fills `out` with the bytes at `offset`, which [`SourceFile::check`] has let pass.
    ///
    /// # Errors
    /// `DataLoss` naming `what` if the file can no longer give them, `ResourceExhausted` if a device has no memory to
    /// copy them.
    pub fn read(&self, what: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        if let FileAccess::Read(file) = &self.access {
            return file.read_exact_at(out, offset).map_err(|e| self.lost(what, offset, out.len(), &e));
        }
        self.with(what, (offset, out.len()), &mut Vec::new(), |bytes| out.copy_from_slice(bytes))
    }

    /// Calls `use_bytes` with the `bytes` bytes at `offset`, which [`SourceFile::check`] has let pass: where they are
    /// mapped, or else read into `scratch`.
    ///
    /// # Errors
    /// As for [`SourceFile::read`].
    pub fn with<T>(
        &self,
        what: &str,
        (offset, bytes): (u64, usize),
        scratch: &mut Vec<u8>,
        use_bytes: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let start = offset as usize;
        match &self.access {
            FileAccess::Read(_) => {
                scratch.resize(bytes.max(scratch.len()), 0);
                self.read(what, offset, &mut scratch[..bytes])?;
                Ok(use_bytes(&scratch[..bytes]))
            }
            FileAccess::Mapped(segment) => {
                let used = segment.map.read(start..start + bytes, use_bytes);
                used.ok_or_else(|| self.lost(what, offset, bytes, &"it was cut short"))
            }
            FileAccess::Computed(computed) => Ok(use_bytes(&computed.compute()?[start..start + bytes])),
            FileAccess::Device(memory) => {
                memory.read(offset..offset + bytes as u64, use_bytes).map_err(|error| match out_of_memory(&error) {
                    Some(why) => Error::ResourceExhausted(format!("{what:?}: no memory to copy it: {why}")),
                    None => self.lost(what, offset, bytes, &error),
                })
            }
        }
    }

    fn lost(&self, what: &str, offset: u64, bytes: usize, why: &dyn Display) -> Error {
        Error::DataLoss(format!(
            "{what:?}: cannot read {bytes} bytes at {offset} of {:?}: {why}; was it changed during the push?",
            self.name
        ))
    }
}
