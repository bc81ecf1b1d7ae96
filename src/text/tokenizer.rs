//! The model's tokenizer. The `tokenizers` crate turns text into ids; this module turns ids into bytes.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value as GgufValue;
use serde_json::Value;

use super::byte_level::byte_of_char;
use super::detokenizer::TextStream;
use super::gguf;
use super::tiktoken::TiktokenRanks;
use crate::error::{Error, Result};
use crate::types::TokenId;

/// The model's tokenizer. It is immutable; share it in an [`std::sync::Arc`].
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    spelling: Spelling,
    /// Entry i is the byte that the character U+i (below U+0144) stands for in a ByteLevel token.
    byte_of_char: Vec<Option<u8>>,
    max_bytes_per_token: Option<usize>,
}

/// How the string of a token encodes bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spelling {
    /// GPT-2's spelling: one character per byte.
    ByteLevel,
    /// SentencePiece's spelling: `▁` for a space, `<0xE6>` for a byte. `strips_space`: the text's leading space is
    /// dropped.
    ByteFallback { strips_space: bool },
}

impl Tokenizer {
    /// Reads the tokenizer from a `tokenizer.json`.
    ///
    /// # Errors
    /// `Config` if the file cannot be read, or if its decoder is neither ByteLevel nor SentencePiece's.
    pub fn from_file(tokenizer_json: &Path) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_file(tokenizer_json)
            .map_err(|e| Error::Config(format!("{}: {e}", tokenizer_json.display())))?;
        // Files may contain the settings of a training run; the server never truncates or pads a prompt.
        inner.with_truncation(None).map_err(|e| Error::Internal(e.to_string()))?;
        inner.with_padding(None);
        Self::new(inner)
    }

    /// Builds the tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`).
    ///
    /// # Errors
    /// `Config` if a key is missing, or names a tokenizer that is not supported.
    pub fn from_gguf(metadata: &HashMap<String, GgufValue>) -> Result<Self> {
        Self::new(gguf::tokenizer(metadata)?)
    }

    /// Builds the tokenizer from the ranks of Qwen v1's vocabulary.
    ///
    /// # Errors
    /// As for [`TiktokenRanks::tokenizer`].
    pub fn from_tiktoken(ranks: &TiktokenRanks) -> Result<Self> {
        Self::new(ranks.tokenizer()?)
    }

    fn new(inner: tokenizers::Tokenizer) -> Result<Self> {
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|e| Error::Internal(e.to_string()))?;
        let spelling = Spelling::of(&decoder)
            .ok_or_else(|| Error::Config(format!("unsupported decoder in the tokenizer: {decoder}")))?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let byte_of_char = byte_of_char();
        let mut tokenizer = Self { inner, vocab_size, spelling, byte_of_char, max_bytes_per_token: None };
        tokenizer.max_bytes_per_token = reach::max_bytes_per_token(&tokenizer)?;
        Ok(tokenizer)
    }

    /// Upper bound on the bytes of text per token; None if no bound is known.
    pub fn max_bytes_per_token(&self) -> Option<usize> {
        self.max_bytes_per_token
    }

    /// The ids of `text`. Special tokens that occur in it (`<|im_start|>`) become their ids. `add_special` adds the
    /// tokens that the model wants around a text (such as a beginning-of-sequence token); a rendered chat template
    /// already has them.
    ///
    /// # Errors
    /// `InvalidArgument` if the text cannot be tokenized.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|e| Error::invalid("text", format!("cannot be tokenized: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `tokens`. Bytes that are not UTF-8 become U+FFFD; ids without a token are left out.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let mut text = String::new();
        let mut stream = TextStream::new(self);
        for &token in tokens {
            stream.push(self, token, skip_special, &mut text);
        }
        stream.finish(&mut text);
        text
    }

    /// The highest token id plus one. The model may have more rows of logits.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// The string that stands for `token` in the vocabulary.
    pub fn id_to_token(&self, token: TokenId) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// The bytes that `token` stands for: the name of a special token; none for an id without a token.
    pub fn bytes(&self, token: TokenId) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.append_bytes(token, false, &mut bytes);
        bytes
    }

    /// Whether `token` is special, so that texts omit it.
    pub fn is_special(&self, token: TokenId) -> bool {
        let piece = self.inner.id_to_token(token);
        piece.is_some_and(|piece| self.inner.get_added_vocabulary().is_special_token(&piece))
    }

    /// Appends the bytes of `token` to `out`.
    pub(super) fn append_bytes(&self, token: TokenId, skip_special: bool, out: &mut Vec<u8>) {
        let Some(piece) = self.inner.id_to_token(token) else { return };
        if skip_special && self.inner.get_added_vocabulary().is_special_token(&piece) {
            return;
        }
        match self.spelling {
            Spelling::ByteLevel => {
                let start = out.len();
                for c in piece.chars() {
                    match self.byte_of_char.get(c as usize).copied().flatten() {
                        Some(byte) => out.push(byte),
                        None => {
                            // The character is outside the ByteLevel alphabet, so this is an added token, which stands
                            // for itself.
                            out.truncate(start);
                            return out.extend_from_slice(piece.as_bytes());
                        }
                    }
                }
            }
            Spelling::ByteFallback { .. } => match fallback_byte(&piece) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(piece.replace('▁', " ").as_bytes()),
            },
        }
    }

    /// Whether the decoder drops the leading space of a text.
    pub(super) fn strips_space(&self) -> bool {
        self.spelling == Spelling::ByteFallback { strips_space: true }
    }
}

impl Spelling {
    /// The spelling that the decoder of a `tokenizer.json` implies; `None` if it is not supported.
    fn of(decoder: &Value) -> Option<Self> {
        let steps = match decoder["type"].as_str()? {
            "Sequence" => decoder["decoders"].as_array()?.as_slice(),
            _ => std::slice::from_ref(decoder),
        };
        let kinds: Vec<&str> = steps.iter().map(|step| step["type"].as_str()).collect::<Option<_>>()?;
        match kinds[..] {
            ["ByteLevel"] => Some(Self::ByteLevel),
            ["Replace", "ByteFallback", "Fuse"] if replaces_underline(&steps[0]) => {
                Some(Self::ByteFallback { strips_space: false })
            }
            ["Replace", "ByteFallback", "Fuse", "Strip"] if replaces_underline(&steps[0]) => {
                let is_one_space = steps[3]["content"] == " " && steps[3]["start"] == 1 && steps[3]["stop"] == 0;
                is_one_space.then_some(Self::ByteFallback { strips_space: true })
            }
            _ => None,
        }
    }
}

fn replaces_underline(step: &Value) -> bool {
    step["pattern"]["String"] == "▁" && step["content"] == " "
}

/// The byte that a token like `<0x0A>` stands for.
fn fallback_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

mod reach;
#[cfg(test)]
mod tests;
