//! Where the tensors of a push come from: its own stream, a segment of shared memory, a directory, or device memory.

mod device_memory;
mod directory;
mod file;
mod header;
mod regular;
mod shared_memory;

use std::path::PathBuf;

use rollout_kernels::{Device, Devices};

pub use device_memory::Allocation;
pub(super) use device_memory::Allocations;
pub(super) use directory::{Directory, open as open_directory};
pub(super) use file::SourceFile;
pub use shared_memory::Segments;

use super::TensorEntry;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};

/// Where the tensors of a push come from, as its header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Chunks in the push's own stream, which go to [`Receiver::write`](super::Receiver::write).
    Inline,
    /// What a trainer broadcasts, which goes there too. Nobody announces its digests.
    Broadcast(SourceRoom),
    /// A segment of shared memory: the name of a file below `/dev/shm`.
    SharedMemory(String),
    /// The path of a directory below `--weights-dir`.
    Directory(String),
    /// Device memory of the sender: each tensor names its allocation.
    DeviceMemory,
}

/// Bytes that a FULL push takes for the way of its tensors to what is made of them, beside that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceRoom {
    /// Of all devices together.
    pub of_devices: u64,
    pub of_host: u64,
}

/// What pushes may be read from, other than their own streams.
#[derive(Debug)]
pub struct Sources {
    /// The directory below which pushes may name directories.
    pub(super) weights_dir: Option<PathBuf>,
    pub(super) segments: Segments,
    /// The devices in whose memory tensors may lie.
    pub(super) devices: Devices,
    /// Counts what is taken for a push before the ledger has its entry.
    pub(super) traffic: Traffic,
}

impl Default for Sources {
    /// Nothing but segments of shared memory, without a limit on what declarations take.
    fn default() -> Self {
        let (weights_dir, segments, devices) = (None, Segments::default(), Devices::default());
        Self { weights_dir, segments, devices, traffic: Traffic::new(u64::MAX) }
    }
}

impl Sources {
    /// Sources with the directory below which pushes may name directories; without one they can name none.
    pub fn new(weights_dir: Option<PathBuf>) -> Self {
        Self { weights_dir, ..Self::default() }
    }

    /// The same, and devices in whose memory the tensors of pushes may lie.
    pub fn with_devices(self, devices: Devices) -> Self {
        Self { devices, ..self }
    }

    /// The same, with what pushes declare counted in `traffic`.
    pub fn with_traffic(self, traffic: Traffic) -> Self {
        Self { traffic, ..self }
    }

    /// UUIDs of the devices in whose memory the tensors of pushes may lie, in the order of the ranks.
    pub fn device_uuids(&self) -> Vec<String> {
        self.devices.iter().filter_map(Device::uuid).collect()
    }

    /// The segments of shared memory that clients have named.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }
}

/// The opened source of a push.
pub(super) enum OpenedSource {
    /// Chunks of the push's own stream.
    Stream,
    /// What a trainer broadcasts, in the order of the tensors.
    Broadcast(SourceRoom),
    /// A segment of shared memory.
    Segment(SourceFile),
    /// Files of a directory.
    Directory {
        files: Vec<SourceFile>,
        /// The index of each tensor's file.
        places: Vec<usize>,
        /// Counts what the files have declared.
        _charge: Charge,
    },
    /// Device memory of another process.
    DeviceMemory(Allocations),
}

impl OpenedSource {
    pub fn is_stream(&self) -> bool {
        matches!(self, Self::Stream | Self::Broadcast(_))
    }

    /// Whether bytes of a tensor may come before those in front of them.
    pub fn is_unordered(&self) -> bool {
        matches!(self, Self::Stream)
    }

    /// Whether the sender declares the tensors. Those of a directory are declared by its files.
    pub fn is_declared(&self) -> bool {
        !matches!(self, Self::Directory { .. })
    }

    /// Whether the sender must announce the digests of the tensors.
    pub fn needs_digests(&self) -> bool {
        matches!(self, Self::Stream | Self::Segment(_))
    }

    /// Takes note of tensor `index`, the next one, and opens the allocation that it names.
    ///
    /// # Errors
    /// `InvalidArgument` if its declaration does not fit the source; as for [`Allocations::add`].
    pub fn add(&mut self, index: usize, entry: &TensorEntry) -> Result<()> {
        let refuse = |field: &str, what: &str| {
            let what = format!("tensor {:?}: {what}", entry.name);
            Err(Error::invalid(format!("tensors[{index}].{field}"), what))
        };
        if self.needs_digests() && entry.digest.is_none() {
            return refuse("digest", "is missing; an XXH3-128 has 16 bytes");
        }
        match self {
            Self::DeviceMemory(allocations) => allocations.add(index, entry),
            _ if entry.allocation.is_some() => refuse("allocation", "is for pushes from device_memory; leave it out"),
            _ => Ok(()),
        }
    }

    pub fn is_broadcast(&self) -> bool {
        matches!(self, Self::Broadcast(_))
    }

    /// What the tensors of a FULL push take on their way.
    pub fn room(&self) -> SourceRoom {
        match self {
            Self::Broadcast(room) => *room,
            Self::DeviceMemory(allocations) => allocations.room(),
            Self::Stream | Self::Segment(_) | Self::Directory { .. } => SourceRoom::default(),
        }
    }

    /// The file that tensor `index` is read from; `None` if it comes in the stream.
    pub fn file(&self, index: usize) -> Option<&SourceFile> {
        match self {
            Self::Stream | Self::Broadcast(_) => None,
            Self::Segment(file) => Some(file),
            Self::Directory { files, places, .. } => files.get(*places.get(index)?),
            Self::DeviceMemory(allocations) => allocations.file(index),
        }
    }
}
