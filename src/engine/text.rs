//! The text of a sample, made once while its tokens arrive: for stop strings, streamed pieces and the completion.

use std::sync::Arc;

use crate::text::{IncrementalDetokenizer, StopMatcher, StopStrings, Tokenizer};
use crate::types::{SamplingParams, TokenId};

/// Turns the tokens of one sample into text, and searches the text for stop strings.
#[derive(Clone)]
pub(super) struct SampleText {
    detokenizer: IncrementalDetokenizer,
    matcher: StopMatcher,
    /// Whether the client gets the text. Otherwise the text is only searched, and not kept.
    is_returned: bool,
    /// The complete characters so far; only those of the last token if the text is not returned.
    text: String,
    /// Byte length of the text that [`SampleText::next_piece`] has returned.
    streamed: usize,
    /// Byte length of the text before the stop string, once a token has completed one.
    stop: Option<usize>,
}

/// The text of a sample that has ended.
#[derive(Debug, PartialEq)]
pub(super) struct FinishedText {
    pub whole: String,
    /// Length in bytes of the part of `whole` that [`SampleText::next_piece`] has returned.
    streamed: usize,
}

impl FinishedText {
    /// The end of the text that [`SampleText::next_piece`] has not returned; may be empty.
    pub fn rest(&self) -> &str {
        &self.whole[self.streamed..]
    }
}

impl SampleText {
    pub fn new(tokenizer: &Arc<Tokenizer>, params: &SamplingParams, is_returned: bool) -> Self {
        Self {
            detokenizer: IncrementalDetokenizer::new(tokenizer.clone(), params.skip_special_tokens),
            matcher: StopMatcher::new(Arc::new(StopStrings::new(&params.stop_strings))),
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

    /// The next piece of a streamed text: complete characters that do not belong to a stop string and cannot become
    /// part of one. `None` if the client does not get the text.
    pub fn next_piece(&mut self) -> Option<String> {
        if !self.is_returned {
            return None;
        }
        let end = self.stop.unwrap_or_else(|| self.text.len() - self.matcher.held_back());
        let piece = self.text[self.streamed..end].to_owned();
        self.streamed = end;
        Some(piece)
    }

    /// Ends the text: before the stop string if one `stopped` the sample, else with U+FFFD for an incomplete character.
    /// `None` if the client does not get the text.
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

    /// Bytes of text that the sample holds.
    pub fn bytes(&self) -> usize {
        if self.is_returned { self.text.len() } else { 0 }
    }
}

#[cfg(test)]
mod tests;
