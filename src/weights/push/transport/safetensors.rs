//! The header of a safetensors file, read within bounds: a push may name a file that was made to exhaust memory.

use std::fmt;

use serde::Deserializer as _;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};

use super::SourceFile;
use crate::error::{self, Error, shown};
use crate::memory::{Charge, human_bytes};
use crate::weights::parameters::Dtype;
use crate::weights::update::TensorEntry;

/// Member of the header that has texts of its writer's, and no tensor.
const METADATA: &str = "__metadata__";
/// Most dimensions of a tensor: more than any parameter of a decoder has.
const MAX_DIMENSIONS: usize = 4;
/// Bytes of memory for each byte of a header: itself, and the tensors that it declares until the push ends. Tensors
/// with short names take the most.
const DECLARED_BYTES: u64 = 24;
/// Most bytes of an error about a header, which can quote it.
const MAX_QUOTED_BYTES: usize = 300;

/// The tensors of a file, in the order of their bytes. Errors are on `field`. `left` is the most bytes that the headers
/// of the files still to be read may have together.
pub(super) fn read_header(
    file: &SourceFile,
    field: &str,
    left: &mut u64,
    charge: &mut Charge,
) -> error::Result<Vec<TensorEntry>> {
    const PREFIX: u64 = size_of::<u64>() as u64;
    let fail = |what: String| Error::invalid(field, format!("{}: {what}", file.name()));
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
        let (header, left) = (human_bytes(header_bytes), human_bytes(*left));
        return Err(fail(format!(
            "its header has {header}, and those of a push to this model may have {left} more; no adapter or checkpoint \
             of it needs as much"
        )));
    }
    *left -= header_bytes;
    charge.grow(header_bytes * DECLARED_BYTES)?;
    let mut text = vec![0; header_bytes as usize];
    file.read(file.name(), PREFIX, &mut text)?;
    let mut tensors = parse(&text)
        .map_err(|e| fail(format!("not a safetensors header: {}", shown(&e.to_string(), MAX_QUOTED_BYTES))))?;
    let declared = tensors.last().map_or(0, end_of);
    let data = PREFIX + header_bytes;
    if file.bytes() - data != declared {
        let bytes = file.bytes() - data;
        return Err(fail(format!(
            "not a whole safetensors file; it has {bytes} bytes of tensors and its header declares {declared}"
        )));
    }
    tensors.iter_mut().for_each(|tensor| tensor.offset += data);
    Ok(tensors)
}

/// The tensors that the text of a header declares, in the order of their bytes. Each has its offset from where the
/// header ends.
fn parse(text: &[u8]) -> serde_json::Result<Vec<TensorEntry>> {
    let mut header = serde_json::Deserializer::from_slice(text);
    let tensors = header.deserialize_map(HeaderVisitor)?;
    header.end().map(|()| tensors)
}

/// A tensor as the header declares it.
#[derive(serde::Deserialize)]
struct StoredTensor {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl StoredTensor {
    /// The tensor of this name, or the reason why it cannot be one.
    fn entry(self, name: String) -> Result<TensorEntry, String> {
        let Self { dtype, shape, data_offsets: (start, end) } = self;
        let dtype = match dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            other => return Err(format!("{name} is stored as {other:?}; supported are F32, F16 and BF16")),
        };
        if shape.len() > MAX_DIMENSIONS {
            let count = shape.len();
            return Err(format!("{name} has {count} dimensions; a tensor has at most {MAX_DIMENSIONS} dimensions"));
        }
        let mut dimensions = shape.iter().map(|&dimension| dimension as u64);
        let bytes = dimensions.try_fold(dtype.size() as u64, u64::checked_mul);
        if bytes.is_none_or(|bytes| start.checked_add(bytes) != Some(end)) {
            return Err(format!("{name} of shape {shape:?} cannot take the bytes {start} to {end}"));
        }
        Ok(TensorEntry { name, dtype, shape, digest: None, payload: None, offset: start, allocation: None })
    }
}

/// The end of the bytes of a tensor that [`StoredTensor::entry`] has made.
fn end_of(entry: &TensorEntry) -> u64 {
    entry.offset + (entry.shape.iter().product::<usize>() * entry.dtype.size()) as u64
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<TensorEntry>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a member for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Vec<TensorEntry>, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = members.next_key::<String>()? {
            if name == METADATA {
                members.next_value::<IgnoredAny>()?;
            } else {
                tensors.push(members.next_value::<StoredTensor>()?.entry(name).map_err(A::Error::custom)?);
            }
        }
        tensors.sort_by_key(|tensor| tensor.offset);
        let mut end = 0;
        for tensor in &tensors {
            if tensor.offset != end {
                let TensorEntry { name, offset, .. } = tensor;
                return Err(A::Error::custom(format!("{name} begins at {offset}, and the one before ends at {end}")));
            }
            end = end_of(tensor);
        }
        Ok(tensors)
    }
}
