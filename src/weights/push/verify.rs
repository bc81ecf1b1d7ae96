//! Verification of a pushed tensor: its bytes have the announced digest, and its values are finite.

use rollout_kernels::Digested;
use rollout_kernels::host::first_saturated;
use twox_hash::xxhash3_128::Hasher;

use crate::error::{Error, Result};
use crate::weights::parameters::Dtype;
use crate::weights::update::TensorEntry;

/// The digest of a tensor's bytes: XXH3-128, big-endian.
pub(super) type Digest = [u8; 16];

/// Verifies one tensor while its bytes pass by. They are hashed in order; their values may be checked in any order.
pub(super) struct Verifier {
    hasher: Hasher,
    /// The dtype of the values; `None` for a payload that is not values.
    dtype: Option<Dtype>,
    /// Index of the first value found that is not finite.
    not_finite: Option<usize>,
}

impl Verifier {
    pub fn new(dtype: Option<Dtype>) -> Self {
        Self { hasher: Hasher::new(), dtype, not_finite: None }
    }

    /// Takes the next bytes of the tensor into its digest.
    pub fn hash(&mut self, bytes: &[u8]) {
        self.hasher.write(bytes);
    }

    /// Looks for values that are not finite among `bytes`, whose first value is the tensor's value `first`.
    pub fn check_values(&mut self, first: usize, bytes: &[u8]) {
        if let (Some(dtype), None) = (self.dtype, self.not_finite) {
            self.not_finite = first_not_finite(bytes, dtype).map(|index| first + index);
        }
    }

    /// [`verify`] of the tensor, once all its bytes were hashed and checked.
    pub fn verify(&self, entry: &TensorEntry) -> Result<Digest> {
        let digest = self.hasher.finish_128().to_be_bytes();
        verify(entry, &Digested { digest, not_finite: self.not_finite })
    }
}

/// The digest of a tensor, all of whose bytes were hashed and checked.
///
/// # Errors
/// `DataLoss` if the digest is not the announced one, else `InvalidArgument` if a value is not finite.
pub(super) fn verify(TensorEntry { name, digest, .. }: &TensorEntry, digested: &Digested) -> Result<Digest> {
    if digest.is_some_and(|announced| announced != digested.digest) {
        // Without the digests: a sender would learn the content of a file that only the server can read.
        return Err(Error::DataLoss(format!(
            "tensor {name:?}: XXH3-128 of the bytes that came is not the announced one; send it again"
        )));
    }
    if let Some(index) = digested.not_finite {
        let what =
            format!("tensor {name:?} is not finite at element {index}; the trainer has diverged or sent garbage");
        return Err(Error::invalid("tensors", what));
    }
    Ok(digested.digest)
}

/// Index of the first infinity or NaN among little-endian values.
pub(super) fn first_not_finite(bytes: &[u8], dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => first_saturated(bytes.as_chunks::<4>().0, 0x7f80_0000),
        Dtype::F16 => first_saturated(bytes.as_chunks::<2>().0, 0x7c00),
        Dtype::Bf16 => first_saturated(bytes.as_chunks::<2>().0, 0x7f80),
    }
}
