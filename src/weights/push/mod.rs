//! A push on its way in: declared, received, verified; nothing here touches the weights that serve.

mod delta;
mod directory;
mod files;
mod finite;
mod manifest;
mod names;
mod ordered;
mod receipt;
mod receiver;
mod regular;
mod shadow;
mod shared_memory;
mod tensors;

use std::path::PathBuf;
use std::sync::Arc;

use super::lora::{Adapter, AdapterTensor};
use super::parameters::Dtype;

pub use delta::{Changes, Delta};
pub use receiver::Receiver;
pub use shadow::{ShadowShard, ShadowWeights};
pub use shared_memory::Segments;
pub use tensors::Tensors;

/// What a push brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateKind {
    Lora,
    Full,
    Delta,
}

/// One tensor as the sender declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// XXH3-128, big-endian, of the bytes as transported.
    pub digest: [u8; 16],
    /// `Delta`: elements of the payload, and its bytes.
    pub payload: Option<(u64, u64)>,
    /// Shared memory: where its bytes start.
    pub offset: u64,
}

impl<'a> From<&'a TensorEntry> for AdapterTensor<'a> {
    fn from(entry: &'a TensorEntry) -> Self {
        Self { name: &entry.name, dtype: entry.dtype, shape: &entry.shape }
    }
}

/// What pushes may be read from, beside the stream.
#[derive(Debug, Default)]
pub struct Sources {
    /// The one directory of which pushes may name parts.
    weights_dir: Option<PathBuf>,
    segments: Segments,
}

impl Sources {
    /// Without `weights_dir` pushes can name no directory.
    pub fn new(weights_dir: Option<PathBuf>) -> Self {
        Self { weights_dir, segments: Segments::default() }
    }

    /// Those that clients share.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }
}

/// Where the tensors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// [`Receiver::write`].
    Inline,
    /// A file of this name below `/dev/shm`.
    SharedMemory(String),
    /// A directory below `--weights-dir`.
    Directory(String),
}

/// What the header of a push says about its tensors.
#[derive(Clone, Debug)]
pub struct UpdateSpec {
    pub kind: UpdateKind,
    /// LORA: `adapter_config.json` (with `Source::Directory` it is read from there).
    pub adapter_config: String,
    /// LORA: is to stay resident unmerged.
    pub unmerged: bool,
    pub tensors: Vec<TensorEntry>,
    /// Bytes of all tensors, those declared later too.
    pub total_bytes: Option<u64>,
    pub source: Source,
}

/// A verified push.
#[derive(Debug)]
pub enum WeightUpdate {
    /// The base with this adapter merged.
    Lora(Arc<Adapter>),
    /// Every parameter; in place the rest of them.
    Full(Arc<Tensors>),
    /// Every parameter, packed.
    Packed(ShadowWeights),
    /// Changed elements.
    Delta(Arc<Delta>),
}

/// What has come of a push.
#[derive(Debug)]
pub struct Received {
    pub update: WeightUpdate,
    /// XXH3-128 over all digests in the order of the tensors' names.
    pub digest: [u8; 16],
    /// Bytes of the tensors as transported.
    pub bytes: u64,
    /// Parameters that it brings.
    pub parameters: usize,
}

#[cfg(test)]
mod tests;
