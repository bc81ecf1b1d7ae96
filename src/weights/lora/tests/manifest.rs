//! Tensors and configurations that do not fit the model, with the error for each.

use super::*;

const Q: &str = "model.layers.0.self_attn.q_proj";
const MLP: &str = "model.layers.0.mlp.up_proj";

/// A layer with a bias `[6, 4]`, one without `[8, 4]`, a norm, an embedding `[10, 4]` and its head.
fn model(tied: bool) -> Parameters {
    let mut specs: Vec<(&str, &[usize])> = vec![
        ("model.embed_tokens.weight", &[10, 4]),
        ("model.layers.0.self_attn.q_proj.weight", &[6, 4]),
        ("model.layers.0.self_attn.q_proj.bias", &[6]),
        ("model.layers.0.mlp.up_proj.weight", &[8, 4]),
        ("model.norm.weight", &[4]),
        ("lm_head.weight", &[10, 4]),
    ];
    if tied {
        specs.pop();
    }
    parameters(&specs, Dtype::Bf16, tied)
}

fn config(fields: &str) -> String {
    format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "unheard_of": [1] {fields}}}"#)
}

type Tensors<'a> = &'a [(&'a str, &'a [usize])];

const Q_FACTORS: Tensors<'static> = &[
    ("model.layers.0.self_attn.q_proj.lora_A.weight", &[2, 4]),
    ("model.layers.0.self_attn.q_proj.lora_B.weight", &[6, 2]),
];

fn push(fields: &str, tensors: &[Tensors<'_>]) -> Push {
    Push::new(&config(fields)).random(&mut rng(0), Dtype::F32, &tensors.concat())
}

/// The field and the text of the error for this adapter.
fn refused(push: &Push, parameters: &Parameters) -> (String, String) {
    match push.check(parameters) {
        Err(Error::InvalidArgument { field, message }) => (field, message),
        Err(other) => panic!("not InvalidArgument: {other:?}"),
        Ok(_) => panic!("{} with {:?} was taken", push.config, push.tensors),
    }
}

fn refuses(push: &Push, tied: bool, field: &str, says: &str) {
    let (named, message) = refused(push, &model(tied));
    assert!(named == field && message.contains(says), "{named}: {message}\nexpected {field}: ...{says}...");
}

fn refuses_tensor(push: &Push, tied: bool, tensor: &str, says: &str) {
    refuses(push, tied, &format!("base_model.model.{tensor}"), says);
}

fn changed(push: &Push, tied: bool) -> Vec<String> {
    push.build(&model(tied)).parameters().map(str::to_string).collect()
}

#[test]
fn names_of_save_pretrained_and_of_state_dict_are_the_same() {
    let fields = r#", "lora_bias": true, "modules_to_save": ["norm"]"#;
    let saved: [Tensors; 3] = [
        Q_FACTORS,
        &[("model.layers.0.self_attn.q_proj.lora_B.bias", &[6]), ("model.norm.weight", &[4])],
        &[("model.embed_tokens.lora_embedding_A", &[2, 10]), ("model.embed_tokens.lora_embedding_B", &[4, 2])],
    ];
    let state: Tensors = &[
        ("model.layers.0.self_attn.q_proj.lora_A.actor.weight", &[2, 4]),
        ("model.layers.0.self_attn.q_proj.lora_B.actor.weight", &[6, 2]),
        ("model.layers.0.self_attn.q_proj.lora_B.actor.bias", &[6]),
        ("model.norm.modules_to_save.actor.weight", &[4]),
        ("model.embed_tokens.lora_embedding_A.actor", &[2, 10]),
        ("model.embed_tokens.lora_embedding_B.actor", &[4, 2]),
    ];
    let expected = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    ];
    let other: Tensors = &[("model.layers.0.mlp.up_proj.lora_A.critic.weight", &[2, 4])];
    refuses_tensor(&push(fields, &[state, other]), false, other[0].0, "critic");
    let (saved, state) = (push(fields, &saved), push(fields, &[state]));
    assert_eq!(changed(&saved, false), expected);
    assert_eq!(changed(&state, false), expected);
    assert_eq!(saved.build(&model(false)).rank(), 2);
    for (name, shape) in [(expected[0], [10, 4].as_slice()), (expected[1], &[6]), (expected[2], &[6, 4])] {
        let mut values = [vec![0.5; 40], vec![0.5; 40]].map(|v| v[..shape.iter().product()].to_vec());
        for (values, push) in values.iter_mut().zip([&saved, &state]) {
            push.build(&model(false)).merge("auto", name, &Slice::whole(shape), values);
        }
        assert_eq!(bits(&values[0]), bits(&values[1]), "{name}");
    }
}

#[test]
fn a_magnitude_has_four_names() {
    for suffix in ["", ".weight", ".default", ".default.weight"] {
        let name = format!("{Q}.lora_magnitude_vector{suffix}");
        let push = push(r#", "use_dora": true"#, &[Q_FACTORS, &[(&name, &[6])]]);
        let adapter = push.build(&model(false));
        let weight = format!("{Q}.weight");
        let change = adapter.change(&weight).unwrap();
        assert!(change.needs_whole_rows() && adapter.factors(&weight).is_none());
        let error = adapter.check_unmerged().unwrap_err().to_string();
        assert!(error.contains(Q) && error.contains("DoRA"), "{error}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let plain = |tensors: &[Tensors<'_>]| push("", tensors);
    let (a, b) = (Q_FACTORS[0], Q_FACTORS[1]);
    for name in
        ["x", "norm.lora_embedding_A.a.b", "model.norm.scale", "weight", "model.layers.0.modules_to_save.weight"]
    {
        refuses_tensor(&plain(&[&[(name, &[4])]]), false, name, "not a name");
    }
    let mut no_prefix = plain(&[&[a, b]]);
    no_prefix.tensors[0].0 = a.0.to_string();
    refuses(&no_prefix, false, a.0, "not a name");
    refuses_tensor(&plain(&[&[a]]), false, b.0, "missing");
    refuses_tensor(&plain(&[&[b]]), false, a.0, "missing");
    refuses_tensor(&plain(&[&[a, b, a]]), false, a.0, "twice");
    let again = format!("{Q}.lora_A.default.weight");
    refuses_tensor(&plain(&[&[a, b, (&again, a.1)]]), false, &again, a.0);
    refuses_tensor(&plain(&[&[(a.0, &[2, 5]), b]]), false, a.0, "[2, 5]; the model and adapter_config make it [2, 4]");
    refuses_tensor(&plain(&[&[(a.0, &[3, 4]), b]]), false, a.0, "[2, 4]");
    refuses_tensor(&plain(&[&[a, (b.0, &[2, 6])]]), false, b.0, "[6, 2]");
    refuses_tensor(&plain(&[&[(a.0, &[8])], &[b]]), false, a.0, "[2, 4]");
    let unknown: Tensors =
        &[("model.layers.7.up.lora_A.weight", &[2, 4]), ("model.layers.7.up.lora_B.weight", &[6, 2])];
    refuses_tensor(&plain(&[unknown]), false, unknown[0].0, "no model.layers.7.up.weight");
    let norm: Tensors = &[("model.norm.lora_A.weight", &[2, 4]), ("model.norm.lora_B.weight", &[4, 2])];
    refuses_tensor(&plain(&[norm]), false, norm[0].0, "no matrix");
    let linear: Tensors =
        &[("model.embed_tokens.lora_A.weight", &[2, 4]), ("model.embed_tokens.lora_B.weight", &[10, 2])];
    refuses_tensor(&plain(&[linear]), false, linear[0].0, "lora_embedding_A");
    let embedding: Tensors = &[("lm_head.lora_embedding_A", &[2, 10]), ("lm_head.lora_embedding_B", &[4, 2])];
    refuses_tensor(&plain(&[embedding]), false, embedding[0].0, "the only embedding");
    let both = format!("{Q}.lora_embedding_A");
    let other = format!("{Q}.lora_embedding_B");
    refuses_tensor(&plain(&[Q_FACTORS, &[(&both, &[2, 10]), (&other, &[4, 2])]]), false, a.0, "one of them");
    let mut mixed = plain(&[Q_FACTORS]);
    mixed.tensors[1].1 = Dtype::Bf16;
    refuses_tensor(&mixed, false, b.0, "one precision");
}

#[test]
fn tensors_and_the_configuration_agree() {
    let magnitude = format!("{Q}.lora_magnitude_vector");
    let bias = format!("{Q}.lora_B.bias");
    let dora = r#", "use_dora": true"#;
    refuses_tensor(&push(dora, &[Q_FACTORS]), false, &magnitude, "missing");
    refuses_tensor(&push("", &[Q_FACTORS, &[(&magnitude, &[6])]]), false, &magnitude, "use_dora");
    refuses_tensor(&push(dora, &[Q_FACTORS, &[(&magnitude, &[4])]]), false, &magnitude, "[6]");
    refuses_tensor(&push(dora, &[&[(&magnitude, &[6])]]), false, &magnitude, "lora_A");
    let embedding: Tensors =
        &[("model.embed_tokens.lora_embedding_A", &[2, 10]), ("model.embed_tokens.lora_embedding_B", &[4, 2])];
    refuses_tensor(&push(dora, &[embedding]), false, embedding[0].0, "not supported");
    let lora_bias = r#", "lora_bias": true"#;
    refuses_tensor(&push(lora_bias, &[Q_FACTORS]), false, &bias, "missing");
    refuses_tensor(&push("", &[Q_FACTORS, &[(&bias, &[6])]]), false, &bias, "lora_bias");
    refuses_tensor(&push(lora_bias, &[Q_FACTORS, &[(&bias, &[5])]]), false, &bias, "[6]");
    let (a, b, of_b) = (format!("{MLP}.lora_A.weight"), format!("{MLP}.lora_B.weight"), format!("{MLP}.lora_B.bias"));
    let no_bias: Tensors = &[(&a, &[2, 4]), (&b, &[8, 2]), (&of_b, &[8])];
    refuses_tensor(&push(lora_bias, &[no_bias]), false, &of_b, "has no bias");
    refuses(&push("", &[]), false, "tensors", "no tensors");
    let mut empty = push("", &[Q_FACTORS]);
    empty.config.clear();
    refuses(&empty, false, "adapter_config", "not the JSON");
}

#[test]
fn saved_modules_and_biases_are_all_there_and_no_others() {
    let saved = r#", "modules_to_save": ["norm", "self_attn"]"#;
    let bias = format!("{Q}.bias");
    let weight = format!("{Q}.weight");
    let container = "model.layers.0.self_attn.modules_to_save.default.q_proj.weight";
    let up: Tensors =
        &[("model.layers.0.mlp.up_proj.lora_A.weight", &[2, 4]), ("model.layers.0.mlp.up_proj.lora_B.weight", &[8, 2])];
    let wholes: Tensors = &[(&bias, &[6]), (container, &[6, 4]), ("model.norm.weight", &[4])];
    let expected = [format!("{MLP}.weight"), bias.clone(), weight.clone(), "model.norm.weight".into()];
    assert_eq!(changed(&push(saved, &[up, wholes]), false), expected);
    let norm = "model.norm.weight";
    refuses_tensor(&push(saved, &[up, &wholes[..2]]), false, norm, "is missing, but modules_to_save");
    refuses_tensor(&push("", &[up, &wholes[2..]]), false, norm, "neither");
    refuses_tensor(&push(saved, &[up, wholes, &[(&weight, &[6, 4])]]), false, &weight, "twice");
    refuses_tensor(&push(saved, &[up, &wholes[..2], &[(norm, &[5])]]), false, norm, "[4]");
    refuses_tensor(&push(saved, &[Q_FACTORS, wholes]), false, container, "adapted");
    let unknown = r#", "modules_to_save": ["norm", "score"]"#;
    refuses(&push(unknown, &[up, wholes]), false, "adapter_config.modules_to_save", "score");
    let head: Tensors = &[("model.score.weight", &[4])];
    refuses_tensor(&push("", &[up, head]), false, head[0].0, "no model.score.weight");

    let (all, lora_only) = (r#", "bias": "all""#, r#", "bias": "lora_only""#);
    let of_base = format!("{Q}.base_layer.bias");
    let both = [format!("{Q}.bias"), format!("{Q}.weight")];
    assert_eq!(changed(&push(lora_only, &[Q_FACTORS, &[(&of_base, &[6])]]), false), both);
    assert_eq!(changed(&push(all, &[Q_FACTORS, &[(&of_base, &[6])]]), false), both);
    assert_eq!(changed(&push(all, &[up, &[(&bias, &[6])]]), false), [format!("{MLP}.weight"), bias.clone()]);
    refuses_tensor(&push(lora_only, &[Q_FACTORS]), false, &bias, "missing");
    refuses_tensor(&push(lora_only, &[Q_FACTORS, &[(&of_base, &[6]), (&bias, &[6])]]), false, &of_base, "twice");
    refuses_tensor(&push(lora_only, &[up, &[(&bias, &[6])]]), false, &bias, "neither");
}

#[test]
fn the_base_beside_an_adapter_is_passed_over_if_it_fits() {
    let of_base: Tensors = &[("model.embed_tokens.base_layer.weight", &[10, 4])];
    let embedding: Tensors =
        &[("model.embed_tokens.lora_embedding_A", &[2, 10]), ("model.embed_tokens.lora_embedding_B", &[4, 2])];
    let mut adapters = [&[embedding][..], &[embedding, of_base]].map(|tensors| push("", tensors).build(&model(false)));
    let merged = adapters.each_mut().map(|adapter| {
        let mut values = vec![0.25; 40];
        adapter.merge("auto", "model.embed_tokens.weight", &Slice::whole(&[10, 4]), &mut values);
        bits(&values)
    });
    assert_eq!(merged[0], merged[1]);
    refuses_tensor(&push("", &[Q_FACTORS, of_base]), false, of_base[0].0, "not there");
    let resized: Tensors = &[("model.embed_tokens.base_layer.weight", &[12, 4])];
    refuses_tensor(&push("", &[embedding, resized]), false, resized[0].0, "[10, 4]");
}

#[test]
fn a_tied_head_changes_the_embedding_or_is_refused() {
    let head: Tensors = &[("lm_head.lora_A.weight", &[2, 4]), ("lm_head.lora_B.weight", &[10, 2])];
    let embedding: Tensors =
        &[("model.embed_tokens.lora_embedding_A", &[2, 10]), ("model.embed_tokens.lora_embedding_B", &[4, 2])];
    let adapter = push("", &[head]).build(&model(true));
    assert_eq!(adapter.parameters().collect::<Vec<_>>(), ["model.embed_tokens.weight"]);
    assert!(adapter.factors("model.embed_tokens.weight").is_none());
    assert!(adapter.check_unmerged().unwrap_err().to_string().contains("embedding"));
    assert_eq!(changed(&push("", &[head]), false), ["lm_head.weight"]);
    refuses_tensor(&push("", &[head, embedding]), true, embedding[0].0, "one matrix");
    let wholes: Tensors = &[("model.embed_tokens.weight", &[10, 4]), ("lm_head.weight", &[10, 4])];
    for key in ["embed_tokens", "lm_head"] {
        let fields = format!(r#", "modules_to_save": ["{key}"]"#);
        refuses(&push(&fields, &[Q_FACTORS, wholes]), true, "adapter_config.modules_to_save", "untie");
        let fields = format!(r#"{fields}, "ensure_weight_tying": true"#);
        let names = changed(&push(&fields, &[Q_FACTORS, wholes]), true);
        assert_eq!(names, ["model.embed_tokens.weight", &format!("{Q}.weight")]);
        refuses_tensor(&push(&fields, &[Q_FACTORS, &wholes[1..]]), true, wholes[0].0, "missing");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_field() {
    for (field, value) in [
        ("alora_invocation_tokens", "[1]"),
        ("arrow_config", r#"{"top_k": 1}"#),
        ("kasa_config", r#"{"beta": 1}"#),
        ("layer_replication", "[[0, 1]]"),
        ("megatron_config", r#"{"a": 1}"#),
        ("monteclora_config", r#"{"a": 1}"#),
        ("trainable_token_indices", "[1, 2]"),
        ("use_bdlora", r#"{"a": 1}"#),
        ("use_qalora", "true"),
        ("velora_config", r#"{"a": 1}"#),
    ] {
        let fields = format!(r#", "{field}": {value}"#);
        refuses(&push(&fields, &[Q_FACTORS]), false, &format!("adapter_config.{field}"), "not supported");
        for unset in ["null", "false", "[]", "{}"] {
            assert!(push(&format!(r#", "{field}": {unset}"#), &[Q_FACTORS]).check(&model(false)).is_ok());
        }
    }
    for (field, value) in [
        ("init_lora_weights", r#""pissa_niter_4""#),
        ("init_lora_weights", r#""OLoRA""#),
        ("init_lora_weights", r#""loftq""#),
        ("bias", r#""some""#),
        ("use_dora", r#""yes""#),
        ("modules_to_save", r#""norm""#),
        ("modules_to_save", r#"[""]"#),
        ("target_parameters", r#"["experts"]"#),
        ("r", "0"),
        ("r", "2.5"),
        ("r", "1e30"),
        ("lora_alpha", r#""4""#),
        ("lora_alpha", "1e300"),
        ("rank_pattern", "[1]"),
        ("rank_pattern", r#"{"(": 2}"#),
        ("rank_pattern", r#"{"a{1000000}": 2}"#),
        ("alpha_pattern", r#"{"q_proj": null}"#),
        ("peft_type", r#""LOHA""#),
        ("peft_type", "null"),
    ] {
        let (named, _) = refused(&push(&format!(r#", "{field}": {value}"#), &[Q_FACTORS]), &model(false));
        let message = format!("{named} for {field}: {value}");
        assert!(
            named == format!("adapter_config.{field}") || named.starts_with("adapter_config.alpha_pattern."),
            "{message}"
        );
    }
    for init in ["true", "false", r#""gaussian""#, r#""eva""#, r#""orthogonal""#] {
        assert!(push(&format!(r#", "init_lora_weights": {init}"#), &[Q_FACTORS]).check(&model(false)).is_ok());
    }
}

#[test]
fn scaling_is_that_of_the_first_pattern_that_matches() {
    let up: Tensors =
        &[("model.layers.0.mlp.up_proj.lora_A.weight", &[3, 4]), ("model.layers.0.mlp.up_proj.lora_B.weight", &[8, 3])];
    let scaling = |fields: &str| {
        let adapter =
            push(&format!(r#", "rank_pattern": {{"up_proj": 3}} {fields}"#), &[Q_FACTORS, up]).build(&model(false));
        adapter.check_unmerged().unwrap();
        let factors = [Q, MLP].map(|module| {
            let factors = adapter.factors(&format!("{module}.weight")).unwrap();
            assert_eq!((factors.a.len(), factors.rank), (4 * factors.rank, if module == Q { 2 } else { 3 }));
            factors.scaling
        });
        assert_eq!(adapter.rank(), 3);
        factors
    };
    let third = |alpha: f64| (alpha / 3.0) as f32;
    assert_eq!(scaling(""), [2.0, third(4.0)]);
    assert_eq!(scaling(r#", "use_rslora": true"#), [(4.0 / 2.0_f64.sqrt()) as f32, (4.0 / 3.0_f64.sqrt()) as f32]);
    for (pattern, alphas) in [
        (r#"{"q_proj": 10, "up_proj": 7.5}"#, [10.0, 7.5]),
        (r#"{"z|proj": 1, "up_proj": 7, "a": 3}"#, [4.0, 7.0]),
        (r#"{"self_attn.q_proj": 1, "q_proj": 2}"#, [1.0, 4.0]),
        (r#"{"q_proj": 2, "self_attn.q_proj": 1}"#, [2.0, 4.0]),
        (r#"{"layers.0..*": 9, "up_proj": 1}"#, [9.0, 9.0]),
        (r#"{"^model.layers.0.mlp.up_proj": 9, "^layers.0.self_attn.q_proj": 8}"#, [4.0, 9.0]),
        (r#"{"_proj": 9, "self_attn": 8, "model": 7}"#, [4.0, 4.0]),
        (r#"{"layers\\.\\d+\\.(mlp|self_attn)\\..*_proj": 9}"#, [9.0, 9.0]),
    ] {
        let found = scaling(&format!(r#", "alpha_pattern": {pattern}"#));
        assert_eq!(found, [(alphas[0] / 2.0) as f32, third(alphas[1])], "{pattern}");
    }
}
