//! Float32 and float64.

use super::integers::op;
use super::operations::{Equal, Operation, check};
use super::random::Random;

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

fn bits(x: f32) -> u64 {
    x.to_bits().into()
}

fn sources(random: &mut Random) -> u64 {
    bits(random.f32())
}

fn long_sources(random: &mut Random) -> u64 {
    random.f64().to_bits()
}

/// Subnormal numbers as zero.
fn ftz(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `exact`, as `high + low`, rounded to float32 down, up or to zero. `high + low` is not overflowing.
fn directed(high: f64, low: f64, to_zero: bool, up: bool) -> u64 {
    let nearest = high as f32;
    let above = |x: f32| f64::from(x) > high || f64::from(x) == high && low < 0.0;
    let below = |x: f32| f64::from(x) < high || f64::from(x) == high && low > 0.0;
    let up = if to_zero { high < 0.0 } else { up };
    bits(if up && below(nearest) {
        nearest.next_up()
    } else if !up && above(nearest) {
        nearest.next_down()
    } else {
        nearest
    })
}

/// The sum of two doubles and what it lost.
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    let part = s - a;
    (s, (a - (s - part)) + (b - part))
}

#[test]
fn nearest() {
    let operations = [
        op!("add.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) + f(b))),
        op!("sub.rn.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) - f(b))),
        op!("mul.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) * f(b))),
        op!("fma.rn.f32 %d32, %a32, %b32, %c32;", |a, b, c| bits(f(a).mul_add(f(b), f(c)))),
        op!("div.rn.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) / f(b))),
        op!("rcp.rn.f32 %d32, %a32;", |a, _, _| bits(1.0 / f(a))),
        op!("sqrt.rn.f32 %d32, %a32;", |a, _, _| bits(f(a).sqrt())),
        op!("add.ftz.f32 %d32, %a32, %b32;", |a, b, _| bits(ftz(ftz(f(a)) + ftz(f(b))))),
        op!("mul.rn.ftz.f32 %d32, %a32, %b32;", |a, b, _| bits(ftz(ftz(f(a)) * ftz(f(b))))),
        op!("fma.rn.ftz.f32 %d32, %a32, %b32, %c32;", |a, b, c| { bits(ftz(ftz(f(a)).mul_add(ftz(f(b)), ftz(f(c))))) }),
        op!("add.sat.f32 %d32, %a32, %b32;", |a, b, _| {
            let sum = f(a) + f(b);
            bits(if sum > 0.0 { sum.min(1.0) } else { 0.0 })
        }),
        op!("add.f32 %d32, %a32, 0f3F800000;", |a, _, _| bits(f(a) + 1.0)),
    ];
    check(11, Equal::F32, sources, &operations);
}

#[test]
fn signs_and_extremes() {
    let operations = [
        op!("neg.f32 %d32, %a32;", |a, _, _| a ^ 0x8000_0000),
        op!("abs.f32 %d32, %a32;", |a, _, _| a & 0x7fff_ffff),
        op!("abs.ftz.f32 %d32, %a32;", |a, _, _| bits(ftz(f(a)).abs())),
        op!("copysign.f32 %d32, %a32, %b32;", |a, b, _| bits(f(b).copysign(f(a)))),
        op!("min.f32 %d32, %a32, %b32;", |a, b, _| {
            let (x, y) = (f(a), f(b));
            bits(if x == y && x.is_sign_negative() {
                x
            } else if x == y {
                y
            } else {
                x.min(y)
            })
        }),
        op!("max.f32 %d32, %a32, %b32;", |a, b, _| {
            let (x, y) = (f(a), f(b));
            bits(if x == y && x.is_sign_negative() {
                y
            } else if x == y {
                x
            } else {
                x.max(y)
            })
        }),
        op!("max.NaN.f32 %d32, %a32, %b32;", |a, b, _| {
            let (x, y) = (f(a), f(b));
            bits(if x.is_nan() || y.is_nan() { f32::NAN } else { x.max(y) })
        }),
        op!("setp.lt.f32 %q, %a32, %b32; selp.b32 %d32, 1, 0, %q;", |a, b, _| u64::from(f(a) < f(b))),
        op!("setp.gtu.f32 %q, %a32, %b32; selp.b32 %d32, 1, 0, %q;", |a, b, _| {
            u64::from(f(a).partial_cmp(&f(b)).is_none_or(std::cmp::Ordering::is_gt))
        }),
        op!("setp.ne.f32 %q, %a32, %b32; selp.b32 %d32, 1, 0, %q;", |a, b, _| u64::from(f(a) < f(b) || f(a) > f(b))),
        op!("setp.neu.f32 %q, %a32, %b32; selp.b32 %d32, 1, 0, %q;", |a, b, _| u64::from(f(a) != f(b))),
        op!("setp.nan.f32 %q, %a32, %b32; selp.b32 %d32, 1, 0, %q;", |a, b, _| {
            u64::from(f(a).is_nan() || f(b).is_nan())
        }),
        op!("setp.eq.ftz.f32 %q, %a32, 0f00000000; selp.b32 %d32, 1, 0, %q;", |a, _, _| u64::from(ftz(f(a)) == 0.0)),
        op!("set.gt.f32.f32 %d32, %a32, %b32;", |a, b, _| bits(if f(a) > f(b) { 1.0 } else { 0.0 })),
        op!("testp.subnormal.f32 %q, %a32; selp.b32 %d32, 1, 0, %q;", |a, _, _| u64::from(f(a).is_subnormal())),
        op!("testp.notanumber.f32 %q, %a32; selp.b32 %d32, 1, 0, %q;", |a, _, _| u64::from(f(a).is_nan())),
    ];
    check(12, Equal::F32, sources, &operations);
}

/// Numbers whose sums and products are exact in two doubles and do not overflow.
fn moderate(random: &mut Random) -> u64 {
    let bits = random.bits();
    bits & 0x807f_ffff | (107 + random.below(40)) << 23
}

#[test]
fn directions() {
    let operations = [
        op!("add.rz.f32 %d32, %a32, %b32;", |a, b, _| {
            let (s, e) = two_sum(f(a).into(), f(b).into());
            directed(s, e, true, false)
        }),
        op!("sub.rm.f32 %d32, %a32, %b32;", |a, b, _| {
            let (s, e) = two_sum(f(a).into(), (-f(b)).into());
            directed(s, e, false, false)
        }),
        op!("mul.rp.f32 %d32, %a32, %b32;", |a, b, _| directed(f64::from(f(a)) * f64::from(f(b)), 0.0, false, true)),
        op!("fma.rz.f32 %d32, %a32, %b32, %c32;", |a, b, c| {
            let (s, e) = two_sum(f64::from(f(a)) * f64::from(f(b)), f(c).into());
            directed(s, e, true, false)
        }),
        op!("div.rz.f32 %d32, %a32, %b32;", |a, b, _| {
            let quotient = f64::from(f(a)) / f64::from(f(b));
            let rest = (-quotient).mul_add(f(b).into(), f(a).into()) / f64::from(f(b));
            directed(quotient, rest, true, false)
        }),
        op!("and.b32 %e32, %a32, 0x7fffffff; sqrt.rp.f32 %d32, %e32;", |a, _, _| {
            let root = f64::from(f(a).abs()).sqrt();
            directed(root, (-root).mul_add(root, f(a).abs().into()), false, true)
        }),
        op!(
            "cvt.f64.f32 %e64, %a32; div.rn.f64 %e64, %e64, 0d4008000000000000; cvt.rm.f32.f64 %d32, %e64;",
            |a, _, _| { directed(f64::from(f(a)) / 3.0, 0.0, false, false) }
        ),
    ];
    check(13, Equal::F32, moderate, &operations);
}

#[test]
fn approximations() {
    let operations = [
        op!("rcp.approx.ftz.f32 %d32, %a32;", |a, _, _| bits(ftz(1.0 / ftz(f(a))))),
        op!("rsqrt.approx.f32 %d32, %a32;", |a, _, _| bits((1.0 / f64::from(f(a)).sqrt()) as f32)),
        op!("sqrt.approx.f32 %d32, %a32;", |a, _, _| bits(f(a).sqrt())),
        op!("div.approx.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) / f(b))),
        op!("div.full.f32 %d32, %a32, %b32;", |a, b, _| bits(f(a) / f(b))),
        op!("ex2.approx.ftz.f32 %d32, %a32;", |a, _, _| bits(ftz(f64::from(ftz(f(a))).exp2() as f32))),
        op!("abs.f32 %e32, %a32; lg2.approx.f32 %d32, %e32;", |a, _, _| bits(f64::from(f(a).abs()).log2() as f32)),
        op!("sin.approx.f32 %d32, %a32;", |a, _, _| bits(f64::from(f(a)).sin() as f32)),
        op!("cos.approx.f32 %d32, %a32;", |a, _, _| bits(f64::from(f(a)).cos() as f32)),
        op!("tanh.approx.f32 %d32, %a32;", |a, _, _| bits(f64::from(f(a)).tanh() as f32)),
    ];
    check(14, Equal::Ulps(2), sources, &operations);
}

#[test]
fn float64() {
    let operations = [
        op!("add.f64 %d64, %a64, %b64;", |a, b, _| (d(a) + d(b)).to_bits()),
        op!("sub.f64 %d64, %a64, %b64;", |a, b, _| (d(a) - d(b)).to_bits()),
        op!("mul.f64 %d64, %a64, %b64;", |a, b, _| (d(a) * d(b)).to_bits()),
        op!("fma.rn.f64 %d64, %a64, %b64, %c64;", |a, b, c| d(a).mul_add(d(b), d(c)).to_bits()),
        op!("div.rn.f64 %d64, %a64, %b64;", |a, b, _| (d(a) / d(b)).to_bits()),
        op!("sqrt.rn.f64 %d64, %a64;", |a, _, _| d(a).sqrt().to_bits()),
        op!("neg.f64 %d64, %a64;", |a, _, _| a ^ 1 << 63),
        op!("abs.f64 %d64, %a64;", |a, _, _| a & !(1 << 63)),
        op!("setp.geu.f64 %q, %a64, %b64; selp.b64 %d64, 1, 0, %q;", |a, b, _| {
            u64::from(d(a).partial_cmp(&d(b)).is_none_or(std::cmp::Ordering::is_ge))
        }),
        op!("add.f64 %d64, %a64, 0d3FF0000000000000;", |a, _, _| (d(a) + 1.0).to_bits()),
    ];
    check(15, Equal::F64, long_sources, &operations);
}
