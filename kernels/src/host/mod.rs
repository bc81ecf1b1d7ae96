//! Host memory, which every device uses: files and streams arrive there, and ranks without a faster connection exchange
//! the values of their tensors through it.

pub mod memory;
mod routing;

use candle_core::quantized::GgmlDType;

use crate::cpu::{self, Isa};
pub use crate::cpu::{StoredBits, first_saturated};
pub use crate::tensor::{with_f32, with_f32_mut};
use crate::values::{Dtype, StorageDtype, TensorView};
pub(crate) use routing::{ELSEWHERE, HostRouter, HostRouting, keep_experts, kept_experts};

/// De-quantises blocks as a GGUF file has them, at any address; one thread. `out` gets the values as a matrix of
/// `precision` would hold them.
///
/// # Panics
/// If `blocks` are not the bytes of as many values as `out` has.
pub fn dequantise(dtype: GgmlDType, blocks: &[u8], precision: StorageDtype, out: &mut [f32]) {
    cpu::dequantise(Isa::detect(), dtype, blocks, precision, out);
}

/// The values as a matrix of `dtype` would hold them, in float32.
///
/// # Panics
/// If `out` has another length.
pub fn to_f32(values: TensorView<'_>, dtype: StorageDtype, out: &mut [f32]) {
    cpu::to_f32(values, dtype, out);
}

/// Rounds float32 values to the nearest of this type, ties to even.
pub fn round(dtype: Dtype, values: &mut [f32]) {
    cpu::round(dtype, values);
}
