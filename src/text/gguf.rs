//! Builds a tokenizer from GGUF metadata. candle can do this too, but replaces SmolLM2's pre-tokenizer (`smollm`) and
//! every unknown one by GPT-2's with a space before the text. Here an unknown pre-tokenizer is an error.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use super::byte_level::PreTokenizer;
use crate::error::{Error, Result};

/// Value in `tokenizer.ggml.token_type` of a special token.
const CONTROL: i64 = 3;
/// Value in `tokenizer.ggml.token_type` of a token that is matched literally in the text but is otherwise ordinary,
/// such as `<tool_call>`.
const USER_DEFINED: i64 = 4;

pub fn tokenizer(metadata: &HashMap<String, Value>) -> Result<Tokenizer> {
    let model = string(metadata, "tokenizer.ggml.model")?;
    if model != "gpt2" {
        let message = "only byte-level BPE (\"gpt2\") is supported; use the model's Hugging Face directory";
        return Err(Error::Config(format!("tokenizer.ggml.model is {model:?}; {message}")));
    }
    let pre = match metadata.get("tokenizer.ggml.pre") {
        None => PreTokenizer::Gpt2,
        Some(_) => pre_tokenizer(string(metadata, "tokenizer.ggml.pre")?)?,
    };
    let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
    let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| (token.to_string(), id)).collect();
    let merges = strings(metadata, "tokenizer.ggml.merges")?
        .into_iter()
        .map(|merge| match merge.split_once(' ') {
            Some((left, right)) => Ok((left.to_string(), right.to_string())),
            None => Err(Error::Config(format!("tokenizer.ggml.merges has {merge:?}, which is not two tokens"))),
        })
        .collect::<Result<Vec<_>>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre == PreTokenizer::Llama3)
        .build()
        .map_err(config)?;
    let mut tokenizer = Tokenizer::new(bpe);
    pre.install(&mut tokenizer).map_err(config)?;
    add_tokens(&mut tokenizer, metadata, &tokens)?;
    add_template(&mut tokenizer, metadata, &tokens, pre)?;
    Ok(tokenizer)
}

/// The pre-tokenizer that `tokenizer.ggml.pre` names.
fn pre_tokenizer(name: &str) -> Result<PreTokenizer> {
    match name {
        "default" | "gpt-2" => Ok(PreTokenizer::Gpt2),
        "smollm" => Ok(PreTokenizer::SmolLm),
        "qwen2" => Ok(PreTokenizer::Qwen2),
        "llama-bpe" | "llama3" | "llama-v3" => Ok(PreTokenizer::Llama3),
        other => Err(Error::Config(format!(
            "tokenizer.ggml.pre is {other:?}; supported are default, gpt-2, smollm, qwen2, llama-bpe. Use the \
             model's Hugging Face directory, whose tokenizer.json says what this name stands for"
        ))),
    }
}

fn add_tokens(tokenizer: &mut Tokenizer, metadata: &HashMap<String, Value>, tokens: &[&str]) -> Result<()> {
    let Some(types) = metadata.get("tokenizer.ggml.token_type") else { return Ok(()) };
    let types = types.to_vec().map_err(|e| Error::Config(format!("tokenizer.ggml.token_type: {e}")))?;
    let added = tokens.iter().zip(types.iter().map(integer)).filter_map(|(token, kind)| match kind {
        Some(CONTROL) => Some(AddedToken::from(*token, true)),
        Some(USER_DEFINED) => Some(AddedToken::from(*token, false).normalized(false)),
        _ => None,
    });
    tokenizer.add_tokens(added).map_err(config)?;
    Ok(())
}

/// Adds beginning-of-sequence and end-of-sequence tokens around a text if the file asks for them.
fn add_template(
    tokenizer: &mut Tokenizer,
    metadata: &HashMap<String, Value>,
    tokens: &[&str],
    pre: PreTokenizer,
) -> Result<()> {
    let wants = |key: &str, default: bool| match metadata.get(key) {
        None => Ok(default),
        Some(value) => value.to_bool().map_err(|e| Error::Config(format!("{key}: {e}"))),
    };
    let special = |key: &str| {
        let id = metadata.get(key).and_then(integer).and_then(|id| usize::try_from(id).ok());
        let token = id.and_then(|id| tokens.get(id)).map(|token| (token.to_string(), id.unwrap_or_default() as u32));
        token.ok_or_else(|| Error::Config(format!("{key} is missing or not in the vocabulary")))
    };
    let mut pieces = vec!["$A".to_string()];
    let mut specials = Vec::new();
    // Like llama.cpp, adds a beginning-of-sequence token for Llama 3 unless the file forbids it.
    if wants("tokenizer.ggml.add_bos_token", pre == PreTokenizer::Llama3)? {
        let bos = special("tokenizer.ggml.bos_token_id")?;
        pieces.insert(0, bos.0.clone());
        specials.push(bos);
    }
    if wants("tokenizer.ggml.add_eos_token", false)? {
        let eos = special("tokenizer.ggml.eos_token_id")?;
        pieces.push(eos.0.clone());
        specials.push(eos);
    }
    if !specials.is_empty() {
        let template = TemplateProcessing::builder()
            .try_single(pieces)
            .map_err(Error::Config)?
            .special_tokens(specials)
            .build()
            .map_err(|e| Error::Config(e.to_string()))?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(())
}

/// Text of the token that the metadata names by id under `key`, such as `tokenizer.ggml.bos_token_id`.
pub fn named_token<'m>(metadata: &'m HashMap<String, Value>, key: &str) -> Option<&'m str> {
    let id = usize::try_from(integer(metadata.get(key)?)?).ok()?;
    let Value::Array(tokens) = metadata.get("tokenizer.ggml.tokens")? else { return None };
    tokens.get(id)?.to_string().ok().map(String::as_str)
}

fn value<'m>(metadata: &'m HashMap<String, Value>, key: &str) -> Result<&'m Value> {
    metadata.get(key).ok_or_else(|| Error::Config(format!("the GGUF file has no {key}")))
}

fn string<'m>(metadata: &'m HashMap<String, Value>, key: &str) -> Result<&'m str> {
    value(metadata, key)?.to_string().map(String::as_str).map_err(|e| Error::Config(format!("{key}: {e}")))
}

fn strings<'m>(metadata: &'m HashMap<String, Value>, key: &str) -> Result<Vec<&'m str>> {
    let fail = |e: candle_core::Error| Error::Config(format!("{key}: {e}"));
    let values = value(metadata, key)?.to_vec().map_err(fail)?;
    values.iter().map(|v| v.to_string().map(String::as_str).map_err(fail)).collect()
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::U8(v) => Some(v.into()),
        Value::I8(v) => Some(v.into()),
        Value::U16(v) => Some(v.into()),
        Value::I16(v) => Some(v.into()),
        Value::U32(v) => Some(v.into()),
        Value::I32(v) => Some(v.into()),
        Value::U64(v) => v.try_into().ok(),
        Value::I64(v) => Some(v),
        _ => None,
    }
}

fn config(e: impl std::fmt::Display) -> Error {
    Error::Config(format!("the GGUF file's tokenizer: {e}"))
}
