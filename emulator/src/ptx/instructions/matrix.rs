//! Matrix instructions of a whole warp.

use super::super::body::Body;
use super::super::error::Result;
use super::super::operand::list;
use super::super::statement::Instruction;
use super::super::types::Type;

/// `mma` with float32 sums.
pub(super) fn mma(body: &mut Body<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    if !(i.has("sync") && i.has("aligned") && i.has("row") && i.has("col")) {
        return Err(i.not_emulated());
    }
    let shape = i.which(&["m16n8k16", "m16n8k8", "m16n8k4"])?;
    let [Type::F32, element, other, Type::F32] = i.types()[..] else { return Err(i.not_emulated()) };
    // How many registers of d, a, b and c a lane holds.
    let registers = match (shape, element) {
        ("m16n8k16", Type::Bf16 | Type::F16) | ("m16n8k8", Type::Tf32) => [4, 4, 2, 4],
        ("m16n8k8", Type::Bf16 | Type::F16) | ("m16n8k4", Type::Tf32) => [4, 2, 1, 4],
        _ => return Err(i.not_emulated()),
    };
    let operands = (0..4).map(|n| Ok(list(i.operand(n)?))).collect::<Result<Vec<_>>>()?;
    if element != other || operands.iter().map(Vec::len).ne(registers) {
        return Err(i.not_emulated());
    }
    let mut c = format!("{} Mma s; s.t = T; ", i.at());
    for (field, registers) in ["a", "b", "c"].iter().zip(&operands[1..]) {
        for (n, register) in registers.iter().enumerate() {
            c += &format!("s.{field}[{n}] = {}; ", body.raw(register, 4)?);
        }
    }
    c += &format!("MEET(~0u, 0, meet_mma_{shape}_{}, &s); ", element.name());
    Ok(c + &set_each(body, &operands[0])?)
}

/// C that writes `s.d` into registers.
fn set_each(body: &Body<'_, '_>, registers: &[String]) -> Result<String> {
    registers.iter().enumerate().map(|(n, register)| body.set(register, Type::Bits(32), &format!("s.d[{n}]"))).collect()
}

/// Checks the modifiers of `ldmatrix` and `stmatrix`, and gives the C that begins them.
fn rows(body: &mut Body<'_, '_>, i: &Instruction<'_>, address: usize, registers: &[String]) -> Result<String> {
    body.unit.alone = false;
    let count = match i.which(&["x1", "x2", "x4"])? {
        "x1" => 1,
        "x2" => 2,
        _ => 4,
    };
    i.ignore(&["shared", "shared::cta"]);
    if !(i.has("sync") && i.has("aligned") && i.has("m8n8")) || i.ty()? != Type::Bits(16) || registers.len() != count {
        return Err(i.not_emulated());
    }
    let address = body.address(i.operand(address)?)?;
    Ok(format!("{} Rows s = {{T, {{0}}, {address}, {count}, {}}}; ", i.at(), i.has("trans")))
}

pub(super) fn ldmatrix(body: &mut Body<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let registers = list(i.operand(0)?);
    let c = rows(body, i, 1, &registers)? + "MEET(~0u, 0, meet_ldmatrix, &s); ";
    Ok(c + &set_each(body, &registers)?)
}

pub(super) fn stmatrix(body: &mut Body<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let registers = list(i.operand(1)?);
    let mut c = rows(body, i, 0, &registers)?;
    for (n, register) in registers.iter().enumerate() {
        c += &format!("s.d[{n}] = {}; ", body.raw(register, 4)?);
    }
    Ok(c + "MEET(~0u, 0, meet_stmatrix, &s);")
}

pub(super) fn movmatrix(body: &mut Body<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    if !(i.has("sync") && i.has("aligned") && i.has("m8n8") && i.has("trans")) || i.ty()? != Type::Bits(16) {
        return Err(i.not_emulated());
    }
    let c = format!("{} Rows s = {{T, {{{}}}, 0, 1, 1}}; ", i.at(), body.raw(i.operand(1)?, 4)?);
    Ok(c + "MEET(~0u, 0, meet_movmatrix, &s); " + &body.set(i.operand(0)?, Type::Bits(32), "s.d[0]")?)
}
