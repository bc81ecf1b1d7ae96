//! A version as TRL's delta weight sync writes it: one file with the indices and the values of each tensor's changes.

use std::collections::HashMap;
use std::path::Path;

use super::super::safetensors::{MAX_QUOTED_BYTES, StoredTensor};
use super::files::VersionFiles;
use super::{DeltaTensor, Indices, StoredChanges, StoredDelta, refuse};
use crate::error::{Result, shown};
use crate::types::WeightVersion;
use crate::weights::update::TensorEntry;

/// Ends of the names of a tensor's indices and of its values.
const INDICES: &str = ".idx";
const VALUES: &str = ".val";

/// Opens a file of changes, and reads its header.
///
/// # Errors
/// `InvalidArgument` naming the file if it is malformed, or of another version or encoding.
pub(super) fn read(files: &mut VersionFiles<'_>, path: &Path, version: WeightVersion) -> Result<StoredDelta> {
    let fail = |what: String| refuse(format!("{}: {}", path.display(), shown(&what, MAX_QUOTED_BYTES)));
    let Some(base) = version.checked_sub(1) else {
        return Err(fail("version 0 changes no other version".into()));
    };
    let file = files.open(path)?;
    let header = files.read_stored(&file)?;
    let text = |key: &str| header.metadata.get(key).map(String::as_str);
    let encoding = text("encoding").unwrap_or("gap_delta");
    if !["raw", "gap_delta"].contains(&encoding) {
        let encoding = shown(encoding, 64);
        return Err(fail(format!("encoding is {encoding:?}; supported: raw, gap_delta (weight_sync_encoding of TRL)")));
    }
    if let Some(named) = text("model_version").filter(|named| named.parse() != Ok(version)) {
        return Err(fail(format!("model_version is {:?}; expected was {version}", shown(named, 64))));
    }
    let mut stored: HashMap<String, StoredTensor> = HashMap::new();
    let mut values = Vec::new();
    for tensor in header.tensors {
        if tensor.name.ends_with(VALUES) {
            values.push(tensor);
        } else {
            stored.insert(tensor.name.clone(), tensor);
        }
    }
    let mut tensors = Vec::with_capacity(values.len());
    for value in values {
        let name = value.name.strip_suffix(VALUES).unwrap_or(&value.name).to_string();
        let indices = stored.remove(&format!("{name}{INDICES}"));
        let indices = indices.ok_or_else(|| fail(format!("{} has no indices {name}{INDICES}", value.name)))?;
        let dtype = value.value_dtype().map_err(fail)?;
        let how = match (encoding, indices.dtype) {
            ("raw", safetensors::Dtype::I32) => Indices::I32,
            ("gap_delta", safetensors::Dtype::U16) => Indices::SkippedU16,
            ("gap_delta", safetensors::Dtype::U32) => Indices::SkippedU32,
            (_, other) => return Err(fail(format!("{} is stored as {other:?}, not as {encoding}", indices.name))),
        };
        let changed = value.bytes / dtype.size() as u64;
        if indices.bytes != changed * how.size() as u64 {
            return Err(fail(format!("{} and {} have different numbers of elements", indices.name, value.name)));
        }
        if changed == 0 {
            continue;
        }
        let (shape, payload) = (files.shape_of(&name), Some((changed, indices.bytes)));
        let (digest, offset, allocation) = (None, indices.offset, None);
        let entry = TensorEntry { name, dtype, shape, digest, payload, offset, allocation };
        tensors.push(DeltaTensor { entry, file: file.clone(), changes: StoredChanges::Apart(how, value.offset) });
    }
    match stored.into_keys().next() {
        Some(name) => Err(fail(format!("{name:?} is neither values ({VALUES}) nor the indices of any"))),
        None => Ok(StoredDelta { base, tensors, charge: files.take_charge() }),
    }
}
