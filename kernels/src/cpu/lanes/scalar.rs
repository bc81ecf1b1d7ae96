//! The portable implementation of [`Lanes`]: an array.

use super::{LANES, Lanes};
use half::bf16;

#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

// SAFETY: an array of 16 values, read and written whole.
unsafe impl Lanes for Scalar {
    const ACCUMULATORS: usize = 2; // there are no vector registers to fill, and more would only be more code

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Scalar([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise; the read needs no alignment.
        Scalar(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the caller's promise; the read needs no alignment.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Scalar(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise; the write needs no alignment.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: f32) -> Self {
        self.zip(x, |a, b| if b < limit { 0.0 } else { a })
    }

    #[inline(always)]
    fn flush_denormals(self) -> Self {
        Scalar(self.0.map(|x| if x.abs() < f32::MIN_POSITIVE { 0.0_f32.copysign(x) } else { x }))
    }

    #[inline(always)]
    fn widened_halves(self) -> (Self, Self) {
        let halves = |f: fn(u32) -> u32| Scalar(self.0.map(|x| f32::from_bits(f(x.to_bits()))));
        (halves(|bits| bits << 16), halves(|bits| bits & 0xffff_0000))
    }

    #[inline(always)]
    fn within(self, from: f32, to: f32) -> u32 {
        let mut bits = 0;
        for i in 0..LANES {
            bits |= u32::from(from <= self.0[i] && self.0[i] <= to) << i;
        }
        bits
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        Scalar(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23))))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let mut a = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}
