//! Halves by their definition, in exact arithmetic: a value of two doubles is rounded by comparing it with the
//! neighbours.

/// The value of float16 bits.
pub fn f16(bits: u16) -> f64 {
    value(bits, 10)
}

/// The value of bfloat16 bits.
pub fn bf16(bits: u16) -> f64 {
    value(bits, 7)
}

pub fn f16_of(x: f64) -> u16 {
    rounded(x, 0.0, 10)
}

pub fn bf16_of(x: f64) -> u16 {
    rounded(x, 0.0, 7)
}

/// `fraction` bits below the exponent of a 16-bit number.
fn value(bits: u16, fraction: i32) -> f64 {
    let (sign, exponent) = (if bits >> 15 == 1 { -1.0 } else { 1.0 }, i32::from(bits & 0x7fff) >> fraction);
    let (mantissa, largest) = (f64::from(i32::from(bits) & ((1 << fraction) - 1)), (1 << (15 - fraction)) - 1);
    let bias = largest / 2;
    if exponent == largest {
        return if mantissa == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let scale = |e: i32| 2f64.powi(e - bias - fraction);
    if exponent == 0 { sign * mantissa * scale(1) } else { sign * (mantissa + 2f64.powi(fraction)) * scale(exponent) }
}

/// The 16-bit number that is nearest to `high + low`, of two the even one; `low` is too small to change `high`.
pub fn rounded(high: f64, low: f64, fraction: i32) -> u16 {
    if high.is_nan() {
        return 0x7fff;
    }
    let (sign, x, low) = if high.is_sign_negative() { (0x8000, -high, -low) } else { (0, high, low) };
    let infinity = ((1 << (15 - fraction)) - 1) << fraction;
    // The largest bits whose value is not above x: bits of one sign are in the order of their values.
    let (mut below, mut above) = (0u16, infinity as u16);
    if x >= value(above - 1, fraction) * 2.0 {
        return sign | above;
    }
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        let at = value(middle, fraction);
        if at < x || at == x && low >= 0.0 { below = middle } else { above = middle }
    }
    // Infinity counts as the number that would follow the largest.
    let step = |bits: u16| value(bits, fraction) - value(bits - 1, fraction);
    let next = if i32::from(above) == infinity { value(below, fraction) + step(below) } else { value(above, fraction) };
    let middle = (value(below, fraction) + next) / 2.0;
    let goes_up = x > middle || x == middle && (low > 0.0 || low == 0.0 && below & 1 == 1);
    sign | if goes_up { above } else { below }
}
