//! AVX2 with FMA: two registers of 8 lanes.

use super::super::Lanes;
use super::{largest, prefetch_far, prefetch_near, sum};
use half::bf16;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// SAFETY: 16 lanes in registers, read and written whole; constructed behind `Isa::dispatch` alone.
unsafe impl Lanes for Avx2 {
    const ACCUMULATORS: usize = 6; // 12 of the 16 registers

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the processor has AVX2 and FMA (see the module); the caller promises 16 readable float32.
        unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the processor has AVX2 and FMA (see the module); the caller promises 16 readable bfloat16.
        unsafe {
            let (a, b) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast()));
            let (a, b) = (_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(b));
            let (a, b) = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
            Avx2(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))
        }
    }

    #[inline(always)]
    fn widened_halves(self) -> (Self, Self) {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe {
            let (a, b) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let even = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
            let odd = (_mm256_and_si256(a, high), _mm256_and_si256(b, high));
            (
                Avx2(_mm256_castsi256_ps(even.0), _mm256_castsi256_ps(even.1)),
                Avx2(_mm256_castsi256_ps(odd.0), _mm256_castsi256_ps(odd.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the processor has AVX2 and FMA (see the module); the caller promises 16 writable float32.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: f32) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            let below = (_mm256_cmp_ps::<_CMP_LT_OQ>(x.0, limit), _mm256_cmp_ps::<_CMP_LT_OQ>(x.1, limit));
            Avx2(_mm256_andnot_ps(below.0, self.0), _mm256_andnot_ps(below.1, self.1))
        }
    }

    #[inline(always)]
    fn flush_denormals(self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe {
            let (magnitude, least) =
                (_mm256_set1_ps(f32::from_bits(i32::MAX as u32)), _mm256_set1_ps(f32::MIN_POSITIVE));
            let small = (
                _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_and_ps(self.0, magnitude), least),
                _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_and_ps(self.1, magnitude), least),
            );
            let dropped = (_mm256_and_ps(small.0, magnitude), _mm256_and_ps(small.1, magnitude));
            Avx2(_mm256_andnot_ps(dropped.0, self.0), _mm256_andnot_ps(dropped.1, self.1))
        }
    }

    #[inline(always)]
    fn within(self, from: f32, to: f32) -> u32 {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe {
            let (from, to) = (_mm256_set1_ps(from), _mm256_set1_ps(to));
            let low = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(self.0, from), _mm256_cmp_ps::<_CMP_LE_OQ>(self.0, to));
            let high =
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(self.1, from), _mm256_cmp_ps::<_CMP_LE_OQ>(self.1, to));
            (_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8) as u32
        }
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe {
            let (a, b) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let (a, b) = (_mm256_slli_epi32::<23>(a), _mm256_slli_epi32::<23>(b));
            let bias = _mm256_set1_epi32(127 << 23);
            let (a, b) = (_mm256_add_epi32(a, bias), _mm256_add_epi32(b, bias));
            Avx2(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        sum(self.0, self.1)
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        largest(self.0, self.1)
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        prefetch_far(p);
    }

    #[inline(always)]
    fn prefetch_near(p: *const u8) {
        prefetch_near(p);
    }
}
