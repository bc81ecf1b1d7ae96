//! Weights by seeds, and checkpoints of them.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rollout_server::weights::{ParamSpec, Parameters};
use safetensors::tensor::TensorView;

use super::fixture;

/// Shape and values of whole parameters, by name.
pub type StateDict = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Random values for every parameter, as large as weights are, and representable in bfloat16.
pub fn random_weights(parameters: &Parameters, seed: u64) -> StateDict {
    println!("weights from seed {seed}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let mut value = |is_norm: bool| {
        let x: f32 = rng.random_range(-0.2..0.2);
        half::bf16::from_f32(if is_norm { 1.0 + x } else { x }).to_f32()
    };
    let mut tensor = |spec: &ParamSpec| {
        let is_norm = spec.name.ends_with("norm.weight");
        let values = (0..spec.shape.iter().product()).map(|_| value(is_norm)).collect();
        (spec.name.clone(), (spec.shape.clone(), values))
    };
    parameters.iter().map(&mut tensor).collect()
}

/// The same weights as transformers has them in memory: a layer's experts are two tensors.
pub fn with_fused_experts(weights: &StateDict) -> StateDict {
    let mut fused = weights.clone();
    for experts in weights.keys().filter_map(|name| name.strip_suffix(".0.gate_proj.weight")) {
        for (tensor, projections) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let (mut count, mut rows, mut columns, mut values) = (0, 0, 0, Vec::new());
            while fused.contains_key(&format!("{experts}.{count}.{}.weight", projections[0])) {
                for projection in projections {
                    let (shape, part) = fused.remove(&format!("{experts}.{count}.{projection}.weight")).unwrap();
                    (rows, columns) = (rows + shape[0], shape[1]);
                    values.extend(part);
                }
                count += 1;
            }
            fused.insert(format!("{experts}.{tensor}"), (vec![count, rows / count, columns], values));
        }
    }
    fused
}

/// Writes a checkpoint with these weights and everything else of the fixture `like`.
pub fn write_checkpoint(like: &str, weights: &StateDict) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture(like).join(name), dir.path().join(name)).unwrap();
    }
    let stored: Vec<_> = weights.iter().map(|(name, (shape, v))| (name, shape.clone(), to_bytes(v))).collect();
    let view = |shape: &Vec<usize>, bytes| TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap();
    let views = stored.iter().map(|(name, shape, bytes)| (name, view(shape, bytes)));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

pub fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
