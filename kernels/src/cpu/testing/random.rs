//! Random inputs of tests: of those beside the sources and of those in `tests/`.

/// A small random generator (xorshift64*). Its seed is printed, so that a failure can be repeated.
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

    /// A uniform value in `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        (((self.next() >> 32) * end as u64) >> 32) as usize
    }

    /// A uniform value in `from..=to`.
    pub fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to - from + 1)
    }

    /// Roughly normal values with this standard deviation, each the sum of four uniform ones.
    pub fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        let scale = deviation * 3.0_f32.sqrt() / 65536.0;
        let four = |bits: u64| (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 - 32767.5).sum::<f32>();
        (0..len).map(|_| four(self.next()) * scale).collect()
    }

    /// Puts the values into a random order.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        (1..values.len()).for_each(|i| values.swap(i, self.below(i + 1)));
    }
}
