//! A model's configuration, parsed once from `config.json` and valid from then on.

mod decoder;
mod experts;
mod internvl;
mod qwen2_5_vl;
mod qwen_v1;
mod rope;
mod vision;

use std::borrow::Cow;

use serde::Deserialize;

use crate::config::MAX_RANKS;
use crate::error::{Error, Result};
use crate::types::TokenId;
use crate::weights::{Dtype, ModelFiles, head_range, padded_share};

use decoder::{DecoderKind, LayerFields};
pub use experts::{ExpertsConfig, SharedExpertConfig};
pub use rope::{RopeConfig, RopeScaling};
pub use vision::{TowerKind, VisionConfig};

/// Everything by which Llama 3.x, Qwen v1, Qwen2/2.5, Qwen3, Mistral, SmolLM3, Phi-3, Phi-4, Qwen2-MoE, Qwen3-MoE,
/// Mixtral and GLM-4.5 differ, as flags and sizes of one decoder; and the vision towers of Qwen2.5-VL and InternVL3,
/// whose decoders are that of Qwen2 (InternVL3.5 has Qwen3's).
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// Divides `num_heads`.
    pub num_kv_heads: usize,
    /// Even. `num_heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// How many of the first dimensions of each head are rotated. Even.
    pub rotary_dim: usize,
    pub rms_norm_eps: f64,
    pub rope: RopeConfig,
    pub max_position_embeddings: usize,
    /// The output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases of the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias of the attention's output projection.
    pub o_bias: bool,
    /// Biases of the gate, up and down projections.
    pub mlp_bias: bool,
    /// RMS norms of each query and key head, before rotary embedding.
    pub qk_norm: bool,
    /// Per layer: whether queries and keys are rotated by their positions.
    pub has_rope: Vec<bool>,
    /// Per layer: position `p` attends to `(p - window, p]`, itself included; `None` to all before it.
    pub sliding_window: Vec<Option<usize>>,
    /// End-of-sequence tokens, ascending; may be empty.
    pub eos_token_ids: Vec<TokenId>,
    pub bos_token_id: Option<TokenId>,
    /// Element type the configuration names; `None` if it names none (GGUF).
    pub dtype: Option<Dtype>,
    /// The mixtures of experts; `None` if all layers have a dense feed-forward block.
    pub experts: Option<ExpertsConfig>,
    /// The vision tower; `None` for a model of text alone.
    pub vision: Option<VisionConfig>,
}

/// Supported architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    QwenV1,
    Qwen2,
    Qwen3,
    Mistral,
    SmolLm3,
    /// Phi-3, and Phi-4 of 14 billion parameters.
    Phi3,
    Qwen2Moe,
    Qwen3Moe,
    Mixtral,
    /// GLM-4.5, and models of its shape such as INTELLECT-3.
    Glm4Moe,
    Qwen25Vl,
    /// InternVL3 as transformers has it.
    InternVl,
    /// InternVL3 as its own code on the hub has it.
    InternVlChat,
}

const ARCHITECTURES: [(&str, Architecture); 14] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("Qwen3ForCausalLM", Architecture::Qwen3),
    ("MistralForCausalLM", Architecture::Mistral),
    ("SmolLM3ForCausalLM", Architecture::SmolLm3),
    ("Phi3ForCausalLM", Architecture::Phi3),
    ("QWenLMHeadModel", Architecture::QwenV1),
    ("Qwen2MoeForCausalLM", Architecture::Qwen2Moe),
    ("Qwen3MoeForCausalLM", Architecture::Qwen3Moe),
    ("MixtralForCausalLM", Architecture::Mixtral),
    ("Glm4MoeForCausalLM", Architecture::Glm4Moe),
    ("Qwen2_5_VLForConditionalGeneration", Architecture::Qwen25Vl),
    ("InternVLForConditionalGeneration", Architecture::InternVl),
    ("InternVLChatModel", Architecture::InternVlChat),
];

/// Fields of the whole model that a nested configuration of the decoder may lack.
const OF_WHOLE_MODEL: [&str; 6] =
    ["architectures", "bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype"];

/// Settings of related architectures that change the result. Where one is set, serving without it would be wrong.
const UNSUPPORTED: [&str; 7] = [
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "use_mrope",
];

impl ModelConfig {
    /// # Errors
    /// See [`ModelConfig::parse`].
    pub fn from_files(files: &ModelFiles) -> Result<Self> {
        let tokens = internvl::ChatTokens::of(&files.config, &files.tokenizer)?;
        let (generation, preprocessor) = (files.generation_config.as_ref(), files.preprocessor_config.as_ref());
        let mut this = Self::parse(&tokens.in_config(&files.config), generation, preprocessor)?;
        this.eos_token_ids.extend(tokens.end);
        if this.architecture == Architecture::QwenV1 {
            this.eos_token_ids.extend(qwen_v1::end_of_turn(files)?);
        }
        this.eos_token_ids.sort_unstable();
        this.eos_token_ids.dedup();
        this.check_shapes()?;
        Ok(this)
    }

    /// From `config.json` (as transformers 4 or 5 writes it), `generation_config.json`, whose end-of-sequence tokens
    /// take precedence, as in transformers' `generate`, and `preprocessor_config.json`, which a vision tower needs.
    ///
    /// # Errors
    /// `Config`: an unsupported architecture or setting by name, a field that is missing or out of range.
    pub fn parse(
        config: &serde_json::Value,
        generation_config: Option<&serde_json::Value>,
        preprocessor_config: Option<&serde_json::Value>,
    ) -> Result<Self> {
        let (name, architecture) = architecture(config)?;
        let whole = config;
        let config = &*decoder_config(architecture, whole)?;
        let decoder = decoder(architecture, config)?;
        let raw: RawConfig = serde_json::from_value(config.clone()).map_err(|e| bad(format!("config.json: {e}")))?;
        refuse_unsupported(config, &raw, name)?;
        let generation: TokenIds = match generation_config {
            Some(g) => serde_json::from_value(g.clone()).map_err(|e| bad(format!("generation_config.json: {e}")))?,
            None => TokenIds::default(),
        };
        let num_heads = raw.num_attention_heads;
        let head_dim = match (raw.head_dim, decoder) {
            (Some(d), _) => d,
            (None, DecoderKind::Qwen3) => 128,
            (None, _) => raw.hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        let rotary_dim = rope::rotary_dim(config, head_dim, if decoder == DecoderKind::Glm4Moe { 0.5 } else { 1.0 })?;
        if rotary_dim != head_dim && !matches!(decoder, DecoderKind::Phi3 | DecoderKind::Glm4Moe) {
            return Err(bad(format!(
                "config.json: partial_rotary_factor makes {rotary_dim} of the {head_dim} dimensions of a head rotate, \
                 which is not supported for {name}"
            )));
        }
        let attention_bias = raw.attention_bias.unwrap_or(false);
        let layers = LayerFields::parse(config)?;
        let this = Self {
            architecture,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_layers: raw.num_hidden_layers,
            num_heads,
            num_kv_heads: raw.num_key_value_heads.unwrap_or(num_heads),
            head_dim,
            rotary_dim,
            rms_norm_eps: raw.rms_norm_eps,
            rope: RopeConfig::parse(config)?,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(decoder == DecoderKind::SmolLm3),
            qkv_bias: match decoder {
                DecoderKind::Qwen2 => raw.qkv_bias.unwrap_or(true),
                DecoderKind::Mistral | DecoderKind::Mixtral | DecoderKind::Phi3 => false,
                _ => attention_bias,
            },
            o_bias: match decoder {
                DecoderKind::Llama | DecoderKind::Qwen3 | DecoderKind::Qwen3Moe | DecoderKind::SmolLm3 => {
                    attention_bias
                }
                _ => false,
            },
            mlp_bias: matches!(decoder, DecoderKind::Llama | DecoderKind::SmolLm3) && raw.mlp_bias.unwrap_or(false),
            qk_norm: match decoder {
                DecoderKind::Glm4Moe => raw.use_qk_norm.unwrap_or(false),
                _ => matches!(decoder, DecoderKind::Qwen3 | DecoderKind::Qwen3Moe),
            },
            has_rope: layers.has_rope(decoder)?,
            sliding_window: layers.sliding_windows(config, decoder)?,
            eos_token_ids: generation.eos_token_id.or(raw.tokens.eos_token_id).map_or_else(Vec::new, OneOrMany::sorted),
            bos_token_id: generation.bos_token_id.or(raw.tokens.bos_token_id),
            dtype: dtype(raw.dtype.or(raw.torch_dtype).as_deref())?,
            experts: ExpertsConfig::parse((name, architecture), config, raw.num_hidden_layers)?,
            vision: vision(architecture, whole, preprocessor_config, (raw.hidden_size, raw.vocab_size))?,
        };
        this.check_shapes()?;
        Ok(this)
    }

    /// Hugging Face's name of the architecture.
    pub fn architecture_name(&self) -> &'static str {
        let found = ARCHITECTURES.iter().find(|(_, architecture)| *architecture == self.architecture);
        found.expect("every architecture is in the list").0
    }

    /// The name of the limit `max_position_embeddings`, and the reason why no sequence is longer, for messages.
    pub fn position_limit(&self) -> &'static str {
        match self.architecture {
            Architecture::QwenV1 => qwen_v1::POSITION_LIMIT,
            _ => "the positions that the model has",
        }
    }

    /// Axes of a rotary position: one, or time, row and column for M-RoPE.
    pub fn rotary_axes(&self) -> usize {
        if self.rope.sections.is_empty() { 1 } else { self.rope.sections.len() }
    }

    /// The widths of the dense feed-forward blocks and of the shared expert.
    fn mlp_widths(&self) -> impl Iterator<Item = usize> {
        let experts = self.experts.as_ref();
        let has_dense = experts.is_none_or(|experts| experts.layers.contains(&false));
        let dense = has_dense.then_some(self.intermediate_size);
        dense
            .into_iter()
            .chain(experts.and_then(|experts| experts.shared.as_ref().map(|shared| shared.intermediate_size)))
    }

    /// The largest width of a dense feed-forward block or of the shared expert; 0 if there are none.
    pub fn widest_mlp(&self) -> usize {
        self.mlp_widths().max().unwrap_or(0)
    }

    /// Numbers of tensor-parallel ranks that divide this model and may be asked for, ascending.
    pub fn tensor_parallel_sizes(&self) -> Vec<usize> {
        (1..=self.num_heads.min(MAX_RANKS)).filter(|&world| self.tensor_parallel_obstacle(world).is_none()).collect()
    }

    /// # Errors
    /// `Config` if the model cannot be divided among `world` ranks; the message has the obstacle and the valid numbers.
    pub fn check_tensor_parallel(&self, world: usize) -> Result<()> {
        let Some(obstacle) = self.tensor_parallel_obstacle(world) else { return Ok(()) };
        let sizes: Vec<String> = self.tensor_parallel_sizes().iter().map(usize::to_string).collect();
        Err(bad(format!("`--tp {world}` is incompatible with {obstacle}. Valid here: {}.", sizes.join(", "))))
    }

    fn tensor_parallel_obstacle(&self, world: usize) -> Option<String> {
        let mut even = vec![("attention heads", self.num_heads)];
        even.extend(self.mlp_widths().map(|width| ("intermediate features", width)));
        even.extend(self.experts.as_ref().map(|experts| ("groups of experts", experts.groups())));
        even.extend(self.vision.as_ref().map(|vision| ("attention heads of the vision tower", vision.num_heads)));
        if let Some((what, n)) = even.into_iter().find(|(_, n)| world == 0 || !n.is_multiple_of(world)) {
            return Some(format!("{n} {what}: it must divide them"));
        }
        let vocabulary = self.vocab_size;
        if padded_share(vocabulary, world) * (world - 1) >= vocabulary {
            return Some(format!("{vocabulary} tokens of the vocabulary: each rank needs some"));
        }
        let kv_heads = self.num_kv_heads;
        let uneven = || format!("{kv_heads} key-value heads: one must be a multiple of the other");
        head_range(kv_heads, 0, world).err().map(|_| uneven())
    }

    fn check_shapes(&self) -> Result<()> {
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = positive.into_iter().find(|&(_, n)| n == 0) {
            return Err(bad(format!("config.json: {name} is 0")));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(bad(format!("config.json: head_dim is {}; rotary embedding needs an even one", self.head_dim)));
        }
        if matches!(&self.rope.scaling, RopeScaling::Divisors(d) if d.len() != self.rotary_dim / 2) {
            return Err(bad(format!(
                "rope_freqs has not one divisor per pair of {} rotated dimensions",
                self.rotary_dim
            )));
        }
        let sections = &self.rope.sections;
        let is_mrope = sections.len() == 3 && sections.iter().sum::<usize>() == self.head_dim / 2;
        let needs_mrope = self.architecture == Architecture::Qwen25Vl;
        if !is_mrope && (needs_mrope || !sections.is_empty()) {
            return Err(bad(format!(
                "config.json: mrope_section is {sections:?}; it must be three numbers that add up to half of head_dim, \
                 {}",
                self.head_dim / 2
            )));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let (q, kv) = (self.num_heads, self.num_kv_heads);
            return Err(bad(format!("config.json: {kv} key-value heads do not divide {q} attention heads")));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(bad(format!("config.json: rms_norm_eps is {}; it must be in (0, 1)", self.rms_norm_eps)));
        }
        let vocab = self.vocab_size;
        match self.eos_token_ids.iter().chain(&self.bos_token_id).find(|&&id| id as usize >= vocab) {
            Some(id) => Err(bad(format!("config.json: special token {id} is not below vocab_size {vocab}"))),
            None => Ok(()),
        }
    }
}

/// `config.json`. Fields without a default are those that transformers' own configurations always have.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: f64,
    max_position_embeddings: usize,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    qkv_bias: Option<bool>,
    use_qk_norm: Option<bool>,
    mlp_bias: Option<bool>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
    #[serde(flatten)]
    tokens: TokenIds,
}

#[derive(Default, Deserialize)]
struct TokenIds {
    eos_token_id: Option<OneOrMany>,
    bos_token_id: Option<TokenId>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(TokenId),
    Many(Vec<TokenId>),
}

impl OneOrMany {
    fn sorted(self) -> Vec<TokenId> {
        let mut ids = match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        };
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

fn bad(message: String) -> Error {
    Error::Config(message)
}

fn architecture(config: &serde_json::Value) -> Result<(&str, Architecture)> {
    let supported = || ARCHITECTURES.map(|(name, _)| name).join(", ");
    let Some(name) = config["architectures"][0].as_str() else {
        return Err(bad(format!("config.json names no architecture; supported are {}", supported())));
    };
    match ARCHITECTURES.iter().find(|(known, _)| *known == name) {
        Some((_, architecture)) => Ok((name, *architecture)),
        None => Err(bad(format!("the architecture {name} is not supported; supported are {}", supported()))),
    }
}

/// The decoder's configuration, under the keys that all architectures have.
fn decoder_config(architecture: Architecture, config: &serde_json::Value) -> Result<Cow<'_, serde_json::Value>> {
    match architecture {
        Architecture::QwenV1 => qwen_v1::as_qwen2(config).map(Cow::Owned),
        _ => Ok(text_config(config)),
    }
}

/// The decoder's configuration: `text_config` where there is one, as transformers 5 writes it, or `llm_config`, as
/// InternVL's own code does, with fields of the whole model; else the whole.
fn text_config(config: &serde_json::Value) -> Cow<'_, serde_json::Value> {
    let Some(nested) = ["text_config", "llm_config"].map(|name| &config[name]).into_iter().find(|c| c.is_object())
    else {
        return Cow::Borrowed(config);
    };
    let mut text = nested.clone();
    for key in OF_WHOLE_MODEL {
        if text[key].is_null() && !config[key].is_null() {
            text[key] = config[key].clone();
        }
    }
    let is_tied = |config: &serde_json::Value| config["tie_word_embeddings"] == true;
    text["tie_word_embeddings"] = (is_tied(config) || is_tied(nested)).into();
    Cow::Owned(text)
}

/// The decoder of an architecture, with this configuration.
fn decoder(architecture: Architecture, config: &serde_json::Value) -> Result<DecoderKind> {
    let model_type = config["model_type"].as_str().unwrap_or("unnamed");
    Ok(match architecture {
        Architecture::Llama => DecoderKind::Llama,
        Architecture::QwenV1 | Architecture::Qwen2 | Architecture::Qwen25Vl => DecoderKind::Qwen2,
        Architecture::Qwen3 => DecoderKind::Qwen3,
        Architecture::Mistral => DecoderKind::Mistral,
        Architecture::SmolLm3 => DecoderKind::SmolLm3,
        Architecture::Phi3 => DecoderKind::Phi3,
        Architecture::Qwen2Moe => DecoderKind::Qwen2,
        Architecture::Qwen3Moe => DecoderKind::Qwen3Moe,
        Architecture::Mixtral => DecoderKind::Mixtral,
        Architecture::Glm4Moe => DecoderKind::Glm4Moe,
        Architecture::InternVl | Architecture::InternVlChat => match model_type {
            "qwen2" => DecoderKind::Qwen2,
            "qwen3" => DecoderKind::Qwen3,
            other => {
                return Err(bad(format!(
                    "config.json: InternVL with a decoder of the type {other} is not supported; supported are qwen2 \
                     and qwen3"
                )));
            }
        },
    })
}

/// The vision tower of a model whose decoder has this hidden size and vocabulary; `None` for a model of text alone.
fn vision(
    architecture: Architecture,
    config: &serde_json::Value,
    preprocessor: Option<&serde_json::Value>,
    decoder: (usize, usize),
) -> Result<Option<VisionConfig>> {
    let vision = match architecture {
        Architecture::Qwen25Vl => qwen2_5_vl::parse(config, preprocessor, decoder)?,
        Architecture::InternVl => internvl::parse(config, preprocessor, decoder)?,
        Architecture::InternVlChat => internvl::parse_chat(config, decoder)?,
        _ => return Ok(None),
    };
    vision.check()?;
    Ok(Some(vision))
}

fn refuse_unsupported(config: &serde_json::Value, raw: &RawConfig, name: &str) -> Result<()> {
    if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
        return Err(bad(format!("config.json: hidden_act is {act}; {name} is supported with silu only")));
    }
    let quantization = &config["quantization_config"];
    if !quantization.is_null() {
        let method = quantization["quant_method"].as_str().unwrap_or("an unnamed method");
        return Err(bad(format!(
            "config.json: the weights are quantised with {method}, which is not supported; serve the unquantised \
             checkpoint, or a GGUF file of the model, which is dequantised at the start"
        )));
    }
    for key in UNSUPPORTED {
        let value = &config[key];
        if !(value.is_null() || value == false) {
            return Err(bad(format!("config.json: {key} is set; it is not supported for {name}")));
        }
    }
    Ok(())
}

fn dtype(name: Option<&str>) -> Result<Option<Dtype>> {
    match name {
        None => Ok(None),
        Some("float32") => Ok(Some(Dtype::F32)),
        Some("float16") => Ok(Some(Dtype::F16)),
        Some("bfloat16") => Ok(Some(Dtype::Bf16)),
        Some(other) => {
            Err(bad(format!("config.json: dtype {other} is not supported; supported are float32, float16, bfloat16")))
        }
    }
}

#[cfg(test)]
mod tests;
