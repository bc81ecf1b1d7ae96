//! Translation of GGUF to Hugging Face: the names of tensors, and metadata to the form of `config.json`, so that the
//! rest of the server knows one vocabulary.

use candle_core::quantized::gguf_file::{Content, Value};
use serde_json::json;

/// The model's parameter that a tensor of a GGUF file is.
#[derive(Debug, PartialEq)]
pub(super) struct Parameter {
    pub hf_name: String,
    /// Whether rotary embedding applies to its output rows: a query or key projection.
    pub is_rotated: bool,
}

/// The configuration of the model in a GGUF file.
#[derive(Debug)]
pub(super) struct GgufConfig {
    /// In the form of `config.json`, with `eos_token_id` as `generation_config.json` would have it.
    pub json: serde_json::Value,
    pub head_dim: usize,
    /// Whether query and key rows are in the order of interleaved rotary embedding.
    pub interleaved: bool,
}

/// The modules of a block: GGUF's name, Hugging Face's name, and whether rotary embedding applies to its output rows.
const BLOCK_MODULES: [(&str, &str, bool); 11] = [
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", false),
    ("attn_q_norm", "self_attn.q_norm", false),
    ("attn_k_norm", "self_attn.k_norm", false),
    ("attn_output", "self_attn.o_proj", false),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", false),
    ("ffn_up", "mlp.up_proj", false),
    ("ffn_down", "mlp.down_proj", false),
];

/// The parameter that a GGUF tensor of this name is; `None` for other tensors, for example rotary frequencies.
pub(super) fn parameter(gguf_name: &str) -> Option<Parameter> {
    let plain = |name: &str| Some(Parameter { hf_name: name.to_string(), is_rotated: false });
    match gguf_name {
        "token_embd.weight" => return plain("model.embed_tokens.weight"),
        "output_norm.weight" => return plain("model.norm.weight"),
        "output.weight" => return plain("lm_head.weight"),
        _ => {}
    }
    let (layer, rest) = gguf_name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (module, kind) = rest.split_once('.')?;
    let &(_, module, is_rotated) = BLOCK_MODULES.iter().find(|(gguf, ..)| *gguf == module)?;
    matches!(kind, "weight" | "bias")
        .then(|| Parameter { hf_name: format!("model.layers.{layer}.{module}.{kind}"), is_rotated })
}

/// The configuration that the metadata describe. `rope_divisors` are the values of the tensor `rope_freqs.weight`, if
/// there is one.
pub(super) fn config(content: &Content, rope_divisors: Option<&[f32]>) -> Result<GgufConfig, String> {
    let m = Metadata::new(content)?;
    // llama.cpp rotates neighbouring rows for the architecture "llama" (to which its converter permutes the rows) and
    // the two halves of a head for the others.
    let (architecture, interleaved) = match m.arch {
        // The converter names Mistral as Llama; only Mistral has a sliding window.
        "llama" if m.optional_int("attention.sliding_window")?.is_some() => ("MistralForCausalLM", true),
        "llama" => ("LlamaForCausalLM", true),
        "qwen2" => ("Qwen2ForCausalLM", false),
        "qwen3" => ("Qwen3ForCausalLM", false),
        other => {
            return Err(format!("the GGUF architecture {other:?} is not supported; supported are llama, qwen2, qwen3"));
        }
    };
    if m.optional_int("expert_count")?.unwrap_or(0) > 0 {
        return Err("a mixture of experts is not supported; supported are the dense llama, qwen2, qwen3".into());
    }
    let heads = m.int("attention.head_count")?;
    let hidden = m.int("embedding_length")?;
    let head_dim = match m.optional_int("attention.key_length")? {
        Some(d) => d,
        None => hidden.checked_div(heads).ok_or("attention.head_count is 0")?,
    };
    if m.optional_int("attention.value_length")?.is_some_and(|d| d != head_dim) {
        return Err("attention.value_length differs from attention.key_length: not supported".into());
    }
    let rotary_dim = m.optional_int("rope.dimension_count")?.unwrap_or(head_dim);
    let embedding = content.tensor_infos.get("token_embd.weight").ok_or("the file has no tensor token_embd.weight")?;
    let has = |name: &str| content.tensor_infos.contains_key(name);
    let json = json!({
        "architectures": [architecture],
        "vocab_size": embedding.shape.dims().first(),
        "hidden_size": hidden,
        "intermediate_size": m.int("feed_forward_length")?,
        "num_hidden_layers": m.int("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": m.optional_int("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": m.float("attention.layer_norm_rms_epsilon")?,
        "max_position_embeddings": m.int("context_length")?,
        "rope_theta": m.optional_float("rope.freq_base")?.unwrap_or(10_000.0),
        "rope_scaling": rope_scaling(&m, rope_divisors)?,
        "partial_rotary_factor": rotary_dim as f64 / head_dim as f64,
        "tie_word_embeddings": !has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias") && architecture != "Qwen2ForCausalLM",
        "mlp_bias": has("blk.0.ffn_up.bias"),
        "sliding_window": m.optional_int("attention.sliding_window")?,
        "bos_token_id": m.token("bos_token_id")?,
        "eos_token_id": eos_token_ids(&m)?,
    });
    Ok(GgufConfig { json, head_dim: head_dim as usize, interleaved })
}

fn rope_scaling(m: &Metadata, divisors: Option<&[f32]>) -> Result<serde_json::Value, String> {
    if let Some(divisors) = divisors {
        return Ok(json!({"rope_type": "divisors", "divisors": divisors}));
    }
    Ok(match m.optional_str("rope.scaling.type")? {
        None | Some("none") => serde_json::Value::Null,
        Some(kind) => json!({"rope_type": kind, "factor": m.optional_float("rope.scaling.factor")?}),
    })
}

/// The tokens that end a generation, as in llama.cpp: the end-of-sequence token and the end-of-turn token.
fn eos_token_ids(m: &Metadata) -> Result<Vec<u64>, String> {
    let mut ids: Vec<u64> = [m.token("eos_token_id")?, m.token("eot_token_id")?].into_iter().flatten().collect();
    ids.dedup();
    Ok(ids)
}

/// The metadata of a GGUF file, with typed access to the keys of its architecture.
struct Metadata<'a> {
    content: &'a Content,
    arch: &'a str,
}

impl<'a> Metadata<'a> {
    fn new(content: &'a Content) -> Result<Self, String> {
        let Some(Value::String(arch)) = content.metadata.get("general.architecture") else {
            return Err("the metadata has no general.architecture".into());
        };
        let m = Self { content, arch };
        if m.unsigned("split.count")?.unwrap_or(1) > 1 {
            return Err("this is one part of several; join them with llama-gguf-split --merge".into());
        }
        Ok(m)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn int(&self, name: &str) -> Result<u64, String> {
        self.optional_int(name)?.ok_or_else(|| format!("the metadata has no {}", self.key(name)))
    }

    fn optional_int(&self, name: &str) -> Result<Option<u64>, String> {
        self.unsigned(&self.key(name))
    }

    fn token(&self, name: &str) -> Result<Option<u64>, String> {
        self.unsigned(&format!("tokenizer.ggml.{name}"))
    }

    fn unsigned(&self, key: &str) -> Result<Option<u64>, String> {
        let wrong = |v: &Value| format!("{key} is {v:?}, not one whole number; this model is not supported");
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Value::I32(v)) => u64::try_from(*v).map(Some).map_err(|_| wrong(&Value::I32(*v))),
            Some(Value::Array(_)) => Err(format!("{key} differs from layer to layer; this model is not supported")),
            Some(v) => v.to_u64().map(Some).map_err(|_| wrong(v)),
        }
    }

    fn float(&self, name: &str) -> Result<f64, String> {
        self.optional_float(name)?.ok_or_else(|| format!("the metadata has no {}", self.key(name)))
    }

    fn optional_float(&self, name: &str) -> Result<Option<f64>, String> {
        match self.content.metadata.get(&self.key(name)) {
            None => Ok(None),
            // By way of decimal digits, because 1e-5 stored as float32 means the 1e-5 of config.json.
            Some(Value::F32(v)) => v.to_string().parse().map(Some).map_err(|_| format!("{name} is {v}")),
            Some(Value::F64(v)) => Ok(Some(*v)),
            Some(v) => Err(format!("{} is {v:?}, not a number", self.key(name))),
        }
    }

    fn optional_str(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.content.metadata.get(&self.key(name)) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(format!("{} is {v:?}, not a string", self.key(name))),
        }
    }
}
