use super::*;

#[test]
fn random_slices_of_random_tensors_are_the_stored_values() {
    for seed in 0..50 {
        let mut rng = rng(seed);
        let (rows, cols) = (rng.random_range(1..20), rng.random_range(1..20));
        let shapes: [&[usize]; 3] = [&[rows, cols], &[rows], &[rows, cols, 3]];
        let mut tensors: Vec<_> =
            shapes.iter().enumerate().map(|(i, s)| Stored::random(&mut rng, &format!("t{i}"), s)).collect();
        let temp = tempfile::tempdir().unwrap();
        write_safetensors(&temp.path().join("model.safetensors"), &tensors);
        let checkpoint = open_directory(temp.path());
        assert_eq!(checkpoint.names(), ["t0", "t1", "t2"]);
        tensors.rotate_left(rng.random_range(0..3));
        for t in &tensors {
            assert_eq!(checkpoint.shape(&t.name).unwrap(), t.shape);
            assert_eq!(checkpoint.stored_bytes(&t.name).unwrap(), t.values.len() * t.dtype.size());
            let (rows, cols) = matrix_shape(&t.shape);
            for _ in 0..10 {
                let slice = random_slice(&mut rng, rows, cols);
                let check = |data: TensorData<'_>| {
                    assert_eq!((data.dtype(), data.len()), (t.dtype, slice.len()), "seed {seed}, {slice:?}");
                    let expected = slice_of(&t.values, cols, &slice);
                    assert_eq!(data.clone().into_f32(), expected, "seed {seed}, {slice:?} of {:?}", t.shape);
                    let halves: Vec<f32> = data.into_bf16().iter().map(|v| v.to_f32()).collect();
                    assert_eq!(halves, expected, "seed {seed}, as bfloat16");
                };
                checkpoint.read(&t.name, &slice, check).unwrap();
                // Pages that were given back to the system must be readable again.
                checkpoint.release(&t.name);
            }
        }
    }
}

#[test]
fn whole_rows_are_borrowed_from_the_map() {
    let checkpoint = open_directory(&fixture("llama"));
    let name = "model.layers.1.mlp.up_proj.weight";
    let is_borrowed = |data: TensorData<'_>| match data {
        TensorData::Bf16(values) => matches!(values, std::borrow::Cow::Borrowed(_)),
        other => panic!("{:?}", other.dtype()),
    };
    let borrowed = |slice: Slice| checkpoint.read(name, &slice, is_borrowed).unwrap();
    assert!(borrowed(Slice { rows: 3..9, cols: 0..128 }));
    assert!(!borrowed(Slice { rows: 3..9, cols: 0..32 }));
}

#[test]
fn rounding_to_bfloat16_is_to_nearest_even() {
    let halfway = f32::from_bits(0x3f80_8000);
    let above = f32::from_bits(0x3f81_8000);
    let data = TensorData::F32(vec![halfway, above, -halfway].into());
    let bits: Vec<u16> = data.into_bf16().iter().map(|v| v.to_bits()).collect();
    assert_eq!(bits, [0x3f80, 0x3f82, 0xbf80]);
}

#[test]
fn shards_are_found_through_the_index_and_read_for_every_rank() {
    for seed in 0..20 {
        let mut rng = rng(seed);
        let world = rng.random_range(1..=4);
        let (rows, cols) = (world * rng.random_range(1..5), world * rng.random_range(1..5));
        let rules = [ShardRule::Replicated, ShardRule::Rows, ShardRule::Columns];
        let tensors: Vec<_> = (0..6).map(|i| Stored::random(&mut rng, &format!("t{i}"), &[rows, cols])).collect();
        let temp = tempfile::tempdir().unwrap();
        write_sharded(temp.path(), &tensors);
        let checkpoint = open_directory(temp.path());
        let specs: Vec<_> =
            tensors.iter().map(|t| ParamSpec::new(&t.name, [rows, cols], rules[rng.random_range(0..3)])).collect();
        for rank in 0..world {
            for (spec, stored) in specs.iter().zip(&tensors) {
                let slice = checkpoint.slice(spec, Partition::new(rank, world)).unwrap();
                let data = checkpoint.read(&spec.name, &slice, as_f32).unwrap();
                assert_eq!(data, slice_of(&stored.values, cols, &slice), "seed {seed}, {}", spec.name);
                checkpoint.release(&spec.name);
            }
        }
    }
}

/// Writes a checkpoint of two shards, each with half of the tensors.
fn write_sharded(dir: &Path, tensors: &[Stored]) {
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", i + 1);
        write_safetensors(&dir.join(&file), part);
        part.iter().for_each(|t| drop(map.insert(t.name.clone(), file.clone().into())));
    }
    std::fs::write(dir.join("model.safetensors.index.json"), serde_json::json!({"weight_map": map}).to_string())
        .unwrap();
}

#[test]
fn what_does_not_fit_the_specs_is_refused() {
    let checkpoint = open_directory(&fixture("mistral"));
    let load = |name: &str, shape: [usize; 2], world: usize| {
        let spec = ParamSpec::new(name, shape, ShardRule::Rows);
        config_error(checkpoint.slice(&spec, Partition::new(0, world)))
    };
    assert!(load("model.layers.9.mlp.up_proj.weight", [128, 64], 1).contains("no tensor model.layers.9.mlp.up_proj"));
    let shape = load("model.layers.1.mlp.up_proj.weight", [256, 64], 1);
    assert!(shape.contains("up_proj.weight has shape [128, 64]") && shape.contains("makes it [256, 64]"), "{shape}");
    assert!(load("model.layers.1.mlp.up_proj.weight", [128, 64], 3).contains("cannot be divided"));
    let outside = checkpoint.read("model.layers.1.mlp.up_proj.weight", &Slice { rows: 100..129, cols: 0..64 }, as_f32);
    assert!(config_error(outside).contains("128 by 64"));
}

#[test]
fn broken_directories_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let open = || config_error(SafetensorsCheckpoint::open(dir));
    assert!(open().contains("has neither model.safetensors nor model.safetensors.index.json"));

    let index = dir.join("model.safetensors.index.json");
    std::fs::write(&index, "{").unwrap();
    assert!(open().contains("model.safetensors.index.json: not a safetensors index"));
    std::fs::write(&index, r#"{"weight_map": {"a": "../x.safetensors"}}"#).unwrap();
    assert!(open().contains("is not a plain file name"));

    let mut rng = rng(0);
    let tensors = ["a", "b"].map(|name| Stored::random(&mut rng, name, &[8, 8]));
    write_sharded(dir, &tensors);
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, text.replace("\"b\"", "\"c\"")).unwrap();
    assert!(open().contains("says that model-00002-of-00002.safetensors has c; it has not"), "{}", open());
    let shard = dir.join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 5]).unwrap();
    assert!(open().contains("model-00002-of-00002.safetensors: not a whole safetensors file"), "{}", open());
    std::fs::write(&shard, b"").unwrap();
    assert!(open().contains("not a whole safetensors file"), "{}", open());
    std::fs::remove_file(&shard).unwrap();
    assert!(open().contains("model-00002-of-00002.safetensors is missing"), "{}", open());
}

#[test]
fn unsupported_element_types_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let view = ::safetensors::tensor::TensorView::new(::safetensors::Dtype::I8, vec![2], &[1, 2]).unwrap();
    ::safetensors::serialize_to_file([("q", view)], None, &temp.path().join("model.safetensors")).unwrap();
    let message = config_error(SafetensorsCheckpoint::open(temp.path()));
    assert!(message.contains("q is stored as I8; supported are F32, F16 and BF16"), "{message}");
}

#[test]
fn misaligned_tensors_are_read_too() {
    // The data begins at an odd offset: a header padded by hand.
    let header = r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}} "#;
    let header = format!("{header}{}", " ".repeat((8 - header.len() % 8) % 8 + 1));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    [1.5f32, -2.0, 3.25].iter().for_each(|v| file.extend(v.to_le_bytes()));
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("model.safetensors"), file).unwrap();
    let checkpoint = open_directory(temp.path());
    let read = |rows| checkpoint.read("x", &Slice { rows, cols: 0..1 }, as_f32).unwrap();
    assert_eq!(read(0..3), [1.5, -2.0, 3.25]);
    assert_eq!(read(1..2), [-2.0]);
}

/// Resident bytes of this process' mapping of the file at `path`.
#[cfg(target_os = "linux")]
fn resident_bytes(path: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = maps.split_once(path.to_str().unwrap()).expect("the file is mapped").1;
    let line = mapping.lines().find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
#[cfg(target_os = "linux")]
fn loading_keeps_at_most_one_parameter_resident() {
    const BYTES: usize = 4 << 20;
    let tensors: Vec<_> = (0..16)
        .map(|i| Stored {
            name: format!("t{i:02}"),
            dtype: Dtype::F32,
            shape: vec![BYTES / 4],
            values: vec![1.0; BYTES / 4],
        })
        .collect();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.safetensors");
    write_safetensors(&path, &tensors);
    let specs: Vec<_> =
        tensors.iter().map(|t| ParamSpec::new(&t.name, t.shape.clone(), ShardRule::Replicated)).collect();
    drop(tensors);
    let checkpoint = open_directory(temp.path());
    let mut peak = 0;
    for spec in &specs {
        let sum = |data: TensorData<'_>| data.into_f32().iter().sum::<f32>();
        let sum = checkpoint.read(&spec.name, &Slice::whole(&spec.shape), sum).unwrap();
        assert_eq!(sum, (BYTES / 4) as f32);
        peak = peak.max(resident_bytes(&path));
        checkpoint.release(&spec.name);
    }
    // One parameter stays, and pages around it that the system maps with it.
    assert!((BYTES..2 * BYTES).contains(&peak), "{peak} bytes resident while loading {} parameters", specs.len());
}

#[test]
fn fused_projections_are_divided_into_parameters_with_rows_of_their_own() {
    let (temp, mut rng) = (tempfile::tempdir().unwrap(), rng(11));
    let block = "model.layers.0";
    let counts = HeadCounts { heads: 6, kv_heads: 2 };
    let fused = [("self_attn.qkv_proj", [50, 7]), ("mlp.gate_up_proj", [12, 7]), ("mlp.down_proj", [7, 6])];
    let stored = fused.map(|(name, shape)| Stored::random(&mut rng, &format!("{block}.{name}.weight"), &shape));
    write_safetensors(&temp.path().join("model.safetensors"), &stored);
    let opened = SafetensorsCheckpoint::open(temp.path()).unwrap();
    let checkpoint = Checkpoint::Safetensors(opened.of_parameters(counts).unwrap());
    let parts = [
        ("self_attn.q_proj", 0, 0..30),
        ("self_attn.k_proj", 0, 30..40),
        ("self_attn.v_proj", 0, 40..50),
        ("mlp.gate_proj", 1, 0..6),
        ("mlp.up_proj", 1, 6..12),
        ("mlp.down_proj", 2, 0..7),
    ];
    assert_eq!(checkpoint.names().len(), parts.len());
    for (name, tensor, rows) in parts {
        let (name, tensor) = (format!("{block}.{name}.weight"), &stored[tensor]);
        let cols = tensor.shape[1];
        assert_eq!(checkpoint.shape(&name).unwrap(), [rows.len(), cols], "{name}");
        let read = checkpoint.read(&name, &Slice::whole(&[rows.len(), cols]), as_f32).unwrap();
        assert_eq!(read, slice_of(&tensor.values, cols, &Slice { rows, cols: 0..cols }), "{name}");
    }

    // One that cannot be divided keeps its name, which no parameter has.
    let odd = Stored::random(&mut rng, &format!("{block}.self_attn.qkv_proj.weight"), &[49, 7]);
    write_safetensors(&temp.path().join("model.safetensors"), std::slice::from_ref(&odd));
    let opened = SafetensorsCheckpoint::open(temp.path()).unwrap().of_parameters(counts).unwrap();
    assert_eq!(opened.names().collect::<Vec<_>>(), [odd.name.as_str()]);

    let twice = ["qkv_proj", "k_proj"].map(|name| format!("{block}.self_attn.{name}.weight"));
    let twice =
        [(&twice[0], [50, 7]), (&twice[1], [10, 7])].map(|(name, shape)| Stored::random(&mut rng, name, &shape));
    write_safetensors(&temp.path().join("model.safetensors"), &twice);
    let message = config_error(SafetensorsCheckpoint::open(temp.path()).unwrap().of_parameters(counts));
    assert!(message.contains("qkv_proj.weight and the same under another name"), "{message}");
}
