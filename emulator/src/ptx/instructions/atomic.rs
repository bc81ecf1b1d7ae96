//! Atomic operations on global and shared memory.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;
use super::space;

/// `atom` gives what was there before, `red` does not.
pub(super) fn atomic(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz"]);
    i.ignore_prefix("L2::");
    let ty = i.ty()?;
    let space = space(i);
    let name = i.which(&["add", "exch", "and", "or", "xor", "min", "max", "inc", "dec", "cas"])?;
    let ty = if matches!(name, "exch" | "and" | "or" | "xor" | "cas") { ty.as_bits() } else { ty };
    if !is_emulated(name, ty) {
        return Err(i.not_emulated());
    }
    let (to, rest) = if i.opcode == "red" { ("_", 0) } else { (i.operand(0)?, 1) };
    let memory = body.pointer(space, i.operand(rest)?, ty.bytes(), "ATOMIC")?;
    let sources = rest + 1..rest + if name == "cas" { 3 } else { 2 };
    let values = sources.map(|n| body.raw(i.operand(n)?, ty.bytes())).collect::<Result<Vec<_>>>()?.join(", ");
    let value = format!("atom_{name}_{}({memory}, {values})", ty.name());
    Ok(i.at() + " " + &body.set(to, ty.as_bits(), &value)?)
}

fn is_emulated(name: &str, ty: PtxType) -> bool {
    match name {
        "add" => matches!(ty.bits(), 32 | 64) && !matches!(ty, PtxType::Bits(_)) || ty.is_half(),
        "min" | "max" => matches!(ty, PtxType::Unsigned(32 | 64) | PtxType::Signed(32 | 64)),
        "inc" | "dec" => ty == PtxType::Unsigned(32),
        "cas" => matches!(ty.bits(), 16 | 32 | 64),
        _ => matches!(ty.bits(), 32 | 64),
    }
}
