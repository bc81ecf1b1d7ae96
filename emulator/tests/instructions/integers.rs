//! Integers and bits.

use super::operations::{Equal, Operation, check};
use super::random::Random;

/// `op!("add.s32 %d32, %a32, %b32;", |a, b, c| ...)`
macro_rules! op {
    ($ptx:literal, $expected:expr) => {
        Operation { ptx: $ptx, expected: $expected }
    };
}
pub(crate) use op;

fn signed(x: u32) -> u64 {
    x as u64
}

#[test]
fn sums_and_products() {
    let operations = [
        op!("add.s32 %d32, %a32, %b32;", |a, b, _| a.wrapping_add(b)),
        op!("sub.u64 %d64, %a64, %b64;", |a, b, _| a.wrapping_sub(b)),
        op!("mul.lo.s32 %d32, %a32, %b32;", |a, b, _| a.wrapping_mul(b)),
        op!("mul.hi.s32 %d32, %a32, %b32;", |a, b, _| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u64),
        op!("mul.hi.u32 %d32, %a32, %b32;", |a, b, _| (u64::from(a as u32) * u64::from(b as u32)) >> 32),
        op!("mul.hi.u64 %d64, %a64, %b64;", |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        op!("mul.hi.s64 %d64, %a64, %b64;", |a, b, _| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
        op!("mul.wide.s32 %d64, %a32, %b32;", |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64),
        op!("mul.wide.u16 %d32, %a16, %b16;", |a, b, _| u64::from(a as u16) * u64::from(b as u16)),
        op!("mad.lo.s32 %d32, %a32, %b32, %c32;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        op!("mad.wide.u32 %d64, %a32, %b32, %c64;", |a, b, c| {
            (u64::from(a as u32) * u64::from(b as u32)).wrapping_add(c)
        }),
        op!("mad.hi.u32 %d32, %a32, %b32, %c32;", |a, b, c| {
            ((u64::from(a as u32) * u64::from(b as u32)) >> 32).wrapping_add(c)
        }),
        op!("add.sat.s32 %d32, %a32, %b32;", |a, b, _| signed((a as i32).saturating_add(b as i32) as u32)),
        op!("sub.sat.s32 %d32, %a32, %b32;", |a, b, _| signed((a as i32).saturating_sub(b as i32) as u32)),
        op!("sad.s32 %d32, %a32, %b32, %c32;", |a, b, c| {
            signed((a as i32).abs_diff(b as i32).wrapping_add(c as u32))
        }),
        op!("add.cc.u32 %e32, %a32, %b32; addc.u32 %d32, %a32, %c32;", |a, b, c| {
            let carry = (u64::from(a as u32) + u64::from(b as u32)) >> 32;
            a.wrapping_add(c).wrapping_add(carry)
        }),
        op!("sub.cc.u32 %e32, %a32, %b32; subc.u32 %d32, %a32, %c32;", |a, b, c| {
            a.wrapping_sub(c).wrapping_sub(u64::from((a as u32) < b as u32))
        }),
        op!("sub.cc.u32 %e32, %a32, %b32; addc.u32 %d32, 0, 0;", |a, b, _| u64::from(a as u32 >= b as u32)),
        op!("mad.lo.cc.u64 %e64, %a64, %b64, %c64; madc.hi.u64 %d64, %a64, %b64, 0;", |a, b, c| {
            let product = u128::from(a) * u128::from(b);
            let carry = ((product & u128::from(u64::MAX)) + u128::from(c)) >> 64;
            ((product >> 64) + carry) as u64
        }),
    ];
    check(1, Equal::Bits, Random::integer, &operations);
}

#[test]
fn quotients_and_extremes() {
    let operations = [
        op!("or.b32 %e32, %b32, 1; div.s32 %d32, %a32, %e32;", |a, b, _| {
            signed((a as i32).wrapping_div(b as i32 | 1) as u32)
        }),
        op!("or.b32 %e32, %b32, 1; rem.s32 %d32, %a32, %e32;", |a, b, _| {
            signed((a as i32).wrapping_rem(b as i32 | 1) as u32)
        }),
        op!("or.b64 %e64, %b64, 1; div.u64 %d64, %a64, %e64;", |a, b, _| a / (b | 1)),
        op!("or.b64 %e64, %b64, 1; rem.u64 %d64, %a64, %e64;", |a, b, _| a % (b | 1)),
        op!("or.b16 %e16, %b16, 1; div.s16 %d16, %a16, %e16;", |a, b, _| {
            (a as i16).wrapping_div(b as i16 | 1) as u64
        }),
        op!("min.s32 %d32, %a32, %b32;", |a, b, _| signed((a as i32).min(b as i32) as u32)),
        op!("max.s32 %d32, %a32, %b32;", |a, b, _| signed((a as i32).max(b as i32) as u32)),
        op!("min.u64 %d64, %a64, %b64;", |a, b, _| a.min(b)),
        op!("max.s64 %d64, %a64, %b64;", |a, b, _| (a as i64).max(b as i64) as u64),
        op!("min.u16 %d16, %a16, %b16;", |a, b, _| u64::from((a as u16).min(b as u16))),
        op!("neg.s32 %d32, %a32;", |a, _, _| a.wrapping_neg()),
        op!("abs.s32 %d32, %a32;", |a, _, _| signed((a as i32).wrapping_abs() as u32)),
        op!("abs.s64 %d64, %a64;", |a, _, _| (a as i64).wrapping_abs() as u64),
    ];
    check(2, Equal::Bits, Random::integer, &operations);
}

#[test]
fn bits() {
    let operations = [
        op!("and.b32 %d32, %a32, %b32;", |a, b, _| a & b),
        op!("or.b64 %d64, %a64, %b64;", |a, b, _| a | b),
        op!("xor.b16 %d16, %a16, %b16;", |a, b, _| a ^ b),
        op!("not.b32 %d32, %a32;", |a, _, _| !a),
        op!("cnot.b32 %d32, %a32;", |a, _, _| u64::from(a as u32 == 0)),
        op!("shl.b32 %d32, %a32, %b32;", |a, b, _| signed((a as u32).checked_shl(b as u32).unwrap_or(0))),
        op!("shl.b64 %d64, %a64, %b32;", |a, b, _| a.checked_shl(b as u32).unwrap_or(0)),
        op!("shr.u32 %d32, %a32, %b32;", |a, b, _| signed((a as u32).checked_shr(b as u32).unwrap_or(0))),
        op!("shr.s32 %d32, %a32, %b32;", |a, b, _| signed((a as i32 >> (b as u32).min(31)) as u32)),
        op!("shr.s64 %d64, %a64, %b32;", |a, b, _| (a as i64 >> (b as u32).min(63)) as u64),
        op!("shf.l.wrap.b32 %d32, %a32, %b32, %c32;", |a, b, c| { ((b << 32 | a & 0xffff_ffff) << (c & 31)) >> 32 }),
        op!("shf.r.wrap.b32 %d32, %a32, %b32, %c32;", |a, b, c| (b << 32 | a & 0xffff_ffff) >> (c & 31)),
        op!("shf.r.clamp.b32 %d32, %a32, %b32, %c32;", |a, b, c| { (b << 32 | a & 0xffff_ffff) >> (c as u32).min(32) }),
        op!("popc.b32 %d32, %a32;", |a, _, _| u64::from((a as u32).count_ones())),
        op!("popc.b64 %d32, %a64;", |a, _, _| u64::from(a.count_ones())),
        op!("clz.b32 %d32, %a32;", |a, _, _| u64::from((a as u32).leading_zeros())),
        op!("clz.b64 %d32, %a64;", |a, _, _| u64::from(a.leading_zeros())),
        op!("brev.b32 %d32, %a32;", |a, _, _| signed((a as u32).reverse_bits())),
        op!("brev.b64 %d64, %a64;", |a, _, _| a.reverse_bits()),
        op!("bfind.u32 %d32, %a32;", |a, _, _| signed((a as u32).checked_ilog2().unwrap_or(!0))),
        op!("bfind.s32 %d32, %a32;", |a, _, _| {
            let a = a as i32;
            signed((if a < 0 { !a } else { a } as u32).checked_ilog2().unwrap_or(!0))
        }),
        op!("bfind.shiftamt.u64 %d32, %a64;", |a, _, _| signed(a.checked_ilog2().map_or(!0, |at| 63 - at))),
        op!("lop3.b32 %d32, %a32, %b32, %c32, 0x96;", |a, b, c| a ^ b ^ c),
        op!("lop3.b32 %d32, %a32, %b32, %c32, 0xe8;", |a, b, c| a & b | a & c | b & c),
        op!("lop3.b32 %d32, %a32, %b32, %c32, 0x2a;", |a, b, c| !(a & b) & c),
    ];
    check(3, Equal::Bits, Random::integer, &operations);
}

/// The byte of a and b that four bits select, or its sign.
fn selected(a: u64, b: u64, selector: u64) -> u64 {
    let byte = (b << 32 | a & 0xffff_ffff) >> (8 * (selector & 7)) & 0xff;
    if selector & 8 == 0 { byte } else { 0xff * (byte >> 7) }
}

#[test]
fn fields() {
    let operations = [
        op!("and.b32 %e32, %b32, 31; bfe.u32 %d32, %a32, %e32, 7;", |a, b, _| { (a & 0xffff_ffff) >> (b & 31) & 0x7f }),
        op!("bfe.u64 %d64, %a64, 60, 9;", |a, _, _| a >> 60),
        op!("bfe.s32 %d32, %a32, 5, 11;", |a, _, _| signed(((a as i32) << 16 >> 21) as u32)),
        op!("bfe.s32 %d32, %a32, 28, 11;", |a, _, _| signed((a as i32 >> 28) as u32)),
        op!("bfe.s64 %d64, %a64, 3, 60;", |a, _, _| ((a as i64) << 1 >> 4) as u64),
        op!("bfe.u32 %d32, %a32, 40, 3;", |_, _, _| 0),
        op!("bfi.b32 %d32, %a32, %b32, 9, 6;", |a, b, _| b & !(63 << 9) | (a & 63) << 9),
        op!("bfi.b32 %d32, %a32, %b32, 30, 6;", |a, b, _| b & 0x3fff_ffff | a << 30),
        op!("bfi.b64 %d64, %a64, %b64, 40, 20;", |a, b, _| b & !(0xfffff << 40) | (a & 0xfffff) << 40),
        op!("prmt.b32 %d32, %a32, %b32, %c32;", |a, b, c| {
            (0..4).map(|i| selected(a, b, c >> (4 * i)) << (8 * i)).sum()
        }),
        op!("prmt.b32 %d32, %a32, %b32, 0x5410U;", |a, b, _| b << 16 | a & 0xffff),
        op!("dp4a.s32.u32 %d32, %a32, %b32, %c32;", |a, b, c| {
            let product = |i: u64| i64::from((a >> (8 * i)) as i8) * i64::from((b >> (8 * i)) as u8);
            c.wrapping_add((0..4).map(product).sum::<i64>() as u64)
        }),
        op!("mov.b64 {%e32, %d32}, %a64;", |a, _, _| a >> 32),
        op!("mov.b64 %d64, {%a32, %b32};", |a, b, _| b << 32 | a & 0xffff_ffff),
        op!("mov.b32 %d32, {%a16, %b16};", |a, b, _| (b & 0xffff) << 16 | a & 0xffff),
        op!("mov.b32 {_, %d16}, %a32;", |a, _, _| a >> 16),
    ];
    check(4, Equal::Bits, Random::integer, &operations);
}

#[test]
fn comparisons_and_selections() {
    let operations = [
        op!("selp.b32 %d32, %a32, %b32, %p;", |a, b, c| if c & 1 == 1 { a } else { b }),
        op!("selp.b64 %d64, %a64, %b64, !%p;", |a, b, c| if c & 1 == 0 { a } else { b }),
        op!("setp.lt.s32 %q, %a32, %b32; selp.u32 %d32, 1, 0, %q;", |a, b, _| u64::from((a as i32) < b as i32)),
        op!("setp.lo.u32 %q, %a32, %b32; selp.u32 %d32, 1, 0, %q;", |a, b, _| u64::from((a as u32) < b as u32)),
        op!("setp.ge.and.s64 %q, %a64, %b64, %p; selp.u32 %d32, 1, 0, %q;", |a, b, c| {
            u64::from(a as i64 >= b as i64 && c & 1 == 1)
        }),
        op!("setp.gt.xor.u16 %q|%p, %a16, %b16, %p; selp.u32 %d32, 1, 0, %q;", |a, b, c| {
            u64::from((a as u16 > b as u16) != (c & 1 == 1))
        }),
        op!("and.b32 %d32, %c32, 1; setp.ne.u32 %p, %d32, 0; mov.b32 %d32, 7; @!%p mov.b32 %d32, %a32;", |a, _, c| {
            if c & 1 == 1 { 7 } else { a }
        }),
        op!("set.le.u32.s32 %d32, %a32, %b32;", |a, b, _| if a as i32 <= b as i32 { !0 } else { 0 }),
        op!("slct.b32.s32 %d32, %a32, %b32, %c32;", |a, b, c| if c as i32 >= 0 { a } else { b }),
        op!("not.pred %q, %p; selp.u32 %d32, 1, 0, %q;", |_, _, c| !c & 1),
        op!("setp.eq.u32 %q, %a32, %b32; or.pred %q, %q, %p; selp.u32 %d32, 1, 0, %q;", |a, b, c| {
            u64::from(a as u32 == b as u32 || c & 1 == 1)
        }),
    ];
    check(5, Equal::Bits, Random::integer, &operations);
}
