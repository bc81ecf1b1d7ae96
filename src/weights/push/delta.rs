//! DELTA pushes: new values of single elements of parameters, and the payload in which they come.
//!
//! The payload of a tensor is compressed by zstd. It has `changed` indices, each a little-endian u32 that is the gap to
//! the index before it (for the first, the index itself), and then as many values in the tensor's dtype.

use std::collections::BTreeMap;

use super::TensorEntry;
use super::buffer::Buffer;
use super::threads::in_parallel;
use super::verify::first_not_finite;
use crate::error::{Error, Result};
use crate::weights::parameters::tensor_of_bytes;
use crate::weights::{Dtype, Slice, TensorData};

/// Bytes of the gap between two indices in a payload.
const GAP_BYTES: usize = size_of::<u32>();

/// New values of single elements of parameters.
#[derive(Debug, Default)]
pub struct Delta {
    /// The changes of a parameter, by its name.
    parameters: BTreeMap<String, ParameterDelta>,
}

/// The elements of one parameter that change, with their new values.
#[derive(Debug)]
pub struct Changes<'a> {
    /// Flat row-major indices into the whole parameter: ascending, without duplicates.
    pub indices: &'a [u64],
    pub values: TensorData<'a>,
}

/// The payload of one tensor as it came.
pub(super) struct Payload<'a> {
    /// The parameter that the tensor changes; `None` if another tensor of the push is the same one by another name.
    pub parameter: Option<&'a str>,
    pub entry: &'a TensorEntry,
    pub bytes: Buffer,
}

/// The decoded payload of one tensor.
#[derive(Debug)]
pub(super) struct ParameterDelta {
    dtype: Dtype,
    indices: Vec<u64>,
    /// The decompressed payload: the gaps between the indices, then the values.
    payload: Buffer,
}

impl Delta {
    /// Names of the parameters that have changes, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The changes of a parameter; `None` if it has none.
    pub fn changes(&self, parameter: &str) -> Option<Changes<'_>> {
        self.parameters.get(parameter).map(ParameterDelta::changes)
    }

    /// Decodes the payloads of a push, several at a time.
    ///
    /// # Errors
    /// As for [`decode`].
    pub(super) fn decode(payloads: Vec<Payload<'_>>) -> Result<Self> {
        let mut decoded: Vec<Option<ParameterDelta>> = payloads.iter().map(|_| None).collect();
        let names: Vec<_> = payloads.iter().map(|payload| payload.parameter).collect();
        let work = payloads.into_iter().zip(&mut decoded).map(|(payload, out)| {
            let (changed, _) = payload.entry.payload.unwrap_or_default();
            (changed as usize, (payload, changed as usize, out))
        });
        in_parallel(work.collect(), |(Payload { entry, bytes, .. }, changed, out)| {
            // The compressed bytes go as soon as they have been decoded.
            *out = Some(decode(&entry.name, &bytes, entry.dtype, changed, entry.shape.iter().product())?);
            Ok(())
        })?;
        let parameters = names.into_iter().zip(decoded).filter_map(|(name, delta)| Some((name?.to_string(), delta?)));
        Ok(Self { parameters: parameters.collect() })
    }
}

impl ParameterDelta {
    pub fn changes(&self) -> Changes<'_> {
        let changed = self.indices.len();
        let (values, all) = (&self.payload[changed * GAP_BYTES..], Slice { rows: 0..changed, cols: 0..1 });
        Changes { indices: &self.indices, values: tensor_of_bytes(self.dtype, values, 1, &all) }
    }
}

/// Most bytes of memory that [`decode`] takes for `changed` elements; `None` if no machine has as many.
pub(super) fn decoded_bytes(changed: u64, dtype: Dtype) -> Option<u64> {
    changed.checked_mul((size_of::<u64>() + GAP_BYTES + dtype.size()) as u64)
}

/// Decodes the payload of a tensor of `elements` values, of which `changed` have changed, at most all. The memory that
/// this takes is bounded by `changed`, whatever the payload would decompress to.
///
/// # Errors
/// `InvalidArgument` naming the tensor if the payload does not have `changed` elements, an index is outside the tensor
/// or not above the one before, or a value is not finite.
pub(super) fn decode(
    name: &str,
    payload: &[u8],
    dtype: Dtype,
    changed: usize,
    elements: usize,
) -> Result<ParameterDelta> {
    let refuse = |what: String| Error::invalid("tensors", format!("payload of tensor {name:?}: {what}"));
    let expected = changed * (GAP_BYTES + dtype.size());
    let mut raw = Buffer::zeroed(expected)?;
    // One call into a buffer of the right size: the output cannot grow past it, and zstd needs no window of its own.
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
        // No overflow: every index so far is below the number of elements, which is below 2^32.
        next += gap;
        if next >= elements as u64 {
            return Err(refuse(format!("index {next} is outside its {elements} elements")));
        }
        indices.push(next);
    }
    if let Some(i) = first_not_finite(values, dtype) {
        return Err(refuse(format!("the new value of element {} is not finite", indices[i])));
    }
    Ok(ParameterDelta { dtype, indices, payload: raw })
}
