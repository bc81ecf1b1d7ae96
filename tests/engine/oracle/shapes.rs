//! Random shapes of all architectures, as far as candle-transformers has them.

use rand::Rng;
use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::common::StateDict;

pub const ARCHITECTURES: [&str; 6] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
];

/// A tiny `config.json`: heads of several widths, grouped or not, with and without a tied head, and the biases, windows
/// and rotary embeddings that candle has for the architecture.
pub fn random_config(architecture: &str, dice: &mut ChaCha8Rng) -> Value {
    let mut one_of = |values: &[usize]| *values.choose(dice).unwrap();
    let kv_heads = one_of(&[1, 2, 3]);
    let heads = kv_heads * one_of(&[1, 2, 4]);
    let head_dim = one_of(&[16, 32, 48, 64]);
    // The others divide it among their heads.
    let own_width = matches!(architecture, "MistralForCausalLM" | "Qwen3ForCausalLM");
    let hidden_size = if own_width { one_of(&[24, 40, 64, 104]) } else { heads * head_dim };
    let window = one_of(&[0, 1, 7, 40]);
    let mut config = json!({
        "architectures": [architecture],
        "vocab_size": one_of(&[512, 515, 640]), // the tokenizer has 512 tokens
        "hidden_size": hidden_size,
        "intermediate_size": one_of(&[24, 72, 130]),
        "num_hidden_layers": one_of(&[1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": if dice.random() { 1e-5 } else { 1e-6 },
        "rope_theta": if dice.random() { 1e4 } else { 1e6 },
        "tie_word_embeddings": dice.random::<bool>(),
        "sliding_window": null,
    });
    match architecture {
        "LlamaForCausalLM" if dice.random() => {
            config["rope_scaling"] = json!({
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            });
        }
        "MistralForCausalLM" if window > 0 => config["sliding_window"] = window.into(),
        "Qwen2ForCausalLM" => {
            config["max_window_layers"] = 0.into();
            config["use_sliding_window"] = (window > 0).into();
            config["sliding_window"] = window.max(1).into();
        }
        "Qwen3ForCausalLM" => {
            config["max_window_layers"] = 0.into();
            config["use_sliding_window"] = false.into();
            config["attention_bias"] = dice.random::<bool>().into();
        }
        "Phi3ForCausalLM" => {
            config["partial_rotary_factor"] = [1.0, 0.75, 0.5, 0.25].choose(dice).copied().into();
        }
        "SmolLM3ForCausalLM" => {
            config["attention_bias"] = dice.random::<bool>().into();
            config["mlp_bias"] = dice.random::<bool>().into();
            match dice.random() {
                true => config["no_rope_layer_interval"] = dice.random_range(1..4).into(),
                false => config["no_rope_layers"] = json!([0; 3].map(|_| dice.random_range(0..2))),
            }
        }
        _ => {}
    }
    config
}

/// Random weights for a configuration, so small that each product has about the size of what it multiplies, as in a
/// trained model: float32 rounds larger ones off by more than the tolerance.
pub fn random_weights(config: &Value, dice: &mut ChaCha8Rng) -> StateDict {
    let mut tensor = |(name, shape): (String, Vec<usize>)| {
        let (center, most) = match shape[..] {
            [_, columns] => (0.0, (3.0 / columns as f32).sqrt()),
            _ if name.ends_with("norm.weight") => (1.0, 0.2),
            _ => (0.0, 0.2),
        };
        let values = (0..shape.iter().product()).map(|_| center + dice.random_range(-most..most)).collect();
        (name, (shape, values))
    };
    tensors(config).into_iter().map(&mut tensor).collect()
}

/// Names and shapes of the parameters, as transformers stores them.
fn tensors(config: &Value) -> Vec<(String, Vec<usize>)> {
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let (hidden, intermediate, head_dim) = (size("hidden_size"), size("intermediate_size"), size("head_dim"));
    let (queries, keys) = (size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim);
    let architecture = config["architectures"][0].as_str().unwrap();
    let (o_bias, mlp_bias) = (config["attention_bias"] == true, config["mlp_bias"] == true);
    let qkv_bias = o_bias || architecture == "Qwen2ForCausalLM";
    let mut found = vec![
        ("model.embed_tokens.weight".to_owned(), vec![size("vocab_size"), hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if config["tie_word_embeddings"] == false {
        found.push(("lm_head.weight".to_owned(), vec![size("vocab_size"), hidden]));
    }
    for layer in 0..size("num_hidden_layers") {
        let mut add =
            |name: &str, shape: &[usize]| found.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        if architecture == "Qwen3ForCausalLM" {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        let inputs = match architecture {
            "Phi3ForCausalLM" => vec![
                ("self_attn.qkv_proj", queries + 2 * keys, hidden, false),
                ("mlp.gate_up_proj", 2 * intermediate, hidden, false),
            ],
            _ => vec![
                ("self_attn.q_proj", queries, hidden, qkv_bias),
                ("self_attn.k_proj", keys, hidden, qkv_bias),
                ("self_attn.v_proj", keys, hidden, qkv_bias),
                ("mlp.gate_proj", intermediate, hidden, mlp_bias),
                ("mlp.up_proj", intermediate, hidden, mlp_bias),
            ],
        };
        let outputs =
            [("self_attn.o_proj", hidden, queries, o_bias), ("mlp.down_proj", hidden, intermediate, mlp_bias)];
        for (name, rows, columns, has_bias) in inputs.into_iter().chain(outputs) {
            add(&format!("{name}.weight"), &[rows, columns]);
            if has_bias {
                add(&format!("{name}.bias"), &[rows]);
            }
        }
    }
    found
}
