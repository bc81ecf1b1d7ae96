//! A version as slime writes it: a directory like that of a checkpoint, whose index says that its tensors are changes.

use std::collections::HashMap;
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::super::SourceFile;
use super::super::safetensors::{MAX_QUOTED_BYTES, StoredTensor};
use super::files::VersionFiles;
use super::{ByteEncoding, DeltaTensor, StoredChanges, StoredDelta, refuse};
use crate::error::{Result, shown};
use crate::types::WeightVersion;
use crate::weights::parameters::Dtype;
use crate::weights::update::{GAP_BYTES, TensorEntry};

const INDEX: &str = "model.safetensors.index.json";
/// Most bytes of the header of a zstd frame.
const FRAME_HEADER_BYTES: usize = 18;

/// The index of a version that is a delta.
pub(super) struct DeltaIndex {
    base: WeightVersion,
    encoding: Encoding,
    /// The name of the file of each tensor.
    weight_map: HashMap<String, String>,
}

/// How the tensors of a delta are encoded.
#[derive(Clone, Copy)]
enum Encoding {
    /// Changed elements of values of this dtype.
    Elements(Dtype),
    Bytes(ByteEncoding),
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: HashMap<String, Value>,
    #[serde(default)]
    weight_map: HashMap<String, String>,
}

/// The index of the version in `directory`; `None` if it is a checkpoint, and no delta.
///
/// # Errors
/// `InvalidArgument` naming the index if it is malformed, or of another version or encoding.
pub(super) fn read_index(
    files: &mut VersionFiles<'_>,
    directory: &Path,
    version: WeightVersion,
) -> Result<Option<DeltaIndex>> {
    let path = directory.join(INDEX);
    let fail = |what: String| refuse(format!("{}: {what}", path.display()));
    let Some(text) = files.read_json(&path)? else { return Ok(None) };
    let Index { metadata, weight_map } = serde_json::from_slice(&text)
        .map_err(|e| fail(format!("not an index: {}", shown(&e.to_string(), MAX_QUOTED_BYTES))))?;
    let text = |key: &str| metadata.get(key).and_then(Value::as_str).unwrap_or_default();
    let one_of = |key: &str, known: &[&str]| {
        let found = text(key);
        let position = known.iter().position(|name| *name == found);
        position.ok_or_else(|| fail(format!("{key} is {:?}; supported: {}", shown(found, 64), known.join(", "))))
    };
    let number = |key: &str| {
        text(key).parse::<WeightVersion>().map_err(|_| fail(format!("{key} is {:?}, no number", shown(text(key), 64))))
    };
    if !metadata.contains_key("delta_encoding") {
        return Ok(None);
    }
    one_of("compression_format", &["zstd"])?;
    one_of("checksum_format", &["xxh3-128"])?;
    let encoding = match one_of("delta_encoding", &["xor", "overwrite", "elements"])? {
        0 => Encoding::Bytes(ByteEncoding::Xor),
        1 => Encoding::Bytes(ByteEncoding::Overwrite),
        _ => {
            let dtypes = [Dtype::F32, Dtype::Bf16, Dtype::F16];
            Encoding::Elements(dtypes[one_of("dtype", &["float32", "bfloat16", "float16"])?])
        }
    };
    let (named, base) = (number("version")?, number("base_version")?);
    if named != version || base >= version {
        return Err(fail(format!(
            "is of version {named}, which changes version {base}; expected was version {version}"
        )));
    }
    Ok(Some(DeltaIndex { base, encoding, weight_map }))
}

/// Opens the files of a delta, and reads their headers.
///
/// # Errors
/// `NotFound` naming a file of the index that is missing; `InvalidArgument` naming one that is malformed.
pub(super) fn read(files: &mut VersionFiles<'_>, directory: &Path, index: DeltaIndex) -> Result<StoredDelta> {
    let mut names: Vec<&String> = index.weight_map.values().collect();
    names.sort_unstable();
    names.dedup();
    let mut tensors = Vec::with_capacity(index.weight_map.len());
    for name in names {
        let path = Path::new(name);
        if !path.components().eq([Component::Normal(name.as_ref())]) {
            let what =
                format!("{}: {:?} is no name of a file beside it", directory.join(INDEX).display(), shown(name, 64));
            return Err(refuse(what));
        }
        let file = files.open(&directory.join(path))?;
        let header = files.read_stored(&file)?;
        for tensor in header.tensors {
            if index.weight_map.get(&tensor.name) != Some(name) {
                let name = shown(&tensor.name, MAX_QUOTED_BYTES);
                return Err(refuse(format!("{}: {INDEX} does not have its tensor {name:?}", file.name())));
            }
            let digest = header.metadata.get(&tensor.name).and_then(|text| digest_of(text));
            tensors.push(changes(files, &file, tensor, index.encoding, digest)?);
        }
    }
    if tensors.len() < index.weight_map.len() {
        let path = directory.join(INDEX);
        return Err(refuse(format!("{}: names tensors that their files do not have", path.display())));
    }
    Ok(StoredDelta { base: index.base, tensors, charge: files.take_charge() })
}

/// The declaration of the changes of a tensor.
fn changes(
    files: &VersionFiles<'_>,
    file: &Arc<SourceFile>,
    tensor: StoredTensor,
    encoding: Encoding,
    digest: Option<[u8; 16]>,
) -> Result<DeltaTensor> {
    let StoredTensor { name, dtype: stored, offset, bytes, .. } = tensor;
    let shown_name = shown(&name, MAX_QUOTED_BYTES).to_string();
    let fail = |what: &str| refuse(format!("{}: tensor {shown_name:?}: {what}", file.name()));
    if stored != safetensors::Dtype::U8 {
        return Err(fail("is not stored as U8, as compressed changes are"));
    }
    let digest = digest.ok_or_else(|| fail("has no XXH3-128 in the header's metadata"))?;
    let mut head = [0; FRAME_HEADER_BYTES];
    let head = &mut head[..FRAME_HEADER_BYTES.min(bytes as usize)];
    file.read(&name, offset, head)?;
    let raw = zstd::zstd_safe::get_frame_content_size(head).ok().flatten();
    let raw = raw.ok_or_else(|| fail("is no zstd frame that declares its size"))?;
    let shape = files.shape_of(&name);
    let (dtype, changed, changes) = match encoding {
        // The dtype is that of the version before.
        Encoding::Bytes(encoding) => (Dtype::F32, 0, StoredChanges::Bytes(encoding, raw)),
        Encoding::Elements(dtype) => {
            let element = (GAP_BYTES + dtype.size()) as u64;
            if raw % element != 0 {
                let what = format!("decompresses to {raw} bytes, not a multiple of the {element} of an element");
                return Err(fail(&what));
            }
            (dtype, raw / element, StoredChanges::Payload)
        }
    };
    let payload = Some((changed, bytes));
    let entry = TensorEntry { name, dtype, shape, digest: Some(digest), payload, offset, allocation: None };
    Ok(DeltaTensor { entry, file: file.clone(), changes })
}

/// The digest that a text of 32 hexadecimal digits is.
fn digest_of(text: &str) -> Option<[u8; 16]> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(u128::to_be_bytes)
}
