//! The decoders that a model may have, and by what their layers differ: sliding windows and rotary embedding.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// The decoders by which the flags of a [`ModelConfig`](super::ModelConfig) differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DecoderKind {
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
    SmolLm3,
    Phi3,
    Qwen3Moe,
    Mixtral,
    Glm4Moe,
}

/// The fields of `config.json` that say which layers have a sliding window or a rotary embedding.
#[derive(Deserialize)]
pub(super) struct LayerFields {
    num_hidden_layers: usize,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// Whether each layer has a rotary embedding: 0 if not. It may have entries for more layers.
    no_rope_layers: Option<Vec<u32>>,
    no_rope_layer_interval: Option<usize>,
}

fn bad(message: String) -> Error {
    Error::Config(message)
}

impl LayerFields {
    /// # Errors
    /// `Config` if a field has another type.
    pub fn parse(config: &Value) -> Result<Self> {
        serde_json::from_value(config.clone()).map_err(|e| bad(format!("config.json: {e}")))
    }

    /// Whether each layer rotates queries and keys by their positions. All do but those of SmolLM3 for which
    /// `no_rope_layers` has 0, or without that list each of the number `no_rope_layer_interval`.
    ///
    /// # Errors
    /// `Config` if the list has too few entries or the interval is 0.
    pub fn has_rope(&self, decoder: DecoderKind) -> Result<Vec<bool>> {
        let layers = self.num_hidden_layers;
        if decoder != DecoderKind::SmolLm3 {
            return Ok(vec![true; layers]);
        }
        if let Some(listed) = &self.no_rope_layers {
            if listed.len() < layers {
                let entries = listed.len();
                return Err(bad(format!("config.json: no_rope_layers has {entries} entries for {layers} layers")));
            }
            return Ok(listed[..layers].iter().map(|flag| *flag != 0).collect());
        }
        let interval = self.no_rope_layer_interval.unwrap_or(4);
        if interval == 0 {
            return Err(bad("config.json: no_rope_layer_interval is 0; it must be positive".into()));
        }
        Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
    }

    /// The sliding window of each layer, by the rules of transformers' configurations. Mistral (4096 where the field is
    /// missing), Mixtral and Phi-3 have it in all layers. The others have it if `use_sliding_window` is set: Qwen3-MoE
    /// in all layers, Qwen and SmolLM3 in those that `layer_types` names, or without that list Qwen in those from
    /// `max_window_layers` on and SmolLM3 in those without rotary embedding. Llama and GLM-4.5 have none.
    ///
    /// # Errors
    /// `Config` if the window is 0, or `layer_types` has another length or a type that is not supported.
    pub fn sliding_windows(&self, config: &Value, decoder: DecoderKind) -> Result<Vec<Option<usize>>> {
        let layers = self.num_hidden_layers;
        let window = match decoder {
            DecoderKind::Mistral if config.get("sliding_window").is_none() => Some(4096),
            DecoderKind::Mistral | DecoderKind::Mixtral | DecoderKind::Phi3 => self.sliding_window,
            DecoderKind::Llama | DecoderKind::Glm4Moe => None,
            DecoderKind::Qwen2 | DecoderKind::Qwen3 | DecoderKind::Qwen3Moe | DecoderKind::SmolLm3 => {
                self.sliding_window.filter(|_| self.use_sliding_window == Some(true))
            }
        };
        if window == Some(0) {
            return Err(bad("config.json: sliding_window is 0; a token must at least see itself".into()));
        }
        let has_list = matches!(decoder, DecoderKind::Qwen2 | DecoderKind::Qwen3 | DecoderKind::SmolLm3);
        if !has_list || window.is_none() {
            return Ok(vec![window; layers]);
        }
        let Some(types) = &self.layer_types else {
            if decoder == DecoderKind::SmolLm3 {
                return Ok(self.has_rope(decoder)?.into_iter().map(|rotated| window.filter(|_| !rotated)).collect());
            }
            let first = self.max_window_layers.unwrap_or(28);
            return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
        };
        if types.len() != layers {
            return Err(bad(format!("config.json: layer_types has {} entries for {layers} layers", types.len())));
        }
        let window_of = |kind: &String| match kind.as_str() {
            "full_attention" => Ok(None),
            "sliding_attention" => Ok(window),
            other => Err(bad(format!("config.json: layer type {other} is not supported"))),
        };
        types.iter().map(window_of).collect()
    }
}
