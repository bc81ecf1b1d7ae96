//! The vision tower of InternVL3 in `config.json`, in the layout of transformers and in that of its own code.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use super::bad;
use super::vision::{TowerKind, VisionConfig, preprocessor, token};
use crate::error::Result;
use crate::pixels::{MAX_TILES, Preprocessor, Sizing};
use crate::types::TokenId;
use crate::weights::TokenizerFiles;

/// Mean and standard deviation of red, green and blue that InternVL's own code has as constants.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];
/// The token that stands for one token of an image, and the end of a turn of a chat, in the tokenizer of InternVL's own
/// layout, whose `config.json` names neither.
const IMAGE_TOKEN: &str = "<IMG_CONTEXT>";
const END_TOKEN: &str = "<|im_end|>";
/// Patches of a side of a token: the pixel shuffle makes one of 2 x 2, because `downsample_ratio` is 0.5.
const MERGE_SIZE: u32 = 2;

/// Tokens of InternVL's own layout that only its tokenizer names. None for all other models.
#[derive(Default)]
pub(super) struct ChatTokens {
    image: Option<TokenId>,
    /// The end of a turn.
    pub end: Option<TokenId>,
}

/// `vision_config` of both layouts.
#[derive(Deserialize)]
struct RawVision {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    image_size: OneOrTwo,
    patch_size: OneOrTwo,
    hidden_act: Option<String>,
    norm_type: Option<String>,
    layer_norm_eps: Option<f32>,
    num_channels: Option<usize>,
    use_mean_pooling: Option<bool>,
    /// transformers' name.
    attention_bias: Option<bool>,
    use_qk_norm: Option<bool>,
    use_mask_token: Option<bool>,
    use_absolute_position_embeddings: Option<bool>,
    /// The name of InternVL's own code.
    qkv_bias: Option<bool>,
    qk_normalization: Option<bool>,
}

/// A number of pixels, or one for each side.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum OneOrTwo {
    One(usize),
    Two([usize; 2]),
}

impl ChatTokens {
    /// Those of a model in InternVL's own layout.
    ///
    /// # Errors
    /// `Config` if its tokenizer cannot be read.
    pub fn of(config: &Value, tokenizer: &TokenizerFiles) -> Result<Self> {
        if !config["llm_config"].is_object() {
            return Ok(Self::default());
        }
        let [image, end] = tokenizer.added_tokens([IMAGE_TOKEN, END_TOKEN])?;
        Ok(Self { image, end })
    }

    /// `config.json` with the token that stands for images, if it does not name one.
    pub fn in_config<'a>(&self, config: &'a Value) -> Cow<'a, Value> {
        let Some(image) = self.image.filter(|_| config["image_token_id"].is_null()) else {
            return Cow::Borrowed(config);
        };
        let mut config = config.clone();
        config["image_token_id"] = image.into();
        Cow::Owned(config)
    }
}

/// The tower in transformers' layout, for a decoder with this hidden size and vocabulary.
pub(super) fn parse(
    config: &Value,
    preprocessor_config: Option<&Value>,
    decoder: (usize, usize),
) -> Result<VisionConfig> {
    expect(config, "vision_feature_layer", &Value::from(-1))?;
    expect(config, "vision_feature_select_strategy", &Value::from("default"))?;
    expect(config, "projector_hidden_act", &Value::from("gelu"))?;
    let preprocessor = preprocessor(preprocessor_config)?;
    if let Sizing::Area { .. } = preprocessor.sizing {
        let message = "preprocessor_config.json: InternVL needs a preprocessor that makes tiles, GotOcr2ImageProcessor";
        return Err(bad(message.into()));
    }
    build(config, preprocessor, decoder)
}

/// The tower in the layout of InternVL's own code, whose `config.json` also says how pictures are cut.
pub(super) fn parse_chat(config: &Value, decoder: (usize, usize)) -> Result<VisionConfig> {
    expect(config, "select_layer", &Value::from(-1))?;
    expect(config, "use_thumbnail", &Value::from(true))?;
    match &config["ps_version"] {
        version if version == "v2" => (),
        version => return Err(bad(format!("config.json: ps_version is {version}; only v2 is supported"))),
    }
    let side = number(config, "force_image_size", config["vision_config"]["image_size"].as_u64().unwrap_or(448), 4096)?;
    let [min_tiles, max_tiles] = match config["dynamic_image_size"] == false {
        true => [1, 1],
        false => {
            [number(config, "min_dynamic_patch", 1, MAX_TILES)?, number(config, "max_dynamic_patch", 12, MAX_TILES)?]
        }
    };
    if min_tiles > max_tiles {
        let message = format!("config.json: min_dynamic_patch {min_tiles} is above max_dynamic_patch {max_tiles}");
        return Err(bad(message));
    }
    let preprocessor = Preprocessor {
        sizing: Sizing::Tiles { side, min_tiles, max_tiles },
        patch_size: number(&config["vision_config"], "patch_size", 14, 256)?,
        merge_size: MERGE_SIZE,
        temporal_patch_size: 1,
        mean: MEAN,
        std: STD,
    };
    build(config, preprocessor, decoder)
}

fn build(
    config: &Value,
    preprocessor: Preprocessor,
    (hidden_size, vocab_size): (usize, usize),
) -> Result<VisionConfig> {
    expect(config, "downsample_ratio", &Value::from(0.5))?;
    let raw: RawVision = serde_json::from_value(config["vision_config"].clone())
        .map_err(|e| bad(format!("config.json: vision_config: {e}")))?;
    raw.refuse_unsupported()?;
    let Sizing::Tiles { side, .. } = preprocessor.sizing else { unreachable!("the preprocessor makes tiles") };
    for (name, of_tower, of_preprocessor) in
        [("image_size", raw.image_size, side), ("patch_size", raw.patch_size, preprocessor.patch_size)]
    {
        let [height, width] = of_tower.sides();
        if height != width || width != of_preprocessor as usize {
            return Err(bad(format!(
                "config.json: vision_config.{name} is {height} x {width}, but pictures are cut into {of_preprocessor} x \
                 {of_preprocessor}; position embeddings are not interpolated"
            )));
        }
    }
    if preprocessor.merge_size != MERGE_SIZE || !side.is_multiple_of(preprocessor.factor()) {
        let (factor, merge) = (preprocessor.factor(), preprocessor.merge_size);
        return Err(bad(format!(
            "config.json: tiles of {side} pixels are not divided by tokens of {factor}, {merge} x {merge} patches"
        )));
    }
    let image_token = token(config, "image_token_id", None, vocab_size)?;
    Ok(VisionConfig {
        kind: TowerKind::Tiled {
            tile_side: side as usize,
            norm_eps: raw.layer_norm_eps.unwrap_or(1e-6),
            qkv_bias: raw.attention_bias.or(raw.qkv_bias).unwrap_or(false),
        },
        depth: raw.num_hidden_layers,
        hidden_size: raw.hidden_size,
        num_heads: raw.num_attention_heads,
        intermediate_size: raw.intermediate_size,
        preprocessor,
        output_size: hidden_size,
        image_token,
        forbidden_tokens: vec![image_token],
    })
}

impl RawVision {
    /// Refuses all settings by which another tower would be computed, such as that of InternVL3-38B and 78B.
    fn refuse_unsupported(&self) -> Result<()> {
        for (name, value, served) in
            [("hidden_act", self.hidden_act.as_deref(), "gelu"), ("norm_type", self.norm_type.as_deref(), "layer_norm")]
        {
            if let Some(value) = value.filter(|value| *value != served) {
                return Err(bad(format!("config.json: vision_config.{name} is {value}; only {served} is supported")));
            }
        }
        for (name, value, served) in [
            ("use_qk_norm", self.use_qk_norm, false),
            ("qk_normalization", self.qk_normalization, false),
            ("use_mask_token", self.use_mask_token, false),
            ("use_mean_pooling", self.use_mean_pooling, true),
            ("use_absolute_position_embeddings", self.use_absolute_position_embeddings, true),
        ] {
            if let Some(value) = value.filter(|value| *value != served) {
                return Err(bad(format!(
                    "config.json: vision_config.{name} is {value}; only {served} is supported, as InternViT-300M has it"
                )));
            }
        }
        match self.num_channels {
            None | Some(3) => Ok(()),
            Some(n) => Err(bad(format!("config.json: vision_config.num_channels is {n}; only 3 is supported"))),
        }
    }
}

impl OneOrTwo {
    /// Height and width.
    fn sides(self) -> [usize; 2] {
        match self {
            Self::One(side) => [side; 2],
            Self::Two(sides) => sides,
        }
    }
}

/// The whole number from 1 to `most` in a field of `config.json`; `default` where there is none.
fn number(config: &Value, name: &str, default: u64, most: u32) -> Result<u32> {
    let number = if config[name].is_null() { Some(default) } else { config[name].as_u64() };
    let number = number.and_then(|number| u32::try_from(number).ok()).filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| bad(format!("config.json: {name} is {}; it must be from 1 to {most}", config[name])))
}

/// Refuses a field of `config.json` that is there and has another value.
fn expect(config: &Value, name: &str, served: &Value) -> Result<()> {
    match &config[name] {
        Value::Null => Ok(()),
        value if value == served => Ok(()),
        value => Err(bad(format!("config.json: {name} is {value}; only {served} is supported"))),
    }
}
