//! The statements of a function's body.

use std::cell::Cell;

use super::error::{Cause, PtxError, Result};
use super::types::PtxType;

/// A statement of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Statement {
    /// `{`
    Open,
    /// `}`
    Close,
    Label(String),
    /// The targets of a `brx.idx`, under the label that it names.
    JumpTable(String, Vec<String>),
    /// A declaration: it begins with a dot.
    Declaration(String),
    /// An instruction, with single spaces, without its semicolon.
    Instruction(String),
}

/// A statement and its line in the module's text.
#[derive(Clone, Debug)]
pub(super) struct NumberedStatement {
    pub number: usize,
    pub statement: Statement,
}

/// The statements of a body without its outer braces; `line` is that of its first character.
pub(super) fn statements(text: &str, mut line: usize) -> Result<Vec<NumberedStatement>, PtxError> {
    let (mut lines, mut rest) = (Vec::new(), text);
    loop {
        let skipped = rest.len() - rest.trim_start().len();
        line += rest[..skipped].matches('\n').count();
        rest = &rest[skipped..];
        if rest.is_empty() {
            return Ok(lines);
        }
        let (statement, bytes) = statement(rest).map_err(|cause| {
            let statement = rest.lines().next().unwrap_or("").to_owned();
            PtxError { line, statement, cause }
        })?;
        lines.extend(statement.map(|statement| NumberedStatement { number: line, statement }));
        line += rest[..bytes].matches('\n').count();
        rest = &rest[bytes..];
    }
}

/// The first statement of a text that begins with one, if it has a meaning here, and its length in bytes.
fn statement(text: &str) -> Result<(Option<Statement>, usize)> {
    match text.as_bytes()[0] {
        b'{' => return Ok((Some(Statement::Open), 1)),
        b'}' => return Ok((Some(Statement::Close), 1)),
        b';' => return Ok((None, 1)),
        _ if text.starts_with(".loc ") || text.starts_with(".loc\t") => {
            return Ok((None, text.find('\n').unwrap_or(text.len())));
        }
        _ => {}
    }
    const NO_END: Cause = Cause::Syntax("a statement has no end");
    let stop = text.find([';', ':']).ok_or(NO_END)?;
    let word = text[..stop].trim_end();
    let is_label = text.as_bytes()[stop] == b':' && !text[stop..].starts_with("::");
    if is_label && !word.contains(char::is_whitespace) && !word.starts_with(['.', '@']) {
        let after = text[stop + 1..].trim_start();
        let Some(table) = after.strip_prefix(".branchtargets") else {
            return Ok((Some(Statement::Label(word.to_owned())), stop + 1));
        };
        let end = table.find(';').ok_or(NO_END)?;
        let bytes = text.len() - table.len() + end + 1;
        return Ok((Some(Statement::JumpTable(word.to_owned(), split(&table[..end]))), bytes));
    }
    let end = text.find(';').ok_or(NO_END)?;
    let words = text[..end].split_whitespace().collect::<Vec<_>>().join(" ");
    let statement = match words.strip_prefix('.') {
        Some(directive) if directive.starts_with("pragma") => None,
        Some(_) => Some(Statement::Declaration(words)),
        None => Some(Statement::Instruction(words)),
    };
    Ok((statement, end + 1))
}

/// Splits at the commas that are in no bracket.
pub(super) fn split(list: &str) -> Vec<String> {
    let (mut depth, mut parts, mut part) = (0, Vec::new(), String::new());
    for c in list.chars() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(std::mem::take(&mut part).trim().to_owned());
                continue;
            }
            _ => {}
        }
        part.push(c);
    }
    if !part.trim().is_empty() {
        parts.push(part.trim().to_owned());
    }
    parts
}

/// `opcode.modifier.modifier operand, operand`. A modifier counts as understood once it was asked for: an instruction
/// with a modifier that no code has asked for is not emulated.
#[derive(Debug)]
pub(super) struct Instruction<'a> {
    pub opcode: &'a str,
    modifiers: Vec<(&'a str, Cell<bool>)>,
    pub operands: Vec<String>,
    pub line: usize,
}

impl<'a> Instruction<'a> {
    /// From its text without a guard.
    pub fn new(text: &'a str, line: usize) -> Self {
        let (operation, operands) = text.split_once(' ').unwrap_or((text, ""));
        let mut words = operation.split('.');
        let opcode = words.next().unwrap_or("");
        let modifiers = words.map(|word| (word, Cell::new(false))).collect();
        Self { opcode, modifiers, operands: split(operands), line }
    }

    /// Whether it has this modifier.
    pub fn has(&self, modifier: &str) -> bool {
        let found = self.modifiers.iter().find(|(word, _)| *word == modifier);
        found.inspect(|(_, used)| used.set(true)).is_some()
    }

    /// Which of these modifiers it has: the first of the list that it has.
    pub fn one_of(&self, modifiers: &[&'static str]) -> Option<&'static str> {
        modifiers.iter().copied().find(|modifier| self.has(modifier))
    }

    /// Which of these modifiers it has; it must have one.
    pub fn which(&self, modifiers: &[&'static str]) -> Result<&'static str> {
        self.one_of(modifiers).ok_or_else(|| self.not_emulated())
    }

    /// Takes modifiers that mean nothing to the emulator.
    pub fn ignore(&self, modifiers: &[&str]) {
        for modifier in modifiers {
            self.has(modifier);
        }
    }

    /// Takes modifiers with this beginning, which mean nothing to the emulator.
    pub fn ignore_prefix(&self, prefix: &str) {
        for (_, used) in self.modifiers.iter().filter(|(word, _)| word.starts_with(prefix)) {
            used.set(true);
        }
    }

    /// Its types, in order.
    pub fn types(&self) -> Vec<PtxType> {
        let typed = |(word, used): &(&str, Cell<bool>)| PtxType::from_name(word).inspect(|_| used.set(true));
        self.modifiers.iter().filter_map(typed).collect()
    }

    /// Its only type.
    pub fn ty(&self) -> Result<PtxType> {
        match self.types()[..] {
            [ty] => Ok(ty),
            _ => Err(self.not_emulated()),
        }
    }

    /// An operand.
    pub fn operand(&self, i: usize) -> Result<&str> {
        self.operands.get(i).map(String::as_str).ok_or(Cause::FewOperands)
    }

    /// The first modifier that no code has asked for.
    pub fn unused(&self) -> Option<&'a str> {
        self.modifiers.iter().find(|(_, used)| !used.get()).map(|(word, _)| *word)
    }

    /// The whole instruction is not emulated.
    pub fn not_emulated(&self) -> Cause {
        let modifiers = self.modifiers.iter().map(|(word, _)| format!(".{word}")).collect::<String>();
        Cause::NotEmulated(format!("{}{modifiers}", self.opcode))
    }

    /// C that notes the line of the instruction, for messages.
    pub fn at(&self) -> String {
        format!("T->line = {};", self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_keep_their_lines() {
        let text = "\n.reg .b32 %r<2>;\n.loc 1 2 3\nLOOP:\n@%p1 bra LOOP;\nt: .branchtargets A,\n B;\n{ ret; }";
        let lines = statements(text, 10).expect("statements");
        let found = lines.iter().map(|line| (line.number, line.statement.clone())).collect::<Vec<_>>();
        let expected = [
            (11, Statement::Declaration(".reg .b32 %r<2>".into())),
            (13, Statement::Label("LOOP".into())),
            (14, Statement::Instruction("@%p1 bra LOOP".into())),
            (15, Statement::JumpTable("t".into(), vec!["A".into(), "B".into()])),
            (17, Statement::Open),
            (17, Statement::Instruction("ret".into())),
            (17, Statement::Close),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_body_without_an_end_says_where() {
        let error = statements("ret;\nadd.s32 %r1, %r2, 3", 5).expect_err("no semicolon");
        assert_eq!((error.line, error.statement.as_str()), (6, "add.s32 %r1, %r2, 3"));
    }

    #[test]
    fn a_modifier_is_understood_once_it_was_asked_for() {
        let i = Instruction::new("fma.rn.ftz.f32 %f1, {%f2, %f3}, [%r1+4]", 1);
        assert_eq!(i.operands, ["%f1", "{%f2, %f3}", "[%r1+4]"]);
        assert!(i.has("rn") && !i.has("sat"));
        assert_eq!((i.ty(), i.unused()), (Ok(PtxType::F32), Some("ftz")));
        assert_eq!(i.which(&["ftz", "sat"]), Ok("ftz"));
        assert_eq!(i.unused(), None);
    }
}
