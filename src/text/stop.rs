//! Finds stop strings while the text arrives in pieces.

use std::sync::Arc;

/// The stop strings of a request, prepared for searching and shared by its samples.
#[derive(Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// Entry i is the length of the longest proper prefix of `bytes[..=i]` that is also its suffix (Knuth, Morris,
    /// Pratt 1977).
    fallback: Vec<usize>,
}

/// Searches the text of one sample for the stop strings of its request.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Arc<StopStrings>,
    /// For each stop string, the length of its longest prefix that the text ends with.
    matched: Vec<usize>,
    text_len: usize,
}

impl StopStrings {
    /// Prepares the strings. None of them may be empty.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Self {
        Self { patterns: strings.iter().map(|s| Pattern::new(s.as_ref().as_bytes())).collect() }
    }

    /// Approximate memory of the prepared strings, in bytes.
    pub fn bytes_for<S: AsRef<str>>(strings: &[S]) -> usize {
        let of_text = |s: &S| s.as_ref().len() * (1 + size_of::<usize>());
        strings.iter().map(|s| size_of::<Pattern>() + of_text(s)).sum()
    }
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        assert!(!bytes.is_empty(), "a stop string is not empty");
        let mut pattern = Self { bytes: bytes.to_vec(), fallback: vec![0] };
        for &byte in &bytes[1..] {
            let longest = *pattern.fallback.last().expect("starts with one entry");
            let next = pattern.advance(longest, byte);
            pattern.fallback.push(next);
        }
        pattern
    }

    /// Number of bytes of the pattern that the text ends with after `byte`, if it ended with `matched` of them before.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.fallback[matched - 1];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

impl StopMatcher {
    pub fn new(stops: Arc<StopStrings>) -> Self {
        let matched = vec![0; stops.patterns.len()];
        Self { stops, matched, text_len: 0 }
    }

    /// Takes the next piece of text. If a stop string ends in it, returns the byte length of the whole text before that
    /// stop string: the one that ends first or, if several end there, the longest. Must not be called after that.
    pub fn push(&mut self, delta: &str) -> Option<usize> {
        for byte in delta.bytes() {
            self.text_len += 1;
            let mut longest = 0;
            for (pattern, matched) in self.stops.patterns.iter().zip(&mut self.matched) {
                *matched = pattern.advance(*matched, byte);
                if *matched == pattern.bytes.len() {
                    longest = longest.max(*matched);
                }
            }
            if longest > 0 {
                return Some(self.text_len - longest);
            }
        }
        None
    }

    /// Number of bytes at the end of the text that may be the beginning of a stop string. A stream must not send them
    /// yet.
    pub fn held_back(&self) -> usize {
        self.matched.iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
