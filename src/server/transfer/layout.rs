//! The broadcasts in which a trainer sends tensors, and the bytes of each tensor in them. Both sides compute them from
//! the names, types and shapes, because the bytes themselves do not say it.

use bytes::Bytes;
use rollout_kernels::Broadcast;

use crate::error::{Error, Result};
use crate::server::pb;
use crate::weights::{BROADCAST_BUFFER_BYTES, Dtype, TensorEntry};

/// How a trainer packs tensors. A push that leaves a field out has that of its group's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::server) struct Packing {
    /// Whether it broadcasts several tensors at once, as bytes, or each by itself.
    pub(in crate::server) packed: Option<bool>,
    /// A broadcast ends behind the tensor with which it has more bytes than this.
    pub(in crate::server) buffer_bytes: Option<u64>,
}

impl Packing {
    /// These fields, and those of `before` where they are not set.
    pub(super) fn or(self, before: Self) -> Self {
        Self { packed: self.packed.or(before.packed), buffer_bytes: self.buffer_bytes.or(before.buffer_bytes) }
    }

    pub(super) fn is_packed(self) -> bool {
        self.packed.unwrap_or(false)
    }

    /// The bytes with more than which a broadcast ends.
    pub(super) fn buffer(self) -> u64 {
        self.buffer_bytes.unwrap_or(BROADCAST_BUFFER_BYTES)
    }
}

/// Tensors that a trainer is about to broadcast, in this order.
#[derive(Clone, Debug)]
pub(in crate::server) struct BroadcastTensors {
    /// None for the tensors of the last time.
    pub(in crate::server) tensors: Vec<TensorEntry>,
    pub(in crate::server) packing: Packing,
}

/// The broadcasts of these tensors, and the bytes of each tensor.
///
/// # Errors
/// `InvalidArgument` naming a tensor that cannot be broadcast.
pub(super) fn broadcasts(tensors: &[TensorEntry], packing: Packing) -> Result<(Vec<Broadcast>, Vec<u64>)> {
    let single = |&TensorEntry { ref name, ref shape, dtype, .. }| {
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let count = count.filter(|&n| n > 0 && n.checked_mul(dtype.size()).is_some()).ok_or_else(|| {
            Error::invalid("update_info.shapes", format!("tensor {name:?} of shape {shape:?} cannot be broadcast"))
        })?;
        Ok(Broadcast { count, dtype: Some(dtype) })
    };
    let single: Vec<Broadcast> = tensors.iter().map(single).collect::<Result<_>>()?;
    let bytes = single.iter().map(|broadcast| broadcast.bytes() as u64).collect();
    Ok((if packing.is_packed() { pack(&single, packing)? } else { single }, bytes))
}

/// Puts broadcasts together, as vLLM's trainer does (`pack_tensors` of its `packed_tensor.py`).
fn pack(single: &[Broadcast], packing: Packing) -> Result<Vec<Broadcast>> {
    let (mut packed, mut count) = (Vec::new(), 0usize);
    for broadcast in single {
        let more = count.checked_add(broadcast.bytes());
        count = more.ok_or_else(|| Error::invalid("update_info.shapes", "no machine has that many bytes"))?;
        if count as u64 > packing.buffer() {
            packed.push(Broadcast { count: std::mem::take(&mut count), dtype: None });
        }
    }
    if count > 0 {
        packed.push(Broadcast { count, dtype: None });
    }
    Ok(packed)
}

/// Splits the received bytes into tensors.
pub(super) struct Cursor {
    /// Number of the current tensor, among those of the whole push.
    tensor: u32,
    /// Received bytes of the tensor.
    offset: u64,
    /// Bytes of the tensors, from the current one on.
    sizes: std::vec::IntoIter<u64>,
    size: u64,
}

impl Cursor {
    /// At the beginning of tensor `first`, of `sizes` bytes and those that follow.
    pub fn new(first: u32, sizes: Vec<u64>) -> Self {
        let mut sizes = sizes.into_iter();
        let size = sizes.next().unwrap_or(0);
        Self { tensor: first, offset: 0, sizes, size }
    }

    /// The next part of a piece, which is of one tensor; None if nothing of it is left.
    pub fn split(&mut self, piece: &mut Bytes) -> Option<pb::Chunk> {
        while self.offset == self.size && !piece.is_empty() {
            (self.tensor, self.offset, self.size) = (self.tensor + 1, 0, self.sizes.next()?);
        }
        if piece.is_empty() {
            return None;
        }
        let length = (piece.len() as u64).min(self.size - self.offset);
        let chunk = pb::Chunk { tensor: self.tensor, offset: self.offset, data: piece.split_to(length as usize) };
        self.offset += length;
        Some(chunk)
    }
}

/// The type that torch calls `name`; `InvalidArgument` if no weight has such values.
pub(in crate::server) fn dtype(name: &str) -> Result<Dtype> {
    match name {
        "float32" => Ok(Dtype::F32),
        "bfloat16" => Ok(Dtype::Bf16),
        "float16" => Ok(Dtype::F16),
        _ => {
            let name = crate::error::shown(name, 100);
            Err(Error::invalid("update_info.dtype_names", format!("{name:?} is not float32, bfloat16 or float16")))
        }
    }
}

#[cfg(test)]
mod tests;
