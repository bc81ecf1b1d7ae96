//! Merges compared with those of PEFT itself: `tests/fixtures/peft`, made by `tests/fixtures/make_peft_fixtures.py`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::*;

/// The content of `merged.json`.
#[derive(serde::Deserialize)]
struct Merged {
    base: String,
    /// The digest of each merged parameter, by serving dtype and the parameter's name.
    merged: BTreeMap<String, BTreeMap<String, String>>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Names, shapes and values of a safetensors file.
fn read(path: &Path) -> Vec<(String, Vec<usize>, TensorData<'static>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let halves = || view.data().chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap()));
        let values = match view.dtype() {
            ::safetensors::Dtype::F16 => TensorData::F16(halves().map(f16::from_bits).collect()),
            ::safetensors::Dtype::BF16 => TensorData::Bf16(halves().map(bf16::from_bits).collect()),
            ::safetensors::Dtype::F32 => {
                let words = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                TensorData::F32(words.collect())
            }
            other => panic!("{name} is {other:?}"),
        };
        (name, view.shape().to_vec(), values)
    });
    tensors.collect()
}

fn read_push(dir: &Path) -> Push {
    let mut push = Push::new(&std::fs::read_to_string(dir.join("adapter_config.json")).unwrap());
    for (name, shape, values) in read(&dir.join("adapter_model.safetensors")) {
        push.add(&name, &shape, values);
    }
    push
}

/// The bytes of values as they serve: rounded to bfloat16, or float32.
fn serve(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

/// Values of the base, rounded to the serving dtype, in float32.
fn base(values: TensorData<'_>, dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => values.into_f32().into_owned(),
        _ => values.into_bf16().iter().map(|x| x.to_f32()).collect(),
    }
}

/// The parameters of a case that are merged to other bits than PEFT's.
fn different(dir: &Path, precision: &str, dtype: Dtype) -> (usize, Vec<String>) {
    let merged: Merged = serde_json::from_str(&std::fs::read_to_string(dir.join("merged.json")).unwrap()).unwrap();
    let alone = fixtures().join("peft").join(&merged.base).with_extension("safetensors");
    let files = if alone.exists() { vec![alone] } else { model_files(&fixtures().join(&merged.base)) };
    let tensors: Vec<_> = files.iter().flat_map(|file| read(file)).collect();
    let tied = !merged.merged[precision].contains_key("lm_head.weight");
    let specs: Vec<_> = tensors.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice())).collect();
    let adapter = read_push(dir).build(&parameters(&specs, dtype, tied));
    assert_eq!(merged.merged[precision].len(), tensors.len(), "parameters of {}", dir.display());
    let mut wrong = Vec::new();
    for (name, shape, values) in tensors {
        let mut values = base(values, dtype);
        adapter.merge("auto", &name, &Slice::whole(&shape), &mut values);
        let digest: String = Sha256::digest(serve(&values, dtype)).iter().map(|byte| format!("{byte:02x}")).collect();
        if merged.merged[precision][&name] != digest {
            wrong.push(name);
        }
    }
    (adapter.parameters().count(), wrong)
}

fn model_files(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_model = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("model") && name.ends_with(".safetensors")
    };
    files.filter(is_model).collect()
}

#[test]
fn every_merge_has_the_bits_of_peft() {
    let mut failures = Vec::new();
    let mut cases = 0;
    for dir in std::fs::read_dir(fixtures().join("peft")).unwrap().map(|entry| entry.unwrap().path()) {
        if !dir.is_dir() {
            continue;
        }
        for (precision, dtype) in [("bfloat16", Dtype::Bf16), ("float32", Dtype::F32)] {
            let (changed, wrong) = different(&dir, precision, dtype);
            assert!(changed > 0, "{} changes nothing", dir.display());
            if !wrong.is_empty() {
                failures.push(format!("{} in {precision}: {wrong:?}", dir.file_name().unwrap().display()));
            }
            cases += 1;
        }
    }
    assert!(cases >= 30, "only {cases} cases");
    assert!(failures.is_empty(), "{failures:#?}");
}
