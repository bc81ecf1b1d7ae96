//! The vision tower's configuration, and how the model takes images in prompts.

use serde::Deserialize;
use serde_json::Value;

use super::bad;
use crate::error::Result;
use crate::pixels::{Preprocessor, Sizing};
use crate::types::TokenId;

/// The vision tower of Qwen2.5-VL, and the tokens that stand for images.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub depth: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub intermediate_size: usize,
    /// How pictures are resized, cut into patches and normalised.
    pub preprocessor: Preprocessor,
    /// Tokens of a window's side.
    pub window: usize,
    /// The blocks whose attention sees the whole image; that of all others sees a window.
    pub full_attention: Vec<usize>,
    /// Width of an embedding: the decoder's hidden size.
    pub output_size: usize,
    /// The token that stands for one token of an image.
    pub image_token: TokenId,
    /// Tokens that no sample may have, because they stand for content that a trainer would look for: ascending.
    pub forbidden_tokens: Vec<TokenId>,
}

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

impl VisionConfig {
    /// From `config.json` of Qwen2.5-VL, whose decoder has this hidden size and vocabulary.
    ///
    /// # Errors
    /// `Config`: a field that is not supported or does not agree with the decoder or the preprocessor, by name.
    pub(super) fn parse(
        config: &Value,
        preprocessor: Preprocessor,
        hidden_size: usize,
        vocab_size: usize,
    ) -> Result<Self> {
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
        let window_pixels = raw.window_size.unwrap_or(112);
        let mut forbidden_tokens = Vec::new();
        for (name, default) in PLACEHOLDERS {
            let token = config[name].as_u64().unwrap_or(default);
            if token >= vocab_size as u64 {
                return Err(bad(format!("config.json: {name} {token} is not below vocab_size {vocab_size}")));
            }
            forbidden_tokens.push(token as TokenId);
        }
        let image_token = forbidden_tokens[0];
        forbidden_tokens.sort_unstable();
        forbidden_tokens.dedup();
        let this = Self {
            depth: raw.depth.unwrap_or(32),
            hidden_size: raw.hidden_size.unwrap_or(1280),
            num_heads: raw.num_heads.unwrap_or(16),
            intermediate_size: raw.intermediate_size.unwrap_or(3420),
            preprocessor,
            window: window_pixels.checked_div(merge_size * patch_size).unwrap_or(0),
            full_attention: raw.fullatt_block_indexes.unwrap_or_else(|| vec![7, 15, 23, 31]),
            output_size: raw.out_hidden_size.unwrap_or(3584),
            image_token,
            forbidden_tokens,
        };
        this.check(hidden_size)?;
        Ok(this)
    }

    fn check(&self, hidden_size: usize) -> Result<()> {
        let positive = [
            ("depth", self.depth),
            ("hidden_size", self.hidden_size),
            ("num_heads", self.num_heads),
            ("intermediate_size", self.intermediate_size),
            ("window_size", self.window),
        ];
        if let Some((name, _)) = positive.into_iter().find(|&(_, n)| n == 0) {
            return Err(bad(format!("config.json: vision_config.{name} is 0 or too small")));
        }
        if !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            let (hidden, heads) = (self.hidden_size, self.num_heads);
            return Err(bad(format!(
                "config.json: vision_config has {heads} heads for a hidden size of {hidden}; a head's width must be a \
                 multiple of 4"
            )));
        }
        if let Some(block) = self.full_attention.iter().find(|block| **block >= self.depth) {
            return Err(bad(format!(
                "config.json: vision_config.fullatt_block_indexes names block {block} of {}",
                self.depth
            )));
        }
        if self.output_size != hidden_size {
            return Err(bad(format!(
                "config.json: vision_config.out_hidden_size is {}, but the decoder's hidden_size is {hidden_size}",
                self.output_size
            )));
        }
        Ok(())
    }

    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Patches of a token.
    pub fn unit(&self) -> usize {
        self.merge_size() * self.merge_size()
    }

    /// Patches of a token's side.
    pub fn merge_size(&self) -> usize {
        self.preprocessor.merge_size as usize
    }

    /// The dimensions of a patch, which are the input features of the tower: channels, frames, rows and columns.
    pub fn patch(&self) -> [usize; 4] {
        let Preprocessor { patch_size, temporal_patch_size, .. } = self.preprocessor;
        [3, temporal_patch_size as usize, patch_size as usize, patch_size as usize]
    }

    /// Most tokens of a picture that the preprocessor makes.
    pub fn most_tokens(&self) -> usize {
        match self.preprocessor.sizing {
            Sizing::Area { max_pixels, .. } => {
                usize::try_from(max_pixels).unwrap_or(usize::MAX) / self.token_side().pow(2)
            }
            Sizing::Tiles { .. } => 0,
        }
    }

    /// Pixels of a token's side, of which a picture's sides must be multiples.
    pub fn token_side(&self) -> usize {
        self.preprocessor.factor() as usize
    }

    /// Rows and columns of the tokens of a picture of this size, which has one tile; `None` if its sides are not
    /// multiples of [`VisionConfig::token_side`].
    pub fn grid(&self, width: u32, height: u32) -> Option<[usize; 2]> {
        let side = self.token_side();
        let sides = [height as usize, width as usize];
        sides.iter().all(|pixels| *pixels > 0 && pixels.is_multiple_of(side)).then(|| sides.map(|pixels| pixels / side))
    }
}
