//! The memory for a trainer's broadcasts. The bytes themselves come as chunks from the trainer's group.

use crate::weights::parameters::Parameters;
use crate::weights::push::manifest::most_announced;

/// Size of a packed broadcast of vLLM's trainers, unless they name another.
pub(crate) const BROADCAST_BUFFER_BYTES: u64 = 1 << 30;

/// Most bytes that a trainer broadcasts at once, if a broadcast ends behind the tensor with which it has more than
/// `buffer` bytes.
pub(crate) fn largest_broadcast(parameters: &Parameters, buffer: u64) -> u64 {
    buffer.saturating_add(parameters.largest_tensor_bytes()).min(most_announced(parameters))
}
