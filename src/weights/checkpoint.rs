//! One face for both checkpoint formats: parameters by Hugging Face name, read as slices.

use super::gguf::GgufCheckpoint;
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

/// How far a load has come, in bytes as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
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

    /// Hands every parameter's slice for `rank` of `world` to `sink`, in the order of the file, and gives its pages back
    /// afterwards: beside what `sink` keeps, at most one parameter is in memory at a time.
    ///
    /// # Errors
    /// `Config` if a parameter is missing, has another shape than its spec, or cannot be divided; and `sink`'s own.
    pub fn load(
        &self,
        specs: &[ParamSpec],
        (rank, world): (usize, usize),
        mut progress: impl FnMut(LoadProgress),
        mut sink: impl FnMut(&ParamSpec, TensorData<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut plan = Vec::with_capacity(specs.len());
        for spec in specs {
            let shape = self.shape(&spec.name)?;
            if shape != spec.shape {
                return Err(Error::Config(format!(
                    "{} has shape {shape:?} in the checkpoint, but the configuration makes it {:?}",
                    spec.name, spec.shape
                )));
            }
            plan.push((
                self.position(&spec.name),
                spec,
                spec.slice(rank, world)?,
                self.stored_bytes(&spec.name)? as u64,
            ));
        }
        plan.sort_by_key(|(position, ..)| *position);
        let total_bytes = plan.iter().map(|(.., bytes)| bytes).sum();
        let mut done_bytes = 0;
        for (_, spec, slice, bytes) in plan {
            sink(spec, self.read(&spec.name, &slice)?)?;
            self.release(&spec.name);
            done_bytes += bytes;
            progress(LoadProgress { done_bytes, total_bytes });
        }
        Ok(())
    }

    fn position(&self, name: &str) -> Option<(usize, usize)> {
        match self {
            Self::Safetensors(c) => c.position(name),
            Self::Gguf(c) => c.offset(name).map(|offset| (0, offset)),
        }
    }
}

fn missing(name: &str) -> Error {
    Error::Config(format!("the checkpoint has no tensor {name}; its files and config.json do not belong together"))
}
