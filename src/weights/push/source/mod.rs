//! Where the tensors of a push come from: its own stream, a segment of shared memory, or a directory.

mod directory;
mod file;
mod regular;
mod shared_memory;

use std::path::PathBuf;

pub(super) use directory::{Directory, open as open_directory};
pub(super) use file::SourceFile;
pub use shared_memory::Segments;

/// Where the tensors of a push come from, as its header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Chunks in the push's own stream, which go to [`Receiver::write`](super::Receiver::write).
    Inline,
    /// A segment of shared memory: the name of a file below `/dev/shm`.
    SharedMemory(String),
    /// The path of a directory below `--weights-dir`.
    Directory(String),
}

/// What pushes may be read from, other than their own streams.
#[derive(Debug, Default)]
pub struct Sources {
    /// The directory below which pushes may name directories.
    pub(super) weights_dir: Option<PathBuf>,
    pub(super) segments: Segments,
}

impl Sources {
    /// Sources with the directory below which pushes may name directories; without one they can name none.
    pub fn new(weights_dir: Option<PathBuf>) -> Self {
        Self { weights_dir, segments: Segments::default() }
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
    /// A segment of shared memory.
    Segment(SourceFile),
    /// Files of a directory.
    Directory {
        files: Vec<SourceFile>,
        /// The index of each tensor's file.
        places: Vec<usize>,
    },
}

impl OpenedSource {
    pub fn is_stream(&self) -> bool {
        matches!(self, Self::Stream)
    }

    /// Whether the sender announces the digests of the tensors. Those of a directory are read by the server alone.
    pub fn has_digests(&self) -> bool {
        !matches!(self, Self::Directory { .. })
    }

    /// The file that tensor `index` is read from; `None` if it comes in the stream.
    pub fn file(&self, index: usize) -> Option<&SourceFile> {
        match self {
            Self::Stream => None,
            Self::Segment(file) => Some(file),
            Self::Directory { files, places } => files.get(*places.get(index)?),
        }
    }
}
