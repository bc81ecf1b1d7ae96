//! Adapters of the fused projections of a decoder, which has parameters of unequal rows in one matrix.

use super::*;

const EMBEDDING: &str = "model.embed_tokens.weight";
const BLOCK: &str = "model.layers.0.self_attn";
const PARTS: [(&str, usize); 3] = [("q_proj", 12), ("k_proj", 4), ("v_proj", 4)];

fn model() -> Parameters {
    let names = PARTS.map(|(part, rows)| (format!("{BLOCK}.{part}.weight"), [rows, 5]));
    let specs: Vec<(&str, &[usize])> = names.iter().map(|(name, shape)| (name.as_str(), &shape[..])).collect();
    parameters(&specs, Dtype::F32, false)
}

fn push(fields: &str, tensors: &[(&str, &[usize])]) -> Push {
    let config = format!(r#"{{"peft_type": "LORA", "r": 3, "lora_alpha": 2, "target_modules": ["qkv_proj"]{fields}}}"#);
    let named: Vec<(String, &[usize])> =
        tensors.iter().map(|(name, shape)| (format!("{BLOCK}.{name}.weight"), *shape)).collect();
    let tensors: Vec<(&str, &[usize])> = named.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
    Push::new(&config).random(&mut rng(12), Dtype::F32, &tensors)
}

const FACTORS: [(&str, &[usize]); 2] = [("qkv_proj.lora_A", &[3, 5]), ("qkv_proj.lora_B", &[20, 3])];

#[test]
fn factors_of_fused_projections_serve_unmerged_by_their_own_rows() {
    let push = push("", &FACTORS);
    let adapter = push.build(&model());
    adapter.check_unmerged().unwrap();
    let values = |index: usize| push.values[index].clone().into_f32().into_owned();
    let mut first_row = 0;
    for (part, rows) in PARTS {
        let factors = adapter.factors(&format!("{BLOCK}.{part}.weight")).unwrap();
        assert_eq!((factors.rank, factors.scaling), (3, 2.0 / 3.0));
        assert_eq!(bits(&factors.a), bits(&values(0)), "{part}");
        assert_eq!(bits(&factors.b), bits(&values(1)[3 * first_row..3 * (first_row + rows)]), "{part}");
        first_row += rows;
    }
}

#[test]
fn magnitudes_of_fused_projections_are_those_of_their_own_rows() {
    let push = push(r#", "use_dora": true"#, &[FACTORS[0], FACTORS[1], ("qkv_proj.lora_magnitude_vector", &[20])]);
    let adapter = push.build(&model());
    let lengths = push.values[2].clone().into_f32().into_owned();
    let mut first_row = 0;
    for (part, rows) in PARTS {
        let change = adapter.change(&format!("{BLOCK}.{part}.weight")).unwrap();
        let magnitude = change.low_rank().unwrap().magnitude.as_ref().unwrap();
        assert_eq!(bits(&magnitude.lengths), bits(&lengths[first_row..first_row + rows]), "{part}");
        first_row += rows;
    }
}

#[test]
fn a_fused_module_and_one_of_its_projections_are_not_adapted_together() {
    let both = [FACTORS[0], FACTORS[1], ("k_proj.lora_A", &[3, 5]), ("k_proj.lora_B", &[4, 3])];
    let error = push("", &both).check(&model()).unwrap_err().to_string();
    assert!(error.contains("k_proj.weight, which another module of the adapter changes too"), "{error}");
    let short = [FACTORS[0], ("qkv_proj.lora_B", &[12, 3])];
    let error = push("", &short).check(&model()).unwrap_err().to_string();
    assert!(error.contains("has shape [12, 3]; the model and adapter_config make it [20, 3]"), "{error}");
}

/// PEFT wraps the modules of Qwen v1 under its own names, of which two end with `c_proj`.
#[test]
fn adapters_of_qwen_v1_have_its_own_names() {
    let layer = "model.layers.0";
    let own = [
        ("self_attn.q_proj.weight", &[6, 6][..]),
        ("self_attn.k_proj.weight", &[6, 6]),
        ("self_attn.v_proj.weight", &[6, 6]),
        ("self_attn.q_proj.bias", &[6]),
        ("self_attn.k_proj.bias", &[6]),
        ("self_attn.v_proj.bias", &[6]),
        ("self_attn.o_proj.weight", &[6, 6]),
        ("mlp.down_proj.weight", &[6, 9]),
    ];
    let own: Vec<(String, &[usize])> =
        own.into_iter().map(|(name, shape)| (format!("{layer}.{name}"), shape)).collect();
    let mut specs: Vec<(&str, &[usize])> = own.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
    specs.push((EMBEDDING, &[12, 6]));
    let model = parameters(&specs, Dtype::F32, false);
    let config = |fields: &str| {
        format!(
            r#"{{"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"],
                 "rank_pattern": {{"attn.c_proj": 2}}{fields}}}"#
        )
    };
    let factors: [(&str, &[usize]); 6] = [
        ("transformer.h.0.attn.c_attn.lora_A.weight", &[3, 6]),
        ("transformer.h.0.attn.c_attn.lora_B.weight", &[18, 3]),
        ("transformer.h.0.attn.c_proj.lora_A.weight", &[2, 6]),
        ("transformer.h.0.attn.c_proj.lora_B.weight", &[6, 2]),
        ("transformer.h.0.mlp.c_proj.lora_A.weight", &[3, 9]),
        ("transformer.h.0.mlp.c_proj.lora_B.weight", &[6, 3]),
    ];
    let push = Push::new(&config("")).random(&mut rng(13), Dtype::F32, &factors);
    let adapter = push.build(&model);
    adapter.check_unmerged().unwrap();
    let values = |index: usize| push.values[index].clone().into_f32().into_owned();
    for (part, rows) in [("q_proj", 0..18), ("k_proj", 18..36), ("v_proj", 36..54)] {
        let factors = adapter.factors(&format!("{layer}.self_attn.{part}.weight")).unwrap();
        assert_eq!(bits(&factors.a), bits(&values(0)), "{part}");
        assert_eq!(bits(&factors.b), bits(&values(1)[rows]), "{part}");
    }
    for (module, a, rank, scaling) in [("self_attn.o_proj", 2, 2, 3.0), ("mlp.down_proj", 4, 3, 2.0)] {
        let factors = adapter.factors(&format!("{layer}.{module}.weight")).unwrap();
        assert_eq!((factors.rank, factors.scaling), (rank, scaling), "{module}");
        assert_eq!((bits(&factors.a), bits(&factors.b)), (bits(&values(a)), bits(&values(a + 1))), "{module}");
    }
    let saved: [(&str, &[usize]); 3] = [
        ("transformer.wte.weight", &[12, 6]),
        ("transformer.h.0.attn.c_attn.weight", &[18, 6]),
        ("transformer.h.0.attn.c_attn.bias", &[18]),
    ];
    let fields = r#", "modules_to_save": ["wte", "c_attn"]"#;
    let push = Push::new(&config(fields)).random(&mut rng(14), Dtype::F32, &[&factors[2..], &saved].concat());
    let adapter = push.build(&model);
    let whole = |name: &str| {
        let replacement = adapter.change(name).unwrap().replacement.as_ref().unwrap();
        replacement.values.clone().into_f32().into_owned()
    };
    let values = |index: usize| push.values[index].clone().into_f32().into_owned();
    assert_eq!(whole(EMBEDDING), values(4));
    assert_eq!(whole(&format!("{layer}.self_attn.v_proj.bias")), values(6)[12..]);
    let one = Push::new(&config(fields)).random(&mut rng(15), Dtype::F32, &[&factors[2..], &saved[..2]].concat());
    let error = one.check(&model).unwrap_err().to_string();
    assert!(error.contains("is missing, but modules_to_save"), "{error}");
}
