//! Asynchronous copies to shared memory. They arrive no sooner than they are waited for, so that a missing wait shows.

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::operand::number;
use super::super::statement::Instruction;

pub(super) fn cp_async(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    if !i.has("async") {
        return Err(i.not_emulated());
    }
    let at = i.at();
    if i.has("commit_group") {
        return Ok(format!("{at} T->b->rt->copy_commit(T);"));
    }
    if i.has("wait_all") {
        return Ok(format!("{at} T->b->rt->copy_wait(T, 0);"));
    }
    if i.has("wait_group") {
        return Ok(format!("{at} T->b->rt->copy_wait(T, {});", body.raw(i.operand(0)?, 4)?));
    }
    if i.has("mbarrier") {
        i.ignore(&["arrive", "shared", "shared::cta", "b64"]);
        let address = body.address(i.operand(0)?)?;
        return Ok(format!("{at} mbarrier_copies(T, {address}, {});", i.has("noinc")));
    }
    copy(body, i)
}

/// 4, 8 or 16 bytes, of which the fourth operand may say how many come from global memory and how many are zero.
fn copy(body: &FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let sizes: &[u64] = if i.which(&["ca", "cg"])? == "cg" { &[16] } else { &[4, 8, 16] };
    if !(i.has("shared") || i.has("shared::cta")) || !i.has("global") {
        return Err(i.not_emulated());
    }
    let has_policy = i.has("L2::cache_hint");
    i.ignore_prefix("L2::");
    let bytes = number(i.operand(2)?, 4).filter(|bytes| sizes.contains(bytes));
    let bytes = bytes.ok_or_else(|| Cause::Operand(i.operands[2].clone()))?;
    let optional = i.operands.get(3).filter(|_| i.operands.len() > 4 || !has_policy);
    let valid = match optional {
        None => bytes.to_string(),
        Some(ignores) if body.is_predicate(ignores) => format!("{} ? 0 : {bytes}", body.raw(ignores, 1)?),
        Some(valid) => body.raw(valid, 4)?,
    };
    let (to, from) = (body.address(i.operand(0)?)?, body.address(i.operand(1)?)?);
    Ok(format!("{} copy_async(T, (u32){to}, {from}, {bytes}, {valid});", i.at()))
}
