//! New weights from a trainer: declared, received and verified. Nothing here touches the weights that serve.
//!
//! The way of a pushed tensor:
//!
//! ```text
//! header ──> Receiver::open, declare ── Manifest: names, dtypes and shapes fit the model; each tensor gets a Receipt
//!
//! chunk ───> Receiver::write ─┬─ LORA, DELTA ──── Receipt::gather: kept, verified when whole ────┐
//!                             ├─ FULL in place ── Receipt::gather ─> Receiver::take_complete ──> engine, at once
//!                             └─ FULL ─────────── Packing::write                                 │
//!                                                   Receipt::stream: rows in order, verified     │
//!                                                   ShadowTensor::write_rows ─> matrix ──────────┤
//!                                                                                                │
//! commit ──> Receiver::finish: every tensor is whole and verified ─> Received <──────────────────┘
//! ```
//!
//! Tensors that come from files take the same ways by `Receipt::read` and `Receipt::stream_file`; those of a FULL push
//! that lie in device memory go from there to the devices of their weights, and are verified where they lie, in
//! `on_device`. What verified means is in `verify`.

mod adapter;
mod buffer;
mod delta;
mod manifest;
mod names;
mod on_device;
mod receipt;
mod receiver;
mod reservation;
mod row_stream;
mod shadow;
mod source;
mod tensors;
mod threads;
mod verify;

use std::sync::Arc;

use super::lora::{Adapter, AdapterTensor};
use super::parameters::Dtype;

pub use delta::{Changes, Delta};
pub use receiver::Receiver;
pub(crate) use reservation::{BROADCAST_BUFFER_BYTES, largest_broadcast, most_announced};
pub use shadow::{ShadowShard, ShadowWeights};
pub use source::{Allocation, Segments, Source, SourceRoom, Sources};
pub use tensors::Tensors;

/// What a push brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateKind {
    /// A LoRA adapter.
    Lora,
    /// A value for every parameter.
    Full,
    /// New values of single elements.
    Delta,
}

/// One tensor as the sender declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// XXH3-128, big-endian, of the tensor's bytes as transported; `None` where only the server computes it.
    pub digest: Option<[u8; 16]>,
    /// DELTA: how many elements have changed, and the bytes of the payload that has them.
    pub payload: Option<(u64, u64)>,
    /// Shared memory, a file or an allocation: the offset of the tensor's first byte.
    pub offset: u64,
    /// Device memory: the allocation that the tensor lies in.
    pub allocation: Option<Allocation>,
}

impl<'a> From<&'a TensorEntry> for AdapterTensor<'a> {
    fn from(entry: &'a TensorEntry) -> Self {
        Self { name: &entry.name, dtype: entry.dtype, shape: &entry.shape }
    }
}

/// The header of a push: what it says of its tensors.
#[derive(Clone, Debug)]
pub struct UpdateSpec {
    pub kind: UpdateKind,
    /// LORA: the text of `adapter_config.json`. Empty with [`Source::Directory`], where it is read from the directory.
    pub adapter_config: String,
    /// LORA: whether the adapter is to stay resident unmerged.
    pub unmerged: bool,
    pub tensors: Vec<TensorEntry>,
    /// Bytes of all tensors as transported, those declared later among them; `None` if `tensors` are all.
    pub total_bytes: Option<u64>,
    pub source: Source,
}

/// What a push brings, verified.
#[derive(Debug)]
pub enum WeightUpdate {
    /// An adapter, to be merged into the base or to stay resident.
    Lora(Arc<Adapter>),
    /// Values of every parameter; of a push in place, those that were not taken before its end.
    Full(Arc<Tensors>),
    /// Values of every parameter, packed as they serve.
    Packed(ShadowWeights),
    /// New values of single elements.
    Delta(Arc<Delta>),
}

/// A push that has come as a whole.
#[derive(Debug)]
pub struct Received {
    pub update: WeightUpdate,
    /// XXH3-128, big-endian, over the digests of all tensors in the order of their names.
    pub digest: [u8; 16],
    /// Bytes of all tensors as transported.
    pub bytes: u64,
    /// How many parameters of the model the push brings.
    pub parameters: usize,
}

#[cfg(test)]
mod tests;
