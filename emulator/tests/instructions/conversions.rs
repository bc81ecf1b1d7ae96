//! Conversions between all numbers.

use super::half::{bf16, bf16_of, f16, f16_of};
use super::integers::op;
use super::operations::{Equal, Operation, check};
use super::random::Random;

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

fn floats(random: &mut Random) -> u64 {
    random.f32().to_bits().into()
}

fn doubles(random: &mut Random) -> u64 {
    random.f64().to_bits()
}

#[test]
fn between_integers() {
    let operations = [
        op!("cvt.s32.s8 %d32, %a32;", |a, _, _| a as i8 as u64),
        op!("cvt.u32.u8 %d32, %a32;", |a, _, _| u64::from(a as u8)),
        op!("cvt.s64.s32 %d64, %a32;", |a, _, _| a as i32 as u64),
        op!("cvt.u64.u32 %d64, %a32;", |a, _, _| u64::from(a as u32)),
        op!("cvt.u16.u64 %d16, %a64;", |a, _, _| u64::from(a as u16)),
        op!("cvt.u8.u32 %d16, %a32;", |a, _, _| u64::from(a as u8)),
        op!("cvt.s8.s32 %d32, %a32;", |a, _, _| a as i8 as u64),
        op!("cvt.sat.s8.s32 %d32, %a32;", |a, _, _| (a as i32).clamp(-128, 127) as u64),
        op!("cvt.sat.u8.s32 %d32, %a32;", |a, _, _| (a as i32).clamp(0, 255) as u64),
        op!("cvt.sat.u32.s64 %d32, %a64;", |a, _, _| (a as i64).clamp(0, u32::MAX.into()) as u64),
        op!("cvt.sat.s32.u64 %d32, %a64;", |a, _, _| a.min(i32::MAX as u64)),
    ];
    check(31, Equal::Bits, Random::integer, &operations);
}

/// float32 that is not above the exact value, of those that are not further from zero.
fn toward_zero(x: i128) -> u64 {
    let nearest = x as f32;
    let too_far = (nearest.abs() as u128) > x.unsigned_abs();
    let bits = if too_far { nearest.to_bits() - 1 } else { nearest.to_bits() };
    bits.into()
}

#[test]
fn integers_to_floats() {
    let operations = [
        op!("cvt.rn.f32.s32 %d32, %a32;", |a, _, _| (a as i32 as f32).to_bits().into()),
        op!("cvt.rn.f32.u32 %d32, %a32;", |a, _, _| (a as u32 as f32).to_bits().into()),
        op!("cvt.rn.f32.s64 %d32, %a64;", |a, _, _| (a as i64 as f32).to_bits().into()),
        op!("cvt.rn.f32.u64 %d32, %a64;", |a, _, _| (a as f32).to_bits().into()),
        op!("cvt.rn.f32.u8 %d32, %a32;", |a, _, _| f32::from(a as u8).to_bits().into()),
        op!("cvt.rn.f32.s16 %d32, %a16;", |a, _, _| f32::from(a as i16).to_bits().into()),
        op!("cvt.rz.f32.u32 %d32, %a32;", |a, _, _| toward_zero((a as u32).into())),
        op!("cvt.rz.f32.s64 %d32, %a64;", |a, _, _| toward_zero((a as i64).into())),
        op!("cvt.rn.f64.s32 %d64, %a32;", |a, _, _| f64::from(a as i32).to_bits()),
        op!("cvt.rn.f64.u64 %d64, %a64;", |a, _, _| (a as f64).to_bits()),
        op!("cvt.rn.f16.s32 %d16, %a32;", |a, _, _| f16_of(f64::from(a as i32)).into()),
        op!("cvt.rn.bf16.u32 %d16, %a32;", |a, _, _| bf16_of(f64::from(a as u32)).into()),
    ];
    check(32, Equal::Bits, Random::integer, &operations);
}

#[test]
fn floats_to_integers() {
    let operations = [
        op!("cvt.rzi.s32.f32 %d32, %a32;", |a, _, _| f(a) as i32 as u64),
        op!("cvt.rzi.u32.f32 %d32, %a32;", |a, _, _| u64::from(f(a) as u32)),
        op!("cvt.rni.s32.f32 %d32, %a32;", |a, _, _| f(a).round_ties_even() as i32 as u64),
        op!("cvt.rmi.s32.f32 %d32, %a32;", |a, _, _| f(a).floor() as i32 as u64),
        op!("cvt.rpi.s32.f32 %d32, %a32;", |a, _, _| f(a).ceil() as i32 as u64),
        op!("cvt.rni.ftz.u8.f32 %d32, %a32;", |a, _, _| u64::from(f(a).round_ties_even() as u8)),
        op!("cvt.rzi.s16.f32 %d16, %a32;", |a, _, _| f(a) as i16 as u64),
        op!("cvt.rzi.s64.f32 %d64, %a32;", |a, _, _| { if f(a).is_nan() { 1 << 63 } else { f(a) as i64 as u64 } }),
        op!("cvt.rzi.u64.f32 %d64, %a32;", |a, _, _| if f(a).is_nan() { 1 << 63 } else { f(a) as u64 }),
    ];
    check(33, Equal::Bits, floats, &operations);
}

#[test]
fn between_floats() {
    let operations = [
        op!("cvt.rni.f32.f32 %d32, %a32;", |a, _, _| f(a).round_ties_even().to_bits().into()),
        op!("cvt.rzi.f32.f32 %d32, %a32;", |a, _, _| f(a).trunc().to_bits().into()),
        op!("cvt.rmi.f32.f32 %d32, %a32;", |a, _, _| f(a).floor().to_bits().into()),
        op!("cvt.sat.f32.f32 %d32, %a32;", |a, _, _| {
            let x = f(a);
            if x > 0.0 { x.min(1.0).to_bits().into() } else { 0 }
        }),
        op!("cvt.f64.f32 %e64, %a32; cvt.rn.f32.f64 %d32, %e64;", |a, _, _| a),
        op!("cvt.rna.tf32.f32 %d32, %a32;", |a, _, _| { if f(a).is_finite() { (a + 0x1000) & !0x1fff } else { a } }),
        op!("mov.b32 {_, %e16}, %a32; cvt.f32.bf16 %d32, %e16;", |a, _, _| a & 0xffff_0000),
    ];
    check(34, Equal::F32, floats, &operations);
    let operations = [
        op!("cvt.rzi.s32.f64 %d32, %a64;", |a, _, _| { if d(a).is_nan() { 1 << 31 } else { d(a) as i32 as u64 } }),
        op!("cvt.rzi.u64.f64 %d64, %a64;", |a, _, _| if d(a).is_nan() { 1 << 63 } else { d(a) as u64 }),
        op!("cvt.rn.f32.f64 %e32, %a64; and.b32 %d32, %e32, 0x7fffffff; min.u32 %d32, %d32, 0x7f800001;", |a, _, _| {
            u64::from((d(a) as f32).to_bits() & 0x7fff_ffff).min(0x7f80_0001)
        }),
    ];
    check(35, Equal::Bits, doubles, &operations);
}

/// The half below (or above) a number, or the number: `nearest` is the half nearest to it.
fn directed(nearest: u16, value: fn(u16) -> f64, x: f64, up: bool) -> u64 {
    let found = value(nearest);
    let away = |bits: u16| bits + 1;
    let toward = |bits: u16| bits - 1;
    let is_negative = nearest >> 15 == 1;
    u64::from(if found < x && up {
        if is_negative { toward(nearest) } else { away(nearest) }
    } else if found > x && !up {
        if is_negative { away(nearest) } else { toward(nearest) }
    } else {
        nearest
    })
}

fn directed_f16(x: f64, up: bool) -> u64 {
    directed(f16_of(x), f16, x, up)
}

fn directed_bf16(x: f64, up: bool) -> u64 {
    directed(bf16_of(x), bf16, x, up)
}

#[test]
fn to_halves_in_a_direction() {
    let operations = [
        op!("cvt.rm.f16.f32 %d16, %a32;", |a, _, _| directed_f16(f(a).into(), false)),
        op!("cvt.rp.f16.f32 %d16, %a32;", |a, _, _| directed_f16(f(a).into(), true)),
        op!("cvt.rz.f16.f32 %d16, %a32;", |a, _, _| directed_f16(f(a).into(), f(a) < 0.0)),
    ];
    check(41, Equal::F16, floats, &operations);
    let operations = [
        op!("cvt.rm.bf16.f32 %d16, %a32;", |a, _, _| directed_bf16(f(a).into(), false)),
        op!("cvt.rp.bf16.f32 %d16, %a32;", |a, _, _| directed_bf16(f(a).into(), true)),
    ];
    check(42, Equal::Bf16, floats, &operations);
    let operations = [
        op!("cvt.rz.f16.s32 %d16, %a32;", |a, _, _| directed_f16(f64::from(a as i32), (a as i32) < 0)),
        op!("cvt.rp.bf16.u32 %d16, %a32;", |a, _, _| directed_bf16(f64::from(a as u32), true)),
    ];
    check(43, Equal::Bits, Random::integer, &operations);
}

#[test]
fn to_halves() {
    let f16_operations = [
        op!("cvt.rn.f16.f32 %d16, %a32;", |a, _, _| f16_of(f(a).into()).into()),
        op!("cvt.rn.f16x2.f32 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, _, _| f16_of(f(a).into()).into()),
        op!("cvt.rn.f16x2.f32 %e32, %a32, %b32; mov.b32 {%d16, _}, %e32;", |_, b, _| f16_of(f(b).into()).into()),
    ];
    check(36, Equal::F16, floats, &f16_operations);
    let bf16_operations = [
        op!("cvt.rn.bf16.f32 %d16, %a32;", |a, _, _| bf16_of(f(a).into()).into()),
        op!("cvt.rz.bf16.f32 %d16, %a32;", |a, _, _| a >> 16 | u64::from(f(a).is_nan()) << 6),
        op!("cvt.rn.bf16x2.f32 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, _, _| bf16_of(f(a).into()).into()),
        op!("cvt.rn.bf16x2.f32 %e32, %a32, %b32; mov.b32 {%d16, _}, %e32;", |_, b, _| bf16_of(f(b).into()).into()),
        op!("cvt.rn.relu.bf16x2.f32 %e32, %a32, %b32; mov.b32 {%d16, _}, %e32;", |_, b, _| {
            if f(b) < 0.0 { 0 } else { bf16_of(f(b).into()).into() }
        }),
    ];
    check(37, Equal::Bf16, floats, &bf16_operations);
    check(38, Equal::F16, doubles, &[op!("cvt.rn.f16.f64 %d16, %a64;", |a, _, _| f16_of(d(a)).into())]);
    check(39, Equal::Bf16, doubles, &[op!("cvt.rn.bf16.f64 %d16, %a64;", |a, _, _| bf16_of(d(a)).into())]);
}

#[test]
fn from_halves() {
    let operations = [
        op!("cvt.f32.f16 %d32, %a16;", |a, _, _| (f16(a as u16) as f32).to_bits().into()),
        op!("cvt.f32.bf16 %d32, %a16;", |a, _, _| (bf16(a as u16) as f32).to_bits().into()),
        op!("cvt.rzi.s32.f16 %d32, %a16;", |a, _, _| f16(a as u16) as i32 as u64),
        op!("cvt.rni.u16.bf16 %d16, %a16;", |a, _, _| u64::from(bf16(a as u16).round_ties_even() as u16)),
    ];
    check(40, Equal::F32, |random| random.halves(false), &operations);
}
