//! The payload of a DELTA push.
//!
//! The payload of a tensor is compressed by zstd. It has `changed` indices, each a little-endian u32 that is the gap to
//! the index before it (for the first, the index itself), and then as many values in the tensor's dtype.

use super::manifest::Manifest;
use super::threads::in_parallel;
use super::verify::first_not_finite;
use crate::error::{Error, Result};
use crate::weights::parameters::Dtype;
use crate::weights::update::{Delta, GAP_BYTES, TensorBuffer, TensorDelta, TensorEntry};

/// Decodes the payloads of a push, all of which are verified and kept, several at a time.
///
/// # Errors
/// As for [`decode`].
pub(super) fn decode_all(manifest: &mut Manifest) -> Result<Delta> {
    let parts = (0..manifest.tensors.len()).map(|i| parts_of(manifest, i)).collect::<Vec<_>>();
    let mut decoded: Vec<Option<TensorDelta>> = manifest.tensors.iter().map(|_| None).collect();
    let work = manifest.tensors.iter_mut().zip(&mut decoded).map(|work| (changed(&work.0.entry) as usize, work));
    in_parallel(work.collect(), |(tensor, out)| {
        // The compressed bytes are freed as soon as they have been decoded.
        let bytes = tensor.take().expect("DELTA tensors are not taken before");
        *out = Some(decode(&tensor.entry, &bytes)?);
        Ok(())
    })?;
    let divided = parts.into_iter().zip(decoded).filter_map(|(parts, delta)| Some(delta?.divide(parts)));
    Ok(Delta { parameters: divided.flatten().collect() })
}

/// The parameters that tensor `index` brings, and the number of elements of each.
fn parts_of(manifest: &Manifest, index: usize) -> Vec<(String, u64)> {
    if manifest.is_second_name(index) {
        return Vec::new();
    }
    let elements = |name: &str| manifest.parameters.get(name).map_or(0, |spec| spec.shape.iter().product::<usize>());
    let parts = manifest.tensors[index].mapping.parts.iter();
    parts.map(|part| (part.parameter.clone(), elements(&part.parameter) as u64)).collect()
}

/// How many elements of a tensor have changed.
pub(super) fn changed(entry: &TensorEntry) -> u64 {
    entry.payload.map_or(0, |(changed, _)| changed)
}

/// Most bytes of memory that [`decode`] takes for `changed` elements; `u64::MAX` if no machine has as many.
pub(super) fn decoded_bytes(changed: u64, dtype: Dtype) -> u64 {
    changed.saturating_mul((size_of::<u64>() + GAP_BYTES + dtype.size()) as u64)
}

/// Decodes the payload of a tensor, of which all elements may have changed. The memory that this takes is bounded by
/// the number of changed elements, whatever the payload would decompress to.
///
/// # Errors
/// `InvalidArgument` naming the tensor if the payload does not have so many elements, an index is outside the tensor or
/// not above the one before, or a value is not finite.
pub(super) fn decode(entry: &TensorEntry, payload: &[u8]) -> Result<TensorDelta> {
    let TensorEntry { name, dtype, shape, .. } = entry;
    let (dtype, changed, elements) = (*dtype, changed(entry) as usize, shape.iter().product::<usize>());
    let refuse = |what: String| Error::invalid("tensors", format!("payload of tensor {name:?}: {what}"));
    let expected = changed * (GAP_BYTES + dtype.size());
    let mut raw = TensorBuffer::zeroed(expected)?;
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
            return Err(refuse(format!("indices do not ascend: index {next} is repeated")));
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
    Ok(TensorDelta { dtype, indices, payload: raw })
}
