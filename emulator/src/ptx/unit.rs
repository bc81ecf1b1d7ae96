//! The C of one entry point: the function, those that it calls, and the places of its shared memory.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use super::body::FunctionBody;
use super::error::{Cause, PtxError, Result};
use super::operand::mangle;
use super::parse::{ParsedFunction, ParsedModule};
use super::statement::{NumberedStatement, Statement};
use super::{EntryPoint, PtxVariable};

/// An entry point on its way to C.
pub(super) struct TranslationUnit<'a> {
    pub source: &'a ParsedModule,
    /// Where each shared variable lies.
    pub shared: HashMap<String, usize>,
    shared_bytes: usize,
    /// No instruction so far waits for other threads.
    pub alone: bool,
    /// Functions that are called; those that are not written yet follow.
    pub called: Vec<&'a ParsedFunction>,
    /// Batches of matrix instructions so far: each has a function of its own.
    pub batches: usize,
    pub declarations: String,
    definitions: String,
}

/// Translates an entry point.
pub(super) fn translate<'a>(source: &'a ParsedModule, entry: &'a ParsedFunction) -> Result<EntryPoint, PtxError> {
    let mut unit = TranslationUnit {
        source,
        shared: HashMap::new(),
        shared_bytes: 0,
        alone: true,
        called: vec![entry],
        batches: 0,
        declarations: String::new(),
        definitions: String::new(),
    };
    let shared = || source.variables.iter().filter(|v| v.space == "shared");
    let mut written = HashSet::new();
    while let Some(f) = unit.called.pop() {
        if written.insert(&f.name) {
            unit.function(f)?;
        }
    }
    // Dynamic shared memory has one place, whatever its names.
    let align = shared().filter(|v| v.external).map(|v| v.align).fold(16, usize::max);
    let dynamic = unit.shared_bytes.next_multiple_of(align);
    let mut c = String::from("#include \"runtime.h\"\n");
    write_line(&mut c, format_args!("enum {{ STATIC_SHARED = {dynamic} }};"));
    for v in shared().filter(|v| v.external) {
        write_line(&mut c, format_args!("#define DYNAMIC_{} {dynamic}u", mangle(&v.name)));
    }
    c += &unit.declarations;
    c += &unit.definitions;
    Ok(EntryPoint {
        c,
        shared: dynamic,
        params: places(&entry.params),
        max_threads: entry.max_threads.unwrap_or(1024),
        alone: unit.alone,
    })
}

/// Offset and bytes of each parameter.
fn places(params: &[PtxVariable]) -> Vec<(usize, usize)> {
    let mut end: usize = 0;
    let place = |p: &PtxVariable| {
        let at = end.next_multiple_of(p.align);
        end = at + p.bytes;
        (at, p.bytes)
    };
    params.iter().map(place).collect()
}

/// The names in a body's instructions: an entry point has only the shared variables of the module that it uses.
fn names(lines: &[NumberedStatement]) -> HashSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_$%".contains(c);
    let mut names = HashSet::new();
    for line in lines {
        if let Statement::Instruction(text) = &line.statement {
            names.extend(text.split(|c| !is_name(c)));
        }
    }
    names
}

/// Appends a line; a string takes any.
pub(super) fn write_line(c: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(c, "{line}").expect("a string takes any line");
}

impl<'a> TranslationUnit<'a> {
    /// Gives a variable a place in shared memory.
    pub fn place_shared(&mut self, v: &PtxVariable) {
        let at = self.shared_bytes.next_multiple_of(v.align);
        self.shared.insert(v.name.clone(), at);
        self.shared_bytes = at + v.bytes;
    }

    /// Writes a function.
    fn function(&mut self, f: &'a ParsedFunction) -> Result<(), PtxError> {
        let source = self.source;
        let failed = |cause| PtxError { line: f.line, statement: f.name.clone(), cause };
        let lines = f.body.as_deref().ok_or_else(|| failed(Cause::NoFunction(f.name.clone())))?;
        let head = if f.entry {
            "void kernel(Thread *T, const u8 *P)".to_owned()
        } else {
            let params = f.returns.iter().chain(&f.params).map(|p| format!(", u8 *{}", mangle(&p.name)));
            format!("static void {}(Thread *T{})", mangle(&f.name), params.collect::<String>())
        };
        write_line(&mut self.declarations, format_args!("{head};"));
        let names = names(lines);
        for v in source.variables.iter().filter(|v| v.space == "shared" && !v.external) {
            if names.contains(v.name.as_str()) && !self.shared.contains_key(&v.name) {
                self.place_shared(v);
            }
        }
        let mut body = FunctionBody::new(self, f);
        if f.entry {
            let takes_address = |line: &NumberedStatement| matches!(&line.statement, Statement::Instruction(t) if t.contains("cvta.param"));
            let are_local = lines.iter().any(takes_address);
            for (p, (at, bytes)) in f.params.iter().zip(places(&f.params)) {
                let name = mangle(&p.name);
                if are_local {
                    body.write(format_args!("u8 {name}[{bytes}] __attribute__((aligned(16)));"));
                    body.write(format_args!("memcpy({name}, P + {at}, {bytes});"));
                } else {
                    body.write(format_args!("const u8 *const {name} = P + {at};"));
                }
            }
        }
        body.lines(lines)?;
        let text = body.finish();
        write_line(&mut self.definitions, format_args!("{head} {{\n{text}}}"));
        Ok(())
    }
}
