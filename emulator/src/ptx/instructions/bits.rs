//! Bits of registers.

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::operand::number;
use super::super::statement::Instruction;
use super::super::types::PtxType;

pub(super) fn logic(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let sign = match i.opcode {
        "and" => '&',
        "or" => '|',
        _ => '^',
    };
    let (a, b) = (body.raw(i.operand(1)?, ty.bytes())?, body.raw(i.operand(2)?, ty.bytes())?);
    body.set(i.operand(0)?, ty, &format!("{a} {sign} {b}"))
}

/// Bitwise, or of the whole value.
pub(super) fn not(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let sign = if ty == PtxType::Pred || i.opcode == "cnot" { '!' } else { '~' };
    let a = body.raw(i.operand(1)?, ty.bytes())?;
    body.set(i.operand(0)?, ty, &format!("{sign}({a})"))
}

pub(super) fn shift(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let name = match (i.opcode, ty.is_signed()) {
        ("shl", _) => "shl",
        (_, true) => "shr_s",
        (_, false) => "shr_u",
    };
    let (a, n) = (body.value(i.operand(1)?, ty)?, body.raw(i.operand(2)?, 4)?);
    body.set(i.operand(0)?, ty, &format!("{name}({a}, {n}, {})", ty.bits()))
}

pub(super) fn funnel_shift(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let name = if i.which(&["l", "r"])? == "l" { "shf_l" } else { "shf_r" };
    let wraps = i.which(&["wrap", "clamp"])? == "wrap";
    let ty = i.ty()?;
    let (a, b, n) = (body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?, body.raw(i.operand(3)?, 4)?);
    let n = if wraps { format!("({n} & 31)") } else { format!("({n} > 32 ? 32 : {n})") };
    body.set(i.operand(0)?, ty, &format!("{name}({a}, {b}, {n})"))
}

pub(super) fn extract(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let name = if ty.is_signed() { "bfe_s" } else { "bfe_u" };
    let (a, at, len) = (body.value(i.operand(1)?, ty)?, body.raw(i.operand(2)?, 4)?, body.raw(i.operand(3)?, 4)?);
    body.set(i.operand(0)?, ty, &format!("{name}({a}, {at}, {len}, {})", ty.bits()))
}

pub(super) fn insert(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let (a, b) = (body.raw(i.operand(1)?, ty.bytes())?, body.raw(i.operand(2)?, ty.bytes())?);
    let (at, len) = (body.raw(i.operand(3)?, 4)?, body.raw(i.operand(4)?, 4)?);
    body.set(i.operand(0)?, ty, &format!("bfi({a}, {b}, {at}, {len}, {})", ty.bits()))
}

pub(super) fn find(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let (ty, shift_amount) = (i.ty()?, i.has("shiftamt"));
    let a = body.value(i.operand(1)?, ty)?;
    body.set(
        i.operand(0)?,
        PtxType::Bits(32),
        &format!("bfind({a}, {}, {shift_amount}, {})", ty.is_signed(), ty.bits()),
    )
}

/// `popc`, `clz` and `brev`.
pub(super) fn count(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let (a, bits) = (body.raw(i.operand(1)?, ty.bytes())?, ty.bits());
    match i.opcode {
        "popc" => body.set(i.operand(0)?, PtxType::Bits(32), &format!("__builtin_popcountll({a})")),
        "clz" => body.set(i.operand(0)?, PtxType::Bits(32), &format!("clz({a}, {bits})")),
        _ => body.set(i.operand(0)?, ty, &format!("brev({a}, {bits})")),
    }
}

pub(super) fn permute(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let (a, b, selectors) = (body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?, body.raw(i.operand(3)?, 4)?);
    body.set(i.operand(0)?, ty, &format!("prmt({a}, {b}, {selectors})"))
}

/// Any function of three bits: the last operand is its table.
pub(super) fn lop3(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let table = number(i.operand(4)?, 4).ok_or_else(|| Cause::Operand(i.operands[4].clone()))?;
    let inputs = [body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?, body.raw(i.operand(3)?, 4)?];
    let term = |row: u64| {
        let input = |(k, x): (usize, &String)| format!("{}({x})", if row >> (2 - k) & 1 == 1 { "" } else { "~" });
        format!("({})", inputs.iter().enumerate().map(input).collect::<Vec<_>>().join(" & "))
    };
    let terms = (0..8).filter(|row| table >> row & 1 == 1).map(term).collect::<Vec<_>>();
    body.set(i.operand(0)?, ty, &if terms.is_empty() { "0".into() } else { terms.join(" | ") })
}

/// The dot product of four bytes, added to a third operand.
pub(super) fn dp4a(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let [x, y] = i.types()[..] else { return Err(i.not_emulated()) };
    let (a, b, c) = (body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?, body.raw(i.operand(3)?, 4)?);
    body.set(i.operand(0)?, PtxType::Bits(32), &format!("dp4a({a}, {b}, {c}, {}, {})", x.is_signed(), y.is_signed()))
}
