//! An update: its checked header, and its content as the ranks apply it. A push makes the content.

mod delta;
mod header;
mod replaced;
mod shadow;
mod tensor_buffer;
mod tensors;

use std::sync::Arc;

use super::lora::Adapter;

pub use delta::{Changes, Delta};
pub(super) use delta::{GAP_BYTES, TensorDelta};
pub use header::{
    AdapterTarget, Allocation, DeltaStore, RunningPolicy, Source, StoredVersion, TensorEntry, TransitBytes,
    UpdateHeader, UpdateKind,
};
pub use replaced::Replaced;
pub(super) use shadow::{PushedRows, RowLayout, ShadowTensor};
pub use shadow::{ShadowShard, ShadowWeights};
pub(super) use tensor_buffer::TensorBuffer;
pub(super) use tensors::ReceivedTensor;
pub use tensors::Tensors;

/// The content of an update.
#[derive(Debug)]
pub enum WeightUpdate {
    /// An adapter, to be merged into the base or to stay resident.
    Lora(Arc<Adapter>),
    /// Values of every parameter; of a push in place, those that were not written before its end.
    Full(Arc<Tensors>),
    /// Values of every parameter, packed as they serve.
    Packed(ShadowWeights),
    /// New values of single elements.
    Delta(Arc<Delta>),
    /// A version of a delta store.
    Stored(StoredUpdate),
}

/// A version of a delta store, as changes of the policy that serves or of a whole version before it.
#[derive(Debug)]
pub struct StoredUpdate {
    /// The whole version that the deltas change, of kind `Full` or `Packed`; `None` if they change what serves.
    pub base: Option<Box<WeightUpdate>>,
    /// The deltas, the oldest first.
    pub deltas: Vec<Arc<Delta>>,
    pub version: StoredVersion,
}
