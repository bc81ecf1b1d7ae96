//! Finds infinities and NaNs among stored values.

use super::isa::{Isa, Kernel};

/// A value as it is stored: little-endian bytes, at any address.
pub trait StoredBits: Copy {
    /// The bits of the value as an integer, in the low bits.
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

/// The index of the first infinity or NaN: only these have all bits of `exponent` set.
pub fn first_saturated<T: StoredBits>(values: &[T], exponent: u32) -> Option<usize> {
    const BLOCK: usize = 4096; // only a block with a hit is searched for the value
    let isa = Isa::detect();
    let mut blocks = values.chunks(BLOCK);
    let block = blocks.position(|values| isa.dispatch(AnySaturated { values, exponent }))?;
    let is_saturated = |value: &T| value.bits() & exponent == exponent;
    values[block * BLOCK..].iter().position(is_saturated).map(|place| block * BLOCK + place)
}

/// Looks for infinities and NaNs without a branch per value, so that the compiler vectorises the loop.
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
