//! Vectors of sixteen float32 lanes, in which every kernel is written.
//!
//! Each operation is one correctly rounded IEEE operation per lane, so kernels give the same bits on every
//! implementation. The x86 types are constructed only below [`Isa::dispatch`](super::isa::Isa::dispatch).

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::math::round_bf16;
use half::bf16;

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// A vector of 16 float32 lanes, with arithmetic lane by lane.
///
/// # Safety
/// An implementation reads and writes what its methods say and nothing beyond, since kernels pass raw pointers. Values
/// may exist only on a processor that has the instruction set.
pub(crate) unsafe trait Lanes: Copy + 'static {
    /// The most accumulators that leave enough registers for the operands of a product.
    const ACCUMULATORS: usize;

    fn splat(x: f32) -> Self;

    /// # Safety
    /// `p` is readable for 16 float32; no alignment is needed.
    unsafe fn load(p: *const f32) -> Self;

    /// # Safety
    /// `p` is readable for 16 bfloat16; no alignment is needed.
    unsafe fn load_bf16(p: *const bf16) -> Self;

    /// Loads 32 bfloat16 as their even and their odd elements.
    ///
    /// # Safety
    /// `p` is readable for 32 bfloat16; no alignment is needed.
    #[inline(always)]
    unsafe fn load_pairs(p: *const bf16) -> (Self, Self) {
        // SAFETY: the caller's promise; 32 bfloat16 are as long as 16 float32.
        unsafe { Self::load(p.cast()) }.widened_halves()
    }

    /// # Safety
    /// `p` is writable for 16 float32; no alignment is needed.
    unsafe fn store(self, p: *mut f32);

    /// Loads 32 float32 and rounds them as [`round_bf16`] does to bfloat16 pairs, the first of each pair in the low
    /// half of its lane.
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

    /// Stores past the caches (non-temporal), for memory that is written in large parts before it is read again. Other
    /// threads see the values after [`fence`](Self::fence).
    ///
    /// # Safety
    /// `p` is writable for 16 float32 and aligned to 64 bytes.
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { self.store(p) };
    }

    /// Transposes a 16 × 16 matrix: lane `j` of vector `i` becomes lane `i` of vector `j`. Bits are moved unchanged,
    /// whatever their type.
    #[inline(always)]
    fn transposed(rows: &[Self; LANES]) -> [Self; LANES] {
        let (mut from, mut to) = ([[0.0; LANES]; LANES], [Self::zero(); LANES]);
        for i in 0..LANES {
            from[i] = rows[i].to_array();
        }
        for j in 0..LANES {
            let mut column = [0.0; LANES];
            for i in 0..LANES {
                column[i] = from[i][j];
            }
            to[j] = Self::from_array(&column);
        }
        to
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

    /// Replaces lane `i` by `other` where bit `i` of `bits` is not set.
    #[inline(always)]
    fn or_where_unset(self, bits: u32, other: f32) -> Self {
        let mut lanes = self.to_array();
        for i in 0..LANES {
            lanes[i] = if bits >> i & 1 == 1 { lanes[i] } else { other };
        }
        Self::from_array(&lanes)
    }

    /// A mask in which bit `i` tells whether lane `i` is in `from..=to`.
    fn within(self, from: f32, to: f32) -> u32;

    /// `2^n` as [`exp`](super::math::exp) makes it, from `n` plus the constant that rounded it to an integer.
    fn power_of_two(self) -> Self;

    /// Prefetches the cache line at `p` into the second-level cache; `p` need not be readable.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}

    /// Prefetches the cache line at `p` into the first-level cache; `p` need not be readable.
    #[inline(always)]
    fn prefetch_near(_p: *const u8) {}

    /// Replaces denormal lanes by zeros of the same sign.
    fn flush_denormals(self) -> Self;

    /// Widens 16 bfloat16 pairs to two vectors of float32: the first elements (in the low halves of the lanes) and the
    /// second ones.
    fn widened_halves(self) -> (Self, Self);

    /// Rounds two vectors of float32 to one of 32 bfloat16 in order, to nearest even; denormals become zeros of the
    /// same sign.
    #[inline(always)]
    fn rounded_pairs(low: Self, high: Self) -> Self {
        let (mut both, mut pairs) = ([0.0; 2 * LANES], [0.0; LANES]);
        both[..LANES].copy_from_slice(&low.flush_denormals().to_array());
        both[LANES..].copy_from_slice(&high.flush_denormals().to_array());
        for i in 0..LANES {
            let [first, second] = [both[2 * i], both[2 * i + 1]].map(|x| u32::from(round_bf16(x).to_bits()));
            pairs[i] = f32::from_bits(first | second << 16);
        }
        Self::from_array(&pairs)
    }

    /// Pairs the first 16 of 32 bfloat16 with the last 16: `a0 … a15 b0 … b15` becomes `a0 b0 … a15 b15`.
    #[inline(always)]
    fn paired_halves(self) -> Self {
        let bits = bf16_bits(self);
        let mut pairs = [0; 2 * LANES];
        for i in 0..LANES {
            (pairs[2 * i], pairs[2 * i + 1]) = (bits[i], bits[LANES + i]);
        }
        from_bf16_bits(&pairs)
    }

    /// Parts 16 bfloat16 pairs into the first and the second elements: `a0 b0 … a15 b15` becomes `a0 … a15 b0 … b15`.
    #[inline(always)]
    fn parted_pairs(self) -> Self {
        let bits = bf16_bits(self);
        let mut parts = [0; 2 * LANES];
        for i in 0..LANES {
            (parts[i], parts[LANES + i]) = (bits[2 * i], bits[2 * i + 1]);
        }
        from_bf16_bits(&parts)
    }

    /// Pairs element `i` of this vector of 32 bfloat16 with element `i` of `second`: returns the pairs of the first 16
    /// elements, and those of the last 16.
    #[inline(always)]
    fn paired_with(self, second: Self) -> (Self, Self) {
        let (a, b) = (bf16_bits(self), bf16_bits(second));
        let (mut low, mut high) = ([0; 2 * LANES], [0; 2 * LANES]);
        for i in 0..LANES {
            (low[2 * i], low[2 * i + 1]) = (a[i], b[i]);
            (high[2 * i], high[2 * i + 1]) = (a[LANES + i], b[LANES + i]);
        }
        (from_bf16_bits(&low), from_bf16_bits(&high))
    }

    /// Loads 16 bfloat16 from each of two addresses as 16 pairs.
    ///
    /// # Safety
    /// Both addresses are readable for 16 bfloat16; no alignment is needed.
    #[inline(always)]
    unsafe fn load_paired(first: *const bf16, second: *const bf16) -> Self {
        let mut both = [bf16::ZERO; 2 * LANES];
        // SAFETY: the caller's promise.
        unsafe {
            both[..LANES].copy_from_slice(std::slice::from_raw_parts(first, LANES));
            both[LANES..].copy_from_slice(std::slice::from_raw_parts(second, LANES));
            Self::load(both.as_ptr().cast())
        }
        .paired_halves()
    }

    /// `self` plus, lane by lane, the dot product of two vectors of 16 bfloat16 pairs: vdpbf16ps, or arithmetic with
    /// the same bits. These are the bits of two fused multiply-adds, **the second elements first**, in which denormal
    /// inputs count as zeros and denormal results become zeros.
    #[inline(always)]
    fn dot_pairs(self, x: Self, w: Self) -> Self {
        emulated_dot_pairs(self, x, w)
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

    /// The horizontal sum of the lanes as a balanced tree: lane `i` plus `i + 8`, then `i + 4`, `i + 2` and `i + 1`.
    fn sum(self) -> f32;

    /// The largest lane; unspecified if one is NaN.
    fn largest(self) -> f32;

    /// `e^x` of every lane, with the bits of [`exp`](super::math::exp).
    #[inline(always)]
    fn exp(self) -> Self {
        Self::exp_each([self])[0]
    }

    /// `e^x` of several vectors, with each step done for all of them: for one vector alone every step would wait for
    /// the one before.
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

    /// `2^x` of every lane to about 1.3 ulp, exactly 1 for 0, and 0 below -126.5. Lanes must be at most 127 or NaN,
    /// which stays NaN.
    #[inline(always)]
    #[allow(clippy::approx_constant)] // a coefficient of the best polynomial is near ln 2, but not equal to it
    fn exp2(self) -> Self {
        let round = Self::splat(12_582_912.0); // as in `exp`
        let x = Self::splat(-127.0).max(self); // the second operand if it is NaN; the power of two made of -127 is 0
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

/// Rounds up to 32 elements to 16 bfloat16 pairs, with zeros in place of missing elements.
#[inline(always)]
pub(crate) fn rounded_pairs<L: Lanes>(x: &[f32]) -> L {
    let pairs = match x.first_chunk::<{ 2 * LANES }>() {
        Some(pairs) => *pairs,
        None => {
            let mut padded = [0.0; 2 * LANES];
            padded[..x.len()].copy_from_slice(x);
            padded
        }
    };
    let halves = pairs.as_chunks::<LANES>().0;
    L::rounded_pairs(L::from_array(&halves[0]), L::from_array(&halves[1]))
}

/// The arithmetic of [`Lanes::dot_pairs`] without its instruction.
#[inline(always)]
fn emulated_dot_pairs<L: Lanes>(sum: L, x: L, w: L) -> L {
    let ((x_first, x_second), (w_first, w_second)) = (x.widened_halves(), w.widened_halves());
    let (x_first, x_second) = (x_first.flush_denormals(), x_second.flush_denormals());
    let sum = x_second.mul_add(w_second.flush_denormals(), sum.flush_denormals()).flush_denormals();
    x_first.mul_add(w_first.flush_denormals(), sum).flush_denormals()
}

#[inline(always)]
fn bf16_bits<L: Lanes>(pairs: L) -> [u16; 2 * LANES] {
    let (lanes, mut bits) = (pairs.to_array(), [0; 2 * LANES]);
    for i in 0..LANES {
        (bits[2 * i], bits[2 * i + 1]) = (lanes[i].to_bits() as u16, (lanes[i].to_bits() >> 16) as u16);
    }
    bits
}

#[inline(always)]
fn from_bf16_bits<L: Lanes>(bits: &[u16; 2 * LANES]) -> L {
    let mut lanes = [0.0; LANES];
    for i in 0..LANES {
        lanes[i] = f32::from_bits(u32::from(bits[2 * i]) | u32::from(bits[2 * i + 1]) << 16);
    }
    L::from_array(&lanes)
}

#[cfg(test)]
mod tests;
