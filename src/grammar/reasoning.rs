//! The reasoning that may stand before the text that a grammar describes.

use crate::types::{TokenId, TokenMask};

/// Where a sample stands before the text of its grammar.
#[derive(Clone, Debug)]
pub(super) enum SparedReasoning {
    /// Its first token may open the reasoning. `mask` has that token, and those that begin the text.
    Possible { open: TokenId, close: TokenId, mask: TokenMask },
    /// It reasons until `close`.
    Open { close: TokenId },
    /// Only the text follows.
    Over,
}

impl SparedReasoning {
    /// Takes the sample's next token. Returns whether it belongs to the reasoning or closes it, so that the grammar
    /// must not see it.
    pub(super) fn takes(&mut self, token: TokenId) -> bool {
        match *self {
            Self::Possible { open, close, .. } => {
                *self = if token == open { Self::Open { close } } else { Self::Over };
                token == open
            }
            Self::Open { close } => {
                if token == close {
                    *self = Self::Over;
                }
                true
            }
            Self::Over => false,
        }
    }
}
