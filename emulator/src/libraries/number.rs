//! Numbers of the libraries' element types, read and written one by one.

/// An element type of a library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ElementType {
    F32,
    F64,
    F16,
    Bf16,
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
}

fn half(bits: u16) -> f32 {
    let (exponent, fraction) = (bits >> 10 & 31, bits & 1023);
    let magnitude = match exponent {
        0 => f32::from(fraction) * 2f32.powi(-24),
        31 if fraction == 0 => f32::INFINITY,
        31 => f32::NAN,
        e => f32::from(fraction | 1024) * 2f32.powi(i32::from(e) - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// The nearest half, ties to even.
fn to_half(x: f32) -> u16 {
    let (sign, magnitude) = (if x.is_sign_negative() { 0x8000 } else { 0 }, x.abs());
    if magnitude.is_nan() {
        return 0x7fff;
    }
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    let smallest = 2f32.powi(-14);
    let exponent = if magnitude < smallest { -14 } else { (magnitude.to_bits() >> 23) as i32 - 127 };
    let step = 2f32.powi(exponent - 10);
    let rounded = (magnitude / step).round_ties_even() * step;
    if rounded < smallest {
        return sign | (rounded / 2f32.powi(-24)) as u16;
    }
    let bits = rounded.to_bits();
    sign | (((bits >> 23) as u16 - 112) << 10) | (bits >> 13 & 1023) as u16
}

/// The nearest bfloat16, ties to even.
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

impl ElementType {
    pub fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The number whose bytes these are. Whole numbers of 64 bits lose what a double does not have.
    pub fn get(self, bytes: &[u8]) -> f64 {
        let low = |n: usize| bytes[..n].iter().rev().fold(0u64, |all, &byte| all << 8 | u64::from(byte));
        match self {
            Self::F32 => f64::from(f32::from_bits(low(4) as u32)),
            Self::F64 => f64::from_bits(low(8)),
            Self::F16 => f64::from(half(low(2) as u16)),
            Self::Bf16 => f64::from(f32::from_bits((low(2) as u32) << 16)),
            Self::I8 => f64::from(low(1) as i8),
            Self::U8 => low(1) as f64,
            Self::I32 => f64::from(low(4) as i32),
            Self::U32 => low(4) as f64,
            Self::I64 => low(8) as i64 as f64,
            Self::U64 => low(8) as f64,
        }
    }

    /// Writes a number, rounded to the nearest.
    pub fn set(self, bytes: &mut [u8], x: f64) {
        let bits = match self {
            Self::F32 => u64::from((x as f32).to_bits()),
            Self::F64 => x.to_bits(),
            Self::F16 => u64::from(to_half(x as f32)),
            Self::Bf16 => u64::from(to_bf16(x as f32)),
            Self::I8 => x as i8 as u64,
            Self::U8 => x as u8 as u64,
            Self::I32 => x as i32 as u64,
            Self::U32 => x as u32 as u64,
            Self::I64 => x as i64 as u64,
            Self::U64 => x as u64,
        };
        bytes[..self.bytes()].copy_from_slice(&bits.to_le_bytes()[..self.bytes()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_comes_back() {
        for bits in 0..=u16::MAX {
            let x = half(bits);
            assert!(x.is_nan() || to_half(x) == bits, "{bits:#x} is {x}");
        }
    }

    #[test]
    fn halves_round_to_the_nearest_and_even() {
        let between = |a: u16, part: f32| half(a) + (half(a + 1) - half(a)) * part;
        for a in [0, 1, 0x3ff, 0x400, 0x3c00, 0x3c01, 0x7bfe] {
            assert_eq!(to_half(between(a, 0.25)), a);
            assert_eq!(to_half(between(a, 0.5)), a + a % 2);
            assert_eq!(to_half(between(a, 0.75)), a + 1);
        }
        assert_eq!([65519.0, 65520.0, -1e9].map(to_half), [0x7bff, 0x7c00, 0xfc00]);
    }

    #[test]
    fn numbers_of_each_type_come_back() {
        for (ty, x) in [
            (ElementType::F32, 1.5),
            (ElementType::F64, 1e300),
            (ElementType::Bf16, -3.0),
            (ElementType::I8, -7.0),
            (ElementType::U8, 200.0),
        ] {
            let mut bytes = [0; 8];
            ty.set(&mut bytes, x);
            assert_eq!(ty.get(&bytes), x, "{ty:?}");
        }
        for (ty, x) in
            [(ElementType::I32, -70000.0), (ElementType::U32, 4e9), (ElementType::I64, -5e12), (ElementType::U64, 5e12)]
        {
            let mut bytes = [0; 8];
            ty.set(&mut bytes, x);
            assert_eq!(ty.get(&bytes), x, "{ty:?}");
        }
    }
}
