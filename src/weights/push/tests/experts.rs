//! The experts of a layer: checkpoints name each one's projections, and trainers push those of all in one tensor.

use super::*;
use crate::weights::parameters::resolve;

const EXPERTS: usize = 4;
const WIDTH: usize = 6;
const LAYER: &str = "model.layers.1.mlp";

fn experts_model() -> Arc<Parameters> {
    let mut specs = vec![ParamSpec::new(format!("{LAYER}.gate.weight"), [EXPERTS, HIDDEN], ShardRule::Replicated)];
    for index in 0..EXPERTS {
        let rule = ShardRule::OneRank { index, of: EXPERTS };
        for (projection, shape) in
            [("gate_proj", [WIDTH, HIDDEN]), ("up_proj", [WIDTH, HIDDEN]), ("down_proj", [HIDDEN, WIDTH])]
        {
            specs.push(ParamSpec::new(format!("{LAYER}.experts.{index}.{projection}.weight"), shape, rule));
        }
    }
    Arc::new(Parameters::new(specs, Dtype::F32, 2, false))
}

#[test]
fn a_full_push_may_lack_a_buffer_and_no_other_push_is_whole_without_a_parameter() {
    const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";
    let specs = experts_model().iter().cloned().chain([ParamSpec::buffer(BIAS, EXPERTS)]).collect();
    let parameters = Arc::new(Parameters::new(specs, Dtype::Bf16, 2, false));
    assert_eq!(parameters.get(BIAS).unwrap().dtype(parameters.dtype()), Dtype::F32);
    assert_eq!(parameters.bytes_on_ranks(parameters.get(BIAS).unwrap()).unwrap(), 2 * 4 * EXPERTS as u64);
    let mut rng = rng(37);
    let push = parameters.iter().map(|spec| {
        let bytes = random_bytes(&mut rng, Dtype::F32, spec.shape.iter().product());
        Sent::new(&spec.name, Dtype::F32, &spec.shape, bytes)
    });
    let push: Vec<Sent> = push.collect();
    let whole = full(receive(UpdateKind::Full, &push, &parameters).unwrap());
    assert!(whole.names().any(|name| name == BIAS));
    let lacking = full(receive(UpdateKind::Full, &push[..push.len() - 1], &parameters).unwrap());
    assert!(lacking.names().all(|name| name != BIAS) && lacking.names().count() == parameters.len() - 1);
    let expected = ["1 of 14 are missing", "gate.weight"];
    refused(open(UpdateKind::Full, &push[1..], &parameters), "tensors", &expected);
}

/// The bytes of the parameters whose names end so, expert by expert, one behind the other.
fn joined(push: &[Sent], projections: &[&str]) -> Vec<u8> {
    let name = |index, projection| format!("{LAYER}.experts.{index}.{projection}.weight");
    let names = (0..EXPERTS).flat_map(|index| projections.iter().map(move |projection| name(index, projection)));
    names.flat_map(|name| push.iter().find(|sent| sent.entry.name == name).unwrap().bytes.clone()).collect()
}

#[test]
fn all_experts_of_a_layer_come_in_one_tensor_or_one_by_one() {
    let parameters = experts_model();
    let mut rng = rng(31);
    let push = parameters.iter().map(|spec| {
        let bytes = random_bytes(&mut rng, Dtype::F32, spec.shape.iter().product());
        Sent::new(&spec.name, Dtype::F32, &spec.shape, bytes)
    });
    let push: Vec<Sent> = push.collect();
    let fused = |name: &str, shape: &[usize], projections: &[&str]| {
        Sent::new(&format!("{LAYER}.experts.{name}"), Dtype::F32, shape, joined(&push, projections))
    };
    let gate_up = fused("gate_up_proj", &[EXPERTS, 2 * WIDTH, HIDDEN], &["gate_proj", "up_proj"]);
    let down = fused("down_proj", &[EXPERTS, HIDDEN, WIDTH], &["down_proj"]);
    let one_by_one = full(receive(UpdateKind::Full, &push, &parameters).unwrap());
    let together = [push[0].clone(), gate_up.clone(), down.clone()];
    let together = full(receive(UpdateKind::Full, &together, &parameters).unwrap());
    for spec in parameters.iter() {
        assert_eq!(whole(&together, spec), whole(&one_by_one, spec), "{}", spec.name);
    }
    let twice = [&push[..], std::slice::from_ref(&down)].concat();
    refused(open(UpdateKind::Full, &twice, &parameters), "tensors", &["experts.down_proj", "bring the same parameter"]);
    let mut flat = gate_up.clone();
    flat.entry.shape = vec![EXPERTS * 2 * WIDTH, HIDDEN];
    let expected = format!("expected was {:?}", [EXPERTS, 2 * WIDTH, HIDDEN]);
    refused(open(UpdateKind::Full, &[flat], &parameters), "tensors", &["[48, 8]", &expected]);
}

#[test]
fn mixtrals_names_are_those_of_its_checkpoints() {
    let parameters = experts_model();
    let found = |name: &str| resolve(name, &parameters).map(|mapping| mapping.parts[0].parameter.clone());
    for (theirs, own) in [
        ("gate.weight", "gate.weight"),
        ("experts.3.w1.weight", "experts.3.gate_proj.weight"),
        ("experts.0.w2.weight", "experts.0.down_proj.weight"),
        ("experts.2.w3.weight", "experts.2.up_proj.weight"),
    ] {
        assert_eq!(found(&format!("model.layers.1.block_sparse_moe.{theirs}")), Some(format!("{LAYER}.{own}")));
    }
    assert_eq!(found("model.layers.1.block_sparse_moe.experts.4.w1.weight"), None);
    assert_eq!(resolve("model.layers.0.mlp.experts.gate_up_proj", &parameters), None);
}
