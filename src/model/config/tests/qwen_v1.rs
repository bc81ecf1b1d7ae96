//! Qwen v1: its own keys, the end of a turn, and settings that are refused.

use super::*;

/// `config.json` of the fixture with these fields changed.
fn qwen_v1(changes: &Value) -> Result<ModelConfig> {
    let path = format!("{}/tests/fixtures/qwen_v1/config.json", env!("CARGO_MANIFEST_DIR"));
    let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    ModelConfig::parse(&config, None, None)
}

#[test]
fn its_keys_are_those_of_qwen2_under_other_names() {
    let model = fixture("qwen_v1");
    assert_eq!(model.architecture_name(), "QWenLMHeadModel");
    assert!(model.qkv_bias && !model.o_bias && !model.mlp_bias && !model.qk_norm && !model.tie_word_embeddings);
    assert_eq!((model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim), (4, 4, 16, 16));
    assert_eq!((model.intermediate_size, model.vocab_size, model.max_position_embeddings), (96, 736, 1024));
    assert_eq!((model.rms_norm_eps, model.rope.theta, model.dtype), (1e-6, 10_000.0, Some(Dtype::Bf16)));
    assert!(model.position_limit().contains("seq_length"));
    assert_eq!((model.rope.scaling, model.sliding_window), (RopeScaling::None, vec![None; 2]));
    let changed = qwen_v1(&json!({"rotary_emb_base": 1e6, "bf16": false, "fp32": true})).unwrap();
    assert_eq!((changed.rope.theta, changed.dtype), (1e6, Some(Dtype::F32)));
    let trained = qwen_v1(&json!({"torch_dtype": "float16"})).unwrap();
    assert_eq!(trained.dtype, Some(Dtype::F16), "as a trainer saved it");
}

#[test]
fn the_end_of_a_turn_ends_an_answer_in_chatml() {
    assert_eq!(fixture("qwen_v1").eos_token_ids, [512, 514]);
    let path = format!("{}/tests/fixtures/qwen_v1", env!("CARGO_MANIFEST_DIR"));
    let mut files = ModelSource::parse(&path).unwrap().open().unwrap();
    files.generation_config = Some(json!({"chat_format": "raw", "eos_token_id": 512}));
    assert_eq!(ModelConfig::from_files(&files).unwrap().eos_token_ids, [512]);
    files.generation_config = None;
    assert!(ModelConfig::from_files(&files).unwrap().eos_token_ids.is_empty());
}

#[test]
fn what_would_be_served_wrongly_is_refused_with_its_value() {
    for (changes, expected) in [
        (json!({"no_bias": false}), "no_bias is false; only true"),
        (json!({"rotary_pct": 0.25}), "rotary_pct is 0.25; only 1"),
        (json!({"use_cache_quantization": true}), "use_cache_quantization is true; only false"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "quantised with gptq, which is not supported"),
        (json!({"kv_channels": 8}), "kv_channels is 8; 4 heads must make up the hidden_size 64"),
        (json!({"intermediate_size": 193}), "intermediate_size is 193; it must be even"),
        (json!({"seq_length": null}), "config.json: "),
        (json!({"seq_length": 0}), "max_position_embeddings is 0"),
    ] {
        let message = qwen_v1(&changes).unwrap_err().to_string();
        assert!(message.contains(expected), "{changes}: {message}");
    }
}
