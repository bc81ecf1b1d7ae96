//! The input of a sequence: token ids, and the media that some of them stand for.

use std::ops::Range;
use std::sync::Arc;

use super::TokenId;

/// Tokens to continue or to score, with the media (images) behind their placeholder tokens. A clone shares both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Arc<[TokenId]>,
    /// Ascending by placeholder range, ranges disjoint and inside `tokens`. Empty for a prompt of text.
    pub media: Arc<[MediaItem]>,
}

/// One image, or other content that is not text, and where a prompt refers to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaItem {
    /// SHA-256 of the content as the model sees it.
    pub hash: [u8; 32],
    /// Indices of its placeholder tokens in the prompt. The content's embeddings replace theirs.
    pub placeholders: Range<usize>,
}

impl Prompt {
    /// A prompt of text alone.
    pub fn from_tokens(tokens: impl Into<Arc<[TokenId]>>) -> Self {
        Self { tokens: tokens.into(), media: Arc::default() }
    }

    /// Rotary positions of the tokens with these indices, counted from the start of the prompt through its completion.
    /// In all supported models the position is the index; the index alone determines the slot and the tokens to attend
    /// to.
    pub fn positions(&self, indices: Range<usize>) -> impl Iterator<Item = u32> {
        indices.map(|index| index as u32)
    }

    /// Size on the heap of the lists, which all clones share, in bytes.
    pub fn heap_bytes(&self) -> usize {
        size_of_val(&self.tokens[..]) + size_of_val(&self.media[..])
    }
}
