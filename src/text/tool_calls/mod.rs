//! Finds tool calls in the text of a sample while it arrives in pieces, in the format that the chat template teaches
//! the model.

mod function;
mod json;
mod parameters;
mod python;

use std::sync::Arc;

use function::FunctionScan;
use json::ValueEnd;
pub use parameters::KnownTool;

use crate::types::{ToolCallCounts, ToolFormat};

/// The member that JSON has if it is meant as a call. Other JSON without a mark is an answer, not a call that failed.
const NAME: &str = "\"name\"";

impl ToolFormat {
    /// The format that the source of a chat template shows to the model; None if it shows another or none.
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("<tool_call>") {
            return match source.contains(function::OPEN) {
                true => Some(Self::Qwen3Coder),
                // GLM-4.5 writes a name and pairs of tags between the same marks.
                false => (!source.contains("<arg_key>")).then_some(Self::Hermes),
            };
        }
        if source.contains("[TOOL_CALLS]") {
            // Later templates write a name and its arguments after the mark, instead of a list.
            return (!source.contains("[ARGS]")).then_some(Self::Mistral);
        }
        let is_llama = source.contains("<|start_header_id|>") && source.contains("\"parameters\": ");
        (is_llama || source.contains("<|python_tag|>")).then_some(Self::Llama)
    }

    /// The mark that begins a call anywhere in the text.
    pub fn mark(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::Qwen3Coder => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Llama => Some("<|python_tag|>"),
            Self::List => None,
        }
    }

    /// Text that may follow a call and belongs to it.
    fn end(self) -> &'static str {
        match self {
            Self::Hermes | Self::Qwen3Coder => "</tool_call>",
            Self::Llama => ";",
            Self::Mistral | Self::List => "",
        }
    }

    /// The text that a call begins with, behind its mark.
    fn opening(self) -> &'static str {
        match self {
            Self::Hermes | Self::Llama => "{",
            Self::Mistral | Self::List => "[",
            Self::Qwen3Coder => function::OPEN,
        }
    }

    /// Whether a call may stand at the beginning of the text without a mark.
    fn may_be_bare(self) -> bool {
        matches!(self, Self::Llama | Self::Mistral | Self::List)
    }

    /// Whether a call's JSON is a list of calls.
    fn is_list(self) -> bool {
        self.opening() == "["
    }

    /// Finds the end of a call that begins at index `start` of the text.
    fn scan(self, start: usize) -> Scan {
        match self {
            Self::Qwen3Coder => Scan::Function(FunctionScan::from(start)),
            Self::Hermes | Self::Llama | Self::Mistral | Self::List => Scan::Json(ValueEnd::from(start)),
        }
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// JSON: the model's own, or what its texts stand for.
    pub arguments: String,
}

/// A parsed part of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text before the answer, which the parser of reasoning finds.
    Reasoning(String),
    Content(String),
    Call(ToolCall),
}

/// Finds the calls in the text of one sample. It reports a call once the call is complete, and returns all other text
/// as content, so no text is lost. White space around a call belongs to the call.
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: ToolFormat,
    /// The tools that the request offers. JSON without a mark is a call only if it names one of them.
    tools: Arc<[KnownTool]>,
    state: State,
    /// Text that has not been reported.
    held: String,
    counts: ToolCallCounts,
}

#[derive(Clone, Debug)]
enum State {
    /// Outside of calls. `is_fresh`: only white space has arrived since the beginning or the last call.
    Open { is_fresh: bool },
    /// Within a call, which begins at `start`, after the mark if there is one.
    Call { start: usize, is_bare: bool, scan: Scan },
    /// After a call.
    Close,
}

/// Finds the end of a call.
#[derive(Clone, Debug)]
enum Scan {
    Json(ValueEnd),
    Function(FunctionScan),
}

impl ToolParser {
    pub fn new(format: ToolFormat, tools: Arc<[KnownTool]>) -> Self {
        let state = State::Open { is_fresh: true };
        Self { format, tools, state, held: String::new(), counts: ToolCallCounts::default() }
    }

    pub fn format(&self) -> ToolFormat {
        self.format
    }

    /// Takes the next piece of text, and appends the calls and contents that it completes to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        loop {
            let goes_on = match &mut self.state {
                State::Open { is_fresh } => {
                    let is_fresh = *is_fresh;
                    self.open(is_fresh, out)
                }
                State::Call { .. } => self.call(out),
                State::Close => self.close(),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Appends the rest at the end of the text. Returns what has become of the text's calls.
    pub fn finish(mut self, out: &mut Vec<Piece>) -> ToolCallCounts {
        self.counts.unclosed += match &self.state {
            State::Call { is_bare, .. } => u64::from(!is_bare || self.held.contains(NAME)),
            State::Open { .. } => u64::from(self.format.mark().is_some_and(|mark| self.held.contains(mark))),
            State::Close => 0,
        };
        if !matches!(self.state, State::Close) {
            self.give(self.held.len(), out);
        }
        self.counts
    }

    fn has_calls(&self) -> bool {
        self.counts.parsed + self.counts.unknown_tool > 0
    }

    /// Looks for the beginning of a call; returns false if it needs more text.
    fn open(&mut self, is_fresh: bool, out: &mut Vec<Piece>) -> bool {
        let opening = self.format.opening();
        if is_fresh && self.has_calls() {
            let space = leading_space(&self.held);
            self.held.drain(..space);
        }
        if is_fresh && self.is_bare(opening) {
            let start = leading_space(&self.held);
            self.state = State::Call { start, is_bare: true, scan: self.format.scan(start) };
            return true;
        }
        let Some(mark) = self.format.mark() else { return self.give_content("", out) };
        let Some(at) = self.held.find(mark) else { return self.give_content(mark, out) };
        let before = self.held[..at].trim_end().len();
        self.give(before, out);
        self.state = State::Open { is_fresh: is_fresh && before == 0 };
        let behind = at - before + mark.len();
        let start = behind + leading_space(&self.held[behind..]);
        let rest = &self.held[start..];
        if rest.starts_with(opening) {
            self.state = State::Call { start, is_bare: false, scan: self.format.scan(start) };
        } else if opening.starts_with(rest) {
            return false;
        } else {
            self.counts.invalid += 1;
            self.give(behind, out);
            self.state = State::Open { is_fresh: false };
        }
        true
    }

    /// Whether the held text begins with the JSON of a call without a mark.
    fn is_bare(&self, opening: &str) -> bool {
        let text = self.held.trim_start();
        let mark = self.format.mark().unwrap_or_default();
        let may_be_mark = !mark.is_empty() && (text.starts_with(mark) || mark.starts_with(text));
        self.format.may_be_bare() && text.starts_with(opening) && !may_be_mark
    }

    /// Returns the held text as content, except white space at its end and a possible beginning of `mark`. Returns
    /// false, because more text is needed.
    fn give_content(&mut self, mark: &str, out: &mut Vec<Piece>) -> bool {
        let held_back = (1..mark.len()).rev().find(|&n| self.held.ends_with(&mark[..n])).unwrap_or(0);
        let end = self.held[..self.held.len() - held_back].trim_end().len();
        if end > 0 {
            self.give(end, out);
            self.state = State::Open { is_fresh: false };
        }
        false
    }

    /// Returns the first `len` bytes of the held text as content.
    fn give(&mut self, len: usize, out: &mut Vec<Piece>) {
        if len > 0 {
            out.push(Piece::Content(self.held.drain(..len).collect()));
        }
    }

    /// Looks for the end of a call, and reports the call; returns false if it needs more text.
    fn call(&mut self, out: &mut Vec<Piece>) -> bool {
        let State::Call { start, is_bare, scan } = &mut self.state else { return false };
        let (start, is_bare) = (*start, *is_bare);
        let is_list = self.format.is_list();
        let found = match scan {
            Scan::Json(end) => end.find(&self.held).map(|end| (end, json::calls(&self.held[start..end], is_list))),
            Scan::Function(scan) => {
                let end = scan.find(&self.held);
                end.map(|end| (end, scan.call(&self.held, &self.tools).map(|call| vec![call])))
            }
        };
        let Some((end, calls)) = found else { return false };
        let is_known = |call: &ToolCall| self.tools.iter().any(|tool| tool.name == call.name);
        match calls.filter(|calls| !is_bare || calls.iter().all(is_known)) {
            Some(calls) => {
                let known = calls.iter().filter(|call| is_known(call)).count() as u64;
                self.counts.parsed += known;
                self.counts.unknown_tool += calls.len() as u64 - known;
                out.extend(calls.into_iter().map(Piece::Call));
                self.held.drain(..end);
                self.state = State::Close;
            }
            None => {
                self.counts.invalid += u64::from(!is_bare || self.held[start..end].contains(NAME));
                self.give(end, out);
                self.state = State::Open { is_fresh: false };
            }
        }
        true
    }

    /// Skips text that belongs to the last call; returns false if it needs more text.
    fn close(&mut self) -> bool {
        let end = self.format.end();
        let rest = self.held.trim_start();
        if rest.len() < end.len() && end.starts_with(rest) {
            return false;
        }
        let rest = rest.strip_prefix(end).unwrap_or(rest).trim_start();
        let passed = self.held.len() - rest.len();
        self.held.drain(..passed);
        self.state = State::Open { is_fresh: true };
        true
    }
}

fn leading_space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

#[cfg(test)]
mod tests;
