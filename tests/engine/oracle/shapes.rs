//! Random shapes of all architectures, as far as candle-transformers has them.

use rand::Rng;
use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::common::StateDict;

pub const ARCHITECTURES: [&str; 9] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
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
    let own_width = matches!(architecture, "MistralForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM");
    let hidden_size = match own_width {
        // The kernels of experts take multiples of 16.
        true if architecture == "Qwen3MoeForCausalLM" => one_of(&[32, 48, 64, 112]),
        true => one_of(&[24, 40, 64, 104]),
        false => heads * head_dim,
    };
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
        "MixtralForCausalLM" | "Qwen2MoeForCausalLM" | "Qwen3MoeForCausalLM" => {
            add_experts(architecture, dice, &mut config);
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

/// Adds the settings of a mixture of experts.
fn add_experts(architecture: &str, dice: &mut ChaCha8Rng, config: &mut Value) {
    let mut one_of = |values: &[usize]| *values.choose(dice).unwrap();
    let experts = one_of(&[1, 3, 4, 6, 8, 16]);
    config["num_experts_per_tok"] = one_of(&[1, 2, 4]).min(experts).into();
    let width = one_of(&[8, 24, 72]);
    if architecture == "MixtralForCausalLM" {
        config["num_local_experts"] = experts.into();
        config["intermediate_size"] = width.into();
        return;
    }
    config["num_experts"] = experts.into();
    config["moe_intermediate_size"] = width.into();
    config["shared_expert_intermediate_size"] = one_of(&[24, 130]).into();
    config["decoder_sparse_step"] = one_of(&[1, 2]).into();
    config["mlp_only_layers"] = json!([]);
    config["max_window_layers"] = 0.into();
    config["use_sliding_window"] = false.into();
    config["norm_topk_prob"] = dice.random::<bool>().into();
    if architecture == "Qwen3MoeForCausalLM" {
        config["attention_bias"] = dice.random::<bool>().into();
    }
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
    let (hidden, head_dim) = (size("hidden_size"), size("head_dim"));
    let (queries, keys) = (size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim);
    let architecture = config["architectures"][0].as_str().unwrap();
    let o_bias = config["attention_bias"] == true;
    let qkv_bias = o_bias || matches!(architecture, "Qwen2ForCausalLM" | "Qwen2MoeForCausalLM");
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
        if matches!(architecture, "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM") {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        let mut linears = vec![("self_attn.o_proj".to_owned(), hidden, queries, o_bias)];
        match architecture {
            "Phi3ForCausalLM" => linears.push(("self_attn.qkv_proj".into(), queries + 2 * keys, hidden, false)),
            _ => linears.extend(
                [("q", queries), ("k", keys), ("v", keys)]
                    .map(|(projection, rows)| (format!("self_attn.{projection}_proj"), rows, hidden, qkv_bias)),
            ),
        }
        linears.extend(feed_forward(config, layer));
        for (name, rows, columns, has_bias) in linears {
            add(&format!("{name}.weight"), &[rows, columns]);
            if has_bias {
                add(&format!("{name}.bias"), &[rows]);
            }
        }
    }
    found
}

/// The linear layers of a feed-forward block: name, rows, columns, and whether it has a bias.
fn feed_forward(config: &Value, layer: usize) -> Vec<(String, usize, usize, bool)> {
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let hidden = size("hidden_size");
    let gated = |block: &str, [gate, up, down]: [&str; 3], width: usize, bias: bool| {
        [(gate, width, hidden), (up, width, hidden), (down, hidden, width)]
            .map(|(part, rows, columns)| (format!("{block}.{part}"), rows, columns, bias))
    };
    let projections = ["gate_proj", "up_proj", "down_proj"];
    let architecture = config["architectures"][0].as_str().unwrap();
    let is_sparse = |step: &str| (layer + 1).is_multiple_of(size(step));
    match architecture {
        "Phi3ForCausalLM" => vec![
            ("mlp.gate_up_proj".into(), 2 * size("intermediate_size"), hidden, false),
            ("mlp.down_proj".into(), hidden, size("intermediate_size"), false),
        ],
        "MixtralForCausalLM" => {
            let experts = size("num_local_experts");
            let mut linears = vec![("block_sparse_moe.gate".into(), experts, hidden, false)];
            linears.extend((0..experts).flat_map(|expert| {
                let block = format!("block_sparse_moe.experts.{expert}");
                gated(&block, ["w1", "w3", "w2"], size("intermediate_size"), false)
            }));
            linears
        }
        "Qwen2MoeForCausalLM" | "Qwen3MoeForCausalLM" if is_sparse("decoder_sparse_step") => {
            let experts = size("num_experts");
            let mut linears = vec![("mlp.gate".into(), experts, hidden, false)];
            linears.extend((0..experts).flat_map(|expert| {
                gated(&format!("mlp.experts.{expert}"), projections, size("moe_intermediate_size"), false)
            }));
            if architecture == "Qwen2MoeForCausalLM" {
                let width = size("shared_expert_intermediate_size");
                linears.extend(gated("mlp.shared_expert", projections, width, false));
                linears.push(("mlp.shared_expert_gate".into(), 1, hidden, false));
            }
            linears
        }
        _ => gated("mlp", projections, size("intermediate_size"), config["mlp_bias"] == true).into(),
    }
}
