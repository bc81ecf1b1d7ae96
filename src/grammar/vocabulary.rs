//! The model's vocabulary in llguidance's form.

use std::sync::Arc;

use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, api::ParserLimits};

use super::watchdog::Watchdog;
use crate::text::Tokenizer;
use crate::types::TokenId;

/// The tokens, and the parser factory that all grammars share.
pub(super) struct Vocabulary {
    pub factory: ParserFactory,
    /// Number of tokens. The id after the last one stands for the end: it is allowed where a text is complete.
    pub len: usize,
    pub watchdog: Watchdog,
}

impl Vocabulary {
    /// Collects the tokens that have both a text and one of the `logits` logits.
    ///
    /// # Errors
    /// llguidance's message.
    pub fn new(tokenizer: &Tokenizer, logits: usize, limits: ParserLimits) -> Result<Self, String> {
        let len = tokenizer.vocab_size().min(logits);
        let mut words: Vec<Vec<u8>> = (0..len as TokenId).map(|token| word(tokenizer, token)).collect();
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], &b"<|end of text|>"[..]].concat());
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, len as TokenId), &words);
        // The environment need not be canonical: a text may be cut into tokens in any way, not only as the tokenizer
        // does.
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|e| e.to_string())?;
        factory.quiet();
        *factory.limits_mut() = limits;
        let watchdog = Watchdog::start().map_err(|e| e.to_string())?;
        Ok(Self { factory, len, watchdog })
    }
}

/// The bytes that a token stands for. A special token has no text; a Lark grammar names it by the string after the
/// marker.
fn word(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    let bytes = tokenizer.bytes(token);
    match tokenizer.is_special(token) {
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat(),
        false => bytes,
    }
}
