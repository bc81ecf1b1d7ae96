//! Finds tool calls in the text of a sample while it arrives in pieces, in the format that the chat template teaches
//! the model.

mod json;

use json::ValueEnd;

/// A format in which a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times: Qwen 2.5 and 3, Hermes.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, or several of them separated by `;`: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or the list as the whole answer, because the mark is a
    /// special token, which the text omits: Mistral.
    Mistral,
    /// `[{"name": ..., "parameters": {...}}, ...]` as the whole answer, which a grammar enforces.
    List,
}

impl ToolFormat {
    /// The format that the source of a chat template shows to the model; None if it shows another or none.
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("<tool_call>") {
            // Qwen3-Coder writes XML between the same marks.
            return (!source.contains("<function=")).then_some(Self::Hermes);
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
            Self::Hermes => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Llama => Some("<|python_tag|>"),
            Self::List => None,
        }
    }

    /// Text that may follow a call and belongs to it.
    fn end(self) -> &'static str {
        match self {
            Self::Hermes => "</tool_call>",
            Self::Llama => ";",
            Self::Mistral | Self::List => "",
        }
    }

    /// First character of a call's JSON.
    fn bracket(self) -> char {
        match self {
            Self::Hermes | Self::Llama => '{',
            Self::Mistral | Self::List => '[',
        }
    }

    /// Whether a call may stand at the beginning of the text without a mark.
    fn may_be_bare(self) -> bool {
        self != Self::Hermes
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// The JSON that the model wrote.
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
    /// Names of the tools. JSON without a mark is a call only if it names one of them.
    names: Vec<String>,
    state: State,
    /// Text that has not been reported.
    held: String,
    has_calls: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Outside of calls. `is_fresh`: only white space has arrived since the beginning or the last call.
    Open { is_fresh: bool },
    /// Within the JSON of a call, which begins at `start`, after the mark if there is one.
    Call { start: usize, is_bare: bool, end: ValueEnd },
    /// After a call's JSON.
    Close,
}

impl ToolParser {
    pub fn new(format: ToolFormat, names: Vec<String>) -> Self {
        Self { format, names, state: State::Open { is_fresh: true }, held: String::new(), has_calls: false }
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
                State::Call { start, is_bare, end } => match end.find(&self.held) {
                    Some(len) => {
                        let (start, is_bare) = (*start, *is_bare);
                        self.end_call(start, len, is_bare, out);
                        true
                    }
                    None => false,
                },
                State::Close => self.close(),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Appends the rest at the end of the text.
    pub fn finish(mut self, out: &mut Vec<Piece>) {
        if !matches!(self.state, State::Close) {
            self.give(self.held.len(), out);
        }
    }

    /// Looks for the beginning of a call; returns false if it needs more text.
    fn open(&mut self, is_fresh: bool, out: &mut Vec<Piece>) -> bool {
        let bracket = self.format.bracket();
        if is_fresh && self.has_calls {
            let space = leading_space(&self.held);
            self.held.drain(..space);
        }
        if is_fresh && self.is_bare(bracket) {
            let start = leading_space(&self.held);
            self.state = State::Call { start, is_bare: true, end: ValueEnd::from(start) };
            return true;
        }
        let Some(mark) = self.format.mark() else { return self.give_content("", out) };
        let Some(at) = self.held.find(mark) else { return self.give_content(mark, out) };
        let before = self.held[..at].trim_end().len();
        self.give(before, out);
        self.state = State::Open { is_fresh: is_fresh && before == 0 };
        let behind = at - before + mark.len();
        let start = behind + leading_space(&self.held[behind..]);
        match self.held[start..].chars().next() {
            None => return false,
            Some(c) if c == bracket => {
                self.state = State::Call { start, is_bare: false, end: ValueEnd::from(start) };
            }
            Some(_) => {
                self.give(behind, out);
                self.state = State::Open { is_fresh: false };
            }
        }
        true
    }

    /// Whether the held text begins with the JSON of a call without a mark.
    fn is_bare(&self, bracket: char) -> bool {
        let text = self.held.trim_start();
        let mark = self.format.mark().unwrap_or_default();
        let may_be_mark = !mark.is_empty() && (text.starts_with(mark) || mark.starts_with(text));
        self.format.may_be_bare() && text.starts_with(bracket) && !may_be_mark
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

    /// Ends a call whose JSON is at `start..end` of the held text.
    fn end_call(&mut self, start: usize, end: usize, is_bare: bool, out: &mut Vec<Piece>) {
        let calls = json::calls(&self.held[start..end], self.format.bracket() == '[');
        match calls.filter(|calls| !is_bare || calls.iter().all(|call| self.names.contains(&call.name))) {
            Some(calls) => {
                out.extend(calls.into_iter().map(Piece::Call));
                self.held.drain(..end);
                self.has_calls = true;
                self.state = State::Close;
            }
            None => {
                self.give(end, out);
                self.state = State::Open { is_fresh: false };
            }
        }
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
