//! Comparisons and selections.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;

const COMPARISONS: [&str; 18] = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

/// A comparison of two C values; those with a `u` at the end hold of not-a-number.
fn comparison(i: &Instruction<'_>, ty: PtxType, a: &str, b: &str) -> Result<String> {
    let name = i.which(&COMPARISONS)?;
    Ok(match (name, ty.is_float()) {
        ("eq", _) => format!("{a} == {b}"),
        ("ne", false) | ("neu", true) => format!("{a} != {b}"),
        ("lt", _) | ("lo", false) => format!("{a} < {b}"),
        ("le", _) | ("ls", false) => format!("{a} <= {b}"),
        ("gt", _) | ("hi", false) => format!("{a} > {b}"),
        ("ge", _) | ("hs", false) => format!("{a} >= {b}"),
        ("ne", true) => format!("({a} < {b} || {a} > {b})"),
        ("equ", true) => format!("!({a} < {b} || {a} > {b})"),
        ("ltu", true) => format!("!({a} >= {b})"),
        ("leu", true) => format!("!({a} > {b})"),
        ("gtu", true) => format!("!({a} <= {b})"),
        ("geu", true) => format!("!({a} < {b})"),
        ("num", true) => format!("(!isnan({a}) && !isnan({b}))"),
        ("nan", true) => format!("(isnan({a}) || isnan({b}))"),
        _ => return Err(i.not_emulated()),
    })
}

/// The comparison of operands 1 and 2.
fn compared(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, ty: PtxType) -> Result<String> {
    let flushes = ty == PtxType::F32 && i.has("ftz");
    let flush = |value: String| if flushes { format!("ftz({value})") } else { value };
    let (a, b) = (flush(body.value(i.operand(1)?, ty)?), flush(body.value(i.operand(2)?, ty)?));
    comparison(i, ty, &a, &b)
}

/// A C condition, combined with the predicate in operand 3 if there is one.
fn combined(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, condition: &str) -> Result<String> {
    let Some(with) = i.operands.get(3) else { return Ok(condition.into()) };
    let sign = match i.which(&["and", "or", "xor"])? {
        "and" => "&&",
        "or" => "||",
        _ => "!=",
    };
    Ok(format!("({condition}) {sign} {}", body.raw(with, 1)?))
}

pub(super) fn setp(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    if let Some(element) = ty.element() {
        return setp_packed(body, i, element);
    }
    let (p, q) = FunctionBody::pair(i)?;
    let mut c = format!("u8 c = {}; ", compared(body, i, ty)?);
    let (yes, no) = (combined(body, i, "c")?, combined(body, i, "!c")?);
    // Neither result may be read by the other's combination.
    c += &format!("u8 yes = {yes}, no = {no}; (void)no; ");
    c += &body.set(p, PtxType::Pred, "yes")?;
    if let Some(q) = q {
        c += &body.set(q, PtxType::Pred, "no")?;
    }
    Ok(c)
}

/// C that compares the halves of operands 1 and 2 into `low` and `high`.
fn compared_halves(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, element: PtxType) -> Result<String> {
    let (a, b) = (body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?);
    let convert = if element == PtxType::F16 { "F16" } else { "BF16" };
    let half = |shift: usize| {
        let (a, b) = (format!("{convert}({a} >> {shift})"), format!("{convert}({b} >> {shift})"));
        combined(body, i, &comparison(i, element, &a, &b)?)
    };
    Ok(format!("u8 low = {}, high = {}; ", half(0)?, half(16)?))
}

/// A predicate for each half.
fn setp_packed(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, element: PtxType) -> Result<String> {
    let (p, q) = FunctionBody::pair(i)?;
    let q = q.ok_or_else(|| i.not_emulated())?;
    let c = compared_halves(body, i, element)?;
    Ok(c + &body.set(p, PtxType::Pred, "low")? + &body.set(q, PtxType::Pred, "high")?)
}

/// All ones or 1.0 where the comparison holds.
pub(super) fn set(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let [to, from] = i.types()[..] else { return Err(i.not_emulated()) };
    if let Some(element) = from.element() {
        let one = match to {
            PtxType::F16x2 => "0x3c00u",
            PtxType::Bf16x2 => "0x3f80u",
            PtxType::Unsigned(32) | PtxType::Signed(32) => "0xffffu",
            _ => return Err(i.not_emulated()),
        };
        let c = compared_halves(body, i, element)?;
        return Ok(c + &body.set(i.operand(0)?, PtxType::Bits(32), &format!("low * {one} | high * {one} << 16"))?);
    }
    let condition = compared(body, i, from)?;
    let condition = combined(body, i, &condition)?;
    body.set(i.operand(0)?, to, &format!("({condition}) ? {} : 0", if to.is_float() { "1.0" } else { "-1" }))
}

pub(super) fn selp(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let (a, b) = (body.raw(i.operand(1)?, ty.bytes())?, body.raw(i.operand(2)?, ty.bytes())?);
    let p = body.raw(i.operand(3)?, 1)?;
    body.set(i.operand(0)?, ty.as_bits(), &format!("{p} ? {a} : {b}"))
}

/// Selects by the sign of the third source.
pub(super) fn slct(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let [ty, by] = i.types()[..] else { return Err(i.not_emulated()) };
    let (a, b) = (body.raw(i.operand(1)?, ty.bytes())?, body.raw(i.operand(2)?, ty.bytes())?);
    let mut c = body.value(i.operand(3)?, by)?;
    if i.has("ftz") {
        c = format!("ftz({c})");
    }
    body.set(i.operand(0)?, ty.as_bits(), &format!("{c} >= 0 ? {a} : {b}"))
}

pub(super) fn testp(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let x = body.value(i.operand(1)?, i.ty()?)?;
    let test = match i.which(&["finite", "infinite", "number", "notanumber", "normal", "subnormal"])? {
        "finite" => format!("isfinite({x})"),
        "infinite" => format!("isinf({x})"),
        "number" => format!("!isnan({x})"),
        "notanumber" => format!("isnan({x})"),
        // As PTX says it, zero is normal.
        "normal" => format!("isnormal({x}) || {x} == 0"),
        _ => format!("fpclassify({x}) == FP_SUBNORMAL"),
    };
    body.set(i.operand(0)?, PtxType::Pred, &test)
}
