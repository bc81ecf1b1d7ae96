//! The memory that a push may take. The engine reserves it before the first tensor comes.

use super::delta::{changed, decoded_bytes};
use super::manifest::Manifest;
use crate::error::Result;
use crate::weights::lora::AdapterSpec;
use crate::weights::update::{TransitBytes, UpdateKind};

/// Most times that an adapter takes the bytes of its tensors as transported: biases and the magnitudes of DoRA are
/// float32 once they are read.
const ADAPTER_GROWTH: u64 = 2;
/// Most bytes of a FULL push that are kept because they come in the stream before those in front of them. A sender that
/// goes through each tensor in order needs none.
const EARLY_BYTES: u64 = 64 << 20;

/// Most bytes that a push takes at any time until it is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingBytes {
    /// Bytes of a push that is staged beside the weights that serve.
    pub staged: u64,
    /// Of `staged`, those of the shadow weights, and those in transit to where the shadow weights are.
    pub shadow: u64,
    /// Bytes of a FULL push that is written in place: of the tensors that are not whole or not written yet.
    pub in_place: u64,
}

/// The limits of a FULL push, which others do not need, from what its header has declared and announced.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// Bytes of the parameters as they serve, on all ranks: the size of the shadow weights.
    serving: u64,
    /// Most bytes that are kept because those in front of them have not come.
    pub early: u64,
    /// Most bytes of tensors that are kept at a time, in place.
    pub in_place: u64,
}

impl Limits {
    /// The limits of the push of this manifest. `is_unordered`: if bytes of a tensor may come before those in front of
    /// them.
    pub fn new(manifest: &Manifest, is_unordered: bool) -> Result<Self> {
        if manifest.kind != UpdateKind::Full {
            return Ok(Self::default());
        }
        let parameters = &manifest.parameters;
        let serving = parameters.iter().map(|spec| parameters.bytes_on_ranks(spec)).sum::<Result<u64>>()?;
        let (largest, total) = (largest_tensor(manifest), manifest.total());
        let early = if is_unordered { EARLY_BYTES.min(largest).min(total) } else { 0 };
        // The largest tensor, and as much again so that senders may begin the next before one is whole.
        Ok(Self { serving, early, in_place: largest.saturating_mul(2).min(total) })
    }

    /// The memory for the push. `adapter` is that of a LORA push once all its tensors are declared; `transit` is the
    /// memory for the tensors between the sender and the weights.
    pub fn staging(&self, manifest: &Manifest, adapter: Option<&AdapterSpec>, transit: TransitBytes) -> StagingBytes {
        let total = manifest.total();
        let (shadow, host) = match manifest.kind {
            UpdateKind::Full => {
                (self.serving.saturating_add(transit.on_devices), self.early.saturating_add(transit.on_host))
            }
            UpdateKind::Lora => (0, total.saturating_add(adapter.map_or(adapter_bytes(total), AdapterSpec::bytes))),
            UpdateKind::Delta => {
                let entries = manifest.tensors.iter().map(|tensor| &tensor.entry);
                let decoded = entries.map(|entry| decoded_bytes(changed(entry), entry.dtype));
                (0, decoded.fold(total, u64::saturating_add))
            }
        };
        StagingBytes { staged: shadow.saturating_add(host), shadow, in_place: self.in_place }
    }
}

/// Bytes that are reserved for an adapter beside its tensors while only `total`, the bytes of those, is known.
pub(super) fn adapter_bytes(total: u64) -> u64 {
    total.saturating_mul(ADAPTER_GROWTH)
}

/// Bytes of the largest tensor that is declared, or may still be.
fn largest_tensor(manifest: &Manifest) -> u64 {
    let declared = manifest.tensors.iter().map(|tensor| tensor.bytes as u64).max().unwrap_or(0);
    // A tensor that is declared later can be any of the model, in float32.
    if manifest.is_final() { declared } else { declared.max(manifest.parameters.largest_tensor_bytes()) }
}
