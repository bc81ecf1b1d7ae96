//! Where the tensors of an open push come from.

use super::files::SourceFile;

/// Where the tensors of a push come from.
pub(super) enum Origin {
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

impl Origin {
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
