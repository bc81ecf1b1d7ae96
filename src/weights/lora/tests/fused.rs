//! Adapters of the fused projections of a decoder, which has parameters of unequal rows in one matrix.

use super::*;

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
        assert_eq!(bits(factors.a), bits(&values(0)), "{part}");
        assert_eq!(bits(factors.b), bits(&values(1)[3 * first_row..3 * (first_row + rows)]), "{part}");
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
