//! Floating point arithmetic. Values of halves are doubles, exact or rounded to odd, which are rounded once afterwards.
//!
//! The results of `approx` instructions are those of the C library; those of a GPU differ in the last bits.

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::statement::Instruction;
use super::super::types::PtxType;

/// `neg` and `abs` change the sign bit alone.
pub(super) fn sign(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, ty: PtxType) -> Result<String> {
    let sign = match ty {
        PtxType::F16x2 | PtxType::Bf16x2 => "0x80008000u".to_owned(),
        _ => format!("((u{0})1 << {1})", ty.bits(), ty.bits() - 1),
    };
    let mut bits = body.raw(i.operand(1)?, ty.bytes())?;
    if ty == PtxType::F32 && i.has("ftz") {
        bits = format!("B32(ftz(F32({bits})))");
    }
    let change = if i.opcode == "neg" { "^ " } else { "& ~" };
    body.set(i.operand(0)?, ty.as_bits(), &format!("{bits} {change}{sign}"))
}

/// The C value of an operation on C values `a`.
pub(super) fn expression(i: &Instruction<'_>, ty: PtxType, a: &[String]) -> Result<String> {
    let arguments = match i.opcode {
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => 1,
        "fma" | "mad" => 3,
        // Three operands came with sm_100.
        "min" | "max" if a.len() == 3 => 3,
        _ => 2,
    };
    if a.len() != arguments {
        return Err(Cause::FewOperands);
    }
    i.ignore(&["rn", "approx", "full"]);
    let value = if let Some(direction) = i.one_of(&["rm", "rp", "rz"]) {
        directed(i, ty, a, ["rm", "rp", "rz"].iter().position(|r| *r == direction).map_or(0, |p| p + 1))?
    } else if let "min" | "max" = i.opcode {
        extreme(i, ty, a)
    } else if ty.is_half() {
        half(i, a)?
    } else {
        nearest(i, if ty == PtxType::F32 { "f" } else { "" }, a)?
    };
    let value = if i.has("relu") { format!("relu({value})") } else { value };
    Ok(if i.has("sat") { format!("sat({value})") } else { value })
}

/// Rounded down (1), up (2) or to zero (3).
fn directed(i: &Instruction<'_>, ty: PtxType, a: &[String], mode: usize) -> Result<String> {
    if ty.is_half() {
        return Err(i.not_emulated());
    }
    let operation = if i.opcode == "mad" { "fma" } else { i.opcode };
    let one = ["1".to_owned()];
    let (name, mut operands) = match operation {
        "add" | "sub" | "mul" | "div" | "fma" | "sqrt" => (operation, a.to_vec()),
        "rcp" => ("div", [&one, a].concat()),
        _ => return Err(i.not_emulated()),
    };
    operands.resize(3, "0".into());
    Ok(format!("{name}_{}({}, {mode})", ty.name(), operands.join(", ")))
}

fn extreme(i: &Instruction<'_>, ty: PtxType, a: &[String]) -> String {
    let name = format!("{}_{}", i.opcode, if ty == PtxType::F32 { "f32" } else { "f64" });
    let value = a[1..].iter().fold(a[0].clone(), |value, next| format!("{name}({value}, {next})"));
    if !i.has("NaN") {
        return value;
    }
    let any = a.iter().map(|x| format!("isnan({x})")).collect::<Vec<_>>().join(" || ");
    format!("({any} ? NAN : {value})")
}

/// Of halves as doubles: the products of two are exact.
fn half(i: &Instruction<'_>, a: &[String]) -> Result<String> {
    Ok(match i.opcode {
        "add" => format!("odd_add({}, {})", a[0], a[1]),
        "sub" => format!("odd_add({}, -({}))", a[0], a[1]),
        "mul" => format!("({} * {})", a[0], a[1]),
        "fma" => format!("odd_add({} * {}, {})", a[0], a[1], a[2]),
        "ex2" => format!("exp2({})", a[0]),
        "tanh" => format!("tanh({})", a[0]),
        _ => return Err(i.not_emulated()),
    })
}

/// Rounded to nearest even; `f` is the suffix of C's functions.
fn nearest(i: &Instruction<'_>, f: &str, a: &[String]) -> Result<String> {
    Ok(match i.opcode {
        "add" => format!("({} + {})", a[0], a[1]),
        "sub" => format!("({} - {})", a[0], a[1]),
        "mul" => format!("({} * {})", a[0], a[1]),
        "div" => format!("({} / {})", a[0], a[1]),
        "fma" | "mad" => format!("fma{f}({}, {}, {})", a[0], a[1], a[2]),
        "rcp" => format!("(1 / {})", a[0]),
        "sqrt" => format!("sqrt{f}({})", a[0]),
        "rsqrt" => format!("(1 / sqrt({}))", a[0]),
        "ex2" => format!("exp2{f}({})", a[0]),
        "lg2" => format!("log2{f}({})", a[0]),
        "sin" | "cos" | "tanh" => format!("{}{f}({})", i.opcode, a[0]),
        "copysign" => format!("copysign{f}({}, {})", a[1], a[0]),
        _ => return Err(i.not_emulated()),
    })
}
