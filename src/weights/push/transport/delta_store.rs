//! Delta stores: directories below `--weights-dir` in which a trainer saves each version of its policy, whole or as the
//! changes of an earlier version. `docs/weights.md` describes the layouts.

mod files;
mod patch;
mod shards;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::{MAX_FILES, Root, open_root, refuse, safetensors_of};
use super::{SourceFile, Sources};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::types::WeightVersion;
use crate::weights::parameters::Parameters;
use crate::weights::update::{DeltaStore, StoredVersion, TensorEntry};
use files::VersionFiles;

/// The open files of a version, and of the versions before it that it needs.
pub(in crate::weights::push) struct Chain {
    /// The whole version that the deltas change; `None` if they change the policy that serves.
    pub base: Option<WholeVersion>,
    /// The deltas, the oldest first.
    pub deltas: Vec<StoredDelta>,
    /// The version itself. Its digest is still to be computed if it is a whole one that is read.
    pub version: StoredVersion,
}

/// The files of a version with every parameter.
pub(in crate::weights::push) struct WholeVersion {
    pub tensors: Vec<TensorEntry>,
    /// The file of each tensor.
    pub files: Vec<Arc<SourceFile>>,
    /// Counts the memory for the declarations in the files.
    pub charge: Charge,
}

/// The files of a version that has the changes of an earlier one.
pub(in crate::weights::push) struct StoredDelta {
    /// The version that it changes.
    pub base: WeightVersion,
    pub tensors: Vec<DeltaTensor>,
    /// Counts the memory for the declarations in the files.
    pub charge: Charge,
}

/// The changes of one tensor. The declaration is of the payload, or of the indices alone if the values are elsewhere.
pub(in crate::weights::push) struct DeltaTensor {
    pub entry: TensorEntry,
    pub file: Arc<SourceFile>,
    pub changes: StoredChanges,
}

/// How the changes of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights::push) enum StoredChanges {
    /// As the payload of a DELTA push.
    Payload,
    /// Indices, and from this offset on the values.
    Apart(Indices, u64),
    /// Changed bytes, which decompress to so many bytes. The declared digest is that of the tensor with the changes.
    Bytes(ByteEncoding, u64),
}

/// How changed bytes of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights::push) enum ByteEncoding {
    /// All bytes, each combined with the one before by exclusive or.
    Xor,
    /// The number of changed bytes, their positions, and the bytes.
    Overwrite,
}

/// How a tensor of indices is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights::push) enum Indices {
    /// Each as it is.
    I32,
    /// The number of elements between each and the one before, or in front of the first.
    SkippedU16,
    SkippedU32,
}

impl StoredDelta {
    /// Whether its changes are of bytes, which can be applied only to the whole bytes of a tensor.
    pub fn is_of_bytes(&self) -> bool {
        self.tensors.iter().any(|tensor| matches!(tensor.changes, StoredChanges::Bytes(..)))
    }
}

impl Indices {
    /// Bytes of one index.
    pub fn size(self) -> usize {
        if self == Self::SkippedU16 { 2 } else { 4 }
    }
}

/// One version of a store.
enum Content {
    Whole(WholeVersion),
    Delta(StoredDelta),
}

impl Content {
    /// How many files it is read from.
    fn files(&self) -> usize {
        let files: HashSet<*const SourceFile> = match self {
            Self::Whole(whole) => whole.files.iter().map(Arc::as_ptr).collect(),
            Self::Delta(delta) => delta.tensors.iter().map(|tensor| Arc::as_ptr(&tensor.file)).collect(),
        };
        files.len()
    }
}

/// Opens a version of a store, and the versions before it back to a whole one, or to the one that serves.
///
/// # Errors
/// `NotFound` naming a file that is missing; `InvalidArgument` on `source.directory` naming one that is malformed;
/// `FailedPrecondition` if the versions go back to the server's checkpoint and that does not serve;
/// `ResourceExhausted` if there is no memory for the declarations; as for [`open_root`].
pub(in crate::weights::push) fn open(store: &DeltaStore, sources: &Sources, parameters: &Parameters) -> Result<Chain> {
    let (root, path) = open_root(&store.path, sources)?;
    let reader = StoreReader { root, path, sources, parameters };
    let (mut deltas, mut files, mut version, mut target) = (Vec::new(), 0, store.version, None);
    let base = loop {
        let found = reader.read(version, store.serving)?;
        let Some((content, found)) = found else {
            target.get_or_insert(StoredVersion::CHECKPOINT);
            break None;
        };
        if let Some(serving) =
            store.serving.filter(|serving| (serving.version, serving.stamp) == (version, found.stamp))
        {
            target.get_or_insert(serving);
            break None;
        }
        target.get_or_insert(found);
        files += content.files().max(1);
        if files > MAX_FILES {
            let (path, version) = (&store.path, store.version);
            return Err(refuse(format!(
                "{path}: version {version} needs more than {MAX_FILES} files; save a whole version more often"
            )));
        }
        match content {
            Content::Whole(whole) => break Some(whole),
            Content::Delta(delta) => {
                version = delta.base;
                deltas.push(delta);
            }
        }
    };
    deltas.reverse();
    Ok(Chain { base, deltas, version: target.expect("the first turn sets it") })
}

/// The store and the version that a path names: a version's own directory or file, or a store, whose newest version
/// is meant. `None` for any other path, such as that of a checkpoint.
///
/// # Errors
/// As for [`open_root`]; `NotFound` or `InvalidArgument` if the path is neither a directory nor a version.
pub fn named(path: &str, sources: &Sources) -> Result<Option<(String, WeightVersion)>> {
    let (root, inside) = open_root(path, sources)?;
    let store_of = |levels: usize| {
        let store = inside.ancestors().nth(levels).unwrap_or_else(|| Path::new("")).to_string_lossy().into_owned();
        if store.is_empty() { ".".to_string() } else { store }
    };
    let name = inside.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if let Some(version) = directory_version(name) {
        return Ok(Some((store_of(1), version)));
    }
    let folder = inside.parent().and_then(|parent| parent.file_name()).and_then(|name| name.to_str());
    if let (Some(version), Some("anchors" | "deltas")) = (file_version(name), folder) {
        return Ok(Some((store_of(2), version)));
    }
    let directories = root.newest(&inside, directory_version)?;
    let files = ["anchors", "deltas"].map(|folder| inside.join(folder));
    let mut newest = directories;
    for folder in files {
        if root.has(&folder)? {
            newest = newest.max(root.newest(&folder, file_version)?);
        }
    }
    Ok(newest.map(|version| (store_of(0), version)))
}

/// The version of a directory of this name.
fn directory_version(name: &str) -> Option<WeightVersion> {
    name.strip_prefix("weight_v").and_then(digits)
}

/// The version of a file of this name.
fn file_version(name: &str) -> Option<WeightVersion> {
    name.strip_prefix("step_")?.strip_suffix(".safetensors").and_then(digits)
}

/// The number of a name that has at least six digits.
fn digits(text: &str) -> Option<WeightVersion> {
    let is_number = text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// A store that is being read for a model.
struct StoreReader<'a> {
    root: Root,
    path: PathBuf,
    sources: &'a Sources,
    parameters: &'a Parameters,
}

impl StoreReader<'_> {
    /// Opens the files of one version, and reads their headers. `None` for version 0 if that is the checkpoint, which
    /// serves.
    fn read(&self, version: WeightVersion, serving: Option<StoredVersion>) -> Result<Option<(Content, StoredVersion)>> {
        let directory = self.path.join(format!("weight_v{version:06}"));
        let anchor = self.path.join(format!("anchors/step_{version:06}.safetensors"));
        let delta = self.path.join(format!("deltas/step_{version:06}.safetensors"));
        let mut files = VersionFiles::new(&self.root, self.sources, self.parameters)?;
        let content = if self.root.has(&directory)? {
            match shards::read_index(&mut files, &directory, version)? {
                Some(index) => Content::Delta(shards::read(&mut files, &directory, index)?),
                None => self.whole(&mut files, safetensors_of(&self.root, &directory)?)?,
            }
        } else if self.root.has(&anchor)? {
            self.whole(&mut files, vec![anchor])?
        } else if self.root.has(&delta)? {
            Content::Delta(patch::read(&mut files, &delta, version)?)
        } else if version == 0 && serving == Some(StoredVersion::CHECKPOINT) && self.root.has(&self.path)? {
            return Ok(None);
        } else {
            return Err(self.missing(version, &[directory, anchor, delta]));
        };
        Ok(Some((content, files.identify(version))))
    }

    fn whole(&self, files: &mut VersionFiles<'_>, paths: Vec<PathBuf>) -> Result<Content> {
        let (mut tensors, mut of_each) = (Vec::new(), Vec::new());
        for path in paths {
            let file = files.open(&path)?;
            tensors.extend(files.read_header(&file)?);
            of_each.resize(tensors.len(), file);
        }
        Ok(Content::Whole(WholeVersion { tensors, files: of_each, charge: files.take_charge() }))
    }

    fn missing(&self, version: WeightVersion, looked_for: &[PathBuf]) -> Error {
        let path = self.path.display();
        if version == 0 {
            return Error::FailedPrecondition(format!(
                "{path} has no version 0, so that its deltas change the checkpoint with which the server was started, \
                 and that does not serve; call Wake with reload, or save a whole version in the store"
            ));
        }
        let looked_for: Vec<_> = looked_for.iter().map(|path| path.display().to_string()).collect();
        let (flag, looked_for) = (self.sources.flag, looked_for.join(", "));
        Error::NotFound(format!(
            "version {version} does not exist in {path} below {flag}: there is none of {looked_for}"
        ))
    }
}
