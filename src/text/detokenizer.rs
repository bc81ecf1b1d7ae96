//! Incremental detokenization: tokens to text, one token at a time.

use std::sync::Arc;

use super::Tokenizer;
use crate::types::TokenId;

/// Turns tokens into text as they arrive. Bytes wait until their character is complete, so a piece never ends within a
/// character. The pieces together are the text that [`Tokenizer::decode`] returns for all tokens. The work per token is
/// constant.
#[derive(Clone)]
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    stream: TextStream,
}

impl IncrementalDetokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let stream = TextStream::new(&tokenizer);
        Self { tokenizer, skip_special, stream }
    }

    /// Appends the characters that `token` completes, if any, to `text`.
    pub fn push(&mut self, token: TokenId, text: &mut String) {
        self.stream.push(&self.tokenizer, token, self.skip_special, text);
    }

    /// Appends the rest after the last token: U+FFFD for an incomplete character.
    pub fn finish(&mut self, text: &mut String) {
        self.stream.finish(text);
    }
}

/// Bytes of tokens that have not become text.
#[derive(Clone)]
pub(super) struct TextStream {
    /// Bytes that wait: between calls at most three, the beginning of an incomplete character.
    pending: Vec<u8>,
    /// Whether the leading space of the text must still be dropped.
    strips_space: bool,
}

impl TextStream {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { pending: Vec::new(), strips_space: tokenizer.strips_space() }
    }

    pub fn push(&mut self, tokenizer: &Tokenizer, token: TokenId, skip_special: bool, text: &mut String) {
        tokenizer.append_bytes(token, skip_special, &mut self.pending);
        if self.strips_space && !self.pending.is_empty() {
            self.strips_space = false;
            if self.pending[0] == b' ' {
                self.pending.remove(0);
            }
        }
        let done = append_valid(&self.pending, text);
        self.pending.drain(..done);
    }

    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends the characters in `bytes` to `text`, with U+FFFD for each invalid sequence (as [`String::from_utf8_lossy`]
/// does). Returns the number of bytes used: all but an incomplete character at the end.
fn append_valid(bytes: &[u8], text: &mut String) -> usize {
    let mut start = 0;
    loop {
        let e = match std::str::from_utf8(&bytes[start..]) {
            Ok(valid) => {
                text.push_str(valid);
                return bytes.len();
            }
            Err(e) => e,
        };
        let valid = &bytes[start..start + e.valid_up_to()];
        text.push_str(std::str::from_utf8(valid).expect("valid up to here"));
        start += valid.len();
        match e.error_len() {
            Some(invalid) => {
                text.push(char::REPLACEMENT_CHARACTER);
                start += invalid;
            }
            None => return start,
        }
    }
}

#[cfg(test)]
mod tests;
