//! PTX to C: the real output of nvcc's front end and optimiser, with a C statement for each instruction. Every CUDA
//! thread runs the function as a fiber of its own, so control flow, divergence included, needs no care here.
//!
//! | step | file |
//! |---|---|
//! | text to variables and functions | [`parse`] |
//! | a function's body to statements | [`statement`] |
//! | an entry point with the functions that it calls to one unit of C | [`mod@unit`] |
//! | scopes, declarations, guards | [`body`] |
//! | matrix instructions that a warp does at one meeting | [`batch`] |
//! | registers, numbers, addresses | [`operand`] |
//! | each instruction, by families | [`instructions`] |
//! | the C functions that it calls | `emulator/runtime/*.h` |
//!
//! A PTX register is a C variable of its width, and each instruction reads it as the type that it names. Labels, jumps
//! and scopes are C's own. Registers and local memory hold NaN before they are written.
//!
//! [`PtxModule::parse`] translates everything, so that an instruction that is not emulated fails when the module is
//! loaded, by its name and line; so does one with a modifier that its function never asked for. To add an instruction:
//! a line in the table of [`instructions`], a function in the file of its family, and a test in `tests/instructions`
//! against the same arithmetic in Rust.
//!
//! Not as on a GPU: the last bits of `approx` instructions; the order in which tensor cores sum (here k ascending, in
//! float32); `activemask`, which gives each thread itself alone; the bits of NaN; and `mul` and `add`
//! of float32 without `.rn`, which ptxas may fuse and the emulator never does: `nvcc --fmad=false` writes `.rn`.

mod batch;
mod body;
mod error;
mod instructions;
mod operand;
mod parse;
mod statement;
mod types;
mod unit;

use std::collections::BTreeMap;

pub use error::{Cause, PtxError};

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
pub struct PtxVariable {
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
pub struct EntryPoint {
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
pub struct PtxModule {
    pub variables: Vec<PtxVariable>,
    pub entries: BTreeMap<String, EntryPoint>,
}

impl PtxModule {
    /// Parses the text of a module and translates its entry points.
    ///
    /// # Errors
    /// [`PtxError`] names the line of the text, and the reason why it is not emulated or not PTX.
    pub fn parse(text: &str) -> Result<Self, PtxError> {
        let source = parse::ParsedModule::parse(text)?;
        let entries = source.functions.values().filter(|f| f.entry);
        let entries =
            entries.map(|f| Ok((f.name.clone(), unit::translate(&source, f)?))).collect::<Result<_, PtxError>>()?;
        Ok(Self { variables: source.variables, entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of an entry point that has this statement in its fourth line.
    fn error(statement: &str) -> (usize, String) {
        let text = format!(".version 8.8\n.entry k() {{\n.reg .b32 %r<4>; .reg .f32 %f<4>;\n{statement}\n}}");
        let error = PtxModule::parse(&text).expect_err(statement);
        (error.line, error.cause.to_string())
    }

    #[test]
    fn what_is_not_emulated_is_named_with_its_line() {
        let cases = [
            ("tcgen05.alloc.cta_group::1 [%r1], 32;", "tcgen05.alloc.cta_group::1 is not emulated"),
            ("add.wrong.s32 %r1, %r2, 3;", "add with .wrong is not emulated"),
            ("cvt.rn.satfinite.e4m3x2.f32 %r1, %f1, %f2;", "cvt.rn.satfinite.e4m3x2.f32 is not emulated"),
            ("add.s32 %r1, %r2, %missing;", "the operand %missing is not known"),
            ("add.s32 %r1, %r2;", "operands are missing"),
            ("call.uni away, (%r1);", "the function away has no body in this module"),
            (".reg .e4m3 %x;", "the type .e4m3 is not emulated here"),
            ("cp.async.cg.shared.global [%r1], [%r2], 8;", "the operand 8 is not known"),
            ("atom.global.min.f32 %f1, [%r1], %f2;", "atom.global.min.f32 is not emulated"),
        ];
        for (statement, cause) in cases {
            assert_eq!(error(statement), (4, cause.into()), "{statement}");
        }
    }

    #[test]
    fn places_of_parameters_and_shared_memory() {
        let text = ".extern .shared .align 128 .b8 dynamic[];
            .entry k(.param .u8 a, .param .u64 b, .param .align 8 .b8 c[12], .param .u16 d) .reqntid 64 {
            .shared .align 16 .b8 tile[20];
            .reg .b32 %r;
            mov.u32 %r, dynamic;
            bar.sync 0;
            }";
        let module = PtxModule::parse(text).expect("a module");
        let code = &module.entries["k"];
        assert_eq!(code.params, [(0, 1), (8, 8), (16, 12), (28, 2)]);
        assert_eq!((code.shared, code.max_threads, code.alone), (128, 64, false));
    }

    #[test]
    fn an_entry_point_has_the_shared_variables_that_it_uses() {
        let text = ".shared .align 4 .b8 first[100];
            .shared .align 4 .b8 second[300];
            .func f() { .reg .b32 %r; ld.shared.u32 %r, [second]; ret; }
            .entry one() { .reg .b32 %r; ld.shared.u32 %r, [first]; ret; }
            .entry both() { .reg .b32 %r; mov.u32 %r, first; call.uni f; ret; }
            .entry none() { ret; }";
        let module = PtxModule::parse(text).expect("a module");
        let bytes = ["one", "both", "none"].map(|name| module.entries[name].shared);
        assert_eq!(bytes, [112, 400, 0]);
    }
}
