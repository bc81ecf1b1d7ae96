//! Sixteen float32 lanes: the unit in which every kernel is written.
//!
//! Each operation is one correctly rounded IEEE operation per lane, so kernels give the same bits on every
//! implementation. Constructors of the x86 types are reached only through [`Isa::dispatch`](super::isa::Isa::dispatch).

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::math::round_bf16;
use half::bf16;

mod scalar;
pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes in a vector.
pub(crate) const LANES: usize = 16;

/// `[f32; 16]` on which arithmetic is lane by lane.
///
/// # Safety
/// Values of an implementation may exist only on a processor that has its instruction set.
pub(crate) trait Lanes: Copy + 'static {
    /// How many of these, as accumulators, leave enough registers for the operands of a product.
    const ACCUMULATORS: usize;

    fn splat(x: f32) -> Self;

    /// # Safety
    /// `p` is readable for 16 float32; no alignment is needed.
    unsafe fn load(p: *const f32) -> Self;

    /// # Safety
    /// `p` is readable for 16 bfloat16; no alignment is needed.
    unsafe fn load_bf16(p: *const bf16) -> Self;

    /// The even and the odd elements of 32 bfloat16.
    ///
    /// # Safety
    /// `p` is readable for 32 bfloat16; no alignment is needed.
    unsafe fn load_pairs(p: *const bf16) -> (Self, Self);

    /// # Safety
    /// `p` is writable for 16 float32; no alignment is needed.
    unsafe fn store(self, p: *mut f32);

    /// 32 float32 rounded as [`round_bf16`] does, two to a lane, the first in the low half.
    ///
    /// # Safety
    /// `p` is readable for 32 float32; no alignment is needed.
    #[inline(always)]
    unsafe fn load_rounded_pairs(p: *const f32) -> Self {
        let mut pairs = [0.0; LANES];
        for i in 0..LANES {
            // SAFETY: the caller's promise.
            let [first, second] = unsafe { [*p.add(2 * i), *p.add(2 * i + 1)] };
            let (low, high) = (u32::from(round_bf16(first).to_bits()), u32::from(round_bf16(second).to_bits()));
            pairs[i] = f32::from_bits(low | high << 16);
        }
        Self::from_array(&pairs)
    }

    /// Writes lane `i` of `rows[j]` to `p[16 * i + j]`, past the caches: memory of which only much is read again. Other
    /// threads see it after [`fence`](Self::fence).
    ///
    /// # Safety
    /// `p` is writable for 256 float32 and aligned to 64 bytes.
    #[inline(always)]
    unsafe fn stream_transposed(rows: &[Self; LANES], p: *mut f32) {
        for j in 0..LANES {
            let row = rows[j].to_array();
            for i in 0..LANES {
                // SAFETY: the caller's promise.
                unsafe { *p.add(LANES * i + j) = row[i] };
            }
        }
    }

    #[inline(always)]
    fn fence() {}

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;

    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// `self > other ? self : other`; `other` if either is NaN.
    fn max(self, other: Self) -> Self;

    /// `self < other ? self : other`; `other` if either is NaN.
    fn min(self, other: Self) -> Self;

    /// `x < limit ? 0 : self`.
    fn zero_where_below(self, x: Self, limit: f32) -> Self;

    /// Bit `i` tells whether lane `i` is in `from..=to`.
    fn within(self, from: f32, to: f32) -> u32;

    /// `2^n` as [`exp`](super::math::exp) makes it, from `n` plus the constant that rounded it to an integer.
    fn power_of_two(self) -> Self;

    /// Asks for the cache line at `p`, which need not be readable.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}

    /// As [`prefetch`](Self::prefetch), into the first-level cache and not only the second.
    #[inline(always)]
    fn prefetch_near(_p: *const u8) {}

    /// Lanes nearer to zero than every normal number become zeros of their sign.
    fn flush_denormals(self) -> Self;

    /// `self` plus, lane by lane, the product of the bfloat16 pair `x` (first element in the low half) with 16 pairs:
    /// vdpbf16ps, or what has its bits.
    ///
    /// # Safety
    /// `w` is readable for 32 bfloat16; no alignment is needed.
    #[inline(always)]
    unsafe fn dot_pairs(self, x: u32, w: *const bf16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { emulated_dot_pairs(self, x, w) }
    }

    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    #[inline(always)]
    fn from_array(a: &[f32; LANES]) -> Self {
        // SAFETY: the array has 16 elements.
        unsafe { Self::load(a.as_ptr()) }
    }

    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }

    /// The sum of the lanes as a balanced tree: lane `i` with `i + 8`, then `i + 4`, `i + 2` and `i + 1`.
    fn sum(self) -> f32;

    /// The largest lane; unspecified if one is NaN.
    fn largest(self) -> f32;

    /// [`exp`](super::math::exp) of every lane, the same bits.
    #[inline(always)]
    fn exp(self) -> Self {
        Self::exp_each([self])[0]
    }

    /// [`exp`](Self::exp) of several vectors, step by step of all: one alone is a chain of which each step waits for the
    /// one before.
    #[inline(always)]
    fn exp_each<const N: usize>(x: [Self; N]) -> [Self; N] {
        const POLYNOMIAL: [f32; 5] = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        let round = Self::splat(12_582_912.0);
        let (mut n, mut r, mut y) = (x, x, x);
        for i in 0..N {
            r[i] = Self::splat(88.376).min(Self::splat(-87.3).max(x[i]));
        }
        for i in 0..N {
            n[i] = r[i].mul_add(Self::splat(std::f32::consts::LOG2_E), round);
        }
        for i in 0..N {
            let n = n[i].sub(round);
            r[i] = n.mul_add(Self::splat(-0.693_359_4), r[i]);
            r[i] = n.mul_add(Self::splat(2.121_944_4e-4), r[i]);
        }
        for i in 0..N {
            y[i] = Self::splat(1.987_569_2e-4);
        }
        for c in POLYNOMIAL {
            for i in 0..N {
                y[i] = y[i].mul_add(r[i], Self::splat(c));
            }
        }
        for i in 0..N {
            y[i] = y[i].mul_add(r[i].mul(r[i]), r[i]).add(Self::splat(1.0));
        }
        for i in 0..N {
            y[i] = y[i].mul(n[i].power_of_two()).zero_where_below(x[i], -87.3);
        }
        y
    }

    /// `2^x` of every lane to about 1.3 ulp, exactly 1 for 0; 0 below -126.5. For lanes up to 127, or NaN, which stays NaN.
    #[inline(always)]
    #[allow(clippy::approx_constant)] // the polynomial of least error has nearly the logarithm of 2, not it
    fn exp2(self) -> Self {
        let round = Self::splat(12_582_912.0); // as in `exp`
        let x = Self::splat(-127.0).max(self); // the second if it is NaN; the power of two made of -127 is 0
        let rounded = x.add(round);
        let r = x.sub(rounded.sub(round));
        let p = Self::splat(1.326_472_6e-3);
        let p = p.mul_add(r, Self::splat(9.671_515e-3));
        let p = p.mul_add(r, Self::splat(5.550_733_6e-2));
        let p = p.mul_add(r, Self::splat(0.240_222_42));
        let p = p.mul_add(r, Self::splat(0.693_147));
        let p = p.mul_add(r, Self::splat(1.0));
        p.mul(rounded.power_of_two())
    }
}

/// [`Lanes::dot_pairs`] without its instruction, which is two fused multiply-adds, **the second elements first**, that take
/// denormals for zeros and give none.
///
/// # Safety
/// As [`Lanes::dot_pairs`].
#[inline(always)]
unsafe fn emulated_dot_pairs<L: Lanes>(sum: L, x: u32, w: *const bf16) -> L {
    // SAFETY: the caller's promise is that of load_pairs.
    let (even, odd) = unsafe { L::load_pairs(w) };
    let (first, second) = (f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000));
    let (first, second) = (L::splat(first).flush_denormals(), L::splat(second).flush_denormals());
    let sum = second.mul_add(odd.flush_denormals(), sum.flush_denormals()).flush_denormals();
    first.mul_add(even.flush_denormals(), sum).flush_denormals()
}

#[cfg(test)]
mod tests;
