//! Values that are no numbers.

use rollout_kernels::host::first_saturated;

use crate::weights::Dtype;

/// Index of the first infinity or NaN among little-endian values.
pub(super) fn first_not_finite(bytes: &[u8], dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => first_saturated(bytes.as_chunks::<4>().0, 0x7f80_0000),
        Dtype::F16 => first_saturated(bytes.as_chunks::<2>().0, 0x7c00),
        Dtype::Bf16 => first_saturated(bytes.as_chunks::<2>().0, 0x7f80),
    }
}
