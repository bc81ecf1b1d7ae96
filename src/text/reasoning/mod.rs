//! Separates a model's reasoning from its answer, in the text of a sample that arrives in pieces.

use super::{Piece, Tokenizer};
use crate::types::TokenId;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Most white space before the mark that opens the reasoning. Models write at most a few line feeds.
const MAX_SPACE: usize = 64;
/// Most tokens of the prompt's last turn that are searched for marks. It is longer than the generation prompt only if
/// the answer continues a message.
const MAX_TURN: usize = 1 << 15;

/// How a text begins that follows a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningStart {
    /// With reasoning, even if it does not begin with `<think>`.
    Open,
    /// With reasoning if it begins with `<think>`.
    Possible,
    /// Without: the prompt has closed the reasoning.
    Closed,
}

/// When the text before `</think>` is reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// If `<think>` stands before it, at the end of the prompt or at the beginning of the text. A call of a tool ends
    /// the reasoning too.
    Marked,
    /// Also without `<think>`, unless the prompt closes the reasoning: DeepSeek-R1.
    DeepSeekR1,
    /// The same, and a call of a tool ends the reasoning too: Qwen3.
    Qwen3,
}

impl ReasoningFormat {
    /// The format of a model whose chat template has this source; None if the template knows no reasoning.
    pub fn of_template(source: &str) -> Option<Self> {
        source.contains(CLOSE).then_some(Self::Marked)
    }

    /// Whether the marks are in the texts of a model with this tokenizer, which leave special tokens out.
    pub fn has_marks(tokenizer: &Tokenizer) -> bool {
        [OPEN, CLOSE].into_iter().filter_map(|mark| tokenizer.token_to_id(mark)).all(|mark| !tokenizer.is_special(mark))
    }

    /// The tokens that open and close reasoning; None if a mark is not a token of its own.
    pub fn marks(tokenizer: &Tokenizer) -> Option<(TokenId, TokenId)> {
        tokenizer.token_to_id(OPEN).zip(tokenizer.token_to_id(CLOSE))
    }

    /// Whether a call of a tool ends the reasoning.
    pub fn ends_at_calls(self) -> bool {
        self != Self::DeepSeekR1
    }

    /// How a text begins that follows `prompt`.
    pub fn start_after(self, prompt: &[TokenId], tokenizer: &Tokenizer) -> ReasoningStart {
        let searched = &prompt[prompt.len().saturating_sub(MAX_TURN)..];
        // A turn begins with a special token.
        let start = searched.iter().rposition(|token| tokenizer.is_special(*token)).map_or(0, |at| at + 1);
        let turn = tokenizer.decode(&searched[start..], false);
        match (turn.rfind(OPEN), turn.rfind(CLOSE)) {
            (None, None) if self == Self::Marked => ReasoningStart::Possible,
            (open, close) if open < close => ReasoningStart::Closed,
            _ => ReasoningStart::Open,
        }
    }
}

/// Finds the tokens of one sample's reasoning.
#[derive(Clone, Debug)]
pub struct ReasoningTokens {
    /// The token that opens the reasoning.
    open: TokenId,
    /// The tokens that end it: the mark that closes it, and that of a call.
    ends: Vec<TokenId>,
    is_open: bool,
    is_over: bool,
}

impl ReasoningTokens {
    /// `is_open`: the sample begins with reasoning, even if it does not begin with `open`. The tokens `ends` end it.
    pub fn new(open: TokenId, ends: Vec<TokenId>, is_open: bool) -> Self {
        Self { open, ends, is_open, is_over: false }
    }

    /// Takes the sample's next token. Returns whether it belongs to the reasoning; the marks do not.
    pub fn takes(&mut self, token: TokenId) -> bool {
        if token == self.open {
            self.is_open = true;
            return false;
        }
        self.is_over |= self.is_open && self.ends.contains(&token);
        self.is_open && !self.is_over
    }
}

/// Separates the reasoning from the answer in the text of one sample. No text is lost but the marks, and the white
/// space before the first one.
#[derive(Clone, Debug)]
pub struct ReasoningParser {
    state: ReasoningState,
    /// The mark of a tool call, if it ends the reasoning; it belongs to the answer.
    call: Option<&'static str>,
    /// Text that has not been reported.
    held: String,
}

#[derive(Clone, Copy, Debug)]
enum ReasoningState {
    /// At the beginning of the text, where `<think>` may stand. `is_open`: the text is reasoning without it too.
    Fresh {
        is_open: bool,
    },
    Reasoning,
    Answer,
}

impl ReasoningParser {
    /// `is_open`: the text begins with reasoning, even if it does not begin with `<think>`. `call`: the mark of a tool
    /// call that ends the reasoning.
    pub fn new(is_open: bool, call: Option<&'static str>) -> Self {
        Self { state: ReasoningState::Fresh { is_open }, call, held: String::new() }
    }

    /// Takes the next piece of text, and appends the reasoning and the content that it completes to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        if let ReasoningState::Fresh { is_open } = self.state {
            self.begin(is_open);
        }
        if matches!(self.state, ReasoningState::Reasoning) {
            self.reason(out);
        }
        if matches!(self.state, ReasoningState::Answer) && !self.held.is_empty() {
            out.push(Piece::Content(std::mem::take(&mut self.held)));
        }
    }

    /// Appends the rest at the end of the text.
    pub fn finish(self, out: &mut Vec<Piece>) {
        match self.state {
            _ if self.held.is_empty() => {}
            ReasoningState::Fresh { is_open: false } | ReasoningState::Answer => out.push(Piece::Content(self.held)),
            ReasoningState::Fresh { is_open: true } | ReasoningState::Reasoning => {
                out.push(Piece::Reasoning(self.held))
            }
        }
    }

    /// Looks for the mark that opens the reasoning.
    fn begin(&mut self, is_open: bool) {
        let text = self.held.trim_start();
        let space = self.held.len() - text.len();
        if space <= MAX_SPACE && text.len() < OPEN.len() && OPEN.starts_with(text) {
            return;
        }
        self.state = match text.strip_prefix(OPEN) {
            Some(_) => {
                self.held.drain(..space + OPEN.len());
                ReasoningState::Reasoning
            }
            None if is_open => ReasoningState::Reasoning,
            None => ReasoningState::Answer,
        };
    }

    /// Looks for the end of the reasoning, and reports the reasoning before it.
    fn reason(&mut self, out: &mut Vec<Piece>) {
        let close = self.held.find(CLOSE).map(|at| (at, CLOSE.len()));
        let call = self.call.and_then(|call| self.held.find(call)).map(|at| (at, 0));
        let end = close.into_iter().chain(call).min();
        let len = end.map_or_else(|| self.held.len() - self.begun_mark(), |(at, _)| at);
        if len > 0 {
            out.push(Piece::Reasoning(self.held.drain(..len).collect()));
        }
        if let Some((_, mark)) = end {
            self.held.drain(..mark);
            self.state = ReasoningState::Answer;
        }
    }

    /// Length of the longest end of the held text that may be the beginning of a mark.
    fn begun_mark(&self) -> usize {
        let begun = |mark: &str| (1..mark.len()).rev().find(|&n| self.held.ends_with(&mark[..n])).unwrap_or(0);
        begun(CLOSE).max(self.call.map_or(0, begun))
    }
}

#[cfg(test)]
mod tests;
