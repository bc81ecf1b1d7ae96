//! A set of tokens, one bit each.

use std::fmt;
use std::sync::Arc;

use super::TokenId;

/// The tokens that may come next. A clone shares the bits.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenMask(Arc<[u32]>);

impl TokenMask {
    /// The set of the tokens whose bits are set: bit `i % 32` of word `i / 32` belongs to token i. The set has no
    /// tokens beyond the words.
    pub fn from_words(words: impl Into<Arc<[u32]>>) -> Self {
        Self(words.into())
    }

    pub fn words(&self) -> &[u32] {
        &self.0
    }

    pub fn contains(&self, token: TokenId) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The set with `tokens` added.
    pub fn with(&self, tokens: &[TokenId]) -> Self {
        let mut words = self.0.to_vec();
        for token in tokens {
            let word = *token as usize / 32;
            words.resize(words.len().max(word + 1), 0);
            words[word] |= 1 << (token % 32);
        }
        Self::from_words(words)
    }

    /// The tokens of the set, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> {
        let of_word = |(first, &word): (TokenId, &u32)| {
            let bits = std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
                .take_while(|rest| *rest != 0);
            bits.map(move |rest| first + rest.trailing_zeros())
        };
        (0..).step_by(32).zip(&*self.0).flat_map(of_word)
    }
}

impl fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenMask of {} tokens", self.0.iter().map(|word| word.count_ones()).sum::<u32>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_those_whose_bits_are_set() {
        let mask = TokenMask::from_words([1 << 3 | 1 << 31, 0, 1, u32::MAX]);
        let expected: Vec<TokenId> = [3, 31, 64].into_iter().chain(96..128).collect();
        assert_eq!(mask.tokens().collect::<Vec<_>>(), expected);
        assert_eq!((0..200).filter(|token| mask.contains(*token)).collect::<Vec<_>>(), expected);
        assert_eq!(TokenMask::from_words([]).tokens().next(), None);
        let more = TokenMask::from_words([1 << 3]).with(&[3, 0, 70]);
        assert_eq!(more.tokens().collect::<Vec<_>>(), [0, 3, 70]);
    }
}
