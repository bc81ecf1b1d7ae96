//! Helpers that the tests of the operators share.

mod random;
pub mod require;
pub use random::Random;

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

mod tests {
    use std::process::{Command, Output};

    use super::require::{left_out, require};

    const VARIABLE: &str = "ROLLOUT_REQUIRE_ISA";

    #[test]
    #[ignore = "no machine can run it: a_test_that_cannot_run_is_counted_or_fails does"]
    fn impossible() {
        require!(left_out(VARIABLE, "no processor can"));
        unreachable!("it is left out");
    }

    #[test]
    fn a_test_that_cannot_run_is_counted_or_fails() {
        let run = |variable: Option<&str>| -> Output {
            let mut child = Command::new(std::env::current_exe().expect("the path of this binary"));
            child.args(["--exact", "cpu::testing::tests::impossible", "--ignored"]).env_remove(VARIABLE);
            child.envs(variable.map(|name| (name, "1"))).output().expect("it runs")
        };
        let counted = run(None);
        let log = String::from_utf8_lossy(&counted.stderr);
        assert!(counted.status.success() && log.contains("1 left out: cpu::testing::tests::impossible"), "{log}");
        assert!(!run(Some(VARIABLE)).status.success());
    }
}
