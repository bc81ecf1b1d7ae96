//! Upper bound on the bytes of text per token. A text that certainly exceeds the context can be rejected without
//! encoding it.

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use super::{Spelling, Tokenizer};
use crate::error::{Error, Result};

/// Factor by which canonical composition can shorten a text. It turns at most three bytes into one (Hangul syllables;
/// the kelvin sign, three bytes, becomes a K); four is a safe bound.
const COMPOSITION: usize = 4;

/// Length of the longest token, times the factor by which the normalizer may shorten a text. None if a part of the
/// tokenizer may drop any amount of text; then every text must be encoded.
pub(super) fn max_bytes_per_token(tokenizer: &Tokenizer) -> Result<Option<usize>> {
    let json = |part: serde_json::Result<Value>| part.map_err(|e| Error::Internal(e.to_string()));
    let normalizer = json(serde_json::to_value(tokenizer.inner.get_normalizer()))?;
    let pre_tokenizer = json(serde_json::to_value(tokenizer.inner.get_pre_tokenizer()))?;
    let added = tokenizer.inner.get_added_tokens_decoder();
    let strips = added.values().any(|token| token.lstrip || token.rstrip);
    let Some(shortening) = shortening(&normalizer) else { return Ok(None) };
    if strips || drops_text(&pre_tokenizer) || !has_every_byte(tokenizer) {
        return Ok(None);
    }
    let (mut longest, mut bytes) = (0, Vec::new());
    for id in 0..tokenizer.vocab_size as u32 {
        bytes.clear();
        tokenizer.append_bytes(id, false, &mut bytes);
        longest = longest.max(bytes.len());
    }
    Ok(Some(longest * shortening))
}

/// Number of bytes of text that a normalizer may turn into one; None if there is no bound.
fn shortening(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None => normalizer.is_null().then_some(1),
        Some("Prepend" | "ByteLevel") => Some(1),
        Some("NFC" | "NFD") => Some(COMPOSITION),
        Some("Replace") => {
            let pattern = normalizer["pattern"]["String"].as_str()?;
            (normalizer["content"].as_str()?.len() >= pattern.len()).then_some(1)
        }
        Some("Sequence") => {
            let steps = normalizer["normalizers"].as_array()?;
            steps.iter().try_fold(1, |product, step| Some(product * shortening(step)?))
        }
        Some(_) => None,
    }
}

fn drops_text(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => !pre_tokenizer.is_null(),
        Some("ByteLevel" | "Digits" | "Metaspace") => false,
        Some("Split") => pre_tokenizer["behavior"] == "Removed",
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().is_none_or(|steps| steps.iter().any(drops_text)),
        Some(_) => true,
    }
}

/// Whether every byte has a token. Otherwise any amount of unknown text may become one token or none.
fn has_every_byte(tokenizer: &Tokenizer) -> bool {
    let has = |token: String| tokenizer.inner.token_to_id(&token).is_some();
    match tokenizer.spelling {
        Spelling::ByteLevel => {
            let chars = tokenizer.byte_of_char.iter().zip(0u32..).filter(|(byte, _)| byte.is_some());
            chars.filter_map(|(_, c)| char::from_u32(c)).all(|c| has(c.to_string()))
        }
        Spelling::ByteFallback { .. } => {
            let falls_back = match tokenizer.inner.get_model() {
                ModelWrapper::BPE(bpe) => bpe.byte_fallback,
                ModelWrapper::Unigram(unigram) => unigram.byte_fallback(),
                _ => false,
            };
            falls_back && (0..=255u8).all(|byte| has(format!("<0x{byte:02X}>")))
        }
    }
}
