use super::*;

const TOWER: &str = "visual.blocks.0.attn";
const DECODER: &str = "layers.0.self_attn.q_proj";

fn model() -> Parameters {
    let tower = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{TOWER}.{part}.weight"));
    let decoder = format!("model.{DECODER}.weight");
    let specs = tower.iter().map(|name| (name.as_str(), &[6, 5][..])).chain([(decoder.as_str(), &[4, 5][..])]);
    parameters(&specs.collect::<Vec<_>>(), Dtype::F32, false)
}

/// A trainer adapts the fused attention of the tower, and names the decoder as it has it in memory.
#[test]
fn factors_of_fused_projections_are_those_of_each() {
    let parameters = model();
    let mut rng = rng(7);
    // The rank of the tower's attention is found under the trainer's own name.
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["qkv", "q_proj"],
                     "rank_pattern": {"model.visual.blocks.0.attn.qkv": 3}}"#;
    let fused = format!("model.{TOWER}.qkv");
    let decoder = format!("model.language_model.{DECODER}");
    let factor = |module: &str, part: &str| format!("{module}.lora_{part}.weight");
    let names = [&fused, &decoder].map(|module| ["A", "B"].map(|part| factor(module, part)));
    let push = Push::new(config).random(
        &mut rng,
        Dtype::F32,
        &[(&names[0][0], &[3, 5]), (&names[0][1], &[18, 3]), (&names[1][0], &[2, 5]), (&names[1][1], &[4, 2])],
    );
    let adapter = push.build(&parameters);
    let values = |index: usize| push.values[index].clone().into_f32().into_owned();
    for (part, name) in ["q_proj", "k_proj", "v_proj"].iter().enumerate() {
        let change = adapter.change(&format!("{TOWER}.{name}.weight")).unwrap();
        let Some(rollout_kernels::LoraDelta::LowRank(factors)) = &change.delta else { panic!("{change:?}") };
        assert_eq!((factors.rank, factors.cols), (3, 5));
        assert_eq!(bits(&factors.a.clone().into_f32()), bits(&values(0)));
        assert_eq!(bits(&factors.b.clone().into_f32()), bits(&values(1)[part * 18..(part + 1) * 18]), "{name}");
    }
    assert!(adapter.touches(&format!("model.{DECODER}.weight")));
    let wrong = Push::new(config).random(&mut rng, Dtype::F32, &[(&names[0][0], &[3, 5]), (&names[0][1], &[6, 3])]);
    let error = wrong.check(&parameters).unwrap_err().to_string();
    assert!(error.contains("has shape [6, 3]; the model and adapter_config make it [18, 3]"), "{error}");
}

#[test]
fn a_module_under_two_names_is_rejected() {
    let names = ["model.language_model.", "model."]
        .map(|prefix| ["A", "B"].map(|part| format!("{prefix}{DECODER}.lora_{part}.weight")));
    let shapes: [&[usize]; 2] = [&[2, 5], &[4, 2]];
    let tensors: Vec<(&str, &[usize])> =
        names.iter().flat_map(|names| names.iter().map(String::as_str).zip(shapes)).collect();
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}"#;
    let push = Push::new(config).random(&mut rng(8), Dtype::F32, &tensors);
    let error = push.check(&model()).unwrap_err().to_string();
    assert!(error.contains("is twice; the other is base_model.model.model.language_model.layers"), "{error}");
}

/// PEFT's `state_dict` has the whole base beside the factors, and trained biases and saved modules under its own names.
#[test]
fn tensors_of_fused_projections_are_divided() {
    let of_tower = |kind: &str| ["q_proj", "k_proj", "v_proj"].map(|part| format!("{TOWER}.{part}.{kind}"));
    let (weights, biases, decoder) = (of_tower("weight"), of_tower("bias"), format!("model.{DECODER}.weight"));
    let specs = weights.iter().map(|name| (name.as_str(), &[6, 5][..]));
    let specs =
        specs.chain(biases.iter().map(|name| (name.as_str(), &[6][..]))).chain([(decoder.as_str(), &[4, 5][..])]);
    let specs: Vec<_> = specs.collect();
    let parameters = parameters(&specs, Dtype::F32, false);
    let fused = |part: &str| format!("model.{TOWER}.qkv.{part}");
    let saved = format!("model.language_model.{DECODER}.weight");
    let names = ["lora_A.weight", "lora_B.weight", "base_layer.weight", "base_layer.bias"].map(fused);
    let shapes: [&[usize]; 4] = [&[2, 5], &[18, 2], &[18, 5], &[18]];
    let tensors: Vec<(&str, &[usize])> =
        names.iter().map(String::as_str).zip(shapes).chain([(saved.as_str(), &[4, 5][..])]).collect();
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["qkv"], "bias": "lora_only",
                     "modules_to_save": ["language_model.layers.0.self_attn.q_proj"]}"#;
    let push = Push::new(config).random(&mut rng(9), Dtype::F32, &tensors);
    let adapter = push.build(&parameters);
    let replaced = |name: &str| {
        let change = adapter.change(name).unwrap();
        bits(&change.replacement.as_ref().unwrap().values.clone().into_f32())
    };
    let values = |index: usize| bits(&push.values[index].clone().into_f32());
    for (part, name) in biases.iter().enumerate() {
        assert_eq!(replaced(name), values(3)[6 * part..6 * (part + 1)], "{name}");
        assert!(adapter.change(&weights[part]).unwrap().replacement.is_none(), "the base changes nothing");
    }
    assert_eq!(replaced(&decoder), values(4));
    let names = ["lora_A.weight", "lora_B.weight", "lora_B.bias"].map(fused);
    let tensors: Vec<(&str, &[usize])> = names.iter().map(String::as_str).zip([&[2, 5][..], &[18, 2], &[18]]).collect();
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["qkv"], "lora_bias": true}"#;
    let push = Push::new(config).random(&mut rng(10), Dtype::F32, &tensors);
    let adapter = push.build(&parameters);
    let all = bits(&push.values[2].clone().into_f32());
    for (part, name) in biases.iter().enumerate() {
        let Some(rollout_kernels::LoraDelta::Bias(bias)) = &adapter.change(name).unwrap().delta else {
            panic!("{name}")
        };
        assert_eq!(bits(bias), all[6 * part..6 * (part + 1)], "{name}");
    }
}

#[test]
fn an_adapter_changes_nothing_of_a_tower_that_is_not_served() {
    let (served, ignored): (Vec<ParamSpec>, Vec<ParamSpec>) =
        model().iter().cloned().partition(|spec| !spec.name.starts_with("visual."));
    let parameters = Parameters::new(served, Dtype::F32, 1, false).with_ignored(ignored);
    let names = [format!("model.{TOWER}.qkv"), format!("model.language_model.{DECODER}")]
        .map(|module| ["A", "B"].map(|part| format!("{module}.lora_{part}.weight")));
    let shapes: [&[usize]; 4] = [&[2, 5], &[18, 2], &[2, 5], &[4, 2]];
    let tensors: Vec<(&str, &[usize])> = names.iter().flatten().map(String::as_str).zip(shapes).collect();
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["qkv", "q_proj"]}"#;
    let adapter = Push::new(config).random(&mut rng(11), Dtype::F32, &tensors).build(&parameters);
    assert_eq!(adapter.parameters().collect::<Vec<_>>(), [&format!("model.{DECODER}.weight")]);
}
