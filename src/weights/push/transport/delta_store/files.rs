//! The files of one version of a delta store: opened, and identified by their headers.

use std::path::Path;
use std::sync::Arc;

use twox_hash::xxhash3_128::Hasher;

use super::super::file::{FIELD, Root, most_header_bytes, open_file};
use super::super::safetensors::{DECLARED_BYTES, StoredHeader, read_header, read_stored};
use super::super::{SourceFile, Sources};
use crate::error::Result;
use crate::memory::Charge;
use crate::types::WeightVersion;
use crate::weights::parameters::{Parameters, resolve};
use crate::weights::update::{StoredVersion, TensorEntry};

/// Opens the files of a version. The memory for their declarations is counted before it is taken.
pub(super) struct VersionFiles<'a> {
    root: &'a Root,
    sources: &'a Sources,
    parameters: &'a Parameters,
    /// Bytes that the headers still to be read may have.
    left: u64,
    charge: Charge,
    digest: Hasher,
    stamp: Hasher,
}

impl<'a> VersionFiles<'a> {
    pub fn new(root: &'a Root, sources: &'a Sources, parameters: &'a Parameters) -> Result<Self> {
        let (left, charge) = (most_header_bytes(parameters.len()), sources.traffic.charge(0)?);
        Ok(Self { root, sources, parameters, left, charge, digest: Hasher::new(), stamp: Hasher::new() })
    }

    /// Opens a file.
    ///
    /// # Errors
    /// `NotFound` or `InvalidArgument` naming it.
    pub fn open(&mut self, path: &Path) -> Result<Arc<SourceFile>> {
        let file = open_file(self.root, path)?;
        self.stamp.write(&file.bytes().to_le_bytes());
        self.stamp.write(&file.changed_at().to_le_bytes());
        Ok(Arc::new(file))
    }

    /// The text of a JSON file; `None` if it does not exist.
    ///
    /// # Errors
    /// As for [`read_stored`].
    pub fn read_json(&mut self, path: &Path) -> Result<Option<Vec<u8>>> {
        if !self.root.has(path)? {
            return Ok(None);
        }
        let file = self.open(path)?;
        if file.bytes() > self.left {
            let what = format!("{}: has {} bytes, and may have {}", file.name(), file.bytes(), self.left);
            return Err(super::refuse(what));
        }
        self.left -= file.bytes();
        self.charge.grow(file.bytes() * DECLARED_BYTES)?;
        let mut text = vec![0; file.bytes() as usize];
        file.read(file.name(), 0, &mut text)?;
        self.digest.write(&text);
        Ok(Some(text))
    }

    /// The tensors of a file of values.
    ///
    /// # Errors
    /// As for [`read_header`].
    pub fn read_header(&mut self, file: &SourceFile) -> Result<Vec<TensorEntry>> {
        read_header(file, FIELD, (&mut self.left, &mut self.charge), Some(&mut self.digest))
    }

    /// The tensors of a file of changes, with the texts of its writer's.
    ///
    /// # Errors
    /// As for [`read_stored`].
    pub fn read_stored(&mut self, file: &SourceFile) -> Result<StoredHeader> {
        read_stored(file, FIELD, (&mut self.left, &mut self.charge), Some(&mut self.digest))
    }

    /// The shape of the model's tensor of this name; empty if it has none, which is refused later.
    pub fn shape_of(&self, tensor: &str) -> Vec<usize> {
        resolve(tensor, self.parameters).and_then(|mapping| mapping.shape).unwrap_or_default()
    }

    /// The charge of what was read, for those who hold it.
    pub fn take_charge(&mut self) -> Charge {
        std::mem::replace(&mut self.charge, self.sources.traffic.charge_always(0))
    }

    /// Identifies the version by what was read.
    pub fn identify(mut self, version: WeightVersion) -> StoredVersion {
        let digest = self.digest.finish_128().to_be_bytes();
        self.stamp.write(&digest);
        StoredVersion { version, digest, stamp: self.stamp.finish_128().to_be_bytes() }
    }
}
