//! How much memory a push may take. The engine reserves it before the first tensor comes.

use super::UpdateKind;
use super::delta::decoded_bytes;
use super::manifest::Manifest;
use super::names;
use crate::error::{Error, Result};
use crate::weights::Parameters;
use crate::weights::lora::AdapterSpec;

/// Most times that an adapter takes the bytes of its tensors as transported: it is float32 once it is read.
const ADAPTER_GROWTH: u64 = 2;
/// Most bytes that a FULL push may announce for buffers that the model does not need.
const BUFFER_BYTES: u64 = 64 << 20;
/// Most bytes of a FULL push that are kept because they come in the stream before those in front of them. A sender that
/// goes through each tensor in order needs none.
const EARLY_BYTES: u64 = 64 << 20;

/// What a push may take, in bytes.
#[derive(Debug, Default)]
pub(super) struct Reservation {
    /// The parameters as they serve, on all ranks: what the shadow weights of a FULL push take.
    serving: u64,
    /// Bytes of a FULL push that may be kept because those in front of them have not come.
    pub early: u64,
    /// Tensors of a FULL push in place that may be kept at a time.
    pub in_place: u64,
}

impl Reservation {
    /// What the push of this manifest may take, from what its header has declared and announced.
    ///
    /// # Errors
    /// `InvalidArgument` if a FULL push announces more bytes than a model can have.
    pub fn new(manifest: &Manifest, is_unordered: bool) -> Result<Self> {
        check_total(manifest)?;
        let parameters = manifest.parameters();
        let serving = parameters.iter().map(|spec| parameters.bytes_on_ranks(spec)).sum::<Result<u64>>()?;
        let (largest, total) = (largest(manifest), manifest.total());
        let early = if is_unordered { EARLY_BYTES.min(largest).min(total) } else { 0 };
        // The largest tensor, and as much again so that senders may begin the next before one is whole.
        Ok(Self { serving, early, in_place: largest.saturating_mul(2).min(total) })
    }

    /// Of the staging bytes of a push that is not in place, those of its shadow weights.
    pub fn shadow_bytes(&self, kind: UpdateKind) -> u64 {
        if kind == UpdateKind::Full { self.serving } else { 0 }
    }

    /// Most bytes that the push takes at any time until it is applied. `adapter` is that of a LORA push once all its
    /// tensors are declared.
    pub fn staging_bytes(&self, manifest: &Manifest, adapter: Option<&AdapterSpec>) -> u64 {
        let total = manifest.total();
        match manifest.kind() {
            UpdateKind::Full => self.serving.saturating_add(self.early),
            UpdateKind::Lora => total.saturating_add(adapter.map_or(adapter_bytes(total), AdapterSpec::bytes)),
            UpdateKind::Delta => decoded(manifest).fold(total, u64::saturating_add),
        }
    }
}

/// Bytes that are reserved for an adapter beside its tensors while only `total`, the bytes of those, is known.
pub(super) fn adapter_bytes(total: u64) -> u64 {
    total.saturating_mul(ADAPTER_GROWTH)
}

/// Bytes from which on vLLM's trainers broadcast the tensors that they have put together, unless they say otherwise.
pub(crate) const BROADCAST_BUFFER_BYTES: u64 = 1 << 30;

/// Most bytes that a trainer broadcasts at once, if a broadcast ends behind the tensor with which it has more than
/// `buffer` bytes.
pub(crate) fn largest_broadcast(parameters: &Parameters, buffer: u64) -> u64 {
    buffer.saturating_add(largest_tensor(parameters)).min(most_announced(parameters))
}

/// Most bytes that a FULL push may announce.
pub(crate) fn most_announced(parameters: &Parameters) -> u64 {
    // Twice, because a head that is the embedding can come beside it.
    float32_bytes(parameters).saturating_mul(2).saturating_add(BUFFER_BYTES)
}

/// Bytes of all parameters in float32.
fn float32_bytes(parameters: &Parameters) -> u64 {
    let elements = parameters.iter().map(|spec| spec.shape.iter().product::<usize>() as u64);
    elements.sum::<u64>().saturating_mul(size_of::<f32>() as u64)
}

/// Bytes of the largest tensor of a FULL push that the model needs, in float32.
fn largest_tensor(parameters: &Parameters) -> u64 {
    (names::largest(parameters) as u64).saturating_mul(size_of::<f32>() as u64)
}

/// Checks that a FULL push announces no more than the model can have. The memory for it is that of the serving weights,
/// whatever is announced, so that nothing else would refuse nonsense.
fn check_total(manifest: &Manifest) -> Result<()> {
    let (parameters, total) = (manifest.parameters(), manifest.total());
    if manifest.kind() != UpdateKind::Full || total <= most_announced(parameters) {
        return Ok(());
    }
    let float32 = float32_bytes(parameters);
    let what = format!("{total} bytes are announced, but all parameters have {float32} in float32");
    Err(Error::invalid("total_bytes", what))
}

/// Bytes that each tensor of a DELTA decodes to.
fn decoded(manifest: &Manifest) -> impl Iterator<Item = u64> {
    manifest.tensors().iter().map(|tensor| {
        let (changed, _) = tensor.entry.payload.unwrap_or_default();
        decoded_bytes(changed, tensor.entry.dtype).unwrap_or(u64::MAX)
    })
}

/// Bytes of the largest tensor that is declared, or may still be.
fn largest(manifest: &Manifest) -> u64 {
    let declared = manifest.tensors().iter().map(|tensor| tensor.bytes as u64).max().unwrap_or(0);
    // What is declared later can be any tensor of the model, in float32.
    let later = largest_tensor(manifest.parameters());
    if manifest.is_final() { declared } else { declared.max(later) }
}
