//! One face for both checkpoint formats: parameters by Hugging Face name, read as slices.

use super::gguf::GgufCheckpoint;
use super::partition::Partition;
use super::safetensors::SafetensorsCheckpoint;
use super::shard::{ParamSpec, Slice, matrix_shape};
use super::tensor::TensorData;
use crate::error::{Error, Result};

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

    /// Values of a slice, row-major. Borrowed from the mapped file if whole rows of a float tensor are asked for;
    /// otherwise a copy of the slice (GGUF: de-quantised to float32, and of no more than the rows asked for, so that a
    /// large parameter can be read in pieces).
    ///
    /// # Errors
    /// `Config` if there is no such parameter, the slice is not inside it, or its quantisation is unknown.
    pub fn read(&self, name: &str, slice: &Slice) -> Result<TensorData<'_>> {
        let (rows, cols) = matrix_shape(self.shape(name)?);
        if slice.rows.end > rows
            || slice.cols.end > cols
            || slice.rows.start > slice.rows.end
            || slice.cols.start > slice.cols.end
        {
            return Err(Error::Config(format!("{name} is {rows} by {cols}; it has no slice {slice:?}")));
        }
        match self {
            Self::Safetensors(c) => c.read(name, slice).ok_or_else(|| missing(name)),
            Self::Gguf(c) => c.read(name, slice).ok_or_else(|| missing(name))?,
        }
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
