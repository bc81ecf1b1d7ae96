//! Integer arithmetic.

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::statement::Instruction;
use super::super::types::PtxType;

/// The C value of an operation on C values `a`.
pub(super) fn expression(i: &Instruction<'_>, ty: PtxType, a: &[String]) -> Result<String> {
    let arguments = match i.opcode {
        "neg" | "abs" => 1,
        "mad" | "sad" => 3,
        _ => 2,
    };
    if a.len() != arguments {
        return Err(Cause::FewOperands);
    }
    if i.has("sat") {
        return saturated(i, ty, a);
    }
    let (signed, bits) = (ty.is_signed(), ty.bits());
    Ok(match i.opcode {
        "add" => format!("((u{bits})({}) + (u{bits})({}))", a[0], a[1]),
        "sub" => format!("((u{bits})({}) - (u{bits})({}))", a[0], a[1]),
        "mul" => product(i, ty, a),
        "mad" => format!("({} + {})", product(i, ty, a), a[2]),
        "sad" => format!("((({0}) > ({1}) ? ({0}) - ({1}) : ({1}) - ({0})) + ({2}))", a[0], a[1], a[2]),
        // Division by zero gives what a GPU gives: all ones, and the dividend.
        "div" if signed => format!("(({1}) == 0 ? -1 : ({1}) == -1 ? -(u{bits})({0}) : ({0}) / ({1}))", a[0], a[1]),
        "rem" if signed => format!("(({1}) == 0 ? ({0}) : ({1}) == -1 ? 0 : ({0}) % ({1}))", a[0], a[1]),
        "div" => format!("(({1}) == 0 ? ~(u{bits})0 : (u{bits})(({0}) / ({1})))", a[0], a[1]),
        "rem" => format!("(({1}) == 0 ? ({0}) : ({0}) % ({1}))", a[0], a[1]),
        "min" => format!("(({0}) < ({1}) ? ({0}) : ({1}))", a[0], a[1]),
        "max" => format!("(({0}) > ({1}) ? ({0}) : ({1}))", a[0], a[1]),
        "neg" => format!("(-(u{bits})({}))", a[0]),
        "abs" => format!("(({0}) < 0 ? -(u{bits})({0}) : (u{bits})({0}))", a[0]),
        _ => return Err(i.not_emulated()),
    })
}

/// The lower half of a product, its upper half or all of it.
fn product(i: &Instruction<'_>, ty: PtxType, a: &[String]) -> String {
    let (bits, wide) = (ty.bits(), ty.wide().c_int());
    if i.has("wide") {
        format!("(({wide})({}) * ({wide})({}))", a[0], a[1])
    } else if i.has("hi") {
        format!("(({})((({wide})({}) * ({wide})({})) >> {bits}))", ty.c_int(), a[0], a[1])
    } else {
        i.ignore(&["lo"]);
        format!("((u{bits})({}) * (u{bits})({}))", a[0], a[1])
    }
}

fn saturated(i: &Instruction<'_>, ty: PtxType, a: &[String]) -> Result<String> {
    let sign = match i.opcode {
        "add" => '+',
        "sub" => '-',
        _ => return Err(i.not_emulated()),
    };
    match ty {
        PtxType::Signed(32) => Ok(format!("clamp((s128)({}) {sign} ({}), INT32_MIN, INT32_MAX)", a[0], a[1])),
        _ => Err(i.not_emulated()),
    }
}

/// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`: `CC` is the carry. A difference is the sum of a, the
/// complement of b and 1, so that its carry is 1 where nothing is borrowed: nvcc's division of 128 bits asks for it
/// with `addc`.
pub(super) fn with_carry(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let ty = i.ty()?;
    let bits = ty.bits();
    let unsigned = |n: usize| Ok(format!("(u128)(u{bits})({})", body.raw(i.operand(n)?, bits / 8)?));
    let carry = match i.opcode {
        "addc" | "subc" | "madc" => "CC",
        "sub" => "1",
        _ => "0",
    };
    let sum = match i.opcode {
        "add" | "addc" => format!("{} + {} + {carry}", unsigned(1)?, unsigned(2)?),
        "sub" | "subc" => format!("{} + (u{bits})~{} + {carry}", unsigned(1)?, unsigned(2)?),
        "mad" | "madc" => {
            let a = [body.value(i.operand(1)?, ty)?, body.value(i.operand(2)?, ty)?];
            format!("(u128)(u{bits}){} + {} + {carry}", product(i, ty, &a), unsigned(3)?)
        }
        _ => return Err(i.not_emulated()),
    };
    let set = body.set(i.operand(0)?, PtxType::Bits(bits), "t")?;
    let keep = if i.has("cc") { format!(" CC = t >> {bits} & 1;") } else { String::new() };
    Ok(format!("u128 t = {sum}; {set}{keep}"))
}
