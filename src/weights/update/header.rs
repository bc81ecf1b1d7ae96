//! The checked header of an update and the declarations of its tensors. The receiver of the push and the engine both
//! decide by them.

use rollout_kernels::MemoryHandle;

use crate::error::{Error, Result};
use crate::types::{Tenant, WeightVersion};
use crate::weights::lora::AdapterTensor;
use crate::weights::parameters::Dtype;

/// The checked header of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateHeader {
    pub kind: UpdateKind,
    /// For LORA: the name under which the adapter becomes resident. `None` merges it into the policy.
    pub adapter: Option<AdapterTarget>,
    /// The tenant among whose adapters it counts.
    pub tenant: Tenant,
    /// For LORA: the text of `adapter_config.json`. Empty with [`Source::Directory`], where the directory has it.
    pub adapter_config: String,
    /// The version of the policy that the update is for. Always given for DELTA.
    pub expected_version: Option<WeightVersion>,
    /// Version of the policy after the update; `None` is one more than before it.
    pub new_version: Option<WeightVersion>,
    /// Whether `new_version` may be one that is not above the present one.
    pub force_version: bool,
    pub running: RunningPolicy,
    /// For FULL: whether the push may be written in place if there is no room for it beside the weights.
    pub in_place: bool,
    /// For FULL: whether parameters of the vision tower may be missing, which then keep their base.
    pub keep_missing: bool,
    /// Bytes of all tensors as transported; `None` if all tensors are declared with the header.
    pub total_bytes: Option<u64>,
    pub source: Source,
}

impl UpdateHeader {
    /// A header without conditions, of a push that comes in its own stream.
    pub fn new(kind: UpdateKind) -> Self {
        Self {
            kind,
            adapter: None,
            tenant: Tenant::default(),
            adapter_config: String::new(),
            expected_version: None,
            new_version: None,
            force_version: false,
            running: RunningPolicy::default(),
            in_place: false,
            keep_missing: false,
            total_bytes: None,
            source: Source::Inline,
        }
    }
}

/// The kind of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateKind {
    /// A LoRA adapter.
    Lora,
    /// A value for every parameter.
    Full,
    /// New values of single elements.
    Delta,
}

/// The name under which an adapter becomes resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTarget {
    pub name: String,
    /// Generation of the adapter that must have the name now; 0 if the name must be free.
    pub expected_generation: Option<u64>,
    /// Whether the least recently used adapter that no request uses is removed if no slot is free.
    pub evicts: bool,
}

/// The effect of an update on requests that run; `weights.proto` describes the choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunningPolicy {
    #[default]
    Keep,
    Recompute,
    Wait,
    Abort,
}

/// The transport of a push, with the place that the tensors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Chunks in the push's own stream.
    Inline,
    /// Broadcasts of a trainer, written as chunks in the order of the tensors. The trainer announces no digests.
    Broadcast(TransitBytes),
    /// A segment of shared memory: the name of a file below `/dev/shm`.
    SharedMemory(String),
    /// The path of a directory below `--weights-dir`.
    Directory(String),
    /// A version of a delta store below `--weights-dir`.
    DeltaStore(DeltaStore),
    /// Device memory of the sender: each tensor names its allocation.
    DeviceMemory,
}

/// The version of a delta store that a push names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaStore {
    /// The path of the store's directory.
    pub path: String,
    pub version: WeightVersion,
    /// The version of the store that the policy serves, if it serves one. Once the push is open, only if its deltas
    /// change that version: otherwise the push brings every parameter.
    pub serving: Option<StoredVersion>,
}

/// Identifies a version that was read from a delta store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredVersion {
    pub version: WeightVersion,
    /// The digest of the push: equal for the same files on every server.
    pub digest: [u8; 16],
    /// Digest of the headers of the version's files with their times and sizes: other files have another one.
    pub stamp: [u8; 16],
}

impl StoredVersion {
    /// The checkpoint that the server was started with: version 0 of every store that has no files for it.
    pub const CHECKPOINT: Self = Self { version: 0, digest: [0; 16], stamp: [0; 16] };
}

/// Memory that a FULL push takes for its tensors between the sender and the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransitBytes {
    /// On all devices together.
    pub on_devices: u64,
    pub on_host: u64,
}

/// One tensor as the sender declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// XXH3-128, big-endian, of the tensor's bytes as transported; `None` where only the server computes it.
    pub digest: Option<[u8; 16]>,
    /// DELTA: the number of changed elements, and the bytes of the payload that has them.
    pub payload: Option<(u64, u64)>,
    /// Shared memory, a file or an allocation: the offset of the tensor's first byte.
    pub offset: u64,
    /// Device memory: the allocation that the tensor lies in.
    pub allocation: Option<Allocation>,
}

/// An allocation that a tensor lies in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// UUID of the device that it is on.
    pub(in crate::weights) device: String,
    pub(in crate::weights) handle: MemoryHandle,
}

impl Allocation {
    /// # Errors
    /// `InvalidArgument` if a handle has another number of bytes.
    pub fn new(device: String, handle: &[u8]) -> Result<Self> {
        let handle = handle.try_into().map_err(|_| {
            let what = format!("{} bytes; a handle of an allocation has {}", handle.len(), MemoryHandle::BYTES);
            Error::invalid("handle", what)
        })?;
        Ok(Self { device, handle: MemoryHandle(handle) })
    }
}

impl<'a> From<&'a TensorEntry> for AdapterTensor<'a> {
    fn from(entry: &'a TensorEntry) -> Self {
        Self { name: &entry.name, dtype: entry.dtype, shape: &entry.shape }
    }
}
