//! Qwen v1 in `config.json`: Qwen2 under other keys, up to the length of sequence that it was trained for.

use serde::Deserialize;
use serde_json::Value;

use super::bad;
use crate::error::Result;
use crate::text::TiktokenRanks;
use crate::types::TokenId;
use crate::weights::{ModelFiles, TokenizerFiles};

/// The end of a turn of a chat, which `generation_config.json` does not name.
const END_TOKEN: &str = "<|im_end|>";

/// The limit on the length of a sequence, and the reason for it.
pub(super) const POSITION_LIMIT: &str = "seq_length of config.json: beyond it, dynamic NTK and log-n attention make \
     every token depend on the length of the whole prompt, and a trainer scores without either";

/// The fields of `config.json` that Qwen2 has under other names, or not at all.
#[derive(Deserialize)]
struct RawQwenV1 {
    hidden_size: usize,
    num_attention_heads: usize,
    /// Twice the width of the feed-forward block.
    intermediate_size: usize,
    /// Width of a head.
    kv_channels: usize,
    layer_norm_epsilon: f64,
    rotary_emb_base: f64,
    /// Positions before dynamic NTK and log-n attention begin.
    seq_length: usize,
    bf16: Option<bool>,
    fp16: Option<bool>,
    fp32: Option<bool>,
    no_bias: Option<bool>,
    rotary_pct: Option<f64>,
    use_cache_quantization: Option<bool>,
}

impl RawQwenV1 {
    /// # Errors
    /// `Config` naming the setting that would be served wrongly.
    fn check(&self) -> Result<()> {
        let refused = |what: String| Err(bad(format!("config.json: {what} of QWenLMHeadModel")));
        if self.no_bias == Some(false) {
            return refused("no_bias is false; only true is supported".into());
        }
        if let Some(share) = self.rotary_pct.filter(|share| *share != 1.0) {
            return refused(format!("rotary_pct is {share}; only 1 is supported"));
        }
        if self.use_cache_quantization == Some(true) {
            return refused("use_cache_quantization is true; only false is supported".into());
        }
        let (width, heads, hidden) = (self.kv_channels, self.num_attention_heads, self.hidden_size);
        if width.checked_mul(heads) != Some(hidden) {
            return refused(format!("kv_channels is {width}; {heads} heads must make up the hidden_size {hidden}"));
        }
        if !self.intermediate_size.is_multiple_of(2) {
            return refused(format!(
                "intermediate_size is {}; it must be even, as twice the width",
                self.intermediate_size
            ));
        }
        Ok(())
    }

    /// The dtype that the flags name.
    fn dtype(&self) -> Option<&'static str> {
        let flags = [(self.bf16, "bfloat16"), (self.fp16, "float16"), (self.fp32, "float32")];
        flags.into_iter().find(|(flag, _)| *flag == Some(true)).map(|(_, name)| name)
    }
}

/// The configuration under the keys of Qwen2.
///
/// # Errors
/// `Config` naming a field that is missing or of another type, or a setting that is not supported.
pub(super) fn as_qwen2(config: &Value) -> Result<Value> {
    let raw: RawQwenV1 = serde_json::from_value(config.clone()).map_err(|e| bad(format!("config.json: {e}")))?;
    raw.check()?;
    let mut qwen2 = config.clone();
    for (key, value) in [
        ("intermediate_size", (raw.intermediate_size / 2).into()),
        ("head_dim", raw.kv_channels.into()),
        ("rms_norm_eps", raw.layer_norm_epsilon.into()),
        ("rope_theta", raw.rotary_emb_base.into()),
        ("max_position_embeddings", raw.seq_length.into()),
    ] {
        qwen2[key] = value;
    }
    if config["torch_dtype"].is_null() {
        qwen2["torch_dtype"] = raw.dtype().into();
    }
    Ok(qwen2)
}

/// The end of a turn, if the model's answers end with it: `chat_format` of `generation_config.json` is `chatml`.
///
/// # Errors
/// `Config` if the tokenizer cannot be read.
pub(super) fn end_of_turn(files: &ModelFiles) -> Result<Option<TokenId>> {
    let format = files.generation_config.as_ref().map(|generation| &generation["chat_format"]);
    if format.is_none_or(|format| format != "chatml") {
        return Ok(None);
    }
    match &files.tokenizer {
        TokenizerFiles::Tiktoken { ranks, .. } => Ok(TiktokenRanks::read(ranks)?.special(END_TOKEN)),
        tokenizer => Ok(tokenizer.added_tokens([END_TOKEN])?[0]),
    }
}
