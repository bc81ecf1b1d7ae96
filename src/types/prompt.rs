//! The input of a sequence: token ids, and the media that some of them stand for.

use std::ops::Range;
use std::sync::Arc;

use super::{TokenId, TokenLogprobs};

/// Tokens to continue or to score, with the media (images) behind their placeholder tokens. A clone shares all lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Arc<[TokenId]>,
    /// Ascending by placeholder range, ranges disjoint and inside `tokens`. Empty for a prompt of text.
    pub media: Arc<[MediaItem]>,
    /// Tokens whose log-probabilities are reported beside those of the prompt's last tokens: the last row beside the
    /// last token, the row before it beside the token before, and so on. Fewer rows than tokens.
    pub logprob_token_ids: Arc<[Vec<TokenId>]>,
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
        Self { tokens: tokens.into(), ..Self::default() }
    }

    /// Index of the first token that predicts one with a row of `logprob_token_ids`.
    pub fn first_with_row(&self) -> usize {
        self.tokens.len().saturating_sub(1 + self.logprob_token_ids.len())
    }

    /// The row of `logprob_token_ids` that belongs to the token after the one with this index; empty if there is none.
    pub fn row_after(&self, index: usize) -> &[TokenId] {
        let row = index.checked_sub(self.first_with_row()).and_then(|row| self.logprob_token_ids.get(row));
        row.map_or(&[], Vec::as_slice)
    }

    /// Takes the log-probabilities of `logprob_token_ids` out of those of the prompt's last tokens, row by row.
    pub fn take_rows(&self, logprobs: &mut [TokenLogprobs]) -> Vec<Vec<(TokenId, f32)>> {
        let first = logprobs.len().saturating_sub(self.logprob_token_ids.len());
        let rows = self.logprob_token_ids.iter().zip(&mut logprobs[first..]);
        rows.map(|(row, token)| token.top.split_off(token.top.len().saturating_sub(row.len()))).collect()
    }

    /// Rotary positions of the tokens with these indices, counted from the start of the prompt through its completion.
    /// In all supported models the position is the index; the index alone determines the slot and the tokens to attend
    /// to.
    pub fn positions(&self, indices: Range<usize>) -> impl Iterator<Item = u32> {
        indices.map(|index| index as u32)
    }

    /// Size on the heap of the lists, which all clones share, in bytes.
    pub fn heap_bytes(&self) -> usize {
        let rows = self.logprob_token_ids.iter().map(|row| size_of_val(row) + size_of_val(&row[..])).sum::<usize>();
        size_of_val(&self.tokens[..]) + size_of_val(&self.media[..]) + rows
    }
}
