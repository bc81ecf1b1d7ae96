//! An index of a group's tokens, by which the earlier continuations of a context are found.

use std::collections::HashMap;

use crate::types::TokenId;

/// Tokens before a place by which it is looked up. One alone would be found everywhere and say little.
const KEY_TOKENS: usize = 2;

/// Most tokens of a context that are compared.
pub const LONGEST: usize = 8;

/// Most places with the same key that a lookup compares, the latest first.
const MOST_PLACES: usize = 32;

/// Most tokens that an index takes, about 2 MB of memory. Tokens that come later are not found.
pub const MOST_TOKENS: usize = 1 << 15;

/// The tokens of one group. Its prompt is a stream of tokens, and so is each of its samples.
#[derive(Debug, Default)]
pub struct NgramIndex {
    streams: Vec<Stream>,
    /// The latest place with each key.
    latest: HashMap<[TokenId; KEY_TOKENS], StreamPlace>,
    num_tokens: usize,
}

#[derive(Debug, Default)]
struct Stream {
    tokens: Vec<TokenId>,
    /// For each token's place, the place before it with the same key.
    earlier: Vec<Option<StreamPlace>>,
}

/// The place of a token in a stream. Its key is the [`KEY_TOKENS`] tokens before it.
#[derive(Clone, Copy, Debug)]
struct StreamPlace {
    stream: u32,
    offset: u32,
}

/// The tokens that followed an earlier context that ends like the one asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Number of tokens that both contexts end with, at most [`LONGEST`].
    pub matched: usize,
    pub tokens: Vec<TokenId>,
}

impl NgramIndex {
    /// Adds the new tokens of a stream. `tokens` is all of the stream, and begins with what it was at the last call.
    pub fn extend(&mut self, stream: usize, tokens: &[TokenId]) {
        if self.streams.len() <= stream {
            self.streams.resize_with(stream + 1, Stream::default);
        }
        let known = self.streams[stream].tokens.len();
        let new = &tokens[known.min(tokens.len())..];
        for &token in &new[..new.len().min(MOST_TOKENS - self.num_tokens)] {
            self.push(stream, token);
        }
    }

    fn push(&mut self, index: usize, token: TokenId) {
        let stream = &mut self.streams[index];
        let place = StreamPlace { stream: index as u32, offset: stream.tokens.len() as u32 };
        let key = stream.tokens.last_chunk::<KEY_TOKENS>();
        stream.earlier.push(key.and_then(|&key| self.latest.insert(key, place)));
        stream.tokens.push(token);
        self.num_tokens += 1;
    }

    /// Finds the place whose context has the most last tokens in common with `context`, and returns at most `limit`
    /// tokens that follow it. Of several such places, that with the most tokens to return is taken, then the latest.
    pub fn find(&self, context: &[TokenId], limit: usize) -> Option<Continuation> {
        let mut next = self.latest.get(context.last_chunk::<KEY_TOKENS>()?).copied();
        let mut best: Option<((usize, usize), StreamPlace)> = None;
        for _ in 0..MOST_PLACES {
            let Some(place) = next else { break };
            let value = self.value(place, context, limit);
            if best.is_none_or(|(other, _)| value > other) {
                best = Some((value, place));
            }
            if value == (LONGEST, limit) {
                break;
            }
            next = self.stream(place).earlier[place.offset as usize];
        }
        best.map(|((matched, len), place)| {
            let start = place.offset as usize;
            Continuation { matched, tokens: self.stream(place).tokens[start..start + len].to_vec() }
        })
    }

    /// Number of context tokens that match before a place, at most [`LONGEST`], and number of tokens from the place on,
    /// at most `limit`.
    fn value(&self, place: StreamPlace, context: &[TokenId], limit: usize) -> (usize, usize) {
        let (before, after) = self.stream(place).tokens.split_at(place.offset as usize);
        let pairs = before.iter().rev().zip(context.iter().rev()).take(LONGEST);
        (pairs.take_while(|(a, b)| a == b).count(), after.len().min(limit))
    }

    fn stream(&self, place: StreamPlace) -> &Stream {
        &self.streams[place.stream as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(index: &NgramIndex, context: &[TokenId], limit: usize) -> Option<(usize, Vec<TokenId>)> {
        index.find(context, limit).map(|c| (c.matched, c.tokens))
    }

    #[test]
    fn the_longest_context_wins_then_the_longest_continuation_then_the_latest() {
        let mut index = NgramIndex::default();
        index.extend(0, &[1, 2, 3, 4, 9, 2, 3, 5, 5]);
        index.extend(2, &[7, 2, 3, 6, 6]);
        assert_eq!(found(&index, &[1, 2, 3], 2), Some((3, vec![4, 9])));
        assert_eq!(found(&index, &[9, 2, 3], 1), Some((3, vec![5])));
        assert_eq!(found(&index, &[8, 2, 3], 2), Some((2, vec![6, 6])), "the latest");
        assert_eq!(found(&index, &[8, 2, 3], 3), Some((2, vec![4, 9, 2])), "the longest");
        assert_eq!(found(&index, &[3, 8], 3), None);
        assert_eq!(found(&index, &[3], 3), None, "too little to ask for");
        assert_eq!(found(&index, &[6, 6], 3), None, "nothing has come after it");
    }

    #[test]
    fn a_stream_grows_and_is_found_in_itself() {
        let mut index = NgramIndex::default();
        let tokens: Vec<TokenId> = (0..40).map(|i| i % 3).collect();
        for len in 0..tokens.len() {
            index.extend(0, &tokens[..len]);
            index.extend(0, &tokens[..len]);
        }
        index.extend(0, &tokens);
        assert_eq!(found(&index, &tokens, 4), Some((LONGEST, vec![1, 2, 0, 1])));
        assert_eq!(index.num_tokens, 40);
    }

    #[test]
    fn what_is_too_much_is_not_taken() {
        let mut index = NgramIndex::default();
        let tokens: Vec<TokenId> = (0..MOST_TOKENS as TokenId + 10).collect();
        index.extend(0, &tokens[..20]);
        index.extend(1, &tokens);
        index.extend(2, &tokens);
        assert_eq!(index.num_tokens, MOST_TOKENS);
        assert_eq!(found(&index, &[5, 6], 2), Some((2, vec![7, 8])));
        let last = MOST_TOKENS as TokenId - 20;
        assert_eq!(found(&index, &[last - 2, last - 1], 2), None);
    }
}
