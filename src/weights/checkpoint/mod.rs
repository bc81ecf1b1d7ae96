//! One face for both checkpoint formats: parameters by Hugging Face name, read as slices.

mod digest;
mod gguf;
mod gguf_config;
mod hub;
mod mapped;
mod safetensors;
mod source;

use std::ops::Range;

use rollout_kernels::WeightDtype;
use rollout_kernels::host::to_f32;

use self::mapped::MappedFile;
use super::parameters::{ParamSpec, Partition, Slice, TensorData, matrix_shape};
use crate::error::{Error, Result};

pub use gguf::{GgufCheckpoint, GgufMetadata};
pub use mapped::Stamp;
pub use safetensors::SafetensorsCheckpoint;
pub use source::{ModelFiles, ModelSource, TokenizerFiles};

/// Weights on disk, mapped. Shared by all ranks: every method takes `&self`.
#[derive(Debug)]
pub enum Checkpoint {
    Safetensors(SafetensorsCheckpoint),
    Gguf(GgufCheckpoint),
}

impl Checkpoint {
    /// Parameter names, ascending.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Safetensors(c) => c.names().collect(),
            Self::Gguf(c) => c.names().collect(),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_ok()
    }

    /// Full shape, in Hugging Face's order.
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

    /// Bytes of the parameter as stored (quantised, for GGUF).
    pub fn stored_bytes(&self, name: &str) -> Result<usize> {
        let bytes = match self {
            Self::Safetensors(c) => c.stored_bytes(name),
            Self::Gguf(c) => c.stored_bytes(name),
        };
        bytes.ok_or_else(|| missing(name))
    }

    /// Hands the values of a slice, row-major, on to `use_values`, which finds zeros where a file was cut short.
    /// Borrowed from the mapped file if whole rows of a safetensors file are asked for; otherwise a copy of the slice
    /// (GGUF: in float32).
    ///
    /// # Errors
    /// `Config` if there is no such parameter, or the slice is not inside it; `DataLoss` if the file was cut short.
    pub fn read<T>(&self, name: &str, slice: &Slice, use_values: impl FnOnce(TensorData<'_>) -> T) -> Result<T> {
        self.check_slice(name, slice)?;
        match self {
            Self::Safetensors(c) => c.read(name, slice, use_values).ok_or_else(|| missing(name))?,
            Self::Gguf(c) => {
                let mut values = vec![0.0; slice.len()];
                let read = c.read_f32(name, slice, WeightDtype::F32, &mut values).ok_or_else(|| missing(name))?;
                let used = use_values(TensorData::F32(values.into()));
                read.map(|()| used)
            }
        }
    }

    /// Writes the values of a slice, row-major, to `out`: in float32 as a matrix of `dtype` would hold them.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read_f32(&self, name: &str, slice: &Slice, dtype: WeightDtype, out: &mut [f32]) -> Result<()> {
        self.check_slice(name, slice)?;
        match self {
            Self::Safetensors(c) => c.read(name, slice, |stored| to_f32(stored.as_rows(), dtype, out)),
            Self::Gguf(c) => c.read_f32(name, slice, dtype, out),
        }
        .ok_or_else(|| missing(name))?
    }

    /// A number that depends on the stored bytes of these rows and on nothing else; that of several parts is the
    /// wrapping sum of theirs.
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

    /// What the system said of the files when they were opened.
    pub fn opened(&self) -> Vec<Stamp> {
        self.files().iter().map(MappedFile::opened).collect()
    }

    /// What the system says of the opened files now.
    ///
    /// # Errors
    /// `DataLoss` naming one that was cut short.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        self.files().iter().map(MappedFile::stamp).collect()
    }

    /// What to say when a parameter is not what it was.
    pub fn other_bytes(&self, name: &str) -> Error {
        let file = match self {
            Self::Safetensors(c) => c.file(name),
            Self::Gguf(c) => Some(c.file()),
        };
        file.map_or_else(|| missing(name), |file| file.lost(&format!("has other bytes in {name} than were loaded")))
    }

    /// The same parameters in the files that have the paths now: for one that was cut short, and is whole again.
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

    /// Gives the pages of a parameter that has been read back to the system, so that resident memory does not grow with
    /// the file. It may be read again.
    pub fn release(&self, name: &str) {
        match self {
            Self::Safetensors(c) => c.release(name),
            Self::Gguf(c) => c.release(name),
        }
    }

    /// The part of a parameter that a rank reads, its shape checked.
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

#[cfg(test)]
mod tests;
