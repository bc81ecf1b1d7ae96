//! One face for both checkpoint formats: parameters by Hugging Face name, read as slices.

use std::ops::Range;

use rollout_kernels::WeightDtype;

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

    /// Values of a slice, row-major. Borrowed from the mapped file if whole rows of a safetensors file are asked for;
    /// otherwise a copy of the slice (GGUF: in float32).
    ///
    /// # Errors
    /// `Config` if there is no such parameter, or the slice is not inside it.
    pub fn read(&self, name: &str, slice: &Slice) -> Result<TensorData<'_>> {
        self.check_slice(name, slice)?;
        match self {
            Self::Safetensors(c) => c.read(name, slice).ok_or_else(|| missing(name)),
            Self::Gguf(_) => {
                let mut values = vec![0.0; slice.len()];
                self.read_f32(name, slice, WeightDtype::F32, &mut values)?;
                Ok(TensorData::F32(values.into()))
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
            Self::Safetensors(c) => c.read(name, slice).map(|stored| stored.as_rows().to_f32(dtype, out)),
            Self::Gguf(c) => c.read_f32(name, slice, dtype, out),
        }
        .ok_or_else(|| missing(name))
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
