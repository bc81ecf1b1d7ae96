//! `cvt`: between all numbers.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;

pub(super) fn cvt(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let [to, from] = i.types()[..] else { return Err(i.not_emulated()) };
    if let Some(element) = to.element() {
        return packed(body, i, element, from);
    }
    if from.element().is_some() {
        return Err(i.not_emulated());
    }
    let mut x = body.value(i.operand(1)?, from)?;
    if i.has("ftz") {
        match (from, to) {
            (PtxType::F32, _) => x = format!("ftz({x})"),
            (_, PtxType::F32) => {}
            _ => return Err(i.not_emulated()),
        }
    }
    let value = match (from.is_float(), to.is_float()) {
        (true, true) => between_floats(i, from, to, x)?,
        (true, false) => float_to_integer(i, from, to, &x)?,
        (false, true) => integer_to_float(i, from, to, &x)?,
        (false, false) => return body.set(i.operand(0)?, to, &between_integers(i, to, x)),
    };
    if let Value::Bits(bits) = value {
        return body.set(i.operand(0)?, to.as_bits(), &bits);
    }
    let Value::Number(mut value) = value else { unreachable!("bits were written") };
    if to == PtxType::F32 && i.has("ftz") {
        value = format!("ftz({value})");
    }
    if to.is_float() && i.has("sat") {
        value = format!("sat({value})");
    }
    body.set(i.operand(0)?, to, &value)
}

/// A conversion's result.
enum Value {
    /// A C value of the type, or a double for halves.
    Number(String),
    /// The rounded bits.
    Bits(String),
}

/// Two float32 into halves: the first operand is the upper one.
fn packed(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, element: PtxType, from: PtxType) -> Result<String> {
    if from != PtxType::F32 {
        return Err(i.not_emulated());
    }
    let relu = i.has("relu");
    let part = |operand: usize| {
        let value = body.value(i.operand(operand)?, from)?;
        rounded(i, element, &if relu { format!("relu({value})") } else { value })
    };
    body.set(i.operand(0)?, PtxType::Bits(32), &format!("(u32){} << 16 | {}", part(1)?, part(2)?))
}

/// The bits of a float32 or double rounded to a half.
fn rounded(i: &Instruction<'_>, to: PtxType, x: &str) -> Result<String> {
    match (direction(i), to) {
        (Some(mode), _) => Ok(format!("directed_half({x}, {mode}, {})", to == PtxType::Bf16)),
        (None, _) if !i.has("rn") => Err(i.not_emulated()),
        (None, PtxType::F16) => Ok(format!("round_f16({x})")),
        (None, _) => Ok(format!("round_bf16({x})")),
    }
}

/// The number of a rounding to an integer: to even, to zero, down, up.
fn integral(i: &Instruction<'_>) -> Option<usize> {
    const MODES: [&str; 4] = ["rni", "rzi", "rmi", "rpi"];
    let mode = i.one_of(&MODES)?;
    MODES.iter().position(|m| *m == mode)
}

/// The number of a direction as the processor has it: down, up, to zero.
fn direction(i: &Instruction<'_>) -> Option<usize> {
    const MODES: [&str; 3] = ["rm", "rp", "rz"];
    let mode = i.one_of(&MODES)?;
    MODES.iter().position(|m| *m == mode).map(|p| p + 1)
}

fn between_floats(i: &Instruction<'_>, from: PtxType, to: PtxType, x: String) -> Result<Value> {
    if let Some(mode) = integral(i) {
        return Ok(Value::Number(format!("integral({x}, {mode})")));
    }
    let relu = i.has("relu");
    let x = if relu { format!("relu({x})") } else { x };
    let x = if i.has("sat") { format!("sat({x})") } else { x };
    match (from, to) {
        (PtxType::F32, PtxType::F16 | PtxType::Bf16) => Ok(Value::Bits(rounded(i, to, &x)?)),
        (PtxType::F32, PtxType::Tf32) => Ok(Value::Number(format!("round_tf32_{}({x})", i.which(&["rn", "rna"])?))),
        (PtxType::F64, PtxType::F32) => Ok(Value::Number(match direction(i) {
            Some(mode) => format!("f32_of_f64({x}, 0, 0, {mode})"),
            None if i.has("rn") => format!("(float)({x})"),
            None => return Err(i.not_emulated()),
        })),
        // To a wider type, or rounded to nearest even from a double.
        _ => {
            i.ignore(&["rn"]);
            Ok(Value::Number(x))
        }
    }
}

/// Limited to the integer's range; NaN becomes 0, or the middle of the range where one side has 64 bits.
fn float_to_integer(i: &Instruction<'_>, from: PtxType, to: PtxType, x: &str) -> Result<Value> {
    let mode = integral(i).ok_or_else(|| i.not_emulated())?;
    i.ignore(&["sat"]);
    let bits = to.bits();
    let is_long = from == PtxType::F64;
    Ok(Value::Number(match (bits, to.is_signed()) {
        (64, true) => format!("to_s64({x}, {mode})"),
        (64, false) => format!("to_u64({x}, {mode})"),
        (_, true) => {
            let nan = if is_long { format!("-0x1p{}", bits - 1) } else { "0".into() };
            format!("(s64)to_int({x}, {mode}, -0x1p{0}, 0x1p{0} - 1, {nan})", bits - 1)
        }
        (_, false) => {
            let nan = if is_long { format!("0x1p{}", bits - 1) } else { "0".into() };
            format!("(u64)to_int({x}, {mode}, 0, 0x1p{bits} - 1, {nan})")
        }
    }))
}

fn integer_to_float(i: &Instruction<'_>, from: PtxType, to: PtxType, x: &str) -> Result<Value> {
    let source = if from.is_signed() { "s64" } else { "u64" };
    let c_type = if to == PtxType::F32 { "float" } else { "double" };
    Ok(Value::Number(match direction(i) {
        Some(mode) if to.is_half() => {
            let bits = format!("directed_half(odd_{source}({x}), {mode}, {})", to == PtxType::Bf16);
            return Ok(Value::Bits(bits));
        }
        Some(mode) => format!("{}_of_{source}({x}, 0, 0, {mode})", to.name()),
        None if !i.has("rn") => return Err(i.not_emulated()),
        None if to.is_half() => format!("odd_{source}({x})"),
        None => format!("({c_type})({x})"),
    }))
}

fn between_integers(i: &Instruction<'_>, to: PtxType, x: String) -> String {
    if !i.has("sat") {
        return x;
    }
    let bits = to.bits();
    let (lowest, highest) = match to.is_signed() {
        true => (format!("-((s128)1 << {})", bits - 1), format!("((s128)1 << {}) - 1", bits - 1)),
        false => ("0".into(), format!("((s128)1 << {bits}) - 1")),
    };
    format!("clamp({x}, {lowest}, {highest})")
}
