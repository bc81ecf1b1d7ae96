//! Pushes from a directory below `--weights-dir`, in which a trainer has saved an adapter or a checkpoint.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};

use super::safetensors::read_header;
use super::source_file::SourceFile;
use super::{OpenSource, Sources};
use crate::error::{Error, Result};
use crate::weights::update::{TensorEntry, UpdateKind};

/// The field of the push that errors name.
pub(super) const FIELD: &str = "source.directory";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER: &str = "adapter_model.safetensors";
/// Most files of a directory. Each stays open until it is read, and a process can have about a thousand files open.
pub(super) const MAX_FILES: usize = 512;
/// Most bytes of the safetensors headers of a directory, unless the model has so many parameters that it needs more.
const MAX_HEADER_BYTES: u64 = 4 << 20;
/// Bytes of headers that the model needs for each parameter: a tensor takes some hundred, and an adapter has up to six
/// tensors for a parameter.
const HEADER_BYTES_PER_PARAMETER: u64 = 1 << 10;
/// Most bytes of an `adapter_config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Most bytes of a path: the system's own limit, checked here because errors repeat the path.
const MAX_PATH_BYTES: usize = 4096;

/// Opens the files of a directory and reads their declarations, for a model with so many parameters. The memory for
/// these is counted before it is taken.
///
/// # Errors
/// `InvalidArgument` on `source.directory` if the server reads from no directory, the path is outside of it, or a file
/// is malformed; `NotFound`; `ResourceExhausted` if there is no memory for the declarations.
pub(super) fn open(
    kind: UpdateKind,
    path: &str,
    sources: &Sources,
    parameters: usize,
) -> Result<(OpenSource, Vec<TensorEntry>)> {
    let (root, path) = open_root(path, sources)?;
    let (paths, adapter_config) = match kind {
        UpdateKind::Lora => (vec![path.join(ADAPTER)], read_text(&root, &path.join(ADAPTER_CONFIG))?),
        UpdateKind::Full => (safetensors_of(&root, &path)?, String::new()),
        UpdateKind::Delta => return Err(refuse("a DELTA from a directory names a delta store")),
    };
    let mut charge = sources.traffic.charge(0)?;
    let (mut tensors, mut files) = (Vec::new(), Vec::new());
    let mut left = most_header_bytes(parameters);
    for path in paths {
        let file = Arc::new(open_file(&root, &path)?);
        tensors.extend(read_header(&file, FIELD, (&mut left, &mut charge), None)?);
        files.resize(tensors.len(), file);
    }
    Ok((OpenSource::Directory { files, adapter_config, _charge: charge }, tensors))
}

/// Opens `--weights-dir`, and returns it with the path of a directory relative to it.
///
/// # Errors
/// `InvalidArgument` on `source.directory` if the server reads from no directory, or the path is outside of it.
pub(super) fn open_root(path: &str, sources: &Sources) -> Result<(Root, PathBuf)> {
    let weights_dir = sources
        .weights_dir
        .as_deref()
        .ok_or_else(|| refuse("this server reads weights from no directory; start it with --weights-dir"))?;
    let path = relative(path, weights_dir, sources.flag)?;
    let root = Dir::open_ambient_dir(weights_dir, ambient_authority())
        .map_err(|e| cannot_open_root(weights_dir, sources.flag, &e))?;
    Ok((Root { root, flag: sources.flag }, path))
}

/// Most bytes of the safetensors headers of a directory, for a model with so many parameters.
pub(super) fn most_header_bytes(parameters: usize) -> u64 {
    MAX_HEADER_BYTES.max(HEADER_BYTES_PER_PARAMETER * parameters as u64)
}

pub(super) fn refuse(message: impl Into<String>) -> Error {
    Error::invalid(FIELD, message)
}

fn cannot_open_root(weights_dir: &Path, flag: &str, error: &std::io::Error) -> Error {
    Error::Internal(format!("cannot open {flag} {}: {error}", weights_dir.display()))
}

/// The open directory, and the flag that names it.
pub(super) struct Root {
    root: Dir,
    flag: &'static str,
}

impl Root {
    /// Whether there is something at `path`.
    ///
    /// # Errors
    /// `InvalidArgument` if the path leads out of the directory, or cannot be read.
    pub fn has(&self, path: &Path) -> Result<bool> {
        match self.root.metadata(path).map_err(|e| self.cannot_open(path, &e)) {
            Ok(_) => Ok(true),
            Err(Error::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The largest number that `number_of` finds in the names of what is in a directory.
    ///
    /// # Errors
    /// As for [`Root::cannot_open`].
    pub fn newest(&self, path: &Path, number_of: impl Fn(&str) -> Option<u64>) -> Result<Option<u64>> {
        let mut newest = None;
        for entry in self.root.read_dir(path).map_err(|e| self.cannot_open(path, &e))? {
            let name = entry.map_err(|e| self.cannot_open(path, &e))?.file_name();
            newest = newest.max(name.to_str().and_then(&number_of));
        }
        Ok(newest)
    }

    /// The error for a path that cannot be opened.
    fn cannot_open(&self, path: &Path, error: &std::io::Error) -> Error {
        let (path, flag) = (path.display(), self.flag);
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => {
                Error::NotFound(format!("{path} does not exist below {flag}"))
            }
            // cap-std refuses without an error number of the system.
            ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
                refuse(format!("{path} leads out of {flag}"))
            }
            _ => refuse(format!("cannot read {path}: {error}")),
        }
    }
}

/// The path that a push names, relative to `weights_dir`, which `flag` names.
fn relative(path: &str, weights_dir: &Path, flag: &str) -> Result<PathBuf> {
    let given = Path::new(path);
    if path.len() > MAX_PATH_BYTES {
        return Err(refuse(format!("a path of {} bytes; they have at most {MAX_PATH_BYTES}", path.len())));
    }
    if path.is_empty() {
        return Err(refuse(format!("path is empty; `.` is {flag} itself")));
    }
    if given.is_relative() {
        return Ok(given.to_path_buf());
    }
    let canonical = weights_dir.canonicalize().map_err(|e| cannot_open_root(weights_dir, flag, &e))?;
    let inside = given.strip_prefix(&canonical).or_else(|_| given.strip_prefix(weights_dir));
    inside.map(|inside| Path::new(".").join(inside)).map_err(|_| refuse(format!("{path} is outside {flag}")))
}

/// The paths of all `*.safetensors` of a directory, in the order of their names.
pub(super) fn safetensors_of(root: &Root, path: &Path) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in root.root.read_dir(path).map_err(|e| root.cannot_open(path, &e))? {
        let name = entry.map_err(|e| root.cannot_open(path, &e))?.file_name();
        if Path::new(&name).extension().is_some_and(|extension| extension == "safetensors") {
            names.push(path.join(name));
        }
        if names.len() > MAX_FILES {
            return Err(refuse(format!("{} has more than {MAX_FILES} safetensors files", path.display())));
        }
    }
    if names.is_empty() {
        return Err(Error::NotFound(format!("{} has no *.safetensors", path.display())));
    }
    names.sort();
    Ok(names)
}

pub(super) fn open_file(root: &Root, path: &Path) -> Result<SourceFile> {
    let mut options = OpenOptions::new();
    // Opening a pipe must not wait for its other end.
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = root.root.open_with(path, &options).map_err(|e| root.cannot_open(path, &e))?;
    SourceFile::new(FIELD, &path.display().to_string(), file.into_std())
}

fn read_text(root: &Root, path: &Path) -> Result<String> {
    let file = open_file(root, path)?;
    if file.bytes() > MAX_CONFIG_BYTES {
        return Err(refuse(format!("{} has more than {MAX_CONFIG_BYTES} bytes", path.display())));
    }
    let mut text = vec![0; file.bytes() as usize];
    file.read(file.name(), 0, &mut text)?;
    String::from_utf8(text).map_err(|e| refuse(format!("{}: {e}", path.display())))
}
