//! Checkpoints on disk: found ([`ModelSource`]), opened, and read by parameter. Safetensors and GGUF have one
//! interface, with Hugging Face's names, shapes and order of rows.

mod digest;
mod gguf;
mod gguf_config;
mod hub;
mod mapped;
mod safetensors;
mod source;

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::Path;

use rollout_kernels::StorageDtype;
use rollout_kernels::host::to_f32;

use self::mapped::MappedFile;
use super::parameters::{ParamSpec, Partition, Slice, TensorData, matrix_shape};
use crate::error::{Error, Result};
use crate::memory::Identity;

pub use gguf::{GgufCheckpoint, GgufMetadata};
pub use mapped::FileStamp;
pub use safetensors::SafetensorsCheckpoint;
pub use source::{ModelFiles, ModelSource, TokenizerFiles};

/// The vocabulary of Qwen v1 in tiktoken's form, which it has instead of `tokenizer.json`.
const TIKTOKEN: &str = "qwen.tiktoken";

/// The weights of a model in mapped files. All ranks share one, because every method takes `&self`.
#[derive(Debug)]
pub enum Checkpoint {
    Safetensors(SafetensorsCheckpoint),
    Gguf(GgufCheckpoint),
}

impl Checkpoint {
    /// Names of the parameters, ascending.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Safetensors(c) => c.names().collect(),
            Self::Gguf(c) => c.names().collect(),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_ok()
    }

    /// Shape of the whole parameter, with Hugging Face's order of dimensions.
    ///
    /// # Errors
    /// `Config` if there is no such parameter.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        let shape = match self {
            Self::Safetensors(c) => c.shape(name),
            Self::Gguf(c) => c.shape(name),
        };
        shape.ok_or_else(|| missing(name))
    }

    /// Bytes of the parameter as stored, which may be quantised in a GGUF file.
    ///
    /// # Errors
    /// `Config` if there is no such parameter.
    pub fn stored_bytes(&self, name: &str) -> Result<usize> {
        let bytes = match self {
            Self::Safetensors(c) => c.stored_bytes(name),
            Self::Gguf(c) => c.stored_bytes(name),
        };
        bytes.ok_or_else(|| missing(name))
    }

    /// Calls `use_values` with the values of a slice, row-major. They are borrowed from the mapped file if they are
    /// whole rows of a safetensors file, else a copy, which is float32 for GGUF. Where the file was cut short they are
    /// zeros, and the result is an error.
    ///
    /// # Errors
    /// `Config` if there is no such parameter, or the slice is not inside it; `DataLoss` if the file was cut short.
    pub fn read<T>(&self, name: &str, slice: &Slice, use_values: impl FnOnce(TensorData<'_>) -> T) -> Result<T> {
        self.check_slice(name, slice)?;
        match self {
            Self::Safetensors(c) => c.read(name, slice, use_values).ok_or_else(|| missing(name))?,
            Self::Gguf(c) => {
                let mut values = vec![0.0; slice.len()];
                let read = c.read_f32(name, slice, StorageDtype::F32, &mut values).ok_or_else(|| missing(name))?;
                let used = use_values(TensorData::F32(values.into()));
                read.map(|()| used)
            }
        }
    }

    /// Writes the values of a slice, row-major, to `out`: in float32, rounded to `dtype`.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read_f32(&self, name: &str, slice: &Slice, dtype: StorageDtype, out: &mut [f32]) -> Result<()> {
        self.check_slice(name, slice)?;
        match self {
            Self::Safetensors(c) => c.read(name, slice, |stored| to_f32(stored.view(), dtype, out)),
            Self::Gguf(c) => c.read_f32(name, slice, dtype, out),
        }
        .ok_or_else(|| missing(name))?
    }

    /// A digest of the stored bytes of some rows of a parameter. That of rows that are read in several parts is the
    /// wrapping sum of the parts' digests.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn digest(&self, name: &str, rows: Range<usize>) -> Result<u64> {
        let (_, cols) = matrix_shape(self.shape(name)?);
        self.check_slice(name, &Slice { rows: rows.clone(), cols: 0..cols })?;
        match self {
            Self::Safetensors(c) => c.digest(name, rows),
            Self::Gguf(c) => c.digest(name, rows),
        }
        .ok_or_else(|| missing(name))?
    }

    fn files(&self) -> &[MappedFile] {
        match self {
            Self::Safetensors(c) => c.files(),
            Self::Gguf(c) => std::slice::from_ref(c.file()),
        }
    }

    /// The stamp of each file when it was opened.
    pub fn opened(&self) -> Vec<FileStamp> {
        self.files().iter().map(MappedFile::opened).collect()
    }

    /// The stamp of each opened file now.
    ///
    /// # Errors
    /// `DataLoss` naming a file that was cut short.
    pub fn stamps(&self) -> Result<Vec<FileStamp>> {
        self.files().iter().map(MappedFile::stamp).collect()
    }

    /// The error for a parameter whose stored bytes have changed since it was loaded.
    pub fn other_bytes(&self, name: &str) -> Error {
        let file = match self {
            Self::Safetensors(c) => c.file(name),
            Self::Gguf(c) => Some(c.file()),
        };
        file.map_or_else(|| missing(name), |file| file.lost(&format!("has other bytes in {name} than were loaded")))
    }

    /// The same parameters in the files that have the paths now, after a file was cut short and has been restored.
    ///
    /// # Errors
    /// `DataLoss` if a file is not there, or has another size.
    pub fn reopened(&self) -> Result<Self> {
        match self {
            Self::Safetensors(c) => c.reopened().map(Self::Safetensors),
            Self::Gguf(c) => c.reopened().map(Self::Gguf),
        }
    }

    fn check_slice(&self, name: &str, slice: &Slice) -> Result<()> {
        let (rows, cols) = matrix_shape(self.shape(name)?);
        let inside = |part: &Range<usize>, len: usize| part.start <= part.end && part.end <= len;
        if inside(&slice.rows, rows) && inside(&slice.cols, cols) {
            return Ok(());
        }
        Err(Error::Config(format!("{name} is {rows} by {cols}; it has no slice {slice:?}")))
    }

    /// Gives the mapped pages of a parameter back to the system after it was read, so that resident memory does not
    /// grow with the file. The parameter can be read again.
    pub fn release(&self, name: &str) {
        match self {
            Self::Safetensors(c) => c.release(name),
            Self::Gguf(c) => c.release(name),
        }
    }

    /// The part of a parameter that a rank reads. Checks that the checkpoint has the parameter in the shape of `spec`.
    ///
    /// # Errors
    /// `Config` if the parameter is missing, has another shape than its spec, or cannot be divided.
    pub fn slice(&self, spec: &ParamSpec, partition: Partition) -> Result<Slice> {
        let shape = self.shape(&spec.name)?;
        if shape != spec.shape {
            return Err(Error::Config(format!(
                "{} has shape {shape:?} in the checkpoint, but the configuration makes it {:?}",
                spec.name, spec.shape
            )));
        }
        partition.slice(spec)
    }
}

fn missing(name: &str) -> Error {
    Error::Config(format!("the checkpoint has no tensor {name}; its files and config.json do not belong together"))
}

/// Whether the model has the file.
///
/// # Errors
/// `Config` if that cannot be seen, or if it is a link to a file that is not there: the hub's cache keeps files so.
fn is_there(path: &Path) -> Result<bool> {
    match path.metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() != ErrorKind::NotFound => Err(unreadable(path, &error)),
        Err(_) => match path.read_link() {
            Ok(target) => Err(Error::Config(format!(
                "{} is a link to {}, which is not there; a container needs a mount that has both, such as the hub's \
                 whole cache",
                path.display(),
                target.display()
            ))),
            Err(_) => Ok(false),
        },
    }
}

/// The error for a file that cannot be read. In a container the server is seldom the user who has made it.
fn unreadable(path: &Path, error: &io::Error) -> Error {
    let advice = match error.kind() {
        ErrorKind::PermissionDenied => {
            let user = Identity::of_process().user();
            format!("; let user {user}, as whom the server runs, read it and the directories above it")
        }
        _ => String::new(),
    };
    Error::Config(format!("cannot read {}: {error}{advice}", path.display()))
}

#[cfg(test)]
mod tests;
