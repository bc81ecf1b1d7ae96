//! The emulated instructions: one function for each, in one file for each family.

mod arithmetic;
mod atomic;
mod bits;
mod compare;
mod control;
mod convert;
mod copy;
mod float;
mod integer;
mod matrix;
mod mbarrier;
mod memory;
mod warp;

pub(super) use matrix::is_matrix;

use super::body::FunctionBody;
use super::error::{Cause, Result};
use super::statement::Instruction;

/// Where an address points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateSpace {
    Global,
    Shared,
    Local,
    Param,
    /// The address says it.
    Generic,
}

/// Writes an instruction in C.
type Emitter = fn(&mut FunctionBody<'_, '_>, &Instruction<'_>) -> Result<String>;

/// The function that writes an instruction in C.
fn emitter(opcode: &str) -> Option<Emitter> {
    Some(match opcode {
        "ld" | "ldu" => memory::load,
        "st" => memory::store,
        "mov" => memory::mov,
        "cvta" => memory::cvta,
        "isspacep" => memory::isspacep,
        "createpolicy" => memory::createpolicy,
        "prefetch" | "prefetchu" | "discard" | "applypriority" => memory::hint,
        "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "fma" | "mad" | "neg" | "abs" | "rcp" | "sqrt"
        | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "sad" => arithmetic::arithmetic,
        "addc" | "subc" | "madc" => integer::with_carry,
        "and" | "or" | "xor" => bits::logic,
        "not" | "cnot" => bits::not,
        "shl" | "shr" => bits::shift,
        "shf" => bits::funnel_shift,
        "bfe" => bits::extract,
        "bfi" => bits::insert,
        "bfind" => bits::find,
        "brev" | "popc" | "clz" => bits::count,
        "prmt" => bits::permute,
        "lop3" => bits::lop3,
        "dp4a" => bits::dp4a,
        "setp" => compare::setp,
        "set" => compare::set,
        "selp" => compare::selp,
        "slct" => compare::slct,
        "testp" => compare::testp,
        "cvt" => convert::cvt,
        "bra" => control::bra,
        "brx" => control::brx,
        "call" => control::call,
        "ret" => control::ret,
        "exit" => control::exit,
        "trap" | "brkpt" => control::trap,
        "nanosleep" => control::nanosleep,
        "membar" | "fence" | "griddepcontrol" | "setmaxnreg" => control::nothing,
        "bar" | "barrier" => warp::barrier,
        "shfl" => warp::shfl,
        "vote" => warp::vote,
        "match" => warp::matching,
        "redux" => warp::redux,
        "activemask" => warp::activemask,
        "elect" => warp::elect,
        "mma" => matrix::mma,
        "ldmatrix" => matrix::ldmatrix,
        "stmatrix" => matrix::stmatrix,
        "movmatrix" => matrix::movmatrix,
        "cp" => copy::cp_async,
        "atom" | "red" => atomic::atomic,
        "mbarrier" => mbarrier::mbarrier,
        _ => return None,
    })
}

/// Whether an instruction does nothing but compute registers from registers.
pub(super) fn is_computation(opcode: &str) -> bool {
    const COMPUTATIONS: [&str; 24] = [
        "mov", "add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", "and", "or", "xor", "not", "shl", "shr",
        "shf", "bfe", "bfi", "prmt", "lop3", "setp", "selp", "cvt",
    ];
    COMPUTATIONS.contains(&opcode)
}

/// Writes an instruction in C, every part of it.
pub(super) fn translate(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let emit = emitter(i.opcode).ok_or_else(|| i.not_emulated())?;
    let code = emit(body, i)?;
    match i.unused() {
        None => Ok(code),
        Some(modifier) => Err(Cause::NotEmulated(format!("{} with .{modifier}", i.opcode))),
    }
}

/// The state space that an instruction names.
fn space(i: &Instruction<'_>) -> StateSpace {
    const SHARED: [&str; 3] = ["shared", "shared::cta", "shared::cluster"];
    if i.one_of(&["global", "const"]).is_some() {
        StateSpace::Global
    } else if i.one_of(&SHARED).is_some() {
        StateSpace::Shared
    } else if i.has("local") {
        StateSpace::Local
    } else if i.one_of(&["param", "param::entry", "param::func"]).is_some() {
        StateSpace::Param
    } else {
        StateSpace::Generic
    }
}

/// Takes the scope of an access and the caches' hints, which mean nothing here.
fn ignore_scope_and_caches(i: &Instruction<'_>) {
    i.ignore(&["cta", "cluster", "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"]);
    i.ignore_prefix("L1::");
    i.ignore_prefix("L2::");
}
