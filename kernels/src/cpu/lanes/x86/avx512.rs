//! AVX-512, with or without its bfloat16 instructions: one register of 16 lanes.

use super::super::{LANES, Lanes, emulated_dot_pairs};
use super::{largest, prefetch_far, prefetch_near, sum};
use half::bf16;
use std::arch::x86_64::*;

/// A vector of 16 lanes in AVX-512; with `BF16` also its dot product of bfloat16 pairs.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(__m512);

/// Rounds float32 to bfloat16 as [`round_bf16`](super::super::super::math::round_bf16) does.
#[inline(always)]
fn round_bf16(x: __m512) -> __m256i {
    // SAFETY: the processor has AVX-512, see the module.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let high = _mm512_srli_epi32::<16>(bits);
        let half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet))
    }
}

/// The indices 0, `second`, 1, `second` + 1, … of bfloat16 elements, for a shuffle.
#[inline(always)]
fn interleaved(second: i32) -> __m512i {
    // SAFETY: the processor has AVX-512, see the module.
    unsafe {
        let first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        _mm512_or_si512(first, _mm512_slli_epi32::<16>(_mm512_add_epi32(first, _mm512_set1_epi32(second))))
    }
}

// SAFETY: 16 lanes in registers, read and written whole; constructed behind `Isa::dispatch` alone.
unsafe impl<const BF16: bool> Lanes for Avx512<BF16> {
    const ACCUMULATORS: usize = 26; // of 32 registers

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 16 readable float32.
        unsafe { Self(_mm512_loadu_ps(p)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 16 readable bfloat16.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    fn widened_halves(self) -> (Self, Self) {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let pairs = _mm512_castps_si512(self.0);
            let even = _mm512_slli_epi32::<16>(pairs);
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Self(_mm512_castsi512_ps(even)), Self(_mm512_castsi512_ps(odd)))
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 16 writable float32.
        unsafe { _mm512_storeu_ps(p, self.0) };
    }

    #[inline(always)]
    unsafe fn load_rounded_pairs(p: *const f32) -> Self {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 32 readable float32.
        unsafe {
            let (low, high) = (round_bf16(_mm512_loadu_ps(p)), round_bf16(_mm512_loadu_ps(p.add(16))));
            Self(_mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)))
        }
    }

    /// Interleaves rows by two, then by four, and then moves quarters of 128 bits.
    #[inline(always)]
    fn transposed(rows: &[Self; LANES]) -> [Self; LANES] {
        let mut to = [Self::zero(); LANES];
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let mut fours = [_mm512_setzero_ps(); LANES];
            for g in 0..4 {
                let [a, b, c, d] = [rows[4 * g].0, rows[4 * g + 1].0, rows[4 * g + 2].0, rows[4 * g + 3].0];
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                let (ab2, cd2) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                fours[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
                fours[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
                fours[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab2), _mm512_castps_pd(cd2)));
                fours[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab2), _mm512_castps_pd(cd2)));
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(fours[c], fours[4 + c]);
                let odd = _mm512_shuffle_f32x4::<0xdd>(fours[c], fours[4 + c]);
                let even2 = _mm512_shuffle_f32x4::<0x88>(fours[8 + c], fours[12 + c]);
                let odd2 = _mm512_shuffle_f32x4::<0xdd>(fours[8 + c], fours[12 + c]);
                to[c] = Self(_mm512_shuffle_f32x4::<0x88>(even, even2));
                to[4 + c] = Self(_mm512_shuffle_f32x4::<0x88>(odd, odd2));
                to[8 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(even, even2));
                to[12 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(odd, odd2));
            }
        }
        to
    }

    #[inline(always)]
    unsafe fn stream(self, p: *mut f32) {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 16 float32 at a multiple of 64 bytes.
        unsafe { _mm512_stream_ps(p, self.0) };
    }

    #[inline(always)]
    fn rounded_pairs(low: Self, high: Self) -> Self {
        if BF16 {
            // SAFETY: the processor has AVX-512 with BF16 (see the module); the types have the same 64 bytes.
            unsafe {
                let pairs = _mm512_cvtne2ps_pbh(high.0, low.0);
                Self(_mm512_castsi512_ps(std::mem::transmute::<__m512bh, __m512i>(pairs)))
            }
        } else {
            // SAFETY: the processor has AVX-512, see the module.
            unsafe {
                let (low, high) = (round_bf16(low.flush_denormals().0), round_bf16(high.flush_denormals().0));
                Self(_mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)))
            }
        }
    }

    #[inline(always)]
    fn paired_halves(self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let pairs = _mm512_permutexvar_epi16(interleaved(16), _mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(pairs))
        }
    }

    #[inline(always)]
    fn parted_pairs(self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let even = _mm512_setr_epi32(
                0x2_0000, 0x6_0004, 0xa_0008, 0xe_000c, 0x12_0010, 0x16_0014, 0x1a_0018, 0x1e_001c, 0x3_0001, 0x7_0005,
                0xb_0009, 0xf_000d, 0x13_0011, 0x17_0015, 0x1b_0019, 0x1f_001d,
            );
            Self(_mm512_castsi512_ps(_mm512_permutexvar_epi16(even, _mm512_castps_si512(self.0))))
        }
    }

    #[inline(always)]
    fn paired_with(self, second: Self) -> (Self, Self) {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let (a, b) = (_mm512_castps_si512(self.0), _mm512_castps_si512(second.0));
            let low = interleaved(32);
            let high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
            let (low, high) = (_mm512_permutex2var_epi16(a, low, b), _mm512_permutex2var_epi16(a, high, b));
            (Self(_mm512_castsi512_ps(low)), Self(_mm512_castsi512_ps(high)))
        }
    }

    #[inline(always)]
    unsafe fn load_paired(first: *const bf16, second: *const bf16) -> Self {
        // SAFETY: the processor has AVX-512 (see the module); the caller promises 16 readable bfloat16 at each pointer.
        unsafe {
            let (first, second) = (_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(second.cast()));
            Self(_mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second))).paired_halves()
        }
    }

    #[inline(always)]
    fn fence() {
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() };
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_min_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: f32) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x.0, _mm512_set1_ps(limit));
            Self(_mm512_mask_mov_ps(self.0, below, _mm512_setzero_ps()))
        }
    }

    #[inline(always)]
    fn flush_denormals(self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(self.0), _mm512_set1_ps(f32::MIN_POSITIVE));
            Self(_mm512_mask_and_ps(self.0, small, self.0, _mm512_set1_ps(-0.0)))
        }
    }

    #[inline(always)]
    fn or_where_unset(self, bits: u32, other: f32) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { Self(_mm512_mask_mov_ps(_mm512_set1_ps(other), bits as u16, self.0)) }
    }

    #[inline(always)]
    fn within(self, from: f32, to: f32) -> u32 {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let reached = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, _mm512_set1_ps(from));
            u32::from(_mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(reached, self.0, _mm512_set1_ps(to)))
        }
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(127 << 23))))
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { sum(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)) }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: the processor has AVX-512, see the module.
        unsafe { largest(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)) }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        prefetch_far(p);
    }

    #[inline(always)]
    fn prefetch_near(p: *const u8) {
        prefetch_near(p);
    }

    #[inline(always)]
    fn dot_pairs(self, x: Self, w: Self) -> Self {
        if BF16 {
            // SAFETY: the processor has AVX-512 with BF16 (see the module); the types have the same 64 bytes.
            unsafe {
                let x = std::mem::transmute::<__m512, __m512bh>(x.0);
                let w = std::mem::transmute::<__m512, __m512bh>(w.0);
                Self(_mm512_dpbf16_ps(self.0, x, w))
            }
        } else {
            emulated_dot_pairs(self, x, w)
        }
    }
}
