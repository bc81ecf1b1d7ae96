//! The transports of a push: how the bytes of its tensors come to the server. Chunks come in the push's own stream or
//! from a trainer's broadcasts; other transports are read as files, whether those are segments of shared memory, files
//! of a directory, or allocations of device memory.

pub(super) mod broadcast;
pub(super) mod delta_store;
pub(super) mod device;
mod file;
pub(super) mod patched;
mod safetensors;
mod shared_memory;
pub(super) mod source_file;
pub(super) mod stream;

use std::fs::{File, Metadata};
use std::path::PathBuf;
use std::sync::Arc;

use rollout_kernels::{Device, Devices};

pub use shared_memory::Segments;
pub(super) use source_file::SourceFile;

use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::types::WeightVersion;
use crate::weights::update::{Source, TensorEntry, TransitBytes, UpdateHeader};
use device::Allocations;
use patched::ServingWeights;

/// The places that pushes may be read from, other than their own streams.
#[derive(Debug)]
pub struct Sources {
    /// The directory below which pushes may name directories.
    weights_dir: Option<PathBuf>,
    /// The flag that names it.
    flag: &'static str,
    segments: Segments,
    /// The devices in whose memory tensors may lie.
    devices: Devices,
    /// The weights that serve, which deltas of bytes are applied to.
    serving: Option<Arc<dyn ServingWeights>>,
    /// Counts the memory that a push takes before the ledger has its entry.
    pub(super) traffic: Traffic,
}

impl Default for Sources {
    /// Nothing but segments of shared memory, without a limit on the memory for declarations.
    fn default() -> Self {
        let (weights_dir, segments, devices) = (None, Segments::default(), Devices::default());
        let (flag, serving, traffic) = ("--weights-dir", None, Traffic::new(u64::MAX));
        Self { weights_dir, flag, segments, devices, serving, traffic }
    }
}

impl Sources {
    /// Sources with the directory below which pushes may name directories; without one they can name none.
    pub fn new(weights_dir: Option<PathBuf>) -> Self {
        Self { weights_dir, ..Self::default() }
    }

    /// Sources with a directory that another flag names.
    pub fn of_flag(flag: &'static str, directory: PathBuf) -> Self {
        Self { flag, ..Self::new(Some(directory)) }
    }

    /// The same, and devices in whose memory the tensors of pushes may lie.
    pub fn with_devices(self, devices: Devices) -> Self {
        Self { devices, ..self }
    }

    /// The same, and the weights that serve.
    pub fn with_serving(self, serving: Arc<dyn ServingWeights>) -> Self {
        Self { serving: Some(serving), ..self }
    }

    /// The same, with the memory for declarations counted in `traffic`.
    pub fn with_traffic(self, traffic: Traffic) -> Self {
        Self { traffic, ..self }
    }

    /// UUIDs of the devices in whose memory the tensors of pushes may lie, in the order of the ranks.
    pub fn device_uuids(&self) -> Vec<String> {
        self.devices.iter().filter_map(Device::uuid).collect()
    }

    /// The delta store below the weights' directory, and its version, that a path names; `None` for the path of a
    /// checkpoint.
    ///
    /// # Errors
    /// `InvalidArgument` on `source.directory` if the path is outside of the directory; `NotFound`.
    pub fn stored_version(&self, path: &str) -> Result<Option<(String, WeightVersion)>> {
        delta_store::named(path, self)
    }

    /// The segments of shared memory that clients have named.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }
}

/// The opened source of a push.
pub(super) enum OpenSource {
    /// Chunks, which [`ReceivingPush::write`](super::ReceivingPush::write) takes.
    Chunks {
        needs_digests: bool,
    },
    Segment(Arc<SourceFile>),
    Directory {
        /// The file of each tensor.
        files: Vec<Arc<SourceFile>>,
        /// The text of `adapter_config.json` for a LORA push, else empty.
        adapter_config: String,
        /// Counts the memory for the declarations in the files.
        _charge: Charge,
    },
    DeviceMemory(Allocations),
}

impl OpenSource {
    /// Opens the source of a push to a model of so many parameters. `tensors` are those that come with its header; also
    /// returns those that are declared, which are those of the files for a push from a directory.
    ///
    /// # Errors
    /// As for [`Segments::open`], [`file::open`] and [`Allocations::new`].
    pub fn open(
        header: &UpdateHeader,
        tensors: Vec<TensorEntry>,
        sources: &Sources,
        parameters: usize,
    ) -> Result<(Self, Vec<TensorEntry>)> {
        let source = match &header.source {
            Source::Inline => Self::Chunks { needs_digests: true },
            Source::Broadcast(_) => Self::Chunks { needs_digests: false },
            Source::SharedMemory(name) => {
                Self::Segment(Arc::new(SourceFile::mapped(name, sources.segments.open(name)?)))
            }
            Source::DeviceMemory => Self::DeviceMemory(Allocations::new(&sources.devices)?),
            Source::Directory(path) => {
                if !tensors.is_empty() || !header.adapter_config.is_empty() {
                    let what = "the directory declares the tensors and the adapter's configuration; leave both out";
                    return Err(Error::invalid("source.directory", what));
                }
                return file::open(header.kind, path, sources, parameters);
            }
            Source::DeltaStore(_) => unreachable!("opened as a chain of versions"),
        };
        Ok((source, tensors))
    }

    /// The source of tensors that are each read from one of these files. `charge` counts the memory for their
    /// declarations.
    pub fn of_files(files: Vec<Arc<SourceFile>>, charge: Charge) -> Self {
        Self::Directory { files, adapter_config: String::new(), _charge: charge }
    }

    /// Whether chunks of the tensors come, instead of being read from files.
    pub fn is_chunks(&self) -> bool {
        matches!(self, Self::Chunks { .. })
    }

    /// The file that tensor `index`, the next one, is read from; `None` if it comes in chunks.
    ///
    /// # Errors
    /// `InvalidArgument` if its declaration does not fit the source; as for [`Allocations::file_of`].
    pub fn file_of(&mut self, index: usize, entry: &TensorEntry) -> Result<Option<Arc<SourceFile>>> {
        let refuse = |field: &str, what: &str| {
            let what = format!("tensor {:?}: {what}", entry.name);
            Err(Error::invalid(format!("tensors[{index}].{field}"), what))
        };
        let needs_digest = matches!(self, Self::Chunks { needs_digests: true } | Self::Segment(_));
        if needs_digest && entry.digest.is_none() {
            return refuse("digest", "is missing; an XXH3-128 has 16 bytes");
        }
        match self {
            Self::DeviceMemory(allocations) => allocations.file_of(index, entry).map(Some),
            _ if entry.allocation.is_some() => refuse("allocation", "is for pushes from device_memory; leave it out"),
            Self::Chunks { .. } => Ok(None),
            Self::Segment(file) => Ok(Some(file.clone())),
            Self::Directory { files, .. } => Ok(files.get(index).cloned()),
        }
    }

    /// The text of the adapter's configuration.
    pub fn adapter_config<'a>(&'a self, header: &'a UpdateHeader) -> &'a str {
        if let Self::Directory { adapter_config, .. } = self { adapter_config } else { &header.adapter_config }
    }

    /// Memory that the tensors of a FULL push take on their way to the weights.
    pub fn transit(&self, header: &UpdateHeader) -> TransitBytes {
        match (&header.source, self) {
            (Source::Broadcast(bytes), _) => *bytes,
            (_, Self::DeviceMemory(allocations)) => allocations.transit(),
            _ => TransitBytes::default(),
        }
    }
}

/// The metadata of an open file, which `field` of the push names `name`.
///
/// # Errors
/// `InvalidArgument` on `field` unless it is a regular file: a directory, pipe or device is refused.
fn check_regular(field: &str, name: &str, file: &File) -> Result<Metadata> {
    let refuse = |what: String| Error::invalid(field, format!("{name:?} {what}"));
    let metadata = file.metadata().map_err(|e| refuse(format!("cannot be read: {e}")))?;
    if metadata.is_file() { Ok(metadata) } else { Err(refuse("is not a regular file".into())) }
}
