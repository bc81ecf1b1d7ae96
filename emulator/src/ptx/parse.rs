//! Reads a module's text: its variables and functions.

use std::collections::BTreeMap;

use super::PtxVariable;
use super::error::{Cause, PtxError, Result};
use super::operand::number;
use super::statement::{NumberedStatement, split, statements};
use super::types::PtxType;

/// A function as it was read.
#[derive(Debug)]
pub(super) struct ParsedFunction {
    pub name: String,
    pub entry: bool,
    pub returns: Vec<PtxVariable>,
    pub params: Vec<PtxVariable>,
    /// `.maxntid` or `.reqntid`.
    pub max_threads: Option<u32>,
    /// `None`: declared only.
    pub body: Option<Vec<NumberedStatement>>,
    pub line: usize,
}

/// A module as it was read.
#[derive(Debug, Default)]
pub(super) struct ParsedModule {
    pub variables: Vec<PtxVariable>,
    pub functions: BTreeMap<String, ParsedFunction>,
}

impl ParsedModule {
    pub fn parse(text: &str) -> Result<Self, PtxError> {
        let text = without_comments(text);
        let (mut source, mut rest, mut line) = (Self::default(), text.as_str(), 1);
        loop {
            let skipped = rest.len() - rest.trim_start().len();
            line += rest[..skipped].matches('\n').count();
            rest = &rest[skipped..];
            if rest.is_empty() || rest.starts_with('\0') {
                return Ok(source);
            }
            let item = Item::first(rest);
            source.add(&item, line)?;
            line += item.text.matches('\n').count();
            rest = &rest[item.text.len()..];
        }
    }

    fn add(&mut self, item: &Item<'_>, line: usize) -> Result<(), PtxError> {
        let head = item.head();
        let failed = |cause| PtxError { line, statement: head.lines().next().unwrap_or("").to_owned(), cause };
        if item.is_line || [".section", ".alias", ".pragma"].iter().any(|d| head.starts_with(d)) {
            return Ok(());
        }
        let is_function = |word: &str| word == ".entry" || word.starts_with(".func");
        if !head.split_whitespace().take(4).any(is_function) {
            self.variables.push(variable(item.text.trim_end_matches(';')).map_err(failed)?);
            return Ok(());
        }
        let mut function = function(head, line).map_err(failed)?;
        if let Some(at) = item.body {
            let first = line + item.text[..at].matches('\n').count();
            function.body = Some(statements(&item.text[at + 1..item.text.len() - 1], first)?);
        }
        if function.body.is_some() || !self.functions.contains_key(&function.name) {
            self.functions.insert(function.name.clone(), function);
        }
        Ok(())
    }
}

/// A directive, variable or function of a module.
struct Item<'a> {
    text: &'a str,
    /// Where the brace of a function's body is.
    body: Option<usize>,
    /// It ends with its line.
    is_line: bool,
}

impl<'a> Item<'a> {
    /// The first item of a text that begins with one.
    fn first(text: &'a str) -> Self {
        if [".version", ".target", ".address_size", ".file"].iter().any(|d| text.starts_with(d)) {
            return Self { text: &text[..text.find('\n').unwrap_or(text.len())], body: None, is_line: true };
        }
        let (mut depth, mut body, mut has_value) = (0, None, false);
        for (i, c) in text.char_indices() {
            match c {
                '=' if depth == 0 => has_value = true,
                '{' if depth == 0 && !has_value => {
                    body = Some(i);
                    depth = 1;
                }
                '{' | '(' => depth += 1,
                '}' | ')' => depth -= 1,
                _ => {}
            }
            if depth == 0 && (c == ';' || c == '}' && body.is_some()) {
                return Self { text: &text[..=i], body, is_line: false };
            }
        }
        Self { text, body: None, is_line: false }
    }

    fn head(&self) -> &'a str {
        self.text[..self.body.unwrap_or(self.text.len())].trim().trim_end_matches(';')
    }
}

/// The text with its comments blanked, on the same lines.
fn without_comments(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['/', '"']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            out.extend(rest[..end].chars().filter(|&c| c == '\n'));
            end
        } else {
            let quoted = rest.starts_with('"').then(|| rest[1..].find(['"', '\n'])).flatten();
            let end = quoted.map_or(1, |end| end + 2);
            out.push_str(&rest[..end]);
            end
        };
        rest = &rest[end..];
    }
    out + rest
}

/// `.param .align 8 .b8 name[16]`, `.shared .b32 name`, `.extern .shared .align 16 .b8 name[]`
pub(super) fn variable(text: &str) -> Result<PtxVariable> {
    let (declaration, value) = text.split_once('=').map_or((text, None), |(d, v)| (d, Some(v)));
    let (mut v, mut element, mut lanes) = (PtxVariable::default(), None, 1);
    let mut words = declaration.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            ".align" => {
                let align = words.next().and_then(|word| word.parse().ok());
                v.align = v.align.max(align.ok_or(Cause::Syntax("an alignment is no number"))?);
            }
            ".extern" => v.external = true,
            ".v2" => lanes = 2,
            ".v4" => lanes = 4,
            ".visible" | ".weak" | ".common" | ".ptr" => {}
            ".shared" | ".global" | ".const" | ".local" | ".param" if element.is_none() => v.space = word[1..].into(),
            word if word.starts_with(".attribute") => {}
            word if word.starts_with('.') && element.is_none() => {
                element = Some(PtxType::parse(&word[1..])?.bytes() * lanes)
            }
            // `.param .u64 .ptr .global .align 1 name` says where a pointer points to.
            word if word.starts_with('.') => {}
            word => v.name.push_str(word),
        }
    }
    let element = element.ok_or(Cause::Syntax("a variable has no type"))?;
    v.bytes = element;
    if let Some(at) = v.name.find('[') {
        let lengths = v.name.split_off(at);
        for length in lengths.split('[').skip(1) {
            v.bytes *= length.trim_end_matches(']').parse::<usize>().unwrap_or(0);
        }
    }
    v.align = v.align.max(element);
    for x in value.map_or_else(Vec::new, |value| split(value.trim().trim_start_matches('{').trim_end_matches('}'))) {
        let bits = number(&x, element).ok_or_else(|| Cause::Operand(x.clone()))?;
        v.value.extend_from_slice(&bits.to_le_bytes()[..element.min(8)]);
    }
    Ok(v)
}

/// `(.param .b32 result) name (.param .b64 a) .maxntid 256, 1, 1`
fn function(head: &str, line: usize) -> Result<ParsedFunction> {
    const HEAD: Cause = Cause::Syntax("the head of a function is not whole");
    let entry = head.contains(".entry");
    let rest = head.split_once(if entry { ".entry" } else { ".func" }).ok_or(HEAD)?.1.trim();
    let rest = rest.strip_prefix(".noreturn").unwrap_or(rest).trim();
    let group = |text: &str| -> Result<(Vec<PtxVariable>, usize)> {
        let end = text.find(')').ok_or(HEAD)?;
        Ok((split(&text[1..end]).iter().map(|p| variable(p)).collect::<Result<_>>()?, end + 1))
    };
    let (mut returns, mut params, mut rest) = (Vec::new(), Vec::new(), rest);
    if rest.starts_with('(') {
        let (list, end) = group(rest)?;
        (returns, rest) = (list, rest[end..].trim());
    }
    let end = rest.find(|c: char| c == '(' || c.is_whitespace()).unwrap_or(rest.len());
    let name = rest[..end].to_owned();
    rest = rest[end..].trim();
    if rest.starts_with('(') {
        let (list, end) = group(rest)?;
        (params, rest) = (list, &rest[end..]);
    }
    let threads = [".maxntid", ".reqntid"].iter().find_map(|d| rest.split_once(d));
    let max_threads = threads.map(|(_, list)| {
        let list = list.split('.').next().unwrap_or("");
        list.split(',').filter_map(|n| n.trim().parse::<u32>().ok()).product()
    });
    let cluster = rest.split_once(".reqnctapercluster").map_or("1", |(_, list)| list.split('.').next().unwrap_or(""));
    if cluster.split(',').any(|n| n.trim() != "1") {
        return Err(Cause::NotEmulated("a cluster of several blocks".into()));
    }
    Ok(ParsedFunction { name, entry, returns, params, max_threads, body: None, line })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_quoted_text_keep_their_lines() {
        let text = "// a\n.file 1 \"/a//b.cu\" /* one\ntwo */\n.global .b32 x;";
        assert_eq!(without_comments(text), "\n.file 1 \"/a//b.cu\" \n\n.global .b32 x;");
    }

    #[test]
    fn variables() {
        let v = variable(".visible .global .align 4 .b8 table[2][3] = {1, -1, 0x10}").expect("a variable");
        assert_eq!((v.name.as_str(), v.space.as_str(), v.align, v.bytes), ("table", "global", 4, 6));
        assert_eq!(v.value, [1, 255, 16]);
        let v = variable(".extern .shared .align 16 .b8 dynamic[]").expect("a variable");
        assert_eq!((v.external, v.bytes, v.align), (true, 0, 16));
        let v = variable(".param .u64 .ptr .global .align 1 pointer").expect("a parameter");
        assert_eq!((v.name.as_str(), v.space.as_str(), v.bytes, v.align), ("pointer", "param", 8, 8));
        assert_eq!(variable(".global .e4m3 x"), Err(Cause::Type(".e4m3".into())));
    }

    #[test]
    fn heads_of_functions() {
        let head = ".visible .entry norm(.param .u64 a, .param .f32 b) .maxntid 256, 2, 1 .minnctapersm 2";
        let f = function(head, 1).expect("a head");
        assert_eq!((f.name.as_str(), f.entry, f.params.len(), f.max_threads), ("norm", true, 2, Some(512)));
        let f = function(".func (.param .b32 r) f(.param .b32 x)", 1).expect("a head");
        assert_eq!((f.name.as_str(), f.entry, f.returns.len(), f.params.len()), ("f", false, 1, 1));
        let f = function(".func  (.param .b32 r) g\n(\n.param .b64 x\n)\n", 1).expect("a head");
        assert_eq!((f.name.as_str(), f.params.len(), f.max_threads), ("g", 1, None));
    }

    #[test]
    fn clusters_are_not_emulated() {
        assert!(function(".entry k() .reqnctapercluster 1, 1, 1 .maxntid 64", 1).is_ok());
        assert!(function(".entry k() .reqnctapercluster 2, 1, 1", 1).is_err());
    }

    #[test]
    fn sections_of_debug_information_are_passed_over() {
        let text = ".version 8.0\n.entry k()\n{\nret;\n}\n.section .debug_str\n{\n$L1:\n.b8 1,2\n}\n.global .u32 x;";
        let source = ParsedModule::parse(text).expect("a module");
        assert_eq!((source.functions.len(), source.variables.len()), (1, 1));
    }
}
