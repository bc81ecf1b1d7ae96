//! Infinities and NaNs among stored values.

use super::isa::{Isa, Kernel};

/// A value as it is stored: little-endian bytes, at any address.
pub trait StoredBits: Copy {
    /// As an integer in the low bits.
    fn bits(self) -> u32;
}

impl StoredBits for [u8; 2] {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(u16::from_le_bytes(self))
    }
}

impl StoredBits for [u8; 4] {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from_le_bytes(self)
    }
}

/// Index of the first value that has all bits of `exponent`, which only infinities and NaNs have.
pub fn first_saturated<T: StoredBits>(values: &[T], exponent: u32) -> Option<usize> {
    const BLOCK: usize = 4096; // only one with a hit is searched for its place
    let isa = Isa::detect();
    let mut blocks = values.chunks(BLOCK);
    let block = blocks.position(|values| isa.dispatch(AnySaturated { values, exponent }))?;
    let is_saturated = |value: &T| value.bits() & exponent == exponent;
    values[block * BLOCK..].iter().position(is_saturated).map(|place| block * BLOCK + place)
}

/// Without a branch per value, which the compiler turns into vectors.
struct AnySaturated<'a, T> {
    values: &'a [T],
    exponent: u32,
}

impl<T: StoredBits> Kernel for AnySaturated<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<L: super::lanes::Lanes>(self) -> bool {
        let mut any = false;
        for value in self.values {
            any |= value.bits() & self.exponent == self.exponent;
        }
        any
    }
}
