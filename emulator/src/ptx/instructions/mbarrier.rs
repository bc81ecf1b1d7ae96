//! `mbarrier`: arrivals and bytes that a phase waits for, in a word of shared memory.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;

pub(super) fn mbarrier(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["shared", "shared::cta", "b64", "cta", "cluster", "release", "acquire", "relaxed"]);
    let at = i.at();
    let raw = |n: usize| body.raw(i.operand(n)?, 4);
    let address = |n: usize| body.address(i.operand(n)?);
    match i.which(&["init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait"])? {
        "init" => Ok(format!("{at} mbarrier_init(T, {}, {});", address(0)?, raw(1)?)),
        "inval" => Ok(format!("{at} mbarrier_inval(T, {});", address(0)?)),
        "expect_tx" => Ok(format!("{at} mbarrier_update(T, {}, {}, 0, 0);", address(0)?, raw(1)?)),
        "complete_tx" => Ok(format!("{at} mbarrier_update(T, {}, -(s32){}, 0, 0);", address(0)?, raw(1)?)),
        "test_wait" | "try_wait" => wait(body, i),
        name => arrive(body, i, name == "arrive_drop"),
    }
}

/// The result is the state before, by which a thread can wait for the end of its phase.
fn arrive(body: &FunctionBody<'_, '_>, i: &Instruction<'_>, drops: bool) -> Result<String> {
    i.ignore(&["noComplete"]);
    let address = body.address(i.operand(1)?)?;
    let expects_bytes = i.has("expect_tx");
    let last = i.operands.get(2).map(|operand| body.raw(operand, 4)).transpose()?;
    let (bytes, count) = match last {
        Some(bytes) if expects_bytes => (bytes, "1".into()),
        None if expects_bytes => return Err(i.not_emulated()),
        Some(count) => ("0".into(), count),
        None => ("0".into(), "1".into()),
    };
    let drop = if drops { &count } else { "0" };
    let value = format!("mbarrier_update(T, {address}, {bytes}, {count}, {drop})");
    Ok(i.at() + " " + &body.set(i.operand(0)?, PtxType::Bits(64), &value)?)
}

/// Whether a phase has passed; if not, others run first.
fn wait(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    let address = body.address(i.operand(1)?)?;
    let parity = match i.has("parity") {
        true => format!("{} & 1", body.raw(i.operand(2)?, 4)?),
        false => format!("mbarrier_of({}).parity", body.raw(i.operand(2)?, 8)?),
    };
    Ok(i.at() + " " + &body.set(i.operand(0)?, PtxType::Pred, &format!("mbarrier_passed(T, {address}, {parity})"))?)
}
