//! Calls as Qwen3-Coder and Qwen3.5 write them: `<function=name><parameter=key>value</parameter></function>`.

use std::ops::Range;

use super::parameters::arguments;
use super::{KnownTool, ToolCall};

pub(super) const OPEN: &str = "<function=";
const CLOSE: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const CALL_END: &str = "</tool_call>";

/// Finds the end of a function while its text arrives.
///
/// A value may have these marks in its text, as code has. It ends at the `</parameter>` before the next parameter or
/// the end of the function, or, if the model has left that out, before `</function></tool_call>`.
#[derive(Clone, Debug)]
pub(super) struct FunctionScan {
    /// Index of the next byte to look at.
    at: usize,
    part: Part,
    name: Range<usize>,
    /// Key and value of each parameter so far.
    parameters: Vec<(Range<usize>, Range<usize>)>,
    /// Whether the text until `at` is a function.
    is_whole: bool,
}

/// The part of a function that begins at an index of the text, or the one between parameters.
#[derive(Clone, Copy, Debug)]
enum Part {
    Name { start: usize },
    Between,
    Key { start: usize },
    Value { start: usize },
}

/// Whether a text that still arrives begins with a mark.
#[derive(PartialEq)]
enum Begins {
    Yes,
    No,
    /// The text is the beginning of the mark.
    Perhaps,
}

fn begins(text: &str, mark: &str) -> Begins {
    match text.starts_with(mark) {
        true => Begins::Yes,
        false if mark.starts_with(text) => Begins::Perhaps,
        false => Begins::No,
    }
}

impl FunctionScan {
    /// Searches for the end of the function whose opening mark begins at index `start` of the text.
    pub(super) fn from(start: usize) -> Self {
        let at = start + OPEN.len();
        Self { at, part: Part::Name { start: at }, name: at..at, parameters: Vec::new(), is_whole: false }
    }

    /// The index after the function's last byte, or where it turns out not to be a function, if `text` has that byte.
    /// `text` must begin with the text of the last call.
    pub(super) fn find(&mut self, text: &str) -> Option<usize> {
        loop {
            let goes_on = match self.part {
                Part::Name { start } => self.named(text, start, |scan, name| {
                    scan.name = name;
                    scan.part = Part::Between;
                }),
                Part::Key { start } => self.named(text, start, |scan, key| {
                    let start = scan.at;
                    scan.parameters.push((key, start..start));
                    scan.part = Part::Value { start };
                }),
                Part::Between => self.between(text),
                Part::Value { start } => self.value(text, start),
            }?;
            if !goes_on {
                return Some(self.at);
            }
        }
    }

    /// The call, if the text until the end that was found is a function.
    pub(super) fn call(&self, text: &str, tools: &[KnownTool]) -> Option<ToolCall> {
        let name = &text[self.name.clone()];
        if !self.is_whole || name.is_empty() {
            return None;
        }
        let parameters = self.parameters.iter().map(|(key, value)| (&text[key.clone()], &text[value.clone()]));
        let tool = tools.iter().find(|tool| tool.name == name);
        Some(ToolCall { name: name.to_owned(), arguments: arguments(parameters, tool) })
    }

    /// Looks for the end of a name that begins at `start`. Returns None if it needs more text, and false if there is
    /// no name.
    fn named(&mut self, text: &str, start: usize, take: fn(&mut Self, Range<usize>)) -> Option<bool> {
        let Some(len) = text[self.at..].find(['>', '<', '\n']) else {
            self.at = text.len();
            return None;
        };
        let end = self.at + len;
        self.at = end;
        let is_named = text[end..].starts_with('>');
        if is_named {
            self.at += 1;
            take(self, start..end);
        }
        Some(is_named)
    }

    fn between(&mut self, text: &str) -> Option<bool> {
        let rest = text[self.at..].trim_start();
        self.at = text.len() - rest.len();
        match [PARAMETER, CLOSE].map(|mark| begins(rest, mark)) {
            [Begins::Yes, _] => {
                self.at += PARAMETER.len();
                self.part = Part::Key { start: self.at };
                Some(true)
            }
            [_, Begins::Yes] => {
                self.at += CLOSE.len();
                self.is_whole = true;
                Some(false)
            }
            [Begins::No, Begins::No] => Some(false),
            _ => None,
        }
    }

    /// Looks for the end of a value that begins at `start`.
    fn value(&mut self, text: &str, start: usize) -> Option<bool> {
        while let Some(len) = text[self.at..].find("</") {
            self.at += len;
            let rest = &text[self.at..];
            let ends =
                [(PARAMETER_END, &[PARAMETER, CLOSE][..]), (CLOSE, &[CALL_END])].map(|(mark, next)| {
                    match begins(rest, mark) {
                        Begins::Yes => {
                            let behind = rest[mark.len()..].trim_start();
                            let found = next.iter().map(|next| begins(behind, next));
                            found.reduce(|a, b| if a == Begins::No { b } else { a }).unwrap_or(Begins::No)
                        }
                        other => other,
                    }
                });
            let end = match ends {
                [Begins::Yes, _] => PARAMETER_END.len(),
                // Something stands between the parameter and the function's end.
                [_, Begins::Yes] if text[start..self.at].contains(PARAMETER_END) => return Some(false),
                [_, Begins::Yes] => 0,
                [Begins::No, Begins::No] => {
                    self.at += "</".len();
                    continue;
                }
                _ => return None,
            };
            if let Some((_, value)) = self.parameters.last_mut() {
                *value = trimmed(text, start..self.at);
            }
            self.at += end;
            self.part = Part::Between;
            return Some(true);
        }
        self.at = text.len() - usize::from(text[self.at..].ends_with('<'));
        None
    }
}

/// A value without the line feeds that its marks stand on.
fn trimmed(text: &str, Range { mut start, mut end }: Range<usize>) -> Range<usize> {
    start += usize::from(text[start..end].starts_with('\n'));
    end -= usize::from(text[start..end].ends_with('\n'));
    start..end
}
