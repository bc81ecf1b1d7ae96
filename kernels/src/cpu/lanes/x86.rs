//! AVX2 (two registers of 8 lanes) and AVX-512 (one of 16). No closures, for the reason that
//! [`tile`](super::super::tile) gives.
//!
//! Every function here runs intrinsics of an instruction set that the processor must have. It has it, because the two
//! types are named as [`Lanes`](super::Lanes) only below [`Isa::dispatch`](super::super::isa::Isa::dispatch), which
//! checked for it. The comments at the unsafe blocks mean this by "see the module".

mod avx2;
mod avx512;

pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;

use std::arch::x86_64::*;

#[inline(always)]
fn prefetch_near(p: *const u8) {
    // SAFETY: a prefetch reads nothing, whatever the pointer; every x86-64 processor has it.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
}

#[inline(always)]
fn prefetch_far(p: *const u8) {
    // SAFETY: a prefetch reads nothing, whatever the pointer; every x86-64 processor has it.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
}

/// The horizontal sum of lanes 0..8 and 8..16, in the order that [`Lanes::sum`](super::Lanes::sum) defines.
#[inline(always)]
fn sum(low: __m256, high: __m256) -> f32 {
    // SAFETY: the processor has AVX2 and FMA, see the module.
    unsafe {
        let eight = _mm256_add_ps(low, high);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

#[inline(always)]
fn largest(low: __m256, high: __m256) -> f32 {
    // SAFETY: the processor has AVX2 and FMA, see the module.
    unsafe {
        let eight = _mm256_max_ps(low, high);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
