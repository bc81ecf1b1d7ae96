//! The vision tower of Qwen2.5-VL in `config.json`.

use serde::Deserialize;
use serde_json::Value;

use super::bad;
use super::vision::{TowerKind, VisionConfig, preprocessor, token};
use crate::error::Result;
use crate::pixels::Sizing;
use crate::types::TokenId;

/// `vision_config` of `config.json`, with the defaults of transformers' `Qwen2_5_VLVisionConfig`.
#[derive(Deserialize)]
struct RawVision {
    depth: Option<usize>,
    hidden_size: Option<usize>,
    hidden_act: Option<String>,
    intermediate_size: Option<usize>,
    num_heads: Option<usize>,
    in_channels: Option<usize>,
    in_chans: Option<usize>,
    patch_size: Option<usize>,
    spatial_patch_size: Option<usize>,
    spatial_merge_size: Option<usize>,
    temporal_patch_size: Option<usize>,
    window_size: Option<usize>,
    out_hidden_size: Option<usize>,
    fullatt_block_indexes: Option<Vec<usize>>,
}

/// Fields of `config.json` that name tokens which stand for images and videos, with transformers' defaults.
const PLACEHOLDERS: [(&str, u64); 2] = [("image_token_id", 151_655), ("video_token_id", 151_656)];

/// The tower of a decoder with this hidden size and vocabulary.
pub(super) fn parse(
    config: &Value,
    preprocessor_config: Option<&Value>,
    (hidden_size, vocab_size): (usize, usize),
) -> Result<VisionConfig> {
    let preprocessor = preprocessor(preprocessor_config)?;
    if let Sizing::Tiles { .. } = preprocessor.sizing {
        return Err(bad(
            "preprocessor_config.json: a preprocessor that makes tiles is not supported for this model".into()
        ));
    }
    let raw: RawVision = serde_json::from_value(config["vision_config"].clone())
        .map_err(|e| bad(format!("config.json: vision_config: {e}")))?;
    if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
        return Err(bad(format!("config.json: vision_config.hidden_act is {act}; only silu is supported")));
    }
    let channels = raw.in_channels.or(raw.in_chans).unwrap_or(3);
    if channels != 3 {
        return Err(bad(format!("config.json: vision_config.in_channels is {channels}; only 3 is supported")));
    }
    let patch_size = raw.patch_size.or(raw.spatial_patch_size).unwrap_or(14);
    let merge_size = raw.spatial_merge_size.unwrap_or(2);
    let frames = raw.temporal_patch_size.unwrap_or(2);
    for (name, of_tower, of_preprocessor) in [
        ("patch_size", patch_size, preprocessor.patch_size),
        ("spatial_merge_size", merge_size, preprocessor.merge_size),
        ("temporal_patch_size", frames, preprocessor.temporal_patch_size),
    ] {
        if of_tower != of_preprocessor as usize {
            return Err(bad(format!(
                "config.json: vision_config.{name} is {of_tower}, but the preprocessor's configuration has \
                 {of_preprocessor}"
            )));
        }
    }
    let window = raw.window_size.unwrap_or(112).checked_div(merge_size * patch_size).unwrap_or(0);
    if window == 0 {
        return Err(bad("config.json: vision_config.window_size is 0 or too small".into()));
    }
    let mut forbidden_tokens: Vec<TokenId> = PLACEHOLDERS
        .into_iter()
        .map(|(name, default)| token(config, name, Some(default), vocab_size))
        .collect::<Result<_>>()?;
    let image_token = forbidden_tokens[0];
    forbidden_tokens.sort_unstable();
    forbidden_tokens.dedup();
    let (depth, output_size) = (raw.depth.unwrap_or(32), raw.out_hidden_size.unwrap_or(3584));
    let full_attention = raw.fullatt_block_indexes.unwrap_or_else(|| vec![7, 15, 23, 31]);
    if let Some(block) = full_attention.iter().find(|block| **block >= depth) {
        let message = format!("config.json: vision_config.fullatt_block_indexes names block {block} of {depth}");
        return Err(bad(message));
    }
    if output_size != hidden_size {
        return Err(bad(format!(
            "config.json: vision_config.out_hidden_size is {output_size}, but the decoder's hidden_size is \
             {hidden_size}"
        )));
    }
    Ok(VisionConfig {
        kind: TowerKind::Windowed { window, full_attention },
        depth,
        hidden_size: raw.hidden_size.unwrap_or(1280),
        num_heads: raw.num_heads.unwrap_or(16),
        intermediate_size: raw.intermediate_size.unwrap_or(3420),
        preprocessor,
        output_size,
        image_token,
        forbidden_tokens,
    })
}
