//! Qwen v1's tokenizer: `qwen.tiktoken`, whose lines have a token's bytes in base64 and its rank, which is its id.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, Tokenizer};

use super::byte_level::{PreTokenizer, byte_of_char};
use crate::error::{Error, Result};
use crate::types::TokenId;

/// Special tokens, whose ids follow the ranks. Behind them are the [`EXTRAS`].
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// How many special tokens are named `<|extra_0|>` and so on.
const EXTRAS: usize = 205;

/// The ranks of a vocabulary in tiktoken's form.
pub struct TiktokenRanks {
    /// The bytes of each token, by its rank.
    tokens: Vec<Vec<u8>>,
}

impl TiktokenRanks {
    /// # Errors
    /// `Config` naming the file and the line that is not a token of its own and the line's rank, or a byte without a
    /// token.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
        Self::parse(&text).map_err(|what| Error::Config(format!("{}: {what}", path.display())))
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        let token = |(rank, line): (usize, &str)| {
            let (token, written) = line.split_once(' ')?;
            let token = BASE64_STANDARD.decode(token).ok().filter(|token| !token.is_empty())?;
            (written.parse() == Ok(rank)).then_some(token)
        };
        let read = |(rank, line)| {
            token((rank, line)).ok_or_else(|| format!("line {} is not a token in base64 and the rank {rank}", rank + 1))
        };
        let this = Self { tokens: text.lines().enumerate().map(read).collect::<std::result::Result<_, _>>()? };
        let ranks = this.by_token();
        if let Some(rank) = (0..this.tokens.len()).find(|&rank| ranks[this.tokens[rank].as_slice()] as usize != rank) {
            return Err(format!("the token of line {} is there twice", rank + 1));
        }
        match (0..=u8::MAX).find(|&byte| !ranks.contains_key([byte].as_slice())) {
            Some(byte) => Err(format!("no token is the byte {byte:#04x} alone")),
            None => Ok(this),
        }
    }

    /// The id of a special token.
    pub fn special(&self, token: &str) -> Option<TokenId> {
        let index = specials().position(|special| special == token)?;
        Some((self.tokens.len() + index) as TokenId)
    }

    /// The tokenizer of Qwen v1 with this vocabulary.
    ///
    /// # Errors
    /// `Config` if the `tokenizers` crate rejects the vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let fail = |e: tokenizers::Error| Error::Config(format!("the vocabulary in tiktoken's form: {e}"));
        let char_of = char_of_byte();
        let spelled = |bytes: &[u8]| bytes.iter().map(|byte| char_of[usize::from(*byte)]).collect::<String>();
        let ranks = self.by_token();
        let vocab: Vocab = self.tokens.iter().zip(0..).map(|(token, rank)| (spelled(token), rank)).collect();
        let merge = |token: &Vec<u8>| {
            let (left, right) = token.split_at(last_merge(token, &ranks)?);
            Some((spelled(left), spelled(right)))
        };
        let merges: Merges = self.tokens.iter().filter_map(merge).collect();
        // tiktoken takes a piece that is a token as it is, whether merges lead to it or not.
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build().map_err(fail)?;
        let mut tokenizer = Tokenizer::new(bpe);
        PreTokenizer::Qwen2.install(&mut tokenizer).map_err(fail)?;
        // The original looks for special tokens in the normalized text.
        let added = specials().map(|token| AddedToken::from(token, true).normalized(true));
        tokenizer.add_tokens(added).map_err(fail)?;
        Ok(tokenizer)
    }

    fn by_token(&self) -> HashMap<&[u8], u32> {
        self.tokens.iter().map(Vec::as_slice).zip(0..).collect()
    }
}

/// All special tokens, in the order of their ids.
fn specials() -> impl Iterator<Item = String> {
    SPECIALS.into_iter().map(str::to_string).chain((0..EXTRAS).map(|index| format!("<|extra_{index}|>")))
}

/// Where a token is divided into the two that are merged last, if tiktoken's algorithm makes it of its bytes: it merges
/// the leftmost adjacent pair of the lowest rank again and again. `None` for a byte.
fn last_merge(token: &[u8], ranks: &HashMap<&[u8], u32>) -> Option<usize> {
    let mut borders: Vec<usize> = (0..=token.len()).collect();
    while borders.len() > 3 {
        let rank = |(pair, ends): (usize, &[usize])| Some((ranks.get(&token[ends[0]..ends[2]])?, pair));
        let (_, pair) = borders.windows(3).enumerate().filter_map(rank).min()?;
        borders.remove(pair + 1);
    }
    (borders.len() == 3).then(|| borders[1])
}

/// GPT-2's character for each byte.
fn char_of_byte() -> [char; 256] {
    let mut table = ['\0'; 256];
    for (c, byte) in ('\0'..).zip(byte_of_char()) {
        if let Some(byte) = byte {
            table[usize::from(byte)] = c;
        }
    }
    table
}

#[cfg(test)]
mod tests;
