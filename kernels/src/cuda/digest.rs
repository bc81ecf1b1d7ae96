//! Digests of device memory.

use std::cmp::Reverse;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, sys};

use super::arena::Arena;
use super::copy::Copies;
use super::launch::{Launch, grid};
use super::module::{Module, fat_binary};
use crate::backend::storage::Digested;
use crate::values::Dtype;

/// Most bytes of which XXH3-128 is computed in other ways, which the kernel does not know.
pub(super) const MOST_SHORT_BYTES: u64 = 240;

/// Threads of a block: `THREADS` of `cu/digest.cu`.
const THREADS: u32 = 288;
/// The default secret of XXH3 and, behind it, what its accumulators begin with.
const CONSTANTS: [u64; 32] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
    0xc2b2_ae3d,
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x85eb_ca77,
    0x27d4_eb2f_1656_67c5,
    0x9e37_79b1,
];

/// Words of a range, and of what the kernel answers: `Range` and `Answer` of `cu/digest.cu`.
const RANGE_WORDS: usize = 4;
const ANSWER_WORDS: usize = 3;

/// Values in device memory, at any address.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceRange {
    pub pointer: sys::CUdeviceptr,
    /// More than [`MOST_SHORT_BYTES`].
    pub bytes: u64,
    pub dtype: Dtype,
}

impl DeviceRange {
    fn words(&self) -> [u64; RANGE_WORDS] {
        let (exponents, log2_value_bytes) = match self.dtype {
            Dtype::Bf16 => (0x7f80_7f80_7f80_7f80, 1),
            Dtype::F16 => (0x7c00_7c00_7c00_7c00, 1),
            Dtype::F32 => (0x7f80_0000_7f80_0000, 2),
        };
        [self.pointer, self.bytes, exponents, log2_value_bytes]
    }
}

/// The kernel that computes them.
pub(super) struct Digests {
    function: CudaFunction,
}

impl Digests {
    pub fn load(context: &Arc<CudaContext>) -> Result<Self> {
        Ok(Self { function: Module::load(context, fat_binary!("digest"))?.function("digest")? })
    }

    /// The digests of `ranges`, beside the operators. Takes memory of `scratch` meanwhile.
    ///
    /// # Errors
    /// If there is no memory, or the driver refuses.
    pub fn compute(&self, scratch: &Arc<Arena>, copies: &Copies, ranges: &[DeviceRange]) -> Result<Vec<Digested>> {
        // A block takes as long as its range is: the longest begin first.
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.sort_by_key(|&i| Reverse(ranges[i].bytes));
        let given_words = CONSTANTS.len() + ranges.len() * RANGE_WORDS;
        let memory = scratch.allocate((given_words + ranges.len() * ANSWER_WORDS) * size_of::<u64>())?;
        // Operators that have used these addresses may still run.
        copies.wait_for_operators()?;
        copies.upload(memory.pointer, given_words, |words: &mut [u64]| {
            let (constants, words) = words.split_at_mut(CONSTANTS.len());
            constants.copy_from_slice(&CONSTANTS);
            words.as_chunks_mut().0.iter_mut().zip(&order).for_each(|(words, &i)| *words = ranges[i].words());
        })?;
        let [first_range, answers] =
            [CONSTANTS.len(), given_words].map(|words| memory.pointer + (words * size_of::<u64>()) as u64);
        copies.run(|stream| {
            let mut launch = Launch::of(stream, &self.function);
            launch.pointer(memory.pointer).pointer(first_range).pointer(answers);
            let blocks = u32::try_from(ranges.len()).expect("tensors of a push");
            // SAFETY: the kernel reads the ranges, which callers have borrowed or own, and all else is in `memory`.
            unsafe { launch.start(grid((blocks, 1, 1), THREADS, 0)) }
        })?;
        let mut digests = vec![Digested::default(); ranges.len()];
        copies.download(answers, ranges.len() * ANSWER_WORDS, |words: &[u64]| {
            for (&[low, high, not_finite], &i) in words.as_chunks().0.iter().zip(&order) {
                let digest = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
                digests[i] = Digested { digest, not_finite: (not_finite != u64::MAX).then_some(not_finite as usize) };
            }
        })?;
        Ok(digests)
    }
}

#[cfg(test)]
mod tests;
