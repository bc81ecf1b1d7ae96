use std::collections::BTreeSet;

use super::*;
use crate::weights::parameters::{HeadCounts, nearest, resolve, stored_parameters};

#[test]
fn wrappers_change_nothing() {
    let parameters = model(false);
    for seed in 0..40 {
        let mut rng = rng(seed);
        let push = random_push(&mut rng, &parameters);
        let mut wrap = |name: &str| -> String {
            let mut segments = Vec::new();
            let prefixes = ["module", "base_model.model", "_fsdp_wrapped_module", "_orig_mod"];
            segments.extend((0..rng.random_range(0..3)).map(|_| prefixes[rng.random_range(0..4)]));
            for segment in name.split('.') {
                let wrappers = ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"];
                segments.extend((0..rng.random_range(0..2)).map(|_| wrappers[rng.random_range(0..4)]));
                segments.push(segment);
            }
            segments.join(".")
        };
        let wrapped: Vec<Sent> = push.iter().map(|sent| sent.renamed(&wrap(&sent.entry.name))).collect();
        let (plain, wrapped) = (
            full(receive(UpdateKind::Full, &push, &parameters).unwrap()),
            full(receive(UpdateKind::Full, &wrapped, &parameters).unwrap_or_else(|e| panic!("seed {seed}: {e}"))),
        );
        for spec in parameters.iter() {
            assert_eq!(whole(&plain, spec), whole(&wrapped, spec), "seed {seed}: {}", spec.name);
        }
    }
}

#[test]
fn names_that_only_look_wrapped_are_unknown() {
    let parameters = model(false);
    for name in [
        "",
        ".",
        "model",
        "modulemodel.embed_tokens.weight",
        "base_model.model.embed_tokens.weight",
        "model.module.embed_tokens.weight",
        "model.embed_tokens.weight.",
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.0.self_attn.qkv_proj",
        "qkv_proj.weight",
        "model.layers.0.mlp.gate_up_proj.bias",
        "model.layers.0.mlp.qkv_proj.weight",
    ] {
        assert_eq!(resolve(name, &parameters), None, "{name:?}");
    }
}

/// The same push with fused tensors: queries, keys and values in one, gate and up in another.
pub(super) fn fuse(push: &[Sent]) -> Vec<Sent> {
    let find = |name: String| push.iter().find(|sent| sent.entry.name == name);
    let mut fused = Vec::new();
    for sent in push {
        let name = &sent.entry.name;
        let (first, others, new) = match name {
            n if n.contains("q_proj") => ("q_proj", vec!["q_proj", "k_proj", "v_proj"], "qkv_proj"),
            n if n.contains("gate_proj") => ("gate_proj", vec!["gate_proj", "up_proj"], "gate_up_proj"),
            n if ["k_proj", "v_proj", "up_proj"].iter().any(|p| n.contains(p)) => continue,
            _ => {
                fused.push(sent.clone());
                continue;
            }
        };
        let parts: Vec<&Sent> = others.iter().map(|other| find(name.replace(first, other)).unwrap()).collect();
        let mut shape = sent.entry.shape.clone();
        shape[0] = parts.iter().map(|part| part.entry.shape[0]).sum();
        let bytes = parts.iter().flat_map(|part| part.bytes.clone()).collect();
        fused.push(Sent::new(&name.replace(first, new), sent.entry.dtype, &shape, bytes));
    }
    fused
}

#[test]
fn fused_is_unfused() {
    let parameters = model(true);
    for seed in 0..30 {
        let mut rng = rng(seed);
        let dtype = random_dtype(&mut rng);
        let mut random = |spec: &ParamSpec| {
            let bytes = random_bytes(&mut rng, dtype, spec.shape.iter().product());
            Sent::new(&spec.name, dtype, &spec.shape, bytes)
        };
        let push: Vec<Sent> = parameters.iter().map(&mut random).collect();
        let fused = fuse(&push);
        assert_eq!(fused.len() + 2 * 5, push.len());
        let (single, together) = (
            receive(UpdateKind::Full, &push, &parameters).unwrap(),
            receive(UpdateKind::Full, &fused, &parameters).unwrap(),
        );
        assert_eq!((single.parameters, single.bytes), (together.parameters, together.bytes));
        let (single, together) = (full(single), full(together));
        assert!(single.names().eq(together.names()));
        for spec in parameters.iter() {
            for (rank, world) in [(0, 1), (0, 2), (1, 2)] {
                let slice = Partition::new(rank, world).slice(spec).unwrap();
                let read = |tensors: &Tensors| tensors.read(&spec.name, &slice).unwrap().into_f32().into_owned();
                assert_eq!(read(&single), read(&together), "seed {seed}: {} of rank {rank} of {world}", spec.name);
            }
        }
    }
}

#[test]
fn the_head_of_a_tied_model_is_its_embedding() {
    let parameters = model(true);
    let mut rng = rng(11);
    let push = random_push(&mut rng, &parameters);
    let place = push.iter().position(|sent| sent.entry.name == EMBEDDING).unwrap();
    let check = |sent: &[Sent]| {
        let received = receive(UpdateKind::Full, sent, &parameters).unwrap();
        assert_eq!((received.parameters, received.bytes), (parameters.len(), total(sent)));
        let tensors = full(received);
        assert!(tensors.names().all(|name| name != HEAD));
        assert_eq!(whole(&tensors, parameters.get(EMBEDDING).unwrap()), push[place].values());
    };
    let mut alone = push.clone();
    alone[place] = push[place].renamed(HEAD);
    check(&alone);
    let mut both = push.clone();
    both.push(push[place].renamed(HEAD));
    check(&both);
    both.swap(0, push.len());
    check(&both);
    let mut other = push[place].bytes.clone();
    other[0] ^= 1;
    let differs = [&push[..], &[push[place].with(other).renamed(HEAD)]].concat();
    refused(open(UpdateKind::Full, &differs, &parameters), "tensors", &[HEAD, "is the embedding", EMBEDDING]);
    let twice = [&alone[..], &[push[place].renamed("module.lm_head.weight")]].concat();
    refused(open(UpdateKind::Full, &twice, &parameters), "tensors", &[HEAD, "the same parameter"]);
    // In place, the embedding has been written when the head, its other name, comes.
    let mut receiver = in_place(open(UpdateKind::Full, &both, &parameters).unwrap());
    let mut written = Vec::new();
    for (i, sent) in both.iter().enumerate() {
        written.extend(receiver.write(i as u32, 0, &sent.bytes).unwrap());
    }
    assert_eq!(written.iter().map(|tensors| tensors.names().count()).sum::<usize>(), parameters.len());
    // A model whose head is not the embedding needs the head.
    let untied = model(false);
    refused(open(UpdateKind::Full, &push, &untied), "tensors", &["1 of 24 are missing", HEAD]);
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let parameters = model(false);
    let push = random_push(&mut rng(12), &parameters);
    let refuse = |push: &[Sent], parts: &[&str]| refused(open(UpdateKind::Full, push, &parameters), "tensors", parts);
    let place = |name: &str| push.iter().position(|sent| sent.entry.name == name).unwrap();
    let o_proj = place("model.layers.1.self_attn.o_proj.weight");

    let mut unknown = push.clone();
    unknown[o_proj].entry.name = "model.layers.1.self_attn.out_proj.weight".into();
    refuse(&unknown, &["\"model.layers.1.self_attn.out_proj.weight\"", "\"model.layers.1.self_attn.o_proj.weight\""]);
    unknown[o_proj].entry.name = "transformer.wte".into();
    refuse(&unknown, &["\"transformer.wte\"", "ListParameters"]);
    assert_eq!(nearest("model.layers.1.mlp.down_proj", &parameters), Some("model.layers.1.mlp.down_proj.weight"));

    let mut shape = push.clone();
    shape[o_proj].entry.shape = vec![HIDDEN, 7];
    refuse(&shape, &["\"model.layers.1.self_attn.o_proj.weight\" has shape [8, 7], expected was [8, 8]"]);
    shape[o_proj].entry.shape = vec![64];
    refuse(&shape, &["has shape [64], expected was [8, 8]"]);
    for (huge, text) in [(vec![usize::MAX, 2], "no machine"), (vec![0], "has 0 bytes"), (vec![1; 9], "9 dimensions")] {
        shape[o_proj].entry.shape = huge;
        refuse(&shape, &["\"model.layers.1.self_attn.o_proj.weight\"", text]);
    }
    let mut long = push.clone();
    long[0].entry.name = "é".repeat(300);
    refuse(&long, &["more than 512 bytes"]);
    let mut payload = push.clone();
    payload[o_proj].entry.payload = Some((1, 1));
    refuse(&payload, &["\"model.layers.1.self_attn.o_proj.weight\"", "only a DELTA"]);
}

#[test]
fn every_parameter_comes_once() {
    let parameters = model(false);
    let push = random_push(&mut rng(13), &parameters);
    let refuse = |push: &[Sent], parts: &[&str]| refused(open(UpdateKind::Full, push, &parameters), "tensors", parts);
    refuse(&push[1..], &["1 of 24 are missing", &push[0].entry.name]);
    let all: Vec<&str> = parameters.iter().take(3).map(|spec| spec.name.as_str()).collect();
    refuse(&[], &[&format!("24 of 24 are missing: {:?}, {:?}, {:?}, ...", all[0], all[1], all[2])]);
    let again = |name: &str| [&push[..], &[push[2].renamed(name)]].concat();
    refuse(&again(&push[2].entry.name), &[&push[2].entry.name, "declared twice"]);
    let wrapped = format!("module.{}", push[2].entry.name);
    refuse(&again(&wrapped), &[&format!("{:?} and {wrapped:?} bring the same parameter", push[2].entry.name)]);
    let gate_up = Sent::random(&mut rng(14), "model.layers.0.mlp.gate_up_proj.weight", &[20, HIDDEN]);
    refuse(&[&push[..], &[gate_up]].concat(), &["gate_up_proj", "bring the same parameter"]);
}

#[test]
fn buffers_are_ignored() {
    let parameters = model(false);
    let mut rng = rng(15);
    let mut push = random_push(&mut rng, &parameters);
    push.push(Sent::random(&mut rng, "model.rotary_emb.inv_freq", &[4]));
    push.insert(3, Sent::random(&mut rng, "model.layers.0.self_attn.rotary_emb.inv_freq", &[2, 2]));
    let received = receive(UpdateKind::Full, &push, &parameters).unwrap();
    assert_eq!((received.parameters, received.bytes), (parameters.len(), total(&push)));
    assert_eq!(full(received).names().count(), parameters.len());
    push[3].entry.shape = vec![1 << 20];
    refused(open(UpdateKind::Full, &push, &parameters), "tensors", &["rotary_emb.inv_freq", "leave it out"]);
}

fn vision_model() -> Parameters {
    let names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"];
    let tower = ["q_proj", "k_proj", "v_proj"].map(|part| format!("visual.blocks.0.attn.{part}.weight"));
    let specs = names.iter().map(|name| name.to_string()).chain(tower);
    let specs = specs.map(|name| ParamSpec::new(name, vec![4, 4], ShardRule::Replicated)).collect();
    Parameters::new(specs, Dtype::F32, 1, false)
}

#[test]
fn a_vision_models_parameters_have_the_names_of_trainers_vllm_and_checkpoints() {
    let parameters = vision_model();
    let found = |name: &str| -> Vec<String> {
        let mapping = resolve(name, &parameters).unwrap_or_else(|| panic!("{name} is unknown"));
        mapping.parts.into_iter().map(|part| part.parameter).collect()
    };
    for (names, expected) in [
        (
            ["model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"],
            "model.embed_tokens.weight",
        ),
        (["lm_head.weight", "language_model.lm_head.weight"], "lm_head.weight"),
        (
            ["model.language_model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"],
            "model.layers.0.self_attn.q_proj.weight",
        ),
    ] {
        names.iter().for_each(|name| assert_eq!(found(name), [expected], "{name}"));
    }
    for name in ["model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"] {
        let mapping = resolve(name, &parameters).unwrap();
        assert_eq!(mapping.shape, Some(vec![12, 4]));
        let parts: Vec<_> =
            mapping.parts.iter().map(|part| (part.parameter.rsplit('.').nth(1).unwrap(), part.first_row)).collect();
        assert_eq!(parts, [("q_proj", 0), ("k_proj", 4), ("v_proj", 8)], "{name}");
    }
    // A model of text has no second names.
    assert_eq!(resolve("model.language_model.embed_tokens.weight", &model(false)), None);
}

fn internvl_model() -> Parameters {
    let tower = [
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.3.attention.q_proj.weight",
        "encoder.layer.3.attention.k_proj.weight",
        "encoder.layer.3.attention.v_proj.weight",
        "encoder.layer.3.attention.projection_layer.bias",
        "encoder.layer.3.layernorm_before.weight",
        "encoder.layer.3.lambda_2",
        "encoder.layer.3.mlp.fc1.weight",
    ]
    .map(|name| format!("vision_tower.{name}"));
    let projector = ["layer_norm", "linear_1", "linear_2"].map(|name| format!("multi_modal_projector.{name}.weight"));
    let decoder = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"].map(String::from);
    let names = tower.into_iter().chain(projector).chain(decoder);
    let specs = names.map(|name| ParamSpec::new(name, vec![4, 4], ShardRule::Replicated)).collect();
    Parameters::new(specs, Dtype::F32, 1, false)
}

/// The parameters that a tensor of this name has.
fn parameters_of(name: &str) -> Vec<String> {
    let mapping = resolve(name, &internvl_model()).unwrap_or_else(|| panic!("{name} is unknown"));
    mapping.parts.into_iter().map(|part| part.parameter).collect()
}

/// The parameters that a checkpoint's tensor of this name has.
fn stored(name: &str) -> Vec<String> {
    let parts = stored_parameters(name, HeadCounts { heads: 6, kv_heads: 2 });
    assert!(parts.iter().all(|(_, share)| *share == 1), "{parts:?}");
    parts.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn internvls_tower_has_the_names_of_both_layouts() {
    for (own, pushed, expected) in [
        ("vision_model.embeddings.class_embedding", "model.vision_tower.embeddings.cls_token", "embeddings.cls_token"),
        (
            "vision_model.embeddings.position_embedding",
            "model.vision_tower.embeddings.position_embeddings",
            "embeddings.position_embeddings",
        ),
        (
            "vision_model.embeddings.patch_embedding.weight",
            "model.vision_tower.embeddings.patch_embeddings.projection.weight",
            "embeddings.patch_embeddings.projection.weight",
        ),
        (
            "vision_model.encoder.layers.3.attn.proj.bias",
            "model.vision_tower.encoder.layer.3.attention.projection_layer.bias",
            "encoder.layer.3.attention.projection_layer.bias",
        ),
        (
            "vision_model.encoder.layers.3.norm1.weight",
            "vision_tower.encoder.layer.3.layernorm_before.weight",
            "encoder.layer.3.layernorm_before.weight",
        ),
        (
            "vision_model.encoder.layers.3.ls2",
            "model.vision_tower.encoder.layer.3.lambda_2",
            "encoder.layer.3.lambda_2",
        ),
        (
            "vision_model.encoder.layers.3.mlp.fc1.weight",
            "model.vision_tower.encoder.layer.3.mlp.fc1.weight",
            "encoder.layer.3.mlp.fc1.weight",
        ),
    ] {
        let expected = [format!("vision_tower.{expected}")];
        assert_eq!((parameters_of(own), parameters_of(pushed)), (expected.to_vec(), expected.to_vec()));
        assert_eq!(stored(own), expected);
    }
}

#[test]
fn internvls_projector_and_decoder_have_the_names_of_both_layouts() {
    for (own, pushed, expected) in [
        ("mlp1.0.weight", "model.multi_modal_projector.layer_norm.weight", "multi_modal_projector.layer_norm.weight"),
        ("mlp1.1.weight", "model.multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
        ("mlp1.3.weight", "multi_modal_projector.linear_2.weight", "multi_modal_projector.linear_2.weight"),
        (
            "language_model.model.layers.0.mlp.up_proj.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("language_model.lm_head.weight", "lm_head.weight", "lm_head.weight"),
    ] {
        assert_eq!(
            (parameters_of(own), parameters_of(pushed)),
            (vec![expected.to_string()], vec![expected.to_string()])
        );
        assert_eq!(stored(own), [expected]);
    }
    let fused = "vision_model.encoder.layers.3.attn.qkv.weight";
    let parts = ["q", "k", "v"].map(|part| format!("vision_tower.encoder.layer.3.attention.{part}_proj.weight"));
    assert_eq!((parameters_of(fused), stored(fused)), (parts.to_vec(), parts.to_vec()));
}

#[test]
fn fused_tensors_of_a_decoder_in_a_checkpoint_are_divided_by_its_heads() {
    let counts = HeadCounts { heads: 6, kv_heads: 2 };
    for (fused, parts) in [
        ("self_attn.qkv_proj", &[("self_attn.q_proj", 6), ("self_attn.k_proj", 2), ("self_attn.v_proj", 2)][..]),
        ("mlp.gate_up_proj", &[("mlp.gate_proj", 1), ("mlp.up_proj", 1)]),
        ("mlp.down_proj", &[("mlp.down_proj", 1)]),
    ] {
        for kind in ["weight", "bias"] {
            let name = |module: &str| format!("model.layers.3.{module}.{kind}");
            let expected: Vec<_> = parts.iter().map(|(module, share)| (name(module), *share)).collect();
            assert_eq!(stored_parameters(&name(fused), counts), expected);
        }
    }
}

#[test]
fn a_full_push_may_leave_out_the_tower_but_nothing_of_the_decoder() {
    let parameters = Arc::new(vision_model());
    let push = random_push(&mut StdRng::seed_from_u64(21), &parameters);
    let with = |is_kept: &dyn Fn(&str) -> bool| -> Vec<Sent> {
        push.iter().filter(|sent| !is_kept(&sent.entry.name)).map(|sent| sent.renamed(&sent.entry.name)).collect()
    };
    let declared = |push: &[Sent], keep_missing| {
        let header = UpdateHeader { keep_missing, ..UpdateHeader::new(UpdateKind::Full) };
        declare(header, push, &parameters, &Sources::default())
    };
    let decoder = with(&|name| name.starts_with("visual."));
    refused(declared(&decoder, false), "tensors", &["brings every parameter;", "3 of 6 are missing", "visual."]);
    let shadow = packing::shadow_weights(&parameters);
    let mut receiving = declared(&decoder, true).unwrap().receive(ReceiveMode::Pack(shadow)).unwrap();
    for (i, sent) in decoder.iter().enumerate() {
        receiving.write(i as u32, 0, &sent.bytes).unwrap();
    }
    let received = receiving.finish().unwrap();
    assert_eq!((received.parameters, received.tower), (3, None));
    let WeightUpdate::Packed(shadow) = received.update else { panic!("{:?}", received.update) };
    let kept: BTreeSet<&str> = shadow.kept().iter().map(String::as_str).collect();
    let expected = ["k_proj", "q_proj", "v_proj"].map(|part| format!("visual.blocks.0.attn.{part}.weight"));
    assert_eq!(kept, expected.iter().map(String::as_str).collect());
    let whole = declared(&push, true).unwrap();
    assert!(whole.manifest.missing().next().is_none());
    for missing in ["lm_head.weight", "model.embed_tokens.weight"] {
        let parts = ["every parameter of the decoder", "1 of 6 are missing", missing];
        refused(declared(&with(&|name| name == missing), true), "tensors", &parts);
    }
    let mixed = with(&|name| name == "visual.blocks.0.attn.k_proj.weight");
    refused(
        declared(&mixed, true),
        "tensors",
        &["k_proj.weight\" is missing", "q_proj.weight\" is not", "both or neither"],
    );
}

#[test]
fn a_tower_that_is_not_served_is_ignored_but_checked() {
    let (served, ignored): (Vec<ParamSpec>, Vec<ParamSpec>) =
        vision_model().iter().cloned().partition(|spec| !spec.name.starts_with("visual."));
    let parameters = Arc::new(Parameters::new(served, Dtype::F32, 1, false).with_ignored(ignored));
    let mut rng = StdRng::seed_from_u64(22);
    let mut push = random_push(&mut rng, &vision_model());
    let received = receive(UpdateKind::Full, &push, &parameters).unwrap();
    assert_eq!((received.parameters, received.tower, received.bytes), (3, None, total(&push)));
    assert_eq!(full(received).names().count(), 3);
    push.retain(|sent| !sent.entry.name.starts_with("visual."));
    push.push(Sent::random(&mut rng, "model.visual.blocks.0.attn.qkv.weight", &[12, 4]));
    let received = receive(UpdateKind::Full, &push, &parameters).unwrap();
    assert_eq!(full(received).names().count(), 3);
    push.pop();
    assert_eq!(full(receive(UpdateKind::Full, &push, &parameters).unwrap()).names().count(), 3, "it may be left out");
    push.push(Sent::random(&mut rng, "model.visual.blocks.0.attn.qkv.weight", &[12, 5]));
    refused(receive(UpdateKind::Full, &push, &parameters), "tensors", &["has shape [12, 5], expected was [12, 4]"]);
    push.pop();
    push.push(Sent::random(&mut rng, "visual.blocks.0.attn.proj.weight", &[4, 4]));
    refused(receive(UpdateKind::Full, &push, &parameters), "tensors", &["the model has no tensor"]);
}
