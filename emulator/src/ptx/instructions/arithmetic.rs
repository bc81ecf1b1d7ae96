//! Arithmetic of all types: the operands' values, the operation of their type, and the result's bits.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;
use super::{float, integer};

pub(super) fn arithmetic(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    if i.has("cc") {
        return integer::with_carry(body, i);
    }
    let ty = i.ty()?;
    if ty.is_float() && matches!(i.opcode, "neg" | "abs") {
        return float::sign(body, i, ty);
    }
    match ty.element() {
        Some(element) => packed(body, i, element),
        None if ty.is_float() => float(body, i, ty),
        None => integer(body, i, ty),
    }
}

/// On both halves of registers.
fn packed(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, element: PtxType) -> Result<String> {
    let sources = i.operands[1..].iter().map(|x| body.raw(x, 4)).collect::<Result<Vec<_>>>()?;
    let half = |shift: usize| -> Result<String> {
        let value = |source: &String| match element {
            PtxType::F16 => format!("F16({source} >> {shift})"),
            _ => format!("(double)BF16({source} >> {shift})"),
        };
        let value = float::expression(i, element, &sources.iter().map(value).collect::<Vec<_>>())?;
        Ok(FunctionBody::bits(element, &value))
    };
    body.set(i.operand(0)?, PtxType::Bits(32), &format!("{} | (u32){} << 16", half(0)?, half(16)?))
}

fn float(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, ty: PtxType) -> Result<String> {
    let flushes = ty == PtxType::F32 && i.has("ftz");
    let flush = |value: String| if flushes { format!("ftz({value})") } else { value };
    let values = i.operands[1..].iter().map(|x| Ok(flush(body.value(x, ty)?))).collect::<Result<Vec<_>>>()?;
    // rcp.approx.ftz.f64 has no subnormal numbers that matter.
    i.ignore(if ty == PtxType::F64 { &["ftz"] } else { &[] });
    body.set(i.operand(0)?, ty, &flush(float::expression(i, ty, &values)?))
}

fn integer(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, ty: PtxType) -> Result<String> {
    let result = if i.has("wide") { ty.wide() } else { ty };
    // The third operand, which is added, is as wide as the result.
    let ty_of = |n: usize| if n == 2 { result } else { ty };
    let values =
        i.operands[1..].iter().enumerate().map(|(n, x)| body.value(x, ty_of(n))).collect::<Result<Vec<_>>>()?;
    body.set(i.operand(0)?, result, &integer::expression(i, ty, &values)?)
}
