//! The parts of a sample's message: its reasoning first, then contents and calls of tools.

use crate::text::{Piece, ReasoningParser, ToolParser};
use crate::types::{ToolCallCounts, ToolFormat};

/// Finds the parts of one sample's message while its text arrives. Only the text behind the reasoning is searched for
/// calls.
#[derive(Clone, Default)]
pub(super) struct MessageParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl MessageParser {
    pub(super) fn new(reasoning: Option<ReasoningParser>, tools: Option<ToolParser>) -> Self {
        Self { reasoning, tools }
    }

    /// Takes the next piece of text, and appends the parts that it completes to `out`. Without any parser the text is a
    /// part, even if it is empty.
    pub(super) fn push(&mut self, text: String, out: &mut Vec<Piece>) {
        let Some(reasoning) = &mut self.reasoning else { return self.answer(Piece::Content(text), out) };
        let mut found = Vec::new();
        reasoning.push(&text, &mut found);
        found.into_iter().for_each(|piece| self.answer(piece, out));
    }

    /// Appends the rest at the end of the text. Returns what has become of the calls, if it was searched for any.
    pub(super) fn finish(mut self, out: &mut Vec<Piece>) -> Option<(ToolFormat, ToolCallCounts)> {
        let mut found = Vec::new();
        if let Some(reasoning) = self.reasoning.take() {
            reasoning.finish(&mut found);
        }
        found.into_iter().for_each(|piece| self.answer(piece, out));
        self.tools.map(|tools| (tools.format(), tools.finish(out)))
    }

    /// Searches a content for calls.
    fn answer(&mut self, piece: Piece, out: &mut Vec<Piece>) {
        match (piece, &mut self.tools) {
            (Piece::Content(text), Some(tools)) => tools.push(&text, out),
            (piece, _) => out.push(piece),
        }
    }
}
