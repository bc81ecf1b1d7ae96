//! NEON, which every aarch64 processor has: four registers of 4 lanes.

use super::{LANES, Lanes};
use half::bf16;
use std::arch::aarch64::*;
use std::arch::asm;

/// Registers of a vector, and lanes of a register.
const REGISTERS: usize = 4;

#[derive(Clone, Copy)]
pub(crate) struct Neon([float32x4_t; REGISTERS]);

/// A vector seen as 32 bfloat16.
type Halves = [uint16x8_t; REGISTERS];

impl Neon {
    /// `operation` of each register of `self` and the same register of `other`.
    #[inline(always)]
    fn zip(mut self, other: Self, operation: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        for i in 0..REGISTERS {
            self.0[i] = operation(self.0[i], other.0[i]);
        }
        self
    }

    /// `operation` of the bits of each register.
    #[inline(always)]
    fn map_bits(mut self, operation: impl Fn(uint32x4_t) -> uint32x4_t) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            for i in 0..REGISTERS {
                self.0[i] = vreinterpretq_f32_u32(operation(vreinterpretq_u32_f32(self.0[i])));
            }
            self
        }
    }

    #[inline(always)]
    fn halves(self) -> Halves {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let mut halves = [vdupq_n_u16(0); REGISTERS];
            for i in 0..REGISTERS {
                halves[i] = vreinterpretq_u16_f32(self.0[i]);
            }
            halves
        }
    }

    #[inline(always)]
    fn from_halves(halves: Halves) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let mut lanes = Self::zero();
            for i in 0..REGISTERS {
                lanes.0[i] = vreinterpretq_f32_u16(halves[i]);
            }
            lanes
        }
    }

    /// Rounds each lane to bfloat16, in the low half of the lane, with the bits of
    /// [`round_bf16`](super::super::math::round_bf16).
    #[inline(always)]
    fn rounded(mut self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            for i in 0..REGISTERS {
                let bits = vreinterpretq_u32_f32(self.0[i]);
                let high = vshrq_n_u32::<16>(bits);
                let half = vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(high, vdupq_n_u32(1)));
                let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, half));
                let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
                let is_number = vceqq_f32(self.0[i], self.0[i]);
                self.0[i] = vreinterpretq_f32_u32(vbslq_u32(is_number, rounded, quiet));
            }
            self
        }
    }

    /// The bfloat16 in the low halves of the lanes of two vectors, one vector after the other.
    #[inline(always)]
    fn narrowed(low: Self, high: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let (low, high) = (low.halves(), high.halves());
            Self::from_halves([
                vuzp1q_u16(low[0], low[1]),
                vuzp1q_u16(low[2], low[3]),
                vuzp1q_u16(high[0], high[1]),
                vuzp1q_u16(high[2], high[3]),
            ])
        }
    }
}

// SAFETY: 16 lanes in registers, read and written whole, on a processor that always has NEON.
unsafe impl Lanes for Neon {
    const ACCUMULATORS: usize = 6; // 24 of the 32 registers

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Neon([vdupq_n_f32(x); REGISTERS]) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: every aarch64 processor has NEON; the caller promises 16 readable float32.
        unsafe { Neon([vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: every aarch64 processor has NEON; the caller promises 16 readable bfloat16.
        unsafe {
            let (low, high) = (vld1q_u16(p.cast()), vld1q_u16(p.add(8).cast()));
            let zeros = vdupq_n_u16(0);
            Self::from_halves([
                vzip1q_u16(zeros, low),
                vzip2q_u16(zeros, low),
                vzip1q_u16(zeros, high),
                vzip2q_u16(zeros, high),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: every aarch64 processor has NEON; the caller promises 16 writable float32.
        unsafe {
            for i in 0..REGISTERS {
                vst1q_f32(p.add(4 * i), self.0[i]);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_rounded_pairs(p: *const f32) -> Self {
        // SAFETY: the caller promises 32 readable float32.
        let (low, high) = unsafe { (Self::load(p), Self::load(p.add(LANES))) };
        Self::narrowed(low.rounded(), high.rounded())
    }

    /// In blocks of 4 × 4 lanes.
    #[inline(always)]
    fn transposed(rows: &[Self; LANES]) -> [Self; LANES] {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let mut to = [Self::zero(); LANES];
            for i in 0..REGISTERS {
                for j in 0..REGISTERS {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|row| rows[4 * i + row].0[j]);
                    let pairs = [vtrn1q_f32(a, b), vtrn2q_f32(a, b), vtrn1q_f32(c, d), vtrn2q_f32(c, d)];
                    let [even_low, odd_low, even_high, odd_high] = pairs.map(|pair| vreinterpretq_f64_f32(pair));
                    let columns = [
                        vtrn1q_f64(even_low, even_high),
                        vtrn1q_f64(odd_low, odd_high),
                        vtrn2q_f64(even_low, even_high),
                        vtrn2q_f64(odd_low, odd_high),
                    ];
                    for (column, values) in columns.into_iter().enumerate() {
                        to[4 * j + column].0[i] = vreinterpretq_f32_f64(values);
                    }
                }
            }
            to
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vaddq_f32(a, b)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vsubq_f32(a, b)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vmulq_f32(a, b)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vdivq_f32(a, b)) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, mut c: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            for i in 0..REGISTERS {
                c.0[i] = vfmaq_f32(c.0[i], self.0[i], b.0[i]);
            }
            c
        }
    }

    /// By comparison, because the instruction for the larger value returns NaN where a lane is NaN.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vbslq_f32(vcgtq_f32(a, b), a, b)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { self.zip(other, |a, b| vbslq_f32(vcltq_f32(a, b), a, b)) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: f32) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let limit = vdupq_n_f32(limit);
            self.zip(x, |a, x| vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit))))
        }
    }

    #[inline(always)]
    fn within(self, from: f32, to: f32) -> u32 {
        // SAFETY: every aarch64 processor has NEON; the array has 4 elements.
        unsafe {
            const BITS: [u32; 4] = [1, 2, 4, 8];
            let weights = vld1q_u32(BITS.as_ptr());
            let (from, to, mut bits) = (vdupq_n_f32(from), vdupq_n_f32(to), 0);
            for i in 0..REGISTERS {
                let is_within = vandq_u32(vcgeq_f32(self.0[i], from), vcleq_f32(self.0[i], to));
                bits |= vaddvq_u32(vandq_u32(is_within, weights)) << (4 * i);
            }
            bits
        }
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let bias = vdupq_n_u32(127 << 23);
            self.map_bits(|bits| vaddq_u32(vshlq_n_u32::<23>(bits), bias))
        }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing, whatever the pointer.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) };
    }

    #[inline(always)]
    fn prefetch_near(p: *const u8) {
        // SAFETY: a prefetch reads nothing, whatever the pointer.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) };
    }

    #[inline(always)]
    fn flush_denormals(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let (magnitude, least) = (vdupq_n_u32(i32::MAX as u32), vdupq_n_f32(f32::MIN_POSITIVE));
            self.map_bits(|bits| {
                let is_small = vcaltq_f32(vreinterpretq_f32_u32(bits), least);
                vbicq_u32(bits, vandq_u32(is_small, magnitude))
            })
        }
    }

    #[inline(always)]
    fn widened_halves(self) -> (Self, Self) {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let high = vdupq_n_u32(0xffff_0000);
            (self.map_bits(|bits| vshlq_n_u32::<16>(bits)), self.map_bits(|bits| vandq_u32(bits, high)))
        }
    }

    #[inline(always)]
    fn rounded_pairs(low: Self, high: Self) -> Self {
        Self::narrowed(low.flush_denormals().rounded(), high.flush_denormals().rounded())
    }

    #[inline(always)]
    fn paired_halves(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let [a, b, c, d] = self.halves();
            Self::from_halves([vzip1q_u16(a, c), vzip2q_u16(a, c), vzip1q_u16(b, d), vzip2q_u16(b, d)])
        }
    }

    #[inline(always)]
    fn parted_pairs(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let [a, b, c, d] = self.halves();
            Self::from_halves([vuzp1q_u16(a, b), vuzp1q_u16(c, d), vuzp2q_u16(a, b), vuzp2q_u16(c, d)])
        }
    }

    #[inline(always)]
    fn paired_with(self, second: Self) -> (Self, Self) {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let ([a, b, c, d], [e, f, g, h]) = (self.halves(), second.halves());
            (
                Self::from_halves([vzip1q_u16(a, e), vzip2q_u16(a, e), vzip1q_u16(b, f), vzip2q_u16(b, f)]),
                Self::from_halves([vzip1q_u16(c, g), vzip2q_u16(c, g), vzip1q_u16(d, h), vzip2q_u16(d, h)]),
            )
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let [a, b, c, d] = self.0;
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let [a, b, c, d] = self.0;
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d)))
        }
    }
}
