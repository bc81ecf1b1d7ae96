//! Pushes under the names of Qwen v1, which has queries, keys and values in one.

use super::*;
use crate::weights::parameters::{HeadCounts, all_names, resolve, stored_parameters};

const MODULES: [(&str, &str); 10] = [
    ("transformer.wte", "model.embed_tokens"),
    ("transformer.ln_f", "model.norm"),
    ("lm_head", "lm_head"),
    ("transformer.h.11.ln_1", "model.layers.11.input_layernorm"),
    ("transformer.h.11.ln_2", "model.layers.11.post_attention_layernorm"),
    ("transformer.h.11.attn.c_attn", "model.layers.11.self_attn.qkv_proj"),
    ("transformer.h.11.attn.c_proj", "model.layers.11.self_attn.o_proj"),
    ("transformer.h.11.mlp.w1", "model.layers.11.mlp.up_proj"),
    ("transformer.h.11.mlp.w2", "model.layers.11.mlp.gate_proj"),
    ("transformer.h.11.mlp.c_proj", "model.layers.11.mlp.down_proj"),
];

/// The name that Qwen v1 has for a tensor of a fused push.
fn own_name(name: &str) -> String {
    let name = name.replace("layers.0.", "layers.11.");
    let (own, parameter) =
        MODULES.into_iter().find(|(_, parameter)| name.starts_with(&format!("{parameter}."))).unwrap();
    name.replace(parameter, own).replace("h.11.", "h.0.")
}

/// A model of one layer with heads of queries, keys and values in equal numbers.
fn own_model() -> Arc<Parameters> {
    let parts = ["q", "k", "v"].map(|part| format!("model.layers.0.self_attn.{part}_proj"));
    let biases = parts.clone().map(|part| (format!("{part}.bias"), vec![HIDDEN]));
    let attention = parts.map(|part| (format!("{part}.weight"), vec![HIDDEN, HIDDEN]));
    let others = [
        ("model.embed_tokens", vec![12, HIDDEN]),
        ("model.norm", vec![HIDDEN]),
        ("model.layers.0.input_layernorm", vec![HIDDEN]),
        ("model.layers.0.self_attn.o_proj", vec![HIDDEN, HIDDEN]),
        ("model.layers.0.mlp.gate_proj", vec![10, HIDDEN]),
        ("model.layers.0.mlp.up_proj", vec![10, HIDDEN]),
        ("model.layers.0.mlp.down_proj", vec![HIDDEN, 10]),
        ("lm_head", vec![12, HIDDEN]),
    ];
    let others = others.into_iter().map(|(module, shape)| (format!("{module}.weight"), shape));
    let all = others.chain(attention).chain(biases);
    let specs = all.map(|(name, shape)| ParamSpec::new(name, shape, ShardRule::Replicated)).collect();
    Arc::new(Parameters::new(specs, Dtype::Bf16, 2, false))
}

/// The same push under Qwen v1's names.
fn renamed(push: &[Sent]) -> Vec<Sent> {
    let (gates, others): (Vec<Sent>, Vec<Sent>) =
        push.iter().cloned().partition(|sent| [".gate_proj.", ".up_proj."].iter().any(|p| sent.entry.name.contains(p)));
    let sent = names::fuse(&others).into_iter().chain(gates);
    sent.map(|sent| sent.renamed(&own_name(&sent.entry.name))).collect()
}

#[test]
fn a_push_under_its_names_is_one_under_the_parameters_own() {
    let parameters = own_model();
    for seed in 0..30 {
        println!("seed {seed}");
        let mut rng = rng(seed);
        let dtype = random_dtype(&mut rng);
        let mut random = |spec: &ParamSpec| {
            let bytes = random_bytes(&mut rng, dtype, spec.shape.iter().product());
            Sent::new(&spec.name, dtype, &spec.shape, bytes)
        };
        let push: Vec<Sent> = parameters.iter().map(&mut random).collect();
        let own = renamed(&push);
        assert_eq!(own.len() + 4, push.len());
        let (plain, own) = (
            full(receive(UpdateKind::Full, &push, &parameters).unwrap()),
            full(receive(UpdateKind::Full, &own, &parameters).unwrap_or_else(|e| panic!("{e}"))),
        );
        for spec in parameters.iter() {
            assert_eq!(whole(&plain, spec), whole(&own, spec), "{}", spec.name);
        }
    }
}

#[test]
fn checkpoints_and_modules_to_save_have_its_names() {
    let counts = HeadCounts { heads: 6, kv_heads: 6 };
    for (own, parameter) in MODULES {
        for kind in ["weight", "bias"] {
            let stored = stored_parameters(&format!("{own}.{kind}"), counts);
            let single = |module: String| (format!("{module}.{kind}"), 1);
            let expected = match parameter.strip_suffix("qkv_proj") {
                None => vec![single(parameter.into())],
                Some(block) => ["q", "k", "v"].map(|part| (format!("{block}{part}_proj.{kind}"), 6)).to_vec(),
            };
            assert_eq!(stored, expected);
            for (part, _) in expected {
                let names = all_names(&part, &own_model());
                assert!(names.contains(&part) && names.contains(&format!("{own}.{kind}")), "{names:?}");
            }
        }
    }
}

#[test]
fn names_that_only_look_like_its_own_are_unknown() {
    for name in [
        "transformer.h.0.ln_10.weight",
        "transformer.h.0.attn.weight",
        "transformer.h.0.mlp.w3.weight",
        "transformer.h.0.c_attn.weight",
        "transformer.h.attn.c_attn.weight",
        "transformer.h.1.mlp.w1.weight",
        "transformer.wte2.weight",
        "h.0.mlp.w1.weight",
    ] {
        assert_eq!(resolve(name, &own_model()), None, "{name:?}");
    }
}
