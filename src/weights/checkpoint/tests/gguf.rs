use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rollout_kernels::StorageDtype;

use super::*;

/// Permutes query and key rows as llama.cpp's converter does: `reshape(heads, 2, d / 2, cols).swapaxes(1, 2)`.
fn permute(values: &[f32], heads: usize, cols: usize) -> Vec<f32> {
    let half = values.len() / cols / heads / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for i in 0..half {
            for j in 0..2 {
                let row = head * 2 * half + j * half + i;
                out.extend_from_slice(&values[row * cols..(row + 1) * cols]);
            }
        }
    }
    out
}

/// The inverse of [`permute`].
fn permute_back(values: &[f32], heads: usize, cols: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    let order = permute(&(0..rows).map(|row| row as f32).collect::<Vec<_>>(), heads, 1);
    let mut out = vec![0.0; values.len()];
    for (from, to) in order.into_iter().enumerate() {
        out[to as usize * cols..][..cols].copy_from_slice(&values[from * cols..(from + 1) * cols]);
    }
    out
}

fn metadata(arch: &str, heads: u32, kv_heads: u32, head_dim: u32) -> Vec<(String, Value)> {
    let key = |name: &str| format!("{arch}.{name}");
    vec![
        ("general.architecture".into(), Value::String(arch.into())),
        (key("embedding_length"), Value::U32(64)),
        (key("feed_forward_length"), Value::U32(96)),
        (key("block_count"), Value::U32(1)),
        (key("context_length"), Value::U32(128)),
        (key("attention.head_count"), Value::U32(heads)),
        (key("attention.head_count_kv"), Value::U32(kv_heads)),
        (key("attention.key_length"), Value::U32(head_dim)),
        (key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
    ]
}

fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(&str, &QTensor)]) {
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    gguf_file::write(&mut std::fs::File::create(path).unwrap(), &metadata, tensors).unwrap();
}

fn quantize(values: &[f32], shape: &[usize], dtype: GgmlDType) -> QTensor {
    QTensor::quantize(&Tensor::from_slice(values, shape, &Device::Cpu).unwrap(), dtype).unwrap()
}

#[test]
fn llama_rows_come_back_in_hugging_face_order() {
    for seed in 0..30 {
        let mut rng = rng(seed);
        let (kv_heads, group, head_dim) = (rng.random_range(1..4), rng.random_range(1..4), 2 * rng.random_range(1..6));
        let (heads, cols) = (kv_heads * group, 32 * rng.random_range(1..4));
        // Types that hold these values exactly, so that every comparison is an equality.
        let dtype = [GgmlDType::F32, GgmlDType::F16, GgmlDType::BF16][rng.random_range(0..3)];
        let q = random_values(&mut rng, heads * head_dim * cols);
        let k = random_values(&mut rng, kv_heads * head_dim * cols);
        let bias = random_values(&mut rng, heads * head_dim);
        let embedding = quantize(&random_values(&mut rng, 64), &[2, 32], GgmlDType::F32);
        for arch in ["llama", "qwen2"] {
            let order = |v: &[f32], heads, cols| if arch == "llama" { permute(v, heads, cols) } else { v.to_vec() };
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("x.gguf");
            write(
                &path,
                &metadata(arch, heads as u32, kv_heads as u32, head_dim as u32),
                &[
                    ("token_embd.weight", &embedding),
                    ("blk.0.attn_q.weight", &quantize(&order(&q, heads, cols), &[heads * head_dim, cols], dtype)),
                    ("blk.0.attn_k.weight", &quantize(&order(&k, kv_heads, cols), &[kv_heads * head_dim, cols], dtype)),
                    ("blk.0.attn_q.bias", &quantize(&order(&bias, heads, 1), &[heads * head_dim], GgmlDType::F32)),
                    ("blk.0.attn_v.weight", &quantize(&k, &[kv_heads * head_dim, cols], dtype)),
                ],
            );
            let checkpoint = Checkpoint::Gguf(GgufCheckpoint::open(&path).unwrap());
            let stored = [("q_proj.weight", &q, cols), ("k_proj.weight", &k, cols), ("q_proj.bias", &bias, 1)];
            for (name, values, cols) in stored.into_iter().chain([("v_proj.weight", &k, cols)]) {
                let name = format!("model.layers.0.self_attn.{name}");
                for _ in 0..10 {
                    let slice = random_slice(&mut rng, values.len() / cols, cols);
                    let read = checkpoint.read(&name, &slice, as_f32).unwrap();
                    assert_eq!(read, slice_of(values, cols, &slice), "seed {seed}, {arch} {dtype:?} {name} {slice:?}");
                }
            }
        }
    }
}

/// Q8_0 by its definition: blocks of 32, a float16 scale and 32 signed bytes.
fn dequantize_q8_0(bytes: &[u8]) -> Vec<f32> {
    let block = |b: &[u8]| {
        let scale = f16::from_le_bytes([b[0], b[1]]).to_f32();
        b[2..].iter().map(|&q| scale * f32::from(q as i8)).collect::<Vec<_>>()
    };
    bytes.chunks_exact(34).flat_map(block).collect()
}

#[test]
fn quantised_tensors_are_dequantised_slice_by_slice() {
    let path = fixture("llama-tied.gguf");
    let checkpoint = Checkpoint::Gguf(GgufCheckpoint::open(&path).unwrap());
    let file = std::fs::read(&path).unwrap();
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(&file)).unwrap();
    let raw = |name: &str| {
        let info = &content.tensor_infos[name];
        assert_eq!(info.ggml_dtype, GgmlDType::Q8_0);
        let start = (content.tensor_data_offset + info.offset) as usize;
        dequantize_q8_0(&file[start..start + info.shape.elem_count() / 32 * 34])
    };
    let whole = |name: &str| {
        let slice = Slice::whole(checkpoint.shape(name).unwrap());
        checkpoint.read(name, &slice, as_f32).unwrap()
    };
    assert_eq!(whole("model.embed_tokens.weight"), raw("token_embd.weight"));
    assert_eq!(permute(&whole("model.layers.1.self_attn.q_proj.weight"), 8, 128), raw("blk.1.attn_q.weight"));
    assert_eq!(permute(&whole("model.layers.1.self_attn.k_proj.weight"), 4, 128), raw("blk.1.attn_k.weight"));
    let mut rng = rng(1);
    for name in checkpoint.names() {
        let (rows, cols) = matrix_shape(checkpoint.shape(name).unwrap());
        let values = whole(name);
        for _ in 0..20 {
            let slice = random_slice(&mut rng, rows, cols);
            let read = checkpoint.read(name, &slice, as_f32).unwrap();
            assert_eq!(read, slice_of(&values, cols, &slice), "{name} {slice:?}");
        }
        checkpoint.release(name);
    }
}

#[test]
fn tensors_of_several_chunks_are_dequantised_whole() {
    const HEADS: usize = 8;
    const SHAPE: [usize; 2] = [HEADS * 48, 256]; // one and a half chunks
    let mut rng = rng(2);
    let values = random_values(&mut rng, SHAPE[0] * SHAPE[1]);
    let stored = quantize(&values, &SHAPE, GgmlDType::Q8_0);
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("x.gguf");
    let tensors = [("token_embd.weight", &stored), ("blk.0.attn_q.weight", &stored)];
    write(&path, &metadata("llama", HEADS as u32, 4, 48), &tensors);
    let checkpoint = Checkpoint::Gguf(GgufCheckpoint::open(&path).unwrap());
    let whole = |name| checkpoint.read(name, &Slice::whole(&SHAPE), as_f32).unwrap();
    let expected = dequantize_q8_0(&stored.data().unwrap());
    assert_eq!(whole("model.embed_tokens.weight"), expected);
    let query = whole("model.layers.0.self_attn.q_proj.weight");
    assert_eq!(permute(&query, HEADS, SHAPE[1]), expected);
    for _ in 0..20 {
        let slice = random_slice(&mut rng, SHAPE[0], SHAPE[1]);
        let read = checkpoint.read("model.layers.0.self_attn.q_proj.weight", &slice, as_f32).unwrap();
        assert_eq!(read, slice_of(&query, SHAPE[1], &slice), "{slice:?}");
    }
}

#[test]
fn the_fixture_is_its_safetensors_original_up_to_quantisation() {
    let gguf = Checkpoint::Gguf(GgufCheckpoint::open(&fixture("llama-tied.gguf")).unwrap());
    let original = open_directory(&fixture("llama-tied"));
    assert_eq!(gguf.names(), original.names());
    for name in original.names() {
        let shape = original.shape(name).unwrap();
        assert_eq!(gguf.shape(name).unwrap(), shape, "{name}");
        let [a, b] = [&gguf, &original].map(|from| from.read(name, &Slice::whole(shape), as_f32).unwrap());
        let largest = b.iter().fold(0f32, |m, v| m.max(v.abs()));
        // Q4_0 has 16 levels over twice the largest value of a block; the other types are finer.
        let error = a.iter().zip(&*b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(error <= largest / 7.0, "{name}: {error} of {largest}");
    }
}

#[test]
fn broken_files_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        config_error(GgufCheckpoint::open(&path))
    };
    let file = std::fs::read(fixture("llama-tied.gguf")).unwrap();
    assert!(open(b"not GGUF").contains("model.gguf: not a whole GGUF file"));
    assert!(open(&file[..1000]).contains("model.gguf: not a whole GGUF file"));
    let short = open(&file[..file.len() - 1]);
    assert!(short.contains("model.gguf: the file ends before its tensor output_norm.weight does"), "{short}");
}

#[test]
fn unsupported_models_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let embedding = quantize(&[0.0; 64], &[2, 32], GgmlDType::F32);
    let open = |arch: &str, extra: Option<(&str, Value)>| {
        let mut metadata = metadata(arch, 4, 2, 16);
        metadata.extend(extra.map(|(key, value)| (key.to_string(), value)));
        write(&path, &metadata, &[("token_embd.weight", &embedding)]);
        config_error(GgufCheckpoint::open(&path))
    };
    assert!(open("gemma2", None).contains("\"gemma2\" is not supported; supported are llama, qwen2, qwen3"));
    assert!(open("llama", Some(("llama.expert_count", Value::U32(8)))).contains("mixture of experts"));
    let layers = Value::Array(vec![Value::U32(4)]);
    assert!(open("llama", Some(("llama.rope.dimension_count", layers))).contains("differs from layer to layer"));
    assert!(open("llama", Some(("split.count", Value::U16(2)))).contains("llama-gguf-split --merge"));
}

#[test]
fn slices_of_blocks_come_in_the_precision_of_the_matrix() {
    let mut rng = rng(3);
    for dtype in [GgmlDType::Q4_1, GgmlDType::Q8_0, GgmlDType::Q6K, GgmlDType::F16] {
        // 512 columns are 16 blocks or 2, depending on the type. Most slices start and end inside a block.
        let (shape, values) = ([16, 512], random_values(&mut rng, 16 * 512));
        let values: Vec<f32> = values.iter().map(|x| x * 0.37).collect();
        let stored = quantize(&values, &shape, dtype);
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("x.gguf");
        write(&path, &metadata("llama", 4, 4, 4), &[("token_embd.weight", &stored), ("blk.0.attn_q.weight", &stored)]);
        let checkpoint = Checkpoint::Gguf(GgufCheckpoint::open(&path).unwrap());
        let exact = stored.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for _ in 0..100 {
            let slice = random_slice(&mut rng, 16, 512);
            let read = |name: &str, dtype| {
                let mut out = vec![f32::NAN; slice.len()];
                checkpoint.read_f32(name, &slice, dtype, &mut out).unwrap();
                out
            };
            let expected = slice_of(&exact, 512, &slice);
            let context = format!("{dtype:?} {slice:?}");
            assert_eq!(read("model.embed_tokens.weight", StorageDtype::F32), expected, "{context}");
            let rounded: Vec<f32> = expected.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            assert_eq!(read("model.embed_tokens.weight", StorageDtype::Bf16), rounded, "{context}");
            let query = read("model.layers.0.self_attn.q_proj.weight", StorageDtype::F32);
            let in_order = permute_back(&exact, 4, 512);
            assert_eq!(query, slice_of(&in_order, 512, &slice), "{context}");
        }
    }
}

#[test]
fn quantised_vectors_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let (embedding, bias) =
        (quantize(&[0.0; 64], &[2, 32], GgmlDType::F32), quantize(&[0.0; 64], &[64], GgmlDType::Q8_0));
    write(&path, &metadata("llama", 4, 2, 16), &[("token_embd.weight", &embedding), ("blk.0.attn_q.bias", &bias)]);
    let error = config_error(GgufCheckpoint::open(&path));
    assert!(error.contains("rows of blk.0.attn_q.bias [64] are no whole number of Q8_0 blocks"), "{error}");
}
