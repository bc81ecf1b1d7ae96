//! The state of a sample until it ends.

use std::time::Instant;

use super::rescoring::Recomputed;
use super::text::SampleText;
use crate::types::{TokenLogprobs, WeightVersion};

/// A sample that has not ended.
pub(super) struct Sample {
    pub seed: u64,
    pub prompt_tokens: usize,
    pub cached_tokens: u32,
    pub tokens: Vec<TokenLogprobs>,
    /// Versions of the policies that made the tokens, as `(version, start, end)` over `tokens`.
    pub weight_versions: Vec<(WeightVersion, u32, u32)>,
    /// The experts of the tokens but the last one, if they are returned.
    pub routing: Vec<u8>,
    /// The sample's text, if the request has stop strings or asks for text.
    pub text: Option<SampleText>,
    /// Times of its first and last token.
    pub span: Option<(Instant, Instant)>,
    /// Size in bytes of its grammar state.
    pub grammar_bytes: usize,
    /// The log-probabilities of its first tokens under a policy that has computed them again.
    pub recomputed: Recomputed,
}

impl Sample {
    pub fn new(seed: u64, prompt_tokens: usize, text: Option<SampleText>) -> Self {
        Self {
            seed,
            prompt_tokens,
            cached_tokens: 0,
            tokens: Vec::new(),
            weight_versions: Vec::new(),
            routing: Vec::new(),
            text,
            span: None,
            grammar_bytes: 0,
            recomputed: Recomputed::default(),
        }
    }

    /// Bytes of text that the sample holds.
    pub fn text_bytes(&self) -> usize {
        self.text.as_ref().map_or(0, SampleText::bytes)
    }

    /// Adds a token that the policy `version` made.
    pub fn push(&mut self, logprobs: TokenLogprobs, version: WeightVersion) {
        let start = self.tokens.len() as u32;
        match self.weight_versions.last_mut() {
            Some((last, _, end)) if *last == version => *end = start + 1,
            _ => self.weight_versions.push((version, start, start + 1)),
        }
        self.tokens.push(logprobs);
    }
}
