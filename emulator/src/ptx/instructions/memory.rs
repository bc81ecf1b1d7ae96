//! Loads, stores and moves.

use std::fmt::Write;

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::operand::list;
use super::super::statement::Instruction;
use super::super::types::PtxType;
use super::{StateSpace, ignore_scope_and_caches, space};

/// Whether other threads may access the same bytes at the same time.
fn is_strong(i: &Instruction<'_>) -> bool {
    i.ignore(&["weak"]);
    i.one_of(&["volatile", "relaxed", "acquire", "release", "mmio"]).is_some()
}

pub(super) fn load(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    ignore_scope_and_caches(i);
    i.ignore(&["v2", "v4", "v8"]);
    let access = if is_strong(i) { "STRONG_READ" } else { "READ" };
    let (ty, registers) = (i.ty()?, list(i.operand(0)?));
    let memory = body.pointer(space(i), i.operand(1)?, ty.bytes() * registers.len(), access)?;
    let mut c = format!("{} u8 *p = {memory}; u{} t[{}];", i.at(), ty.bits(), registers.len());
    c += " memcpy(t, p, sizeof t);";
    let ty = if ty.is_signed() { ty } else { ty.as_bits() };
    for (n, register) in registers.iter().enumerate() {
        c += &body.set(register, ty, &format!("t[{n}]"))?;
    }
    Ok(c)
}

pub(super) fn store(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    ignore_scope_and_caches(i);
    i.ignore(&["v2", "v4", "v8"]);
    let access = if is_strong(i) { "ATOMIC" } else { "WRITE" };
    let (ty, values) = (i.ty()?, list(i.operand(1)?));
    let memory = body.pointer(space(i), i.operand(0)?, ty.bytes() * values.len(), access)?;
    let mut c = format!("{} u8 *p = {memory}; u{} t[{}];", i.at(), ty.bits(), values.len());
    for (n, value) in values.iter().enumerate() {
        write!(c, " t[{n}] = (u{})({});", ty.bits(), body.raw(value, ty.bytes())?).expect("a string takes any text");
    }
    Ok(c + " memcpy(p, t, sizeof t);")
}

/// Between registers, or between the parts of one register and registers for each part.
pub(super) fn mov(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let (ty, to, from) = (i.ty()?, i.operand(0)?, i.operand(1)?);
    let bits = ty.bits();
    if to.starts_with('{') {
        let registers = list(to);
        let part = bits / registers.len();
        let mut c = format!("u{bits} t = {};", body.raw(from, ty.bytes())?);
        for (n, register) in registers.iter().enumerate() {
            c += &body.set(register, PtxType::Bits(part), &format!("t >> {}", n * part))?;
        }
        return Ok(c);
    }
    if from.starts_with('{') {
        let registers = list(from);
        let part = bits / registers.len();
        let shifted = registers.iter().enumerate().map(|(n, register)| {
            let raw = body.raw(register, part / 8)?;
            Ok(format!("(u{bits})(u{part})({raw}) << {}", n * part))
        });
        let value = shifted.collect::<Result<Vec<_>>>()?.join(" | ");
        return body.set(to, PtxType::Bits(bits), &value);
    }
    let value = body.raw(from, ty.bytes())?;
    body.set(to, if ty == PtxType::Pred { ty } else { ty.as_bits() }, &value)
}

/// A generic address is the window's number above 44 bits of offset; those of local and global memory are so already,
/// and those of an entry's parameters, which lie in local memory if their address is asked for.
pub(super) fn cvta(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let (ty, to_space) = (i.ty()?, i.has("to"));
    let address = body.raw(i.operand(1)?, 8)?;
    let value = match (space(i), to_space) {
        (StateSpace::Shared, false) => format!("SHARED << 44 | (u32)({address})"),
        (StateSpace::Shared, true) => format!("(u64)(u32)({address})"),
        (StateSpace::Global | StateSpace::Local, _) | (StateSpace::Param, false) => address,
        _ => return Err(i.not_emulated()),
    };
    body.set(i.operand(0)?, ty, &value)
}

pub(super) fn isspacep(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let window = match space(i) {
        StateSpace::Shared => "SHARED",
        StateSpace::Local => "LOCAL",
        StateSpace::Global => "DEVICE",
        _ => return Err(i.not_emulated()),
    };
    let address = body.raw(i.operand(1)?, 8)?;
    body.set(i.operand(0)?, PtxType::Pred, &format!("({address}) >> 44 == {window}"))
}

/// How a cache should treat what is loaded: a number that nothing reads.
pub(super) fn createpolicy(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["fractional", "range", "global"]);
    i.ignore_prefix("L2::");
    body.set(i.operand(0)?, i.ty()?, "0")
}

/// Advice to caches.
pub(super) fn hint(_: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["global", "local", "L1", "L2", "tensormap"]);
    ignore_scope_and_caches(i);
    if i.operands.is_empty() { Err(Cause::FewOperands) } else { Ok(String::new()) }
}
