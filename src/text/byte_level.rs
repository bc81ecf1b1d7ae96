//! Byte-level BPE: GPT-2's alphabet of bytes, and how the families that have it divide a text into pieces.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{Result, SplitDelimiterBehavior, Tokenizer};

/// How a text is divided into pieces, in each of which tokens are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PreTokenizer {
    Gpt2,
    /// GPT-2's pre-tokenizer, after a split at each digit.
    SmolLm,
    /// That of Qwen, from Qwen v1 on.
    Qwen2,
    Llama3,
}

impl PreTokenizer {
    /// Sets normalizer, pre-tokenizer and decoder to those in the family's tokenizer.json.
    pub fn install(self, tokenizer: &mut Tokenizer) -> Result<()> {
        let byte_level = |use_regex| ByteLevel::new(false, true, use_regex);
        let steps: Vec<PreTokenizerWrapper> = match self {
            Self::Gpt2 => vec![byte_level(true).into()],
            Self::SmolLm => vec![Digits::new(true).into(), byte_level(true).into()],
            Self::Qwen2 => vec![split(r"\p{N}")?, byte_level(false).into()],
            Self::Llama3 => vec![split(r"\p{N}{1,3}")?, byte_level(false).into()],
        };
        if self == Self::Qwen2 {
            tokenizer.with_normalizer(Some(NFC))?;
        }
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
        tokenizer.with_decoder(Some(byte_level(true)));
        Ok(())
    }
}

/// The pre-tokenizer of Llama 3 and Qwen2, which differ in how many digits stay together (`digits`, a regular
/// expression).
fn split(digits: &str) -> Result<PreTokenizerWrapper> {
    let regex = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        digits,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ];
    Ok(Split::new(SplitPattern::Regex(regex.concat()), SplitDelimiterBehavior::Isolated, false)?.into())
}

/// GPT-2's alphabet: the printable bytes of Latin-1 stand for themselves, the others for U+0100 and up, in order. Entry
/// i is the byte that the character U+i stands for.
pub(super) fn byte_of_char() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let is_itself = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let c = if is_itself { usize::from(byte) } else { next };
        next += usize::from(!is_itself);
        table[c] = Some(byte);
    }
    table
}
