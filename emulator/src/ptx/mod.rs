//! PTX to C: what nvcc's front end and optimiser really made, with a C statement for each instruction. Every CUDA thread
//! runs the function as a fiber of its own, so control flow, divergence included, needs no care here.
//!
//! [`Module::parse`] reads a module's text and translates each entry point with the functions that it calls, so that an
//! instruction that is not emulated fails there, by its name. [`instructions`] has the table of what is emulated.

mod body;
mod error;
mod instructions;
mod operand;
mod parse;
mod statement;
mod types;
mod unit;

use std::collections::BTreeMap;

pub use error::{Cause, Error};

/// The C that translated functions stand on; each begins with `#include "runtime.h"`, which is this text.
pub const RUNTIME: &str = concat!(
    include_str!("../../runtime/types.h"),
    include_str!("../../runtime/memory.h"),
    include_str!("../../runtime/float.h"),
    include_str!("../../runtime/integer.h"),
    include_str!("../../runtime/warp.h"),
    include_str!("../../runtime/matrix.h"),
    include_str!("../../runtime/atomic.h"),
    include_str!("../../runtime/mbarrier.h"),
);

/// A variable or parameter of a module or function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    /// `global`, `const`, `shared`, `local` or `param`.
    pub space: String,
    pub align: usize,
    /// 0 for an array without a length.
    pub bytes: usize,
    pub external: bool,
    /// The bytes it begins with; what is missing is zero.
    pub value: Vec<u8>,
}

/// An entry point in C.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// A translation unit that defines `void kernel(Thread *, const u8 *parameters)`.
    pub c: String,
    /// Bytes of shared memory that it declares; dynamic shared memory follows.
    pub shared: usize,
    /// Offset and bytes of each parameter.
    pub params: Vec<(usize, usize)>,
    /// The largest number of threads of a block.
    pub max_threads: u32,
    /// No thread ever waits for another, so one fiber can run the threads of a block one after another.
    pub alone: bool,
}

/// A module whose entry points are all translated.
#[derive(Debug, Default)]
pub struct Module {
    pub variables: Vec<Variable>,
    pub entries: BTreeMap<String, Code>,
}

impl Module {
    /// Parses the text of a module and translates its entry points.
    ///
    /// # Errors
    /// [`Error`] names the line of the text and what about it is not emulated or not PTX.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let source = parse::Source::parse(text)?;
        let entries = source.functions.values().filter(|f| f.entry);
        let entries =
            entries.map(|f| Ok((f.name.clone(), unit::translate(&source, f)?))).collect::<Result<_, Error>>()?;
        Ok(Self { variables: source.variables, entries })
    }
}
