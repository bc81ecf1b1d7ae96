//! The deltas between two versions of a delta store: declared, read, verified and decoded like those of DELTA pushes.

use std::collections::HashSet;
use std::sync::Arc;

use super::delta::{changed, decode, decode_apart, decode_each, decoded_bytes};
use super::manifest::Manifest;
use super::tensor::PushedTensor;
use super::threads::in_parallel;
use super::transport::delta_store::{StoredChanges, StoredDelta};
use super::transport::{OpenSource, SourceFile};
use crate::error::{Error, Result};
use crate::weights::parameters::Parameters;
use crate::weights::update::{Delta, UpdateHeader, UpdateKind};

/// The changes of one version, whose tensors fit the model.
pub(super) struct DeltaLink {
    manifest: Manifest,
    files: Vec<Arc<SourceFile>>,
    /// How the changes of each tensor are stored.
    changes: Vec<StoredChanges>,
    /// Keeps the charge of the declarations.
    _source: OpenSource,
}

impl DeltaLink {
    /// Checks the declarations of a delta.
    ///
    /// # Errors
    /// `InvalidArgument` naming the file and the tensor.
    pub fn new(delta: StoredDelta, parameters: Arc<Parameters>) -> Result<Self> {
        let StoredDelta { tensors, charge, .. } = delta;
        let (mut entries, mut files, mut changes) = (Vec::new(), Vec::new(), Vec::new());
        for tensor in tensors {
            entries.push(tensor.entry);
            files.push(tensor.file);
            changes.push(tensor.changes);
        }
        let mut source = OpenSource::of_files(files.clone(), charge);
        let mut manifest = Manifest::new(&UpdateHeader::new(UpdateKind::Delta), parameters);
        let first = files.first().map(|file| file.name().to_string());
        manifest.add(entries, &mut source).map_err(|error| in_file(error, first.as_deref()))?;
        Ok(Self { manifest, files, changes, _source: source })
    }

    /// Bytes of the changes as they are stored.
    pub fn bytes(&self) -> u64 {
        let entries = self.manifest.tensors.iter().map(|tensor| &tensor.entry);
        let apart = entries.zip(&self.changes).filter(|(_, changes)| matches!(changes, StoredChanges::Apart(..)));
        apart.map(|(entry, _)| changed(entry) * entry.dtype.size() as u64).sum::<u64>() + self.manifest.total()
    }

    /// Most bytes that reading and decoding take.
    pub fn staging(&self) -> u64 {
        let entries = self.manifest.tensors.iter().map(|tensor| &tensor.entry);
        let decoded = entries.map(|entry| decoded_bytes(changed(entry), entry.dtype));
        decoded.fold(self.manifest.total(), u64::saturating_add)
    }

    /// Adds the names of the parameters that change.
    pub fn add_names(&self, names: &mut HashSet<String>) {
        let parts = self.manifest.tensors.iter().flat_map(|tensor| &tensor.mapping.parts);
        names.extend(parts.map(|part| part.parameter.clone()));
    }

    /// Reads, verifies and decodes the changes.
    ///
    /// # Errors
    /// `DataLoss` naming the file and the tensor whose bytes are not those that were written; `InvalidArgument` naming
    /// one that is malformed.
    pub fn decode(mut self) -> Result<Delta> {
        let Self { manifest, files, changes, .. } = &mut self;
        let tensors = manifest.tensors.iter_mut().map(|tensor| (tensor.bytes, tensor));
        in_parallel(tensors.collect(), |tensor| {
            let file = tensor.file().map(|file| file.name().to_string());
            PushedTensor::read(tensor).map_err(|error| in_file(error, file.as_deref()))
        })?;
        let (files, changes) = (&*files, &*changes);
        decode_each(manifest, |i, entry, bytes| {
            let decoded = match changes[i] {
                StoredChanges::Payload => decode(entry, bytes),
                StoredChanges::Apart(how, offset) => {
                    decode_apart(entry, how, bytes, |values| files[i].read(&entry.name, offset, values))
                }
                StoredChanges::Bytes(..) => Err(Error::invalid("tensors", "has changes of bytes")),
            };
            decoded.map_err(|error| in_file(error, Some(files[i].name())))
        })
    }
}

/// The error of a tensor, with the name of its file.
fn in_file(error: Error, file: Option<&str>) -> Error {
    let Some(file) = file else { return error };
    match error {
        Error::InvalidArgument { message, .. } => Error::invalid("source.directory", format!("{file}: {message}")),
        Error::DataLoss(message) => Error::DataLoss(format!("{file}: {message}")),
        other => other,
    }
}
