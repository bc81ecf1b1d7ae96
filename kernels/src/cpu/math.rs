//! Scalar functions written so that loops over them vectorise, with the same bits on every instruction set.

/// `e^x` to about 1 ulp for `x` in `[-87.3, 88.376]`; below it is 0 (so is `-inf`), above it is the largest finite power.
///
/// Range reduction by `x = n ln 2 + r` with `ln 2` in two parts, then the degree-6 polynomial of Cephes' `expf`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
    let xc = x.clamp(-87.3, 88.376);
    let shifted = xc.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, xc);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_2e-4_f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // The low bits of `shifted` are n: a shift takes them to the exponent (`n as i32` saturates, which does not vectorise).
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x.is_nan() {
        x
    } else if x < -87.3 {
        0.0
    } else {
        scaled
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn exp_is_within_two_ulp_of_libm() {
        for i in -873_000..=883_760 {
            let x = i as f32 * 1e-4;
            let (ours, exact) = (f64::from(super::exp(x)), f64::from(x).exp());
            assert!(((ours - exact) / exact).abs() < 2.4e-7, "exp({x}) = {ours}, exact {exact}");
        }
        assert_eq!(super::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(super::exp(0.0), 1.0);
        assert_eq!(super::exp(f32::INFINITY), super::exp(88.376));
        assert!(super::exp(f32::from_bits(0x7fc0_1234)).is_nan());
    }
}
