//! Pushes from a directory below `--weights-dir`, in which a trainer has saved an adapter or a checkpoint.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};

use super::Sources;
use super::file::SourceFile;
use super::header::Header;
use crate::error::{Error, Result, shown};
use crate::memory::{Charge, human_bytes};
use crate::weights::{TensorEntry, UpdateKind};

/// The field of the push that errors name.
const FIELD: &str = "source.directory";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER: &str = "adapter_model.safetensors";
/// Most files of a directory. Each stays open until it is read, and a process can have about a thousand files open.
const MAX_FILES: usize = 512;
/// Most bytes of the safetensors headers of a directory, unless the model has so many parameters that it needs more.
const MAX_HEADER_BYTES: u64 = 4 << 20;
/// Bytes of headers that the model needs for each parameter: a tensor takes some hundred, and an adapter has up to six
/// tensors for a parameter.
const HEADER_BYTES_PER_PARAMETER: u64 = 1 << 10;
/// What each byte of a header takes: itself, the tensors it declares, and what is noted of them until the push ends.
/// Most are taken by tensors with short names.
const DECLARED_BYTES: u64 = 24;
/// Most bytes of an error about a header, which can quote it.
const MAX_QUOTED_BYTES: usize = 300;
/// Most bytes of an `adapter_config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Most bytes of a path: the system's own limit, checked here because errors repeat the path.
const MAX_PATH_BYTES: usize = 4096;

/// The push that a directory contains.
pub(in crate::weights::push) struct Directory {
    pub files: Vec<SourceFile>,
    pub tensors: Vec<TensorEntry>,
    /// The index in `files` of each tensor's file.
    pub places: Vec<usize>,
    /// The text of `adapter_config.json`. Empty unless the push is LORA.
    pub adapter_config: String,
    /// Counts what the files have declared.
    pub charge: Charge,
}

/// Opens the files of a directory and reads what they declare, for a model with so many parameters. What that takes is
/// counted before it is taken.
///
/// # Errors
/// `InvalidArgument` on `source.directory` if the server reads from no directory, the path is outside of it, or a file
/// is not what it should be; `NotFound`; `ResourceExhausted` if there is no memory for what the files declare.
pub(in crate::weights::push) fn open(
    kind: UpdateKind,
    path: &str,
    sources: &Sources,
    parameters: usize,
) -> Result<Directory> {
    let weights_dir = sources.weights_dir.as_deref().ok_or_else(|| {
        refuse("this server reads weights from no directory; start it with --weights-dir".to_string())
    })?;
    let path = relative(path, weights_dir)?;
    let root = Dir::open_ambient_dir(weights_dir, ambient_authority())
        .map_err(|e| Error::Internal(format!("cannot open --weights-dir {}: {e}", weights_dir.display())))?;
    let (names, adapter_config) = match kind {
        UpdateKind::Lora => (vec![path.join(ADAPTER)], read_text(&root, &path.join(ADAPTER_CONFIG))?),
        UpdateKind::Full => (safetensors_of(&root, &path)?, String::new()),
        UpdateKind::Delta => return Err(refuse("a DELTA comes in the stream or in shared memory".to_string())),
    };
    let charge = sources.traffic.charge(0)?;
    let mut directory =
        Directory { files: Vec::new(), tensors: Vec::new(), places: Vec::new(), adapter_config, charge };
    let mut left = MAX_HEADER_BYTES.max(HEADER_BYTES_PER_PARAMETER * parameters as u64);
    for name in names {
        let file = open_file(&root, &name)?;
        let tensors = read_header(&file, &mut left, &mut directory.charge)?;
        directory.places.resize(directory.places.len() + tensors.len(), directory.files.len());
        directory.tensors.extend(tensors);
        directory.files.push(file);
    }
    Ok(directory)
}

fn refuse(message: impl Into<String>) -> Error {
    Error::invalid(FIELD, message)
}

/// The error for a path that cannot be opened.
fn cannot_open(path: &Path, error: &std::io::Error) -> Error {
    let path = path.display();
    match error.kind() {
        ErrorKind::NotFound => Error::NotFound(format!("{path} does not exist below --weights-dir")),
        // cap-std refuses without an error number of the system.
        ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
            refuse(format!("{path} leads out of --weights-dir"))
        }
        _ => refuse(format!("cannot read {path}: {error}")),
    }
}

/// The path that a push names, relative to `weights_dir`.
fn relative(path: &str, weights_dir: &Path) -> Result<PathBuf> {
    let given = Path::new(path);
    if path.len() > MAX_PATH_BYTES {
        return Err(refuse(format!("a path of {} bytes; they have at most {MAX_PATH_BYTES}", path.len())));
    }
    if path.is_empty() {
        return Err(refuse("path is empty; `.` is --weights-dir itself".to_string()));
    }
    if given.is_relative() {
        return Ok(given.to_path_buf());
    }
    let canonical = weights_dir
        .canonicalize()
        .map_err(|e| Error::Internal(format!("cannot open --weights-dir {}: {e}", weights_dir.display())))?;
    let inside = given.strip_prefix(&canonical).or_else(|_| given.strip_prefix(weights_dir));
    inside.map(|inside| Path::new(".").join(inside)).map_err(|_| refuse(format!("{path} is outside --weights-dir")))
}

/// The paths of all `*.safetensors` of a directory, in the order of their names.
fn safetensors_of(root: &Dir, path: &Path) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in root.read_dir(path).map_err(|e| cannot_open(path, &e))? {
        let name = entry.map_err(|e| cannot_open(path, &e))?.file_name();
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

fn open_file(root: &Dir, path: &Path) -> Result<SourceFile> {
    let mut options = OpenOptions::new();
    // Opening a pipe must not wait for its other end.
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = root.open_with(path, &options).map_err(|e| cannot_open(path, &e))?;
    SourceFile::new(FIELD, &path.display().to_string(), file.into_std())
}

fn read_text(root: &Dir, path: &Path) -> Result<String> {
    let file = open_file(root, path)?;
    if file.bytes() > MAX_CONFIG_BYTES {
        return Err(refuse(format!("{} has more than {MAX_CONFIG_BYTES} bytes", path.display())));
    }
    let mut text = vec![0; file.bytes() as usize];
    file.read(file.name(), 0, &mut text)?;
    String::from_utf8(text).map_err(|e| refuse(format!("{}: {e}", path.display())))
}

/// The tensors of a safetensors file, in the order of their bytes. `left` is how long the headers of the files that are
/// still to be read may be together.
fn read_header(file: &SourceFile, left: &mut u64, charge: &mut Charge) -> Result<Vec<TensorEntry>> {
    const PREFIX: u64 = size_of::<u64>() as u64;
    let fail = |what: String| refuse(format!("{}: {what}", file.name()));
    let mut prefix = [0; PREFIX as usize];
    if file.bytes() < PREFIX {
        return Err(fail("not a safetensors file; it has no header".into()));
    }
    file.read(file.name(), 0, &mut prefix)?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > file.bytes() - PREFIX {
        return Err(fail(format!("not a whole safetensors file; its header would have {header_bytes} bytes")));
    }
    if header_bytes > *left {
        return Err(fail(format!(
            "its header has {}, and those of a push to this model may have {} more; no adapter or checkpoint of it \
             needs as much",
            human_bytes(header_bytes),
            human_bytes(*left)
        )));
    }
    *left -= header_bytes;
    charge.grow(header_bytes * DECLARED_BYTES)?;
    let mut text = vec![0; header_bytes as usize];
    file.read(file.name(), PREFIX, &mut text)?;
    let header = Header::parse(&text)
        .map_err(|e| fail(format!("not a safetensors header: {}", shown(&e.to_string(), MAX_QUOTED_BYTES))))?;
    let data = PREFIX + header_bytes;
    if file.bytes() - data != header.data_bytes() {
        return Err(fail(format!(
            "not a whole safetensors file; it has {} bytes of tensors and its header declares {}",
            file.bytes() - data,
            header.data_bytes()
        )));
    }
    let mut tensors = header.0;
    tensors.iter_mut().for_each(|tensor| tensor.offset += data);
    Ok(tensors)
}
