//! Jumps, calls, and what ends or orders a thread.

use super::super::body::FunctionBody;
use super::super::error::{Cause, Result};
use super::super::operand::mangle;
use super::super::statement::{Instruction, split};

pub(super) fn bra(_: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["uni"]);
    Ok(format!("goto {};", mangle(i.operand(0)?)))
}

/// To the label of a table that the first operand counts.
pub(super) fn brx(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["uni", "idx"]);
    let case = |(n, label): (usize, &String)| format!("case {n}: goto {};", mangle(label));
    let cases = body.jump_table(i.operand(1)?)?.iter().enumerate().map(case).collect::<String>();
    Ok(format!("switch ({}) {{ {cases} }}", body.raw(i.operand(0)?, 4)?))
}

/// `call (result), name, (parameters)`
pub(super) fn call(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["uni"]);
    let operands = i.operands.iter().map(String::as_str).collect::<Vec<_>>();
    let is_list = |operand: &str| operand.starts_with('(');
    let (returns, name, params) = match operands[..] {
        [returns, name, params] if is_list(returns) && is_list(params) => (returns, name, params),
        [returns, name] if is_list(returns) => (returns, name, "()"),
        [name, params] if is_list(params) => ("()", name, params),
        [name] => ("()", name, "()"),
        // Through a pointer: the last operand is the prototype.
        _ => return Err(i.not_emulated()),
    };
    let names = |list: &str| split(&list[1..list.len() - 1]).iter().map(|name| mangle(name)).collect::<Vec<_>>();
    let (returns, params) = (names(returns), names(params));
    let at = i.at();
    match (name, &returns[..], &params[..]) {
        ("__assertfail", _, [message, ..]) => return Ok(format!("{at} fault(T, F_ASSERT, *(u64 *){message}, 0);")),
        ("vprintf", [_], [format, arguments]) => {
            return Ok(format!("{at} T->b->rt->print(T, *(u64 *){format}, *(u64 *){arguments});"));
        }
        _ => {}
    }
    let source = body.unit.source;
    let function = source.functions.get(name).filter(|f| f.body.is_some());
    let function = function.ok_or_else(|| Cause::NoFunction(name.into()))?;
    body.unit.called.push(function);
    let arguments = returns.iter().chain(&params).map(|name| format!(", {name}")).collect::<String>();
    Ok(format!("{at} {}(T{arguments});", mangle(name)))
}

pub(super) fn ret(_: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["uni"]);
    Ok("return;".into())
}

/// In an entry point it is a return.
pub(super) fn exit(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    if body.is_entry { Ok("return;".into()) } else { Err(i.not_emulated()) }
}

pub(super) fn trap(_: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    Ok(format!("{} fault(T, F_TRAP, 0, 0);", i.at()))
}

/// Others run meanwhile; time is not kept.
pub(super) fn nanosleep(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ty()?;
    body.unit.alone = false;
    Ok(format!("{} T->b->rt->pause(T);", i.at()))
}

/// Memory is in order here, registers are without limit, and launches do not overlap.
pub(super) fn nothing(_: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    i.ignore(&["cta", "gl", "sys", "cluster", "gpu", "sc", "acq_rel", "acquire", "release", "proxy", "async", "alias"]);
    i.ignore(&["global", "mbarrier_init", "launch_dependents", "wait", "inc", "dec", "sync", "aligned"]);
    i.ignore_prefix("shared::");
    i.ignore_prefix("async");
    i.types();
    Ok(String::new())
}
