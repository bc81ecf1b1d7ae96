//! Scalar functions written so that loops over them vectorise, with the same bits on every instruction set.

use half::{bf16, f16};

/// `e^x` to about 1 ulp for `x` in `[-87.3, 88.376]`; 0 for smaller `x`, also `-inf`; `e^88.376` for larger `x`.
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
    // The low bits of `shifted` are n, and a shift takes them to the exponent. (`n as i32` would saturate, which does
    // not vectorise.)
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x.is_nan() {
        x
    } else if x < -87.3 {
        0.0
    } else {
        scaled
    }
}

/// Rounds `x` to bfloat16, to nearest even and without branches. The bits are those of [`bf16::from_f32`].
#[inline(always)]
pub fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

/// Widens `x` to float32 without branches. The bits are those of `f16::to_f32`.
#[inline(always)]
pub fn widen_f16(x: f16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23; // exponents count from 127 in float32, from 15 in float16
    let sign = u32::from(x.to_bits() & 0x8000) << 16;
    let magnitude = u32::from(x.to_bits() & 0x7fff) << 13;
    let normal = magnitude + BIAS;
    // A denormal's bits with the smallest normal exponent are that power of two plus the value, so the power is
    // subtracted.
    let subnormal = f32::from_bits(normal + (1 << 23)) - f32::from_bits(BIAS + (1 << 23));
    let quiet = if magnitude > 0x7c00 << 13 { 1 << 22 } else { 0 };
    let bits = match magnitude >> 23 {
        0 => subnormal.to_bits(),
        31 => magnitude | 0xff << 23 | quiet,
        _ => normal,
    };
    f32::from_bits(sign | bits)
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

    #[test]
    fn rounding_to_bf16_has_the_bits_of_half() {
        let specials = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-40];
        let some = (0..u32::MAX - 40_000).step_by(20_011).map(f32::from_bits);
        let ties = (0..=0xffff_u32).map(|high| f32::from_bits(high << 16 | 0x8000));
        for x in some.chain(ties).chain(specials) {
            assert_eq!(super::round_bf16(x).to_bits(), super::bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
        }
    }

    #[test]
    fn widening_float16_has_the_bits_of_half() {
        for x in (0..=u16::MAX).map(super::f16::from_bits) {
            assert_eq!(super::widen_f16(x).to_bits(), x.to_f32().to_bits(), "{:#x}", x.to_bits());
        }
    }
}
