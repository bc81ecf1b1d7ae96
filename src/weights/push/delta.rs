//! The payload of a DELTA push, and what a delta store has instead.
//!
//! The payload of a tensor is compressed by zstd. It has `changed` indices, each a little-endian u32 that is the gap to
//! the index before it (for the first, the index itself), and then as many values in the tensor's dtype.

use super::manifest::Manifest;
use super::threads::in_parallel;
use super::transport::delta_store::Indices;
use super::verify::first_not_finite;
use crate::error::{Error, Result};
use crate::weights::parameters::Dtype;
use crate::weights::update::{Delta, GAP_BYTES, TensorBuffer, TensorDelta, TensorEntry};

/// Decodes the payloads of a push, all of which are verified and kept, several at a time.
///
/// # Errors
/// As for [`decode`].
pub(super) fn decode_all(manifest: &mut Manifest) -> Result<Delta> {
    decode_each(manifest, |_, entry, bytes| decode(entry, bytes))
}

/// Decodes all tensors, which are verified and kept, with `decode`, several at a time; it gets their indices.
///
/// # Errors
/// Those of `decode`.
pub(super) fn decode_each(
    manifest: &mut Manifest,
    decode: impl Fn(usize, &TensorEntry, &[u8]) -> Result<TensorDelta> + Sync,
) -> Result<Delta> {
    let parts = (0..manifest.tensors.len()).map(|i| parts_of(manifest, i)).collect::<Vec<_>>();
    let mut decoded: Vec<Option<TensorDelta>> = manifest.tensors.iter().map(|_| None).collect();
    let work = manifest.tensors.iter_mut().zip(&mut decoded).enumerate();
    let work = work.map(|(i, (tensor, out))| (changed(&tensor.entry) as usize, (i, tensor, out)));
    in_parallel(work.collect(), |(i, tensor, out)| {
        // The compressed bytes are freed as soon as they have been decoded.
        let bytes = tensor.take().expect("DELTA tensors are not taken before");
        *out = Some(decode(i, &tensor.entry, &bytes)?);
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
    let (gaps, _) = raw[..changed * GAP_BYTES].as_chunks::<GAP_BYTES>();
    let mut before = 0;
    let all = gaps.iter().map(|gap| {
        // No overflow: an index that is passed on is below the number of elements, which is below 2^32.
        before += u64::from(u32::from_le_bytes(*gap));
        before
    });
    let indices = ascending(all, changed, elements as u64).map_err(refuse)?;
    check_finite(&raw, &indices, dtype).map_err(refuse)?;
    Ok(TensorDelta { dtype, indices, payload: raw })
}

/// The changes of a tensor whose indices and values a delta store has apart. `values` fills a buffer with the values.
///
/// # Errors
/// As for [`decode`], and those of `values`.
pub(super) fn decode_apart(
    entry: &TensorEntry,
    how: Indices,
    indices: &[u8],
    values: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<TensorDelta> {
    let TensorEntry { name, dtype, shape, .. } = entry;
    let (dtype, changed, elements) = (*dtype, changed(entry) as usize, shape.iter().product::<usize>());
    let refuse = |what: String| Error::invalid("tensors", format!("changes of tensor {name:?}: {what}"));
    let mut payload = TensorBuffer::zeroed(changed * (GAP_BYTES + dtype.size()))?;
    values(&mut payload[changed * GAP_BYTES..])?;
    let mut next = 0;
    let all = indices.chunks_exact(how.size()).map(|bytes| match (how, bytes) {
        // A negative index becomes one that is outside.
        (Indices::I32, &[a, b, c, d]) => i64::from(i32::from_le_bytes([a, b, c, d])) as u64,
        (Indices::SkippedU16, &[a, b]) => skip(&mut next, u16::from_le_bytes([a, b]).into()),
        (Indices::SkippedU32, &[a, b, c, d]) => skip(&mut next, u32::from_le_bytes([a, b, c, d]).into()),
        _ => unreachable!("chunks of the size of an index"),
    });
    let indices = ascending(all, changed, elements as u64).map_err(refuse)?;
    check_finite(&payload, &indices, dtype).map_err(refuse)?;
    Ok(TensorDelta { dtype, indices, payload })
}

/// The index behind `skipped` elements from `next` on. `next` becomes the one behind it.
fn skip(next: &mut u64, skipped: u64) -> u64 {
    // No overflow: see `decode`.
    let index = *next + skipped;
    *next = index + 1;
    index
}

/// Collects `changed` indices into a tensor of `elements` elements.
///
/// # Errors
/// Says which one does not ascend, or is outside.
fn ascending(all: impl Iterator<Item = u64>, changed: usize, elements: u64) -> std::result::Result<Vec<u64>, String> {
    let mut indices: Vec<u64> = Vec::with_capacity(changed);
    for index in all {
        if let Some(before) = indices.last().filter(|before| **before >= index) {
            let what = if *before == index { "is repeated" } else { "follows a larger one" };
            return Err(format!("indices do not ascend: index {index} {what}"));
        }
        if index >= elements {
            return Err(format!("index {index} is outside its {elements} elements"));
        }
        indices.push(index);
    }
    Ok(indices)
}

/// Checks the values behind the gaps of a decompressed payload.
///
/// # Errors
/// Says which element would not be finite.
fn check_finite(payload: &[u8], indices: &[u64], dtype: Dtype) -> std::result::Result<(), String> {
    match first_not_finite(&payload[indices.len() * GAP_BYTES..], dtype) {
        Some(i) => Err(format!("the new value of element {} is not finite", indices[i])),
        None => Ok(()),
    }
}
