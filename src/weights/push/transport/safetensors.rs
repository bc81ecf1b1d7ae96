//! The header of a safetensors file, read within bounds: a push may name a file that was made to exhaust memory.

use std::collections::HashMap;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use twox_hash::xxhash3_128::Hasher;

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
pub(super) const DECLARED_BYTES: u64 = 24;
/// Most bytes of an error about a header, which can quote it.
pub(super) const MAX_QUOTED_BYTES: usize = 300;

/// A file's header as it is stored.
pub(super) struct StoredHeader {
    /// In the order of their bytes, which follow one another without gaps.
    pub tensors: Vec<StoredTensor>,
    /// The texts of its writer's; empty unless they were asked for.
    pub metadata: HashMap<String, String>,
}

/// A tensor of a file, of any dtype.
pub(super) struct StoredTensor {
    pub name: String,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    /// Its first byte in the file, and the number of its bytes.
    pub offset: u64,
    pub bytes: u64,
}

/// The tensors of a file, in the order of their bytes, for a push of values. Arguments are those of [`read_stored`].
pub(super) fn read_header(
    file: &SourceFile,
    field: &str,
    limits: (&mut u64, &mut Charge),
    digest: Option<&mut Hasher>,
) -> error::Result<Vec<TensorEntry>> {
    let header = read_stored(file, field, limits, digest)?;
    let entries = header.tensors.into_iter().map(StoredTensor::entry);
    entries.collect::<Result<_, _>>().map_err(|what| {
        let what = shown(&what, MAX_QUOTED_BYTES);
        Error::invalid(field, format!("{}: not a safetensors header: {what}", file.name()))
    })
}

/// The header of a file, whose text is added to `digest`; with the texts of its writer's if there is a digest. Errors
/// are on `field`. `left` is the most bytes that the headers of the files still to be read may have together.
pub(super) fn read_stored(
    file: &SourceFile,
    field: &str,
    (left, charge): (&mut u64, &mut Charge),
    digest: Option<&mut Hasher>,
) -> error::Result<StoredHeader> {
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
    let mut header = parse(&text, digest.is_some())
        .map_err(|e| fail(format!("not a safetensors header: {}", shown(&e.to_string(), MAX_QUOTED_BYTES))))?;
    let declared = header.tensors.last().map_or(0, |tensor| tensor.offset + tensor.bytes);
    let data = PREFIX + header_bytes;
    if file.bytes() - data != declared {
        let bytes = file.bytes() - data;
        return Err(fail(format!(
            "not a whole safetensors file; it has {bytes} bytes of tensors and its header declares {declared}"
        )));
    }
    if let Some(digest) = digest {
        digest.write(&text);
    }
    header.tensors.iter_mut().for_each(|tensor| tensor.offset += data);
    Ok(header)
}

/// The tensors that the text of a header declares, in the order of their bytes. Each has its offset from where the
/// header ends.
fn parse(text: &[u8], has_metadata: bool) -> serde_json::Result<StoredHeader> {
    let mut header = serde_json::Deserializer::from_slice(text);
    let stored = header.deserialize_map(HeaderVisitor { has_metadata })?;
    header.end().map(|()| stored)
}

/// A tensor as the header declares it.
#[derive(serde::Deserialize)]
struct Declaration {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl StoredTensor {
    /// The declared tensor of this name, or the reason why there can be none.
    fn new(name: String, declared: Declaration) -> Result<Self, String> {
        let Declaration { dtype, shape, data_offsets: (start, end) } = declared;
        if shape.len() > MAX_DIMENSIONS {
            let count = shape.len();
            return Err(format!("{name} has {count} dimensions; a tensor has at most {MAX_DIMENSIONS} dimensions"));
        }
        let mut dimensions = shape.iter().map(|&dimension| dimension as u64);
        let bytes = dimensions.try_fold(dtype.bitsize() as u64, u64::checked_mul).map(|bits| bits / 8);
        match bytes.filter(|&bytes| start.checked_add(bytes) == Some(end)) {
            Some(bytes) => Ok(Self { name, dtype, shape, offset: start, bytes }),
            None => Err(format!("{name} of shape {shape:?} cannot take the bytes {start} to {end}")),
        }
    }

    /// The dtype of the tensor's values.
    ///
    /// # Errors
    /// Says which are supported, if this is another.
    pub fn value_dtype(&self) -> Result<Dtype, String> {
        match self.dtype {
            safetensors::Dtype::F32 => Ok(Dtype::F32),
            safetensors::Dtype::F16 => Ok(Dtype::F16),
            safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
            other => Err(format!("{} is stored as {other:?}; supported are F32, F16 and BF16", self.name)),
        }
    }

    fn entry(self) -> Result<TensorEntry, String> {
        let dtype = self.value_dtype()?;
        let Self { name, shape, offset, .. } = self;
        Ok(TensorEntry { name, dtype, shape, digest: None, payload: None, offset, allocation: None })
    }
}

struct HeaderVisitor {
    has_metadata: bool,
}

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = StoredHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a member for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<StoredHeader, A::Error> {
        let (mut tensors, mut metadata) = (Vec::new(), HashMap::new());
        while let Some(name) = members.next_key::<String>()? {
            if name != METADATA {
                tensors.push(StoredTensor::new(name, members.next_value()?).map_err(A::Error::custom)?);
            } else if self.has_metadata {
                metadata = members.next_value()?;
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        tensors.sort_by_key(|tensor| tensor.offset);
        let mut end = 0;
        for StoredTensor { name, offset, bytes, .. } in &tensors {
            if *offset != end {
                return Err(A::Error::custom(format!("{name} begins at {offset}, and the one before ends at {end}")));
            }
            end = offset + bytes;
        }
        Ok(StoredHeader { tensors, metadata })
    }
}
