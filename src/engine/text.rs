//! The text of a sample, made once while its tokens come: for stop strings, for streamed pieces and for the completion.

use std::sync::Arc;

use crate::text::{IncrementalDetokenizer, StopMatcher, StopStrings, Tokenizer};
use crate::types::TokenId;

/// Turns the tokens of one sample into text and searches that for stop strings. Special tokens are no part of the text.
#[derive(Clone)]
pub(super) struct SampleText {
    detokenizer: IncrementalDetokenizer,
    matcher: StopMatcher,
    /// Whether the client gets the text. If not, it is only searched, and not kept.
    is_returned: bool,
    /// The complete characters so far; only those of the last token if the text is not returned.
    text: String,
    /// Byte length of the text that [`SampleText::next_piece`] has given.
    streamed: usize,
    /// Byte length of the text before the stop string, once there is one.
    stop: Option<usize>,
}

/// The text of a sample that has ended.
#[derive(Debug, PartialEq)]
pub(super) struct FinishedText {
    pub whole: String,
    /// Byte length of the beginning of `whole` that [`SampleText::next_piece`] has given.
    streamed: usize,
}

impl FinishedText {
    /// The end of the text that [`SampleText::next_piece`] has not given; may be empty.
    pub fn rest(&self) -> &str {
        &self.whole[self.streamed..]
    }
}

impl SampleText {
    pub fn new(tokenizer: &Arc<Tokenizer>, stop_strings: &[String], is_returned: bool) -> Self {
        Self {
            detokenizer: IncrementalDetokenizer::new(tokenizer.clone(), true),
            matcher: StopMatcher::new(Arc::new(StopStrings::new(stop_strings))),
            is_returned,
            text: String::new(),
            streamed: 0,
            stop: None,
        }
    }

    /// Takes the next token and returns whether it completes a stop string. No token follows one that does.
    pub fn push(&mut self, token: TokenId) -> bool {
        if !self.is_returned {
            self.text.clear();
        }
        let start = self.text.len();
        self.detokenizer.push(token, &mut self.text);
        self.stop = self.matcher.push(&self.text[start..]);
        self.stop.is_some()
    }

    /// What the last tokens have added to a streamed text: complete characters, none of which belongs to a stop string
    /// or may turn out to. `None` if the text is not returned.
    pub fn next_piece(&mut self) -> Option<String> {
        if !self.is_returned {
            return None;
        }
        let end = self.stop.unwrap_or_else(|| self.text.len() - self.matcher.held_back());
        let piece = self.text[self.streamed..end].to_owned();
        self.streamed = end;
        Some(piece)
    }

    /// Ends the text: before the stop string if that is what `stopped` the sample, else with U+FFFD for a character
    /// that was not completed. `None` if the text is not returned.
    pub fn finish(mut self, stopped: bool) -> Option<FinishedText> {
        if !self.is_returned {
            return None;
        }
        match self.stop {
            Some(len) if stopped => self.text.truncate(len),
            _ => self.detokenizer.finish(&mut self.text),
        }
        Some(FinishedText { whole: self.text, streamed: self.streamed })
    }

    /// Bytes of text that are kept.
    pub fn bytes(&self) -> usize {
        if self.is_returned { self.text.len() } else { 0 }
    }
}

#[cfg(test)]
mod tests;
