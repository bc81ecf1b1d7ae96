//! Random operands, with more of those that are at the edges.

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// Bits of an integer: small ones, ones at the ends of each width, and any.
    pub fn integer(&mut self) -> u64 {
        let edges = [0, 1, 2, 31, 32, 33, 0x7f, 0x80, 0x7fff, 0x8000, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 63];
        match self.below(6) {
            0 => edges[self.below(edges.len() as u64) as usize],
            1 => edges[self.below(edges.len() as u64) as usize].wrapping_neg(),
            2 => self.below(64),
            3 => self.below(64).wrapping_neg(),
            4 => self.bits() >> self.below(64),
            _ => self.bits(),
        }
    }

    /// A float32 of moderate size, at times zero, infinite, subnormal or no number.
    pub fn f32(&mut self) -> f32 {
        match self.below(12) {
            0 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE, f32::MAX, 1.0]
                [self.below(8) as usize],
            1 => f32::from_bits(self.below(1 << 23) as u32), // subnormal
            2 => f32::from_bits(self.bits() as u32),
            3 => self.below(2000) as f32 / 2.0 - 500.0,
            _ => ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2f32.powi(self.below(16) as i32 - 6),
        }
    }

    pub fn f64(&mut self) -> f64 {
        match self.below(8) {
            0 => [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MIN_POSITIVE, f64::MAX, 1.0]
                [self.below(8) as usize],
            1 => f64::from_bits(self.bits()),
            2 => self.f32().into(),
            _ => ((self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * 2f64.powi(self.below(40) as i32 - 10),
        }
    }

    /// Two halves of moderate size as float16 or bfloat16 bits, at times anything.
    pub fn halves(&mut self, bf16: bool) -> u64 {
        let mut half = || {
            let x = self.f32();
            let bits = if bf16 { (x.to_bits() >> 16) as u16 } else { super::half::f16_of(x.into()) };
            if self.below(16) == 0 { self.bits() as u16 } else { bits }
        };
        u64::from(half()) | u64::from(half()) << 16
    }
}
