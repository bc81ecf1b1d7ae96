//! Float16 and bfloat16, alone and packed.

use super::half::{bf16, f16, rounded};
use super::integers::op;
use super::operations::{Equal, Operation, check};

/// The float16 or bfloat16 nearest to `a b + c`, of which the product is exact.
fn fma(a: f64, b: f64, c: f64, fraction: i32) -> u64 {
    let (product, sum) = (a * b, a * b + c);
    let part = sum - product;
    let low = (product - (sum - part)) + (c - part);
    rounded(sum, if low.is_nan() { 0.0 } else { low }, fraction).into()
}

fn fma_f16(a: u64, b: u64, c: u64) -> u64 {
    fma(f16(a as u16), f16(b as u16), f16(c as u16), 10)
}

fn fma_bf16(a: u64, b: u64, c: u64) -> u64 {
    fma(bf16(a as u16), bf16(b as u16), bf16(c as u16), 7)
}

const ONE_F16: u64 = 0x3c00;
const ONE_BF16: u64 = 0x3f80;

/// On the lower or on the upper half.
fn low(x: u64) -> u64 {
    x & 0xffff
}

fn high(x: u64) -> u64 {
    x >> 16 & 0xffff
}

/// Keeps the sign of an exact zero as the sum has it.
fn minus(x: u64) -> u64 {
    x ^ 0x8000
}

#[test]
fn float16() {
    let operations = [
        op!("add.f16 %d16, %a16, %b16;", |a, b, _| fma_f16(a, ONE_F16, b)),
        op!("sub.rn.f16 %d16, %a16, %b16;", |a, b, _| fma_f16(a, ONE_F16, minus(b))),
        op!("mul.f16 %d16, %a16, %b16;", |a, b, _| rounded(f16(a as u16) * f16(b as u16), 0.0, 10).into()),
        op!("fma.rn.f16 %d16, %a16, %b16, %c16;", fma_f16),
        op!("neg.f16 %d16, %a16;", |a, _, _| minus(a)),
        op!("abs.f16 %d16, %a16;", |a, _, _| a & 0x7fff),
        op!("setp.lt.f16 %q, %a16, %b16; selp.b16 %d16, 1, 0, %q;", |a, b, _| u64::from(f16(a as u16) < f16(b as u16))),
        op!("fma.rn.f16x2 %e32, %a32, %b32, %c32; mov.b32 {%d16, _}, %e32;", |a, b, c| {
            fma_f16(low(a), low(b), low(c))
        }),
        op!("fma.rn.f16x2 %e32, %a32, %b32, %c32; mov.b32 {_, %d16}, %e32;", |a, b, c| {
            fma_f16(high(a), high(b), high(c))
        }),
        op!("add.f16x2 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, b, _| fma_f16(high(a), ONE_F16, high(b))),
        op!("set.lt.f16x2.f16x2 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, b, _| {
            if f16(high(a) as u16) < f16(high(b) as u16) { ONE_F16 } else { 0 }
        }),
        op!("set.geu.u32.f16x2 %e32, %a32, %b32; mov.b32 {%d16, _}, %e32;", |a, b, _| {
            if f16(a as u16) < f16(b as u16) { 0 } else { 0xffff }
        }),
        op!("neg.f16x2 %e32, %a32; mov.b32 {_, %d16}, %e32;", |a, _, _| minus(high(a))),
        op!("setp.gt.f16x2 %p|%q, %a32, %b32; selp.b16 %d16, 1, 0, %q;", |a, b, _| {
            u64::from(f16(high(a) as u16) > f16(high(b) as u16))
        }),
    ];
    check(21, Equal::F16, |random| random.halves(false), &operations);
}

#[test]
fn bfloat16() {
    let operations = [
        op!("add.rn.bf16 %d16, %a16, %b16;", |a, b, _| fma_bf16(a, ONE_BF16, b)),
        op!("sub.rn.bf16 %d16, %a16, %b16;", |a, b, _| fma_bf16(a, ONE_BF16, minus(b))),
        op!("mul.rn.bf16 %d16, %a16, %b16;", |a, b, _| rounded(bf16(a as u16) * bf16(b as u16), 0.0, 7).into()),
        op!("fma.rn.bf16 %d16, %a16, %b16, %c16;", fma_bf16),
        op!("fma.rn.relu.bf16 %d16, %a16, %b16, %c16;", |a, b, c| {
            let value = fma_bf16(a, b, c);
            if bf16(value as u16) < 0.0 { 0 } else { value }
        }),
        op!("neg.bf16 %d16, %a16;", |a, _, _| minus(a)),
        op!("max.bf16 %d16, %a16, %b16;", |a, b, _| {
            let (x, y) = (bf16(a as u16), bf16(b as u16));
            if y.is_nan() || x > y || x == y && x.is_sign_positive() { a } else { b }
        }),
        op!("fma.rn.bf16x2 %e32, %a32, %b32, %c32; mov.b32 {%d16, _}, %e32;", |a, b, c| {
            fma_bf16(low(a), low(b), low(c))
        }),
        op!("fma.rn.bf16x2 %e32, %a32, %b32, %c32; mov.b32 {_, %d16}, %e32;", |a, b, c| {
            fma_bf16(high(a), high(b), high(c))
        }),
        op!("mul.rn.bf16x2 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, b, _| {
            rounded(bf16(high(a) as u16) * bf16(high(b) as u16), 0.0, 7).into()
        }),
        op!("set.gtu.bf16x2.bf16x2 %e32, %a32, %b32; mov.b32 {_, %d16}, %e32;", |a, b, _| {
            if bf16(high(a) as u16) <= bf16(high(b) as u16) { 0 } else { ONE_BF16 }
        }),
        op!("abs.bf16x2 %e32, %a32; mov.b32 {_, %d16}, %e32;", |a, _, _| high(a) & 0x7fff),
        op!("min.NaN.bf16x2 %e32, %a32, %b32; mov.b32 {%d16, _}, %e32;", |a, b, _| {
            let (x, y) = (bf16(a as u16), bf16(b as u16));
            if x.is_nan() || x < y || x == y && x.is_sign_negative() { low(a) } else { low(b) }
        }),
    ];
    check(22, Equal::Bf16, |random| random.halves(true), &operations);
}
