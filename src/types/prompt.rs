//! The input of a sequence: token ids, and the images that some of them stand for.

use std::ops::Range;
use std::sync::Arc;

use super::{ForcedRouting, Picture, TokenId, TokenLogprobs};

/// Tokens to continue or to score, with the images behind their placeholder tokens. A clone shares all lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Arc<[TokenId]>,
    /// Ascending by placeholder range, ranges disjoint and inside `tokens`. Empty for a prompt of text.
    pub images: Arc<[PromptImage]>,
    /// Tokens whose log-probabilities are reported beside those of the prompt's last tokens: the last row beside the
    /// last token, the row before it beside the token before, and so on. Fewer rows than tokens.
    pub logprob_token_ids: Arc<[Vec<TokenId>]>,
    /// The experts that some of the tokens take, in place of those that the routers would choose.
    pub routing: Option<ForcedRouting>,
}

/// An image of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptImage {
    pub picture: Picture,
    /// Indices of its placeholder tokens in the prompt. The image's embeddings replace theirs.
    pub placeholders: Range<usize>,
    /// Rows and columns of its tokens, of which it has as many as placeholders.
    pub grid: [usize; 2],
    /// Rotary position of its first token, on all axes.
    first_position: usize,
}

impl Prompt {
    /// A prompt of text alone.
    pub fn from_tokens(tokens: impl Into<Arc<[TokenId]>>) -> Self {
        Self { tokens: tokens.into(), ..Self::default() }
    }

    /// A prompt with images: for each its picture, its placeholder tokens, and the rows and columns of these tokens.
    ///
    /// # Panics
    /// If the placeholders are not ascending, disjoint and inside `tokens`, or are not as many as an image's tokens.
    pub fn with_images(
        tokens: impl Into<Arc<[TokenId]>>,
        images: impl IntoIterator<Item = (Picture, Range<usize>, [usize; 2])>,
    ) -> Self {
        let mut prompt = Self::from_tokens(tokens);
        let mut placed: Vec<PromptImage> = Vec::new();
        for (picture, placeholders, grid) in images {
            let first = placed.last().map_or(0, |last| last.placeholders.end);
            let Range { start, end } = placeholders;
            assert!(first <= start && end <= prompt.tokens.len(), "placeholders {placeholders:?} are in their place");
            assert_eq!(placeholders.len(), grid[0] * grid[1], "placeholders of an image of {grid:?} tokens");
            let [first_position, ..] = position(&placed, start);
            placed.push(PromptImage { picture, placeholders, grid, first_position });
        }
        prompt.images = placed.into();
        prompt
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

    /// Rotary position of the token with this index, counted from the start of the prompt through its completion: time,
    /// row and column, as M-RoPE has them. The tokens of an image have the time of its first token, and their row and
    /// column are counted from it. The text after it begins behind the longer side of the image. All three are the
    /// index in a prompt of text. The index alone determines the slot and the tokens to attend to.
    pub fn position(&self, index: usize) -> [u32; 3] {
        position(&self.images, index).map(|position| position as u32)
    }

    /// Size on the heap of the lists, which all clones share, in bytes.
    pub fn heap_bytes(&self) -> usize {
        let rows = self.logprob_token_ids.iter().map(|row| size_of_val(row) + size_of_val(&row[..])).sum::<usize>();
        let images = self.images.iter().map(|image| size_of_val(image) + image.picture.rgb().len()).sum::<usize>();
        let routing = self.routing.as_ref().map_or(0, ForcedRouting::heap_bytes);
        size_of_val(&self.tokens[..]) + images + rows + routing
    }
}

/// Rotary position of the token with this index, in a prompt that has these images before it or around it.
fn position(images: &[PromptImage], index: usize) -> [usize; 3] {
    let behind = images.partition_point(|image| image.placeholders.start <= index);
    let Some(image) = images[..behind].last() else { return [index; 3] };
    let (first, [rows, columns]) = (image.first_position, image.grid);
    if index < image.placeholders.end {
        let offset = index - image.placeholders.start;
        return [first, first + offset / columns, first + offset % columns];
    }
    [first + rows.max(columns) + index - image.placeholders.end; 3]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(tokens: [usize; 2]) -> Picture {
        let [height, width] = tokens.map(|side| side as u32);
        Picture::new("image", width, height, 1, vec![0; tokens[0] * tokens[1] * 3]).unwrap()
    }

    #[test]
    fn positions_count_an_image_by_its_sides() {
        let images = [(picture([2, 3]), 2..8, [2, 3]), (picture([1, 2]), 8..10, [1, 2])];
        let prompt = Prompt::with_images(vec![0; 11], images);
        let positions: Vec<[u32; 3]> = (0..13).map(|index| prompt.position(index)).collect();
        let first = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
        let second = [[5, 5, 5], [5, 5, 6]];
        let text = |positions: std::ops::Range<u32>| positions.map(|position| [position; 3]).collect::<Vec<_>>();
        assert_eq!(positions, [text(0..2), first.to_vec(), second.to_vec(), text(7..10)].concat());
        assert_eq!(Prompt::from_tokens(vec![1, 2]).position(5), [5; 3]);
    }
}
