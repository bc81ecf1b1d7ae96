//! Mixtures of experts: which layers have them, how they are chosen, and among how many ranks they can be divided.

use super::*;

fn qwen3_moe(changes: &Value) -> Value {
    let mut config = with(&json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32
    }));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn experts(changes: &Value) -> ExpertsConfig {
    ModelConfig::parse(&qwen3_moe(changes), None, None).unwrap().experts.expect("some layers have experts")
}

#[test]
fn families_differ_by_their_fields() {
    let qwen3 = fixture("qwen3_moe");
    assert!(qwen3.qk_norm && !qwen3.qkv_bias);
    let experts = qwen3.experts.unwrap();
    assert_eq!((experts.count, experts.top_k, experts.intermediate_size, experts.normalised), (8, 2, 32, true));
    assert_eq!((experts.layers, experts.shared), (vec![true, false, true], None));
    assert_eq!(fixture("qwen3_moe_60").experts.unwrap().groups(), 4);

    let qwen2 = fixture("qwen2_moe");
    assert!(qwen2.qkv_bias && !qwen2.qk_norm);
    let experts = qwen2.experts.unwrap();
    assert!(!experts.normalised && !experts.has_correction_bias && experts.shared.unwrap().is_gated);

    let mixtral = fixture("mixtral");
    assert!(!mixtral.qkv_bias && mixtral.sliding_window.iter().all(Option::is_none));
    let experts = mixtral.experts.unwrap();
    assert!(experts.normalised && experts.layers.iter().all(|sparse| *sparse));
    assert_eq!(experts.intermediate_size, mixtral.intermediate_size);

    let glm = fixture("glm4_moe");
    assert!(glm.qkv_bias && !glm.o_bias && glm.qk_norm);
    assert_eq!((glm.head_dim, glm.rotary_dim), (32, 16));
    let experts = glm.experts.unwrap();
    assert!(experts.normalised && experts.has_correction_bias);
    assert_eq!((experts.scale, experts.layers), (2.5, vec![false, true, true]));
    assert_eq!(experts.shared, Some(SharedExpertConfig { intermediate_size: 32, is_gated: false }));
}

/// GLM-4.5 with the defaults of transformers and these fields.
fn glm4_moe(changes: &Value) -> Value {
    let mut config = with(&json!({
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "head_dim": 16
    }));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn glm_has_the_defaults_of_transformers() {
    let glm = ModelConfig::parse(&glm4_moe(&json!({})), None, None).unwrap();
    assert!(!glm.qkv_bias && !glm.qk_norm && !glm.tie_word_embeddings);
    assert_eq!(glm.rotary_dim, 8, "half of each head");
    let experts = glm.experts.unwrap();
    assert_eq!((experts.normalised, experts.scale, experts.layers), (true, 1.0, vec![false, true]));
    assert_eq!(experts.shared.unwrap().intermediate_size, 32);

    let changes = json!({"n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": false});
    let experts = ModelConfig::parse(&glm4_moe(&changes), None, None).unwrap().experts.unwrap();
    assert_eq!((experts.normalised, experts.layers), (false, vec![true, true]));
    assert_eq!(experts.shared.unwrap().intermediate_size, 64);
}

#[test]
fn groups_of_experts_are_refused_with_their_number() {
    for field in ["n_group", "topk_group"] {
        let config = glm4_moe(&json!({field: 3}));
        let refused = ModelConfig::parse(&config, None, None).unwrap_err().to_string();
        assert!(refused.contains(&format!("{field} is 3; Glm4MoeForCausalLM")), "{refused}");
    }
}

#[test]
fn layers_are_dense_where_the_configuration_says_so() {
    let layers = |changes: Value| experts(&changes).layers;
    assert_eq!(layers(json!({})), [true; 4]);
    assert_eq!(layers(json!({"decoder_sparse_step": 2})), [false, true, false, true]);
    assert_eq!(layers(json!({"mlp_only_layers": [0, 3]})), [false, true, true, false]);
    let none = qwen3_moe(&json!({"mlp_only_layers": [0, 1, 2, 3]}));
    assert_eq!(ModelConfig::parse(&none, None, None).unwrap().experts, None);
}

#[test]
fn experts_are_divided_among_ranks_in_whole_groups() {
    let sizes = |changes: Value| ModelConfig::parse(&qwen3_moe(&changes), None, None).unwrap().tensor_parallel_sizes();
    assert_eq!(sizes(json!({})), [1, 2, 4, 8]);
    assert_eq!(sizes(json!({"num_experts": 60})), [1, 2, 4]);
    assert_eq!(sizes(json!({"num_experts": 6})), [1, 2]);
    // The width of a dense block counts only if a layer has one.
    assert_eq!(sizes(json!({"intermediate_size": 3})), [1, 2, 4, 8]);
    assert_eq!(sizes(json!({"intermediate_size": 3, "mlp_only_layers": [0]})), [1]);
}

#[test]
fn wrong_settings_are_refused_by_name() {
    let refusal = |changes: Value| match ModelConfig::parse(&qwen3_moe(&changes), None, None) {
        Err(Error::Config(message)) => message,
        other => panic!("{changes} gave {other:?}"),
    };
    assert!(refusal(json!({"num_experts": 0})).contains("0 experts"));
    assert!(refusal(json!({"num_experts": 70000})).contains("70000 experts"));
    assert!(refusal(json!({"num_experts_per_tok": 9})).contains("num_experts_per_tok is 9"));
    assert!(refusal(json!({"num_experts_per_tok": 0})).contains("num_experts_per_tok is 0"));
    assert!(refusal(json!({"moe_intermediate_size": 0})).contains("width of an expert"));
}
