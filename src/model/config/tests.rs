use serde_json::{Value, json};

use super::*;
use crate::model::{Build, Decoder};
use crate::weights::{ModelSource, Partition};
use rollout_kernels::{Backend, DeviceOptions, StorageDtype};

mod experts;
mod qwen_v1;

fn fixture(name: &str) -> ModelConfig {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    ModelConfig::from_files(&ModelSource::parse(&path).unwrap().open().unwrap()).unwrap()
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024, "eos_token_id": 7, "bos_token_id": 1
    })
}

/// `llama()` with these fields changed.
fn with(changes: &Value) -> Value {
    let mut config = llama();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn parse(changes: &Value) -> ModelConfig {
    ModelConfig::parse(&with(changes), None, None).unwrap()
}

fn refusal(changes: &Value) -> String {
    match ModelConfig::parse(&with(changes), None, None) {
        Err(Error::Config(message)) => message,
        other => panic!("{changes} gave {other:?}"),
    }
}

#[test]
fn fixtures_have_their_flags() {
    let llama = fixture("llama");
    assert_eq!(llama.architecture_name(), "LlamaForCausalLM");
    assert!(llama.qkv_bias && llama.o_bias && llama.mlp_bias && !llama.qk_norm && !llama.tie_word_embeddings);
    assert_eq!((llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.num_layers), (8, 4, 16, 2));
    assert_eq!(llama.eos_token_ids, [0, 2], "generation_config.json before config.json");
    assert_eq!((llama.bos_token_id, llama.dtype, llama.rms_norm_eps), (Some(0), Some(Dtype::Bf16), 1e-5));
    assert!(matches!(llama.rope.scaling, RopeScaling::Llama3 { original_max_position: 128, .. }));
    assert_eq!((llama.rope.theta, llama.max_position_embeddings), (500_000.0, 1024));

    let tied = fixture("llama-tied");
    assert!(tied.tie_word_embeddings && !tied.qkv_bias && !tied.o_bias && !tied.mlp_bias);
    assert_eq!((tied.rope.theta, tied.dtype), (100_000.0, Some(Dtype::F32)));
    assert!(matches!(tied.rope.scaling, RopeScaling::Llama3 { original_max_position: 256, .. }));

    let qwen2 = fixture("qwen2");
    assert!(qwen2.qkv_bias && !qwen2.o_bias && qwen2.tie_word_embeddings && !qwen2.qk_norm);
    assert_eq!(qwen2.sliding_window, [None, None, Some(100)]);

    let qwen3 = fixture("qwen3");
    assert!(qwen3.qk_norm && !qwen3.qkv_bias && !qwen3.tie_word_embeddings);
    assert_eq!((qwen3.num_heads, qwen3.num_kv_heads, qwen3.head_dim), (4, 2, 32));
    assert_eq!(qwen3.sliding_window, [None, None]);

    let mistral = fixture("mistral");
    assert!(!mistral.qkv_bias && !mistral.o_bias && !mistral.tie_word_embeddings);
    assert_eq!((mistral.head_dim, mistral.rotary_dim), (16, 16));
    assert_eq!((mistral.has_rope, mistral.sliding_window), (vec![true; 2], vec![Some(64); 2]));

    let smollm3 = fixture("smollm3");
    assert_eq!(smollm3.architecture_name(), "SmolLM3ForCausalLM");
    assert!(smollm3.tie_word_embeddings && !smollm3.qkv_bias && !smollm3.o_bias && !smollm3.mlp_bias);
    assert_eq!((smollm3.has_rope, smollm3.sliding_window), (vec![true, false, true], vec![None, Some(100), None]));

    let phi3 = fixture("phi3");
    assert_eq!(phi3.architecture_name(), "Phi3ForCausalLM");
    assert!(!phi3.tie_word_embeddings && !phi3.qkv_bias && !phi3.o_bias && !phi3.mlp_bias);
    assert_eq!((phi3.head_dim, phi3.rotary_dim, phi3.rope.theta), (16, 12, 10_000.0));
    assert_eq!((phi3.has_rope, phi3.sliding_window), (vec![true; 2], vec![Some(100); 2]));
}

#[test]
fn a_gguf_file_gives_the_configuration_of_its_original() {
    let (gguf, original) = (fixture("llama-tied.gguf"), fixture("llama-tied"));
    let (ours, exact) = (gguf.rope.inv_freq(gguf.head_dim), original.rope.inv_freq(original.head_dim));
    // llama.cpp's converter stores the scaling as divisors, which round once more.
    for (a, b) in ours.iter().zip(&exact) {
        assert!((a - b).abs() <= b * 2e-7, "{ours:?} for {exact:?}");
    }
    let RopeScaling::Divisors(divisors) = gguf.rope.scaling.clone() else { panic!("{:?}", gguf.rope) };
    assert_eq!(divisors.len(), 8);
    let same =
        ModelConfig { rope: original.rope.clone(), eos_token_ids: vec![0, 2], dtype: original.dtype, ..gguf.clone() };
    assert_eq!(same, original);
    assert_eq!((gguf.eos_token_ids, gguf.dtype), (vec![2], None));
}

#[test]
fn rotary_frequencies_are_those_of_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/rope.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let head_dim = case["head_dim"].as_u64().unwrap() as usize;
        let new = json!({"rope_parameters": case["rope_parameters"]});
        let mut scaling = case["rope_parameters"].clone();
        let theta = scaling.as_object_mut().unwrap().remove("rope_theta").unwrap();
        let old = json!({"rope_theta": theta, "rope_scaling": scaling});
        let expected: Vec<f32> =
            case["inv_freq"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        for style in [new, old] {
            let ours = RopeConfig::parse(&style).unwrap().inv_freq(head_dim);
            assert_eq!(ours.len(), expected.len());
            for (i, (a, b)) in ours.iter().zip(&expected).enumerate() {
                // Equal but where PyTorch's float32 power is not the nearest float (2 of these 1260 pairs).
                let ulps = a.to_bits().abs_diff(b.to_bits());
                let rope = &case["rope_parameters"];
                assert!(ulps <= 1, "pair {i} is {a}, transformers has {b}: {rope} with head_dim {head_dim}");
            }
        }
    }
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = parse(&json!({"num_key_value_heads": null}));
    assert_eq!((config.num_kv_heads, config.head_dim, config.rope.theta), (8, 8, 10_000.0));
    assert_eq!((config.tie_word_embeddings, config.dtype, config.eos_token_ids), (false, None, vec![7]));
    assert_eq!(config.sliding_window, [None, None]);
    let qwen3 = json!({"architectures": ["Qwen3ForCausalLM"]});
    assert_eq!(parse(&qwen3).head_dim, 128);
    let mistral = json!({"architectures": ["MistralForCausalLM"]});
    assert_eq!(parse(&mistral).sliding_window, [Some(4096), Some(4096)]);
    let mistral = json!({"architectures": ["MistralForCausalLM"], "sliding_window": null});
    assert_eq!(parse(&mistral).sliding_window, [None, None]);
    let unused = json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 0});
    assert_eq!(parse(&unused).sliding_window, [None, None]);
    let named = json!({
        "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": true,
        "layer_types": ["sliding_attention", "full_attention"]
    });
    assert_eq!(parse(&named).sliding_window, [Some(64), None]);
}

#[test]
fn layers_of_smollm3_have_rotary_embedding_or_a_window_as_in_transformers() {
    let smollm3 = |changes: Value| {
        let mut config = json!({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config
    };
    let config = parse(&smollm3(json!({"sliding_window": 9})));
    assert_eq!(config.has_rope, [true, true, true, false, true, true, true, false]);
    assert!(config.tie_word_embeddings && config.sliding_window == [None; 8]);
    let biases = parse(&smollm3(json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": false})));
    assert!(biases.qkv_bias && biases.o_bias && biases.mlp_bias && !biases.tie_word_embeddings);
    let listed = json!({
        "no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 1, 0], "use_sliding_window": true, "sliding_window": 9
    });
    let config = parse(&smollm3(listed.clone()));
    assert_eq!(config.has_rope, [true, false, false, true, true, true, true, true]);
    assert_eq!(config.sliding_window, [None, Some(9), Some(9), None, None, None, None, None]);
    let mut typed = smollm3(listed);
    typed["layer_types"] = json!(["full_attention", "sliding_attention"].repeat(4));
    assert_eq!(parse(&typed).sliding_window, [None, Some(9)].repeat(4));
    for (changes, expected) in [
        (json!({"no_rope_layers": [1, 0]}), "no_rope_layers has 2 entries for 8 layers"),
        (json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval is 0"),
        (json!({"partial_rotary_factor": 0.5}), "4 of the 8 dimensions of a head rotate"),
    ] {
        let message = refusal(&smollm3(changes));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn heads_of_phi3_are_rotated_in_part_and_its_long_contexts_are_refused() {
    let phi3 = |changes: Value| {
        let mut config = json!({
            "architectures": ["Phi3ForCausalLM"], "hidden_size": 256, "attention_bias": false, "resid_pdrop": 0.1,
            "embd_pdrop": 0.1, "original_max_position_embeddings": 512
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config
    };
    let whole = parse(&phi3(json!({"rope_scaling": null, "sliding_window": 2047})));
    assert_eq!((whole.head_dim, whole.rotary_dim, whole.num_kv_heads), (32, 32, 4));
    assert_eq!((whole.has_rope, whole.sliding_window), (vec![true; 2], vec![Some(2047); 2]));
    assert_eq!(parse(&phi3(json!({}))).sliding_window, [None; 2]);
    for part in [
        json!({"partial_rotary_factor": 0.75}),
        json!({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    ] {
        assert_eq!(parse(&phi3(part)).rotary_dim, 24);
    }
    for (changes, expected) in [
        (
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}),
            "rope scaling longrope is not supported",
        ),
        (json!({"rope_scaling": {"type": "su", "short_factor": [1.0]}}), "such as Phi-3-mini-4k or Phi-4"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope scaling yarn is not supported"),
        (json!({"partial_rotary_factor": 0.1}), "partial_rotary_factor 0.1 makes 3 of the 32 dimensions"),
        (json!({"partial_rotary_factor": 0.0}), "makes 0 of the 32 dimensions"),
        (json!({"partial_rotary_factor": 1.5}), "makes 48 of the 32 dimensions"),
    ] {
        let message = refusal(&phi3(changes));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn end_of_sequence_tokens_are_merged() {
    let eos = |config: Value, generation: Option<Value>| {
        ModelConfig::parse(&with(&config), generation.as_ref(), None).unwrap().eos_token_ids
    };
    assert_eq!(eos(json!({"eos_token_id": [9, 3, 9]}), None), [3, 9]);
    assert_eq!(eos(json!({}), Some(json!({"eos_token_id": [5, 4]}))), [4, 5]);
    assert_eq!(eos(json!({}), Some(json!({"temperature": 0.7}))), [7]);
    assert_eq!(eos(json!({"eos_token_id": null}), Some(json!({}))), Vec::<u32>::new());
}

#[test]
fn what_would_be_served_wrongly_is_refused_by_name() {
    let supported = "supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM";
    let cases = [
        (json!({"architectures": ["GPT2LMHeadModel"]}), "the architecture GPT2LMHeadModel is not supported"),
        (json!({"architectures": ["GPT2LMHeadModel"]}), supported),
        (json!({"architectures": null}), supported),
        (json!({"hidden_act": "gelu"}), "hidden_act is gelu"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "quantised with gptq, which is not supported"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping is set"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope scaling yarn is not supported"),
        (json!({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}), "rope scaling longrope"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "differ between layers"),
        (json!({"rope_scaling": {"factor": 4.0}}), "no rope_type"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "no low_freq_factor"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}), "factor of the rope scaling is 0"),
        (json!({"rope_theta": "much"}), "rope_theta is \"much\""),
        (json!({"rope_theta": -1}), "rope_theta is -1"),
        (
            json!({"partial_rotary_factor": 0.5}),
            "4 of the 8 dimensions of a head rotate, which is not supported for Llama",
        ),
        (json!({"dtype": "float8_e4m3fn"}), "dtype float8_e4m3fn"),
        (json!({"vocab_size": null}), "config.json: "),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json!({"num_attention_heads": 0}), "num_attention_heads is 0"),
        (json!({"num_key_value_heads": 3}), "3 key-value heads do not divide 8"),
        (json!({"head_dim": 7}), "head_dim is 7"),
        (json!({"rms_norm_eps": -1e-5}), "rms_norm_eps"),
        (json!({"eos_token_id": 512}), "special token 512 is not below vocab_size 512"),
        (json!({"architectures": ["MistralForCausalLM"], "sliding_window": 0}), "sliding_window is 0"),
    ];
    for (changes, expected) in cases {
        let message = refusal(&changes);
        assert!(message.contains(expected), "{changes}: {message}");
    }
    let windows = json!({
        "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": true, "sliding_window": 8,
        "layer_types": ["full_attention", "linear_attention"]
    });
    assert!(refusal(&windows).contains("layer type linear_attention"));
}

#[test]
fn dynamic_scaling_is_none_up_to_the_positions_of_the_model() {
    let dynamic = parse(&json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}));
    assert_eq!(dynamic, parse(&json!({})));
}

#[test]
fn tensor_parallel_sizes_are_those_that_divide_everything() {
    let config = parse(&json!({}));
    assert_eq!(config.tensor_parallel_sizes(), [1, 2, 4, 8]);
    // SmolLM2-135M, but for its layers.
    let smol = json!({
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3
    });
    let smol = parse(&smol);
    assert_eq!(smol.tensor_parallel_sizes(), [1, 3]);
    let Err(Error::Config(message)) = smol.check_tensor_parallel(2) else { panic!("9 heads in 2") };
    assert_eq!(message, "`--tp 2` is incompatible with 9 attention heads: it must divide them. Valid here: 1, 3.");
    let Err(Error::Config(message)) = smol.check_tensor_parallel(9) else { panic!("1536 features in 9") };
    assert!(message.contains("with 1536 intermediate features: it must divide them. Valid here: 1, 3."), "{message}");
    assert!(smol.check_tensor_parallel(0).is_err() && smol.check_tensor_parallel(3).is_ok());
    let with = |vocabulary: usize| {
        parse(&json!({"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 4,
            "vocab_size": vocabulary, "intermediate_size": 96}))
    };
    assert_eq!(with(509).tensor_parallel_sizes(), [1, 2, 4, 12], "the last rank may have fewer tokens");
    assert_eq!(with(13).tensor_parallel_sizes(), [1, 2, 4]);
    let Err(Error::Config(message)) = with(13).check_tensor_parallel(12) else { panic!("13 tokens on 12 ranks") };
    assert!(message.contains("with 13 tokens of the vocabulary: each rank needs some. Valid"), "{message}");
}

/// Shapes that divide in many ways, with shares of the reductions that are not multiples of 16, of 2, or of anything.
#[test]
fn every_number_of_ranks_is_built_or_refused_with_those_that_are() {
    let (mut built, mut refused) = (0, 0);
    for (heads, kv_heads, intermediate, vocabulary) in [
        (8, 4, 128, 512),
        (12, 2, 96, 540),
        (12, 4, 60, 516),
        (10, 1, 90, 510),
        (20, 5, 140, 480),
        (9, 3, 1536, 49152),
        (64, 8, 192, 512),
        (128, 128, 256, 1024),
        (7, 7, 7, 7),
    ] {
        let config = parse(&json!({
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 32,
            "intermediate_size": intermediate, "vocab_size": vocabulary, "eos_token_id": 1
        }));
        let sizes = config.tensor_parallel_sizes();
        let device = Backend::Cpu.open(&DeviceOptions::default()).unwrap();
        for world in 1..=MAX_RANKS {
            if let Err(error) = config.check_tensor_parallel(world) {
                let listed: Vec<String> = sizes.iter().map(usize::to_string).collect();
                let list = format!(" Valid here: {}.", listed.join(", "));
                assert!(error.to_string().ends_with(&list) && !sizes.contains(&world), "--tp {world}: {error}");
                refused += 1;
                continue;
            }
            assert!(sizes.contains(&world), "--tp {world} works and is not listed: {sizes:?}");
            for (rank, weights) in (0..world).flat_map(|rank| [(rank, StorageDtype::F32), (rank, StorageDtype::Bf16)]) {
                let build = Build { device: device.clone(), partition: Partition::new(rank, world), weights };
                Decoder::new(&config, &build, 16).unwrap_or_else(|e| panic!("rank {rank} of {world}: {e}"));
                built += 1;
            }
        }
    }
    println!("{built} ranks were built, {refused} numbers of ranks refused");
    assert!(built > 300 && refused > 300);
}

/// A change of `config.json` and `preprocessor_config.json`.
type Change = fn(&mut Value, &mut Value);

fn qwen2_5_vl(model: &str, change: impl FnOnce(&mut Value, &mut Value)) -> Result<ModelConfig> {
    let read = |file: &str| -> Value {
        let path = format!("{}/tests/fixtures/{model}/{file}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let (mut config, mut preprocessor) = (read("config.json"), read("preprocessor_config.json"));
    change(&mut config, &mut preprocessor);
    ModelConfig::parse(&config, None, Some(&preprocessor))
}

#[test]
fn a_vision_models_configuration_is_nested_or_flat() {
    let nested = qwen2_5_vl("qwen2_5_vl", |_, _| ()).unwrap();
    assert_eq!(nested.architecture_name(), "Qwen2_5_VLForConditionalGeneration");
    assert!(nested.qkv_bias && !nested.tie_word_embeddings && nested.sliding_window == [None, None]);
    assert_eq!((nested.rope.sections.clone(), nested.rotary_axes()), (vec![2, 3, 3], 3));
    assert_eq!(nested.rope.axis_of(), [0, 0, 1, 1, 1, 2, 2, 2]);
    let vision = nested.vision.unwrap();
    assert_eq!((vision.depth, vision.num_heads, vision.preprocessor.factor()), (4, 4, 28));
    assert_eq!(vision.kind, TowerKind::Windowed { window: 4, full_attention: vec![1, 3] });
    assert_eq!((vision.image_token, vision.forbidden_tokens), (514, vec![514, 515]));
    let flat = qwen2_5_vl("qwen2_5_vl-tied", |_, _| ()).unwrap();
    assert!(flat.tie_word_embeddings && flat.rope.sections == [2, 3, 3]);
    assert_eq!(flat.vision.unwrap().head_dim(), 80);
}

#[test]
fn a_vision_model_that_cannot_be_served_is_refused_by_the_fields_name() {
    let refused = |change: Change, says: &str| {
        let error = qwen2_5_vl("qwen2_5_vl", change).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(|config, _| config["vision_config"]["hidden_act"] = "gelu".into(), "vision_config.hidden_act is gelu");
    refused(|config, _| config["vision_config"]["num_heads"] = 3.into(), "3 heads for a hidden size of 64");
    refused(|config, _| config["vision_config"]["out_hidden_size"] = 32.into(), "out_hidden_size is 32");
    refused(|config, _| config["vision_config"]["fullatt_block_indexes"] = json!([4]), "names block 4 of 4");
    refused(|config, _| config["image_token_id"] = 600.into(), "image_token_id 600 is not below vocab_size 516");
    refused(
        |config, _| config["text_config"]["rope_parameters"]["mrope_section"] = json!([2, 3]),
        "mrope_section is [2, 3]",
    );
    refused(|_, preprocessor| preprocessor["patch_size"] = 16.into(), "vision_config.patch_size is 14, but");
    let whole = std::fs::read(format!("{}/tests/fixtures/qwen2_5_vl/config.json", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let without = ModelConfig::parse(&serde_json::from_slice(&whole).unwrap(), None, None).unwrap_err().to_string();
    assert!(without.contains("no preprocessor_config.json"), "{without}");
    let text = refusal(&json!({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1]}}));
    assert!(text.contains("mrope_section"), "{text}");
}

fn internvl(model: &str, change: impl FnOnce(&mut Value, &mut Value)) -> Result<ModelConfig> {
    let path = format!("{}/tests/fixtures/{model}", env!("CARGO_MANIFEST_DIR"));
    let mut files = crate::weights::ModelSource::parse(&path).unwrap().open().unwrap();
    change(&mut files.config, files.preprocessor_config.as_mut().unwrap());
    ModelConfig::from_files(&files)
}

#[test]
fn internvl_has_two_layouts() {
    let hub = internvl("internvl3", |_, _| ()).unwrap();
    assert_eq!(hub.architecture_name(), "InternVLForConditionalGeneration");
    assert!(hub.qkv_bias && !hub.qk_norm && hub.rotary_axes() == 1 && hub.rope.scaling == RopeScaling::None);
    assert_eq!(hub.eos_token_ids, [0, 2]);
    let own = internvl("internvl3-chat", |_, _| ()).unwrap();
    assert_eq!(own.architecture_name(), "InternVLChatModel");
    assert!(!own.qkv_bias && own.qk_norm, "the decoder is that of Qwen3");
    assert_eq!(own.eos_token_ids, [0, 2], "the end of a turn, which only the tokenizer names, is among them");
    for (config, tile_side, rows) in [(hub, 56, 17), (own, 84, 37)] {
        let vision = config.vision.unwrap();
        assert_eq!(vision.kind, TowerKind::Tiled { tile_side, norm_eps: 1e-6, qkv_bias: true });
        assert_eq!((vision.image_token, vision.forbidden_tokens.clone()), (514, vec![514]));
        assert_eq!((vision.tile_rows(), vision.patch()), (rows, [3, 1, 14, 14]));
        assert_eq!(vision.most_tokens(), 13 * vision.fewest_tokens());
        assert_eq!((vision.preprocessor.mean, vision.preprocessor.std[2]), ([0.485, 0.456, 0.406], 0.225));
    }
}

#[test]
fn internvl_that_cannot_be_served_is_refused_by_the_fields_name() {
    let refused = |model: &str, change: Change, says: &str| {
        let error = internvl(model, change).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    let hub: [(Change, &str); 9] = [
        (|config, _| config["vision_feature_layer"] = (-2).into(), "vision_feature_layer is -2; only -1"),
        (|config, _| config["downsample_ratio"] = 0.25.into(), "downsample_ratio is 0.25; only 0.5"),
        (|config, _| config["vision_config"]["use_qk_norm"] = true.into(), "vision_config.use_qk_norm is true"),
        (|config, _| config["vision_config"]["norm_type"] = "rms_norm".into(), "vision_config.norm_type is rms_norm"),
        (|config, _| config["vision_config"]["image_size"] = json!([84, 84]), "vision_config.image_size is 84 x 84"),
        (|config, _| config["text_config"]["model_type"] = "llama".into(), "a decoder of the type llama"),
        (|config, _| config["image_token_id"] = Value::Null, "image_token_id is missing"),
        (|config, _| config["image_token_id"] = 600.into(), "image_token_id 600 is not below vocab_size 515"),
        (
            |_, preprocessor| {
                preprocessor["image_processor_type"] = "Qwen2VLImageProcessor".into();
                preprocessor["size"] = Value::Null;
            },
            "GotOcr2ImageProcessor",
        ),
    ];
    hub.into_iter().for_each(|(change, says)| refused("internvl3", change, says));
    let own: [(Change, &str); 6] = [
        (|config, _| config["ps_version"] = "v1".into(), "ps_version is \"v1\"; only v2"),
        (|config, _| config["ps_version"] = Value::Null, "ps_version is null; only v2"),
        (|config, _| config["select_layer"] = (-4).into(), "select_layer is -4; only -1"),
        (|config, _| config["use_thumbnail"] = false.into(), "use_thumbnail is false; only true"),
        (|config, _| config["vision_config"]["qk_normalization"] = true.into(), "qk_normalization is true"),
        (|config, _| config["max_dynamic_patch"] = 0.into(), "max_dynamic_patch is 0"),
    ];
    own.into_iter().for_each(|(change, says)| refused("internvl3-chat", change, says));
}
