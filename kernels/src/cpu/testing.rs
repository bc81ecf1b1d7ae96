//! What the tests of the operators share.

/// A small generator (xorshift64*), so that a failure is repeated from its printed seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        println!("seed {seed}");
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        (((self.next() >> 32) * end as u64) >> 32) as usize
    }

    /// Uniform in `from..=to`.
    pub fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to - from + 1)
    }

    /// About normal with this standard deviation: the sum of four uniforms.
    pub fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        let scale = deviation * 3.0_f32.sqrt() / 65536.0;
        let four = |bits: u64| (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 - 32767.5).sum::<f32>();
        (0..len).map(|_| four(self.next()) * scale).collect()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        (1..values.len()).for_each(|i| values.swap(i, self.below(i + 1)));
    }
}

/// `value` is within `tolerance`, relative to `expected` where that is above 1.
#[track_caller]
pub fn close(value: f32, expected: f64, tolerance: f64, what: &str) {
    let error = (f64::from(value) - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1.0), "{what}: {value}, expected {expected}, error {error:e}");
}

/// The bits, so that a comparison tells -0 from 0 and accepts equal NaNs.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
