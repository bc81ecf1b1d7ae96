//! Barriers, and what the threads of a warp do together. Each thread that waits for others needs a fiber of its own.

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::statement::Instruction;
use super::super::types::PtxType;

/// `bar` and `barrier`: of the block, and `bar.warp.sync`.
pub(super) fn barrier(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    i.ignore(&["cta", "aligned"]);
    let at = i.at();
    if i.has("warp") {
        i.ignore(&["sync"]);
        return Ok(format!("{at} MEET({}, 1, meet_sync, 0);", body.raw(i.operand(0)?, 4)?));
    }
    if i.has("sync") {
        let count = i.operands.get(1).map_or(Ok("0".into()), |count| body.raw(count, 4))?;
        return Ok(format!("{at} T->b->rt->barrier(T, {}, {count}, 0, 0);", body.raw(i.operand(0)?, 4)?));
    }
    if i.has("arrive") {
        let (id, count) = (body.raw(i.operand(0)?, 4)?, body.raw(i.operand(1)?, 4)?);
        return Ok(format!("{at} T->b->rt->barrier(T, {id}, {count}, 4, 0);"));
    }
    if !i.has("red") {
        return Err(i.not_emulated());
    }
    let operation = match i.which(&["popc", "and", "or"])? {
        "popc" => 1,
        "and" => 2,
        _ => 3,
    };
    let has_count = i.operands.len() > 3;
    let count = if has_count { body.raw(i.operand(2)?, 4)? } else { "0".into() };
    let predicate = body.raw(i.operand(if has_count { 3 } else { 2 })?, 1)?;
    let id = body.raw(i.operand(1)?, 4)?;
    let value = format!("T->b->rt->barrier(T, {id}, {count}, {operation}, {predicate})");
    Ok(at + " " + &body.set(i.operand(0)?, i.ty()?, &value)?)
}

pub(super) fn shfl(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    if !i.has("sync") {
        return Err(i.not_emulated());
    }
    let mode = i.which(&["up", "down", "bfly", "idx"])?.to_uppercase();
    let ty = i.ty()?;
    let operands = (1..5).map(|n| body.raw(i.operand(n)?, 4)).collect::<Result<Vec<_>>>()?.join(", ");
    let (to, in_range) = FunctionBody::pair(i)?;
    let mut c = format!("{} u8 ok; u32 d = shfl(T, SHFL_{mode}, {operands}, &ok); ", i.at());
    c += &body.set(to, ty, "d")?;
    if let Some(predicate) = in_range {
        c += &body.set(predicate, PtxType::Pred, "ok")?;
    }
    Ok(c)
}

pub(super) fn vote(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    if !i.has("sync") {
        return Err(i.not_emulated());
    }
    let (p, mask, ty) = (body.raw(i.operand(1)?, 1)?, body.raw(i.operand(2)?, 4)?, i.ty()?);
    // Lanes that have exited may be in the mask and do not vote, so that `all` asks whether none voted no.
    let value = match i.which(&["ballot", "any", "all", "uni"])? {
        "ballot" => format!("vote(T, {p}, {mask}, meet_ballot)"),
        "any" => format!("vote(T, {p}, {mask}, meet_ballot) != 0"),
        "all" => format!("vote(T, !({p}), {mask}, meet_ballot) == 0"),
        _ => format!("vote(T, {p}, {mask}, meet_match_all) != 0"),
    };
    Ok(i.at() + " " + &body.set(i.operand(0)?, ty, &value)?)
}

/// `match`: the lanes with the same value.
pub(super) fn matching(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    if !i.has("sync") {
        return Err(i.not_emulated());
    }
    let ty = i.ty()?;
    let name = i.which(&["any", "all"])?;
    let (value, mask) = (body.raw(i.operand(1)?, ty.bytes())?, body.raw(i.operand(2)?, 4)?);
    let (to, all) = FunctionBody::pair(i)?;
    let mut c = format!("{} u32 lanes = vote(T, {value}, {mask}, meet_match_{name}); ", i.at());
    c += &body.set(to, PtxType::Bits(32), "lanes")?;
    if let Some(predicate) = all {
        c += &body.set(predicate, PtxType::Pred, "lanes != 0")?;
    }
    Ok(c)
}

pub(super) fn redux(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    let ty = i.ty()?;
    if !i.has("sync") || ty.is_float() || ty.bits() != 32 {
        return Err(i.not_emulated());
    }
    let name = i.which(&["add", "and", "or", "xor", "min", "max"])?;
    let suffix = if matches!(name, "min" | "max") { ty.name() } else { "b32".into() };
    let (value, mask) = (body.raw(i.operand(1)?, 4)?, body.raw(i.operand(2)?, 4)?);
    let value = format!("vote(T, {value}, {mask}, meet_{name}_{suffix})");
    Ok(i.at() + " " + &body.set(i.operand(0)?, PtxType::Bits(32), &value)?)
}

/// Each lane alone, which is one of the answers that a GPU may give.
pub(super) fn activemask(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.set(i.operand(0)?, i.ty()?, "1u << T->lane")
}

/// One of the lanes of a mask: the lowest.
pub(super) fn elect(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    body.unit.alone = false;
    i.ignore(&["sync"]);
    let mask = body.raw(i.operand(1)?, 4)?;
    let (to, is_elected) = FunctionBody::pair(i)?;
    let mut c = format!("{} u32 lane = __builtin_ctz(vote(T, 1, {mask}, meet_ballot)); ", i.at());
    c += &body.set(to, PtxType::Bits(32), "lane")?;
    if let Some(predicate) = is_elected {
        c += &body.set(predicate, PtxType::Pred, "lane == T->lane")?;
    }
    Ok(c)
}
