//! The C of a function's body: scopes, declarations, and its instructions in order.

use std::collections::HashMap;
use std::fmt::Arguments;

use super::batch::Batch;
use super::error::{Cause, PtxError, Result};
use super::instructions;
use super::operand::mangle;
use super::parse::{ParsedFunction, variable};
use super::statement::{Instruction, NumberedStatement, Statement, split};
use super::types::PtxType;
use super::unit::{TranslationUnit, write_line};

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// A register, as it was declared.
    Register(PtxType),
    /// A parameter or local memory: its C name is a pointer or an array.
    Memory,
}

/// A function's body on its way to C.
pub(super) struct FunctionBody<'u, 'a> {
    pub unit: &'u mut TranslationUnit<'a>,
    pub is_entry: bool,
    /// The names of each open scope.
    scopes: Vec<HashMap<String, Name>>,
    tables: HashMap<String, Vec<String>>,
    /// Matrix instructions that have not been done yet.
    pub batch: Batch,
    /// The words that the largest batch needs.
    pub words: usize,
    c: String,
}

impl<'u, 'a> FunctionBody<'u, 'a> {
    pub fn new(unit: &'u mut TranslationUnit<'a>, f: &ParsedFunction) -> Self {
        let params = f.returns.iter().chain(&f.params).map(|p| (p.name.clone(), Name::Memory));
        Self {
            unit,
            is_entry: f.entry,
            scopes: vec![params.collect()],
            tables: HashMap::new(),
            batch: Batch::default(),
            words: 0,
            c: String::new(),
        }
    }

    /// Appends a line of C.
    pub fn write(&mut self, line: Arguments<'_>) {
        write_line(&mut self.c, line);
    }

    /// The C of the lines so far.
    pub fn finish(self) -> String {
        // `CC` is the carry of add.cc and its kind; a label needs a statement behind it.
        let words = match self.words {
            0 => String::new(),
            words => format!("struct {{ Thread *t; u32 w[{words}]; }} W; W.t = T;\n"),
        };
        format!("u8 CC = 0; (void)CC;\n{words}{}return;\n", self.c)
    }

    /// Writes the lines of a body.
    pub fn lines(&mut self, lines: &[NumberedStatement]) -> Result<(), PtxError> {
        // A jump table may stand after its jump.
        for line in lines {
            if let Statement::JumpTable(name, targets) = &line.statement {
                self.tables.insert(name.clone(), targets.clone());
            }
        }
        for (i, line) in lines.iter().enumerate() {
            if matches!(line.statement, Statement::Open | Statement::Close | Statement::Label(_)) {
                self.close_batch();
            }
            match &line.statement {
                Statement::Open => self.open(&lines[i + 1..]),
                Statement::Close => {
                    self.scopes.pop();
                    self.write(format_args!("}}"));
                }
                Statement::Label(name) => self.write(format_args!("{}:;", mangle(name))),
                Statement::JumpTable(..) => {}
                Statement::Declaration(text) | Statement::Instruction(text) => {
                    let done = match &line.statement {
                        Statement::Declaration(_) => self.declaration(text),
                        _ => self.instruction(text, line.number),
                    };
                    done.map_err(|cause| PtxError { line: line.number, statement: text.clone(), cause })?;
                }
            }
        }
        self.close_batch();
        Ok(())
    }

    /// Opens a scope whose labels are its own: inline assembly brings the same ones each time.
    fn open(&mut self, inside: &[NumberedStatement]) {
        self.scopes.push(HashMap::new());
        let (mut depth, mut labels) = (1, Vec::new());
        for line in inside {
            match &line.statement {
                Statement::Open => depth += 1,
                Statement::Close => depth -= 1,
                Statement::Label(name) if depth == 1 => labels.push(mangle(name)),
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
        match labels[..] {
            [] => self.write(format_args!("{{")),
            _ => self.write(format_args!("{{ __label__ {};", labels.join(", "))),
        }
    }

    /// The labels of a jump table.
    pub fn jump_table(&self, name: &str) -> Result<&[String]> {
        self.tables.get(name).map(Vec::as_slice).ok_or_else(|| Cause::Operand(name.into()))
    }

    /// The meaning of a name in the innermost scope that has it.
    pub fn name(&self, name: &str) -> Option<Name> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    fn declare(&mut self, name: String, what: Name) {
        self.scopes.last_mut().expect("the function's own scope is never closed").insert(name, what);
    }

    fn declaration(&mut self, text: &str) -> Result<()> {
        if let Some(registers) = text.strip_prefix(".reg") {
            return self.registers(registers.trim());
        }
        let v = variable(text)?;
        match v.space.as_str() {
            "shared" => self.unit.place_shared(&v),
            "local" | "param" => {
                let (name, bytes) = (mangle(&v.name), v.bytes.max(1));
                let align = v.align.max(16);
                self.write(format_args!("u8 {name}[{bytes}] __attribute__((aligned({align})));"));
                if v.space == "local" {
                    self.write(format_args!("memset({name}, 0xff, {bytes});"));
                }
                self.declare(v.name, Name::Memory);
            }
            _ => return Err(Cause::NotEmulated(text.into())),
        }
        Ok(())
    }

    /// `.b32 %r<8>, %x`
    fn registers(&mut self, text: &str) -> Result<()> {
        const LIST: Cause = Cause::Syntax("a list of registers is not whole");
        let (ty, names) = text.split_once(' ').ok_or(LIST)?;
        let ty = PtxType::parse(ty.strip_prefix('.').ok_or(LIST)?)?;
        for name in split(names) {
            let names = match name.split_once('<') {
                Some((stem, count)) => {
                    let count = count.trim_end_matches('>').parse::<usize>().map_err(|_| LIST)?;
                    (0..count).map(|i| format!("{stem}{i}")).collect()
                }
                None => vec![name],
            };
            for name in names {
                let bits = ty.bits();
                self.write(format_args!("u{bits} {} = POISON_U{bits};", mangle(&name)));
                self.declare(name, Name::Register(ty));
            }
        }
        Ok(())
    }

    fn instruction(&mut self, text: &str, line: usize) -> Result<()> {
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => {
                let (guard, rest) = rest.split_once(' ').ok_or(Cause::Syntax("a guard has no instruction"))?;
                (Some(self.raw(guard, 1)?), rest)
            }
            None => (None, text),
        };
        let i = Instruction::new(text, line);
        let joins = instructions::is_matrix(i.opcode);
        if self.batch.is_open() && (guard.is_some() || !self.batch.lets_pass(&i) || self.batch.is_full()) {
            self.close_batch();
        }
        if let Some(guard) = &guard {
            self.write(format_args!("if ({guard}) {{"));
        }
        let code = instructions::translate(self, &i)?;
        if joins && (guard.is_some() || i.opcode == "stmatrix") {
            self.close_batch();
        }
        if !code.is_empty() {
            self.write(format_args!("{{ {code} }}"));
        }
        if guard.is_some() {
            self.write(format_args!("}}"));
        }
        Ok(())
    }
}
