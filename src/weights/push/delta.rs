//! New values of single elements, and the payload in which they come.
//!
//! A tensor's payload is zstd of `changed` gaps (u32, little-endian: the first index, then the differences) followed by
//! as many values in the tensor's dtype.

use std::collections::BTreeMap;

use super::finite::first_not_finite;
use super::receipt::Buffer;
use crate::error::{Error, Result};
use crate::weights::{Dtype, Slice, TensorData};

const GAP_BYTES: usize = size_of::<u32>();

/// New values of single elements.
#[derive(Debug, Default)]
pub struct Delta {
    parameters: BTreeMap<String, Decoded>,
}

/// The elements of one parameter that change, and their new values.
#[derive(Debug)]
pub struct Changes<'a> {
    /// Flat row-major indices into the whole parameter, ascending, no duplicates.
    pub indices: &'a [u64],
    pub values: TensorData<'a>,
}

/// One tensor's payload.
#[derive(Debug)]
pub(super) struct Decoded {
    dtype: Dtype,
    indices: Vec<u64>,
    /// Decompressed: gaps, then values.
    payload: Buffer,
}

impl Delta {
    /// Names of the parameters with changes, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    pub fn changes(&self, parameter: &str) -> Option<Changes<'_>> {
        let Decoded { dtype, indices, payload } = self.parameters.get(parameter)?;
        let changed = indices.len();
        let all = Slice { rows: 0..changed, cols: 0..1 };
        Some(Changes { indices, values: TensorData::of_bytes(*dtype, &payload[changed * GAP_BYTES..], 1, &all) })
    }

    pub(super) fn insert(&mut self, parameter: String, decoded: Decoded) {
        self.parameters.insert(parameter, decoded);
    }
}

/// Most memory that [`decode`] takes for so many changes; None if no machine has it.
pub(super) fn decoded_bytes(changed: u64, dtype: Dtype) -> Option<u64> {
    changed.checked_mul((size_of::<u64>() + GAP_BYTES + dtype.size()) as u64)
}

/// Decodes the payload of a tensor of so many elements, of which at most all have `changed`. What it takes is bounded
/// by `changed`, whatever the payload would grow to.
///
/// # Errors
/// `InvalidArgument` naming the tensor if the payload is not of `changed` elements, indices are outside or do not
/// ascend, or a value is not finite.
pub(super) fn decode(name: &str, payload: &[u8], dtype: Dtype, changed: usize, elements: usize) -> Result<Decoded> {
    let refuse = |what: String| Error::invalid("tensors", format!("payload of tensor {name:?}: {what}"));
    let expected = changed * (GAP_BYTES + dtype.size());
    let mut raw = Buffer::zeroed(expected)?;
    // One call into a buffer of the right size: it cannot grow past it, and zstd needs no window of its own.
    let bytes = zstd::bulk::decompress_to_buffer(payload, &mut raw).map_err(|e| {
        refuse(format!("does not decompress to the {expected} bytes of {changed} changed elements: {e}"))
    })?;
    if bytes != expected {
        return Err(refuse(format!("has {bytes} bytes, but {changed} changed elements have {expected}")));
    }
    let (gaps, values) = raw.split_at(changed * GAP_BYTES);
    let (gaps, _) = gaps.as_chunks::<GAP_BYTES>();
    let mut indices = Vec::with_capacity(changed);
    let mut next = 0u64;
    for (i, gap) in gaps.iter().enumerate() {
        let gap = u64::from(u32::from_le_bytes(*gap));
        if gap == 0 && i > 0 {
            return Err(refuse(format!("indices do not ascend: index {next} comes again")));
        }
        // No overflow: every index so far is below the elements, of which there are fewer than 2^32.
        next += gap;
        if next >= elements as u64 {
            return Err(refuse(format!("index {next} is outside its {elements} elements")));
        }
        indices.push(next);
    }
    if let Some(i) = first_not_finite(values, dtype) {
        return Err(refuse(format!("the new value of element {} is not finite", indices[i])));
    }
    Ok(Decoded { dtype, indices, payload: raw })
}
