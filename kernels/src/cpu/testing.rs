//! Helpers that the tests of the operators share.

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

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        (1..values.len()).for_each(|i| values.swap(i, self.below(i + 1)));
    }
}

/// The result of vdpbf16ps in one lane, `sum + x[1] w[1]` and then `+ x[0] w[0]`, without a fused multiply-add: the
/// products of bfloat16 are exact in float64, which has more than twice the bits of float32.
pub fn dot_pair(sum: f32, x: [f32; 2], w: [f32; 2]) -> f32 {
    let flush = |x: f32| if x.is_normal() || !x.is_finite() { x } else { 0.0_f32.copysign(x) };
    [1, 0].into_iter().fold(flush(sum), |sum, i| {
        let (product, sum) = (f64::from(flush(x[i])) * f64::from(flush(w[i])), f64::from(sum));
        let exact = add_to_odd(product, sum);
        let rounded = exact as f32;
        let is_known = exact.abs() >= f64::from(f32::MIN_POSITIVE) || rounded.abs() < f32::MIN_POSITIVE;
        assert!(is_known, "{exact:e} becomes a normal number by rounding: whether it is flushed is not documented");
        flush(rounded)
    })
}

/// `a + b` rounded to odd: if the sum is not a float64, the one of its two neighbours with an odd last bit. Rounding
/// that once more to fewer bits gives the rounded exact sum.
fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let part = sum - a;
    let error = (a - (sum - part)) + (b - part);
    if error == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    if (error > 0.0) == (sum > 0.0) { f64::from_bits(sum.to_bits() + 1) } else { f64::from_bits(sum.to_bits() - 1) }
}

/// Asserts that `value` is within `tolerance` of `expected`, relative to `expected` where that is above 1.
#[track_caller]
pub fn close(value: f32, expected: f64, tolerance: f64, what: &str) {
    let error = (f64::from(value) - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1.0), "{what}: {value}, expected {expected}, error {error:e}");
}

/// The bits of the values, so that a comparison tells -0 from 0 and accepts equal NaNs.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
