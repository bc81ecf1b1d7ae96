//! candle-transformers' models of a checkpoint.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, IndexOp as _, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::smol::smollm3;
use candle_transformers::models::{llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe};
use rollout_server::types::TokenId;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A model that computes in float32 on the CPU.
pub struct Candle {
    model: Model,
}

enum Model {
    Llama(llama::Llama, llama::Cache),
    Qwen2(qwen2::ModelForCausalLM),
    Qwen3(qwen3::ModelForCausalLM),
    Mistral(mistral::Model),
    SmolLm3(smollm3::ModelForCausalLM),
    Phi3(phi3::Model),
    Qwen2Moe(qwen2_moe::Model),
    Qwen3Moe(qwen3_moe::ModelForCausalLM),
    Mixtral(mixtral::Model),
}

impl Candle {
    /// Loads the checkpoint in the directory `model`, whose configuration is `config`.
    pub fn load(model: &Path, config: &Value) -> Self {
        let mut tensors = HashMap::new();
        for entry in std::fs::read_dir(model).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("model") && name.ends_with(".safetensors") {
                tensors.extend(candle_core::safetensors::load(entry.path(), &Device::Cpu).unwrap());
            }
        }
        let architecture = config["architectures"][0].as_str().unwrap();
        let has_head = ["MistralForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM"].contains(&architecture);
        if has_head && config["tie_word_embeddings"] == true {
            // candle's model always has a head of its own.
            tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
        }
        let config = of_candle(config);
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let model = match architecture {
            "LlamaForCausalLM" => {
                let config = parse::<llama::LlamaConfig>(&config).into_config(false);
                let cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
                Model::Llama(llama::Llama::load(weights, &config).unwrap(), cache)
            }
            "Qwen2ForCausalLM" => Model::Qwen2(qwen2::ModelForCausalLM::new(&parse(&config), weights).unwrap()),
            "Qwen3ForCausalLM" => Model::Qwen3(qwen3::ModelForCausalLM::new(&parse(&config), weights).unwrap()),
            "MistralForCausalLM" => Model::Mistral(mistral::Model::new(&parse(&config), weights).unwrap()),
            "SmolLM3ForCausalLM" => Model::SmolLm3(smollm3::ModelForCausalLM::new(&parse(&config), weights).unwrap()),
            "Phi3ForCausalLM" => Model::Phi3(phi3::Model::new(&parse(&config), weights).unwrap()),
            "Qwen2MoeForCausalLM" => Model::Qwen2Moe(qwen2_moe::Model::new(&parse(&config), weights).unwrap()),
            "Qwen3MoeForCausalLM" => {
                Model::Qwen3Moe(qwen3_moe::ModelForCausalLM::new(&parse(&config), weights).unwrap())
            }
            "MixtralForCausalLM" => Model::Mixtral(mixtral::Model::new(&parse(&config), weights).unwrap()),
            other => panic!("candle has no {other} here"),
        };
        Self { model }
    }

    /// Log-probabilities of all tokens but the first.
    ///
    /// Each is computed by a run over all tokens before it: candle's models return the logits of the last token only,
    /// and ignore sliding windows when they decode with a cache.
    pub fn logprobs(&mut self, tokens: &[TokenId]) -> Vec<f32> {
        (1..tokens.len())
            .map(|end| {
                let logits = self.logits(&tokens[..end]).flatten_all().unwrap();
                let logprobs = candle_nn::ops::log_softmax(&logits, 0).unwrap();
                logprobs.i(tokens[end] as usize).unwrap().to_scalar().unwrap()
            })
            .collect()
    }

    fn logits(&mut self, tokens: &[TokenId]) -> Tensor {
        let tokens = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        match &mut self.model {
            Model::Llama(model, cache) => model.forward(&tokens, 0, cache),
            Model::Qwen2(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::Qwen3(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::Mistral(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::SmolLm3(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::Phi3(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::Qwen2Moe(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            Model::Qwen3Moe(model) => {
                model.clear_kv_cache();
                model.forward(&tokens, 0)
            }
            // Its cache cannot be cleared.
            Model::Mixtral(model) => model.clone().forward(&tokens, 0),
        }
        .unwrap()
    }
}

fn parse<T: DeserializeOwned>(config: &Value) -> T {
    serde_json::from_value(config.clone()).unwrap()
}

/// A configuration as candle reads it: rotary embedding as transformers 4 writes it, windows without the token itself.
fn of_candle(config: &Value) -> Value {
    let mut config = config.clone();
    if let Some(rope) = config.get("rope_parameters").cloned() {
        config["rope_theta"] = rope["rope_theta"].clone();
        config["partial_rotary_factor"] = rope["partial_rotary_factor"].clone();
        config["rope_scaling"] = if rope["rope_type"] == "default" { Value::Null } else { rope };
    }
    let window = config["sliding_window"].as_u64();
    match config["architectures"][0].as_str() {
        Some("MistralForCausalLM") => config["sliding_window"] = window.map(|window| window - 1).into(),
        // candle's Qwen2 has its window in all layers, whatever the configuration says.
        Some("Qwen2ForCausalLM") => {
            let in_all = config["use_sliding_window"] == true && config["max_window_layers"] == 0;
            config["sliding_window"] =
                window.filter(|_| in_all).map_or(u64::from(u32::MAX), |window| window - 1).into();
        }
        // candle's SmolLM3 has no windows, and refuses those that the configuration names.
        Some("SmolLM3ForCausalLM") => config["use_sliding_window"] = false.into(),
        // candle's models have no windows here, and need the fields all the same.
        Some("MixtralForCausalLM" | "Qwen2MoeForCausalLM") => {
            config["sliding_window"] = u32::MAX.into();
            config["use_flash_attn"] = false.into();
        }
        Some("Qwen3MoeForCausalLM") => {
            config["max_window_layers"] = 0.into();
            // As transformers 5 writes it.
            if let Some(experts) = config.get("num_local_experts").cloned() {
                config["num_experts"] = experts;
            }
        }
        _ => {}
    }
    config
}
