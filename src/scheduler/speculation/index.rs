//! Where a group has been before: its tokens, found by the two before them.

use std::collections::HashMap;

use crate::types::TokenId;

/// Tokens before a place that name it: one alone is found everywhere and says little.
const NAME: usize = 2;

/// Longest context that is compared.
pub const LONGEST: usize = 8;

/// Places of one name that are looked at, the latest first.
const MOST_PLACES: usize = 32;

/// Tokens that an index takes; what comes later is not found. With this many it has about 2 MB.
pub const MOST_TOKENS: usize = 1 << 15;

/// The tokens of a group: its prompt and each of its samples are a stream.
#[derive(Debug, Default)]
pub struct NgramIndex {
    streams: Vec<Stream>,
    /// The latest place with this name.
    latest: HashMap<[TokenId; NAME], Place>,
    num_tokens: usize,
}

#[derive(Debug, Default)]
struct Stream {
    tokens: Vec<TokenId>,
    /// For each place, the one before it with the same name.
    earlier: Vec<Option<Place>>,
}

/// A token of a stream; its name are the tokens before it.
#[derive(Clone, Copy, Debug)]
struct Place {
    stream: u32,
    offset: u32,
}

/// What came after a context that is like the one asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Tokens that both contexts end with, at most [`LONGEST`].
    pub matched: usize,
    pub tokens: Vec<TokenId>,
}

impl NgramIndex {
    /// Takes what is new of a stream; `tokens` is all of it, and starts with what it was before.
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
        let place = Place { stream: index as u32, offset: stream.tokens.len() as u32 };
        let name = stream.tokens.last_chunk::<NAME>();
        stream.earlier.push(name.and_then(|&name| self.latest.insert(name, place)));
        stream.tokens.push(token);
        self.num_tokens += 1;
    }

    /// The place whose context matches the end of `context` furthest; of several, one that at most `limit` tokens follow
    /// longest, then the latest.
    pub fn find(&self, context: &[TokenId], limit: usize) -> Option<Continuation> {
        let mut next = self.latest.get(context.last_chunk::<NAME>()?).copied();
        let mut best: Option<((usize, usize), Place)> = None;
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

    /// How far the context of a place matches, and how many tokens follow it.
    fn value(&self, place: Place, context: &[TokenId], limit: usize) -> (usize, usize) {
        let (before, after) = self.stream(place).tokens.split_at(place.offset as usize);
        let pairs = before.iter().rev().zip(context.iter().rev()).take(LONGEST);
        (pairs.take_while(|(a, b)| a == b).count(), after.len().min(limit))
    }

    fn stream(&self, place: Place) -> &Stream {
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
