//! Versions of delta stores, compared with the states that were saved; and stores that must be refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype as Stored;
use safetensors::tensor::TensorView;

use super::super::delta::decoded_bytes;
use super::*;
use crate::memory::Traffic;
use crate::weights::{DeltaStore, StoredUpdate, StoredVersion};

/// Values of each parameter, all of one dtype.
type State = BTreeMap<String, Vec<u8>>;
/// Indices and new values of the changed elements of each tensor.
type Patch = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

/// A store with a whole version 0 and deltas after it, with the state of each version.
struct Saved {
    dir: tempfile::TempDir,
    dtype: Dtype,
    states: Vec<State>,
    patches: Vec<Patch>,
}

#[derive(Clone, Copy, Debug)]
enum Layout {
    Shards,
    /// TRL's, with this encoding of the indices.
    Patches(&'static str),
}

impl Saved {
    /// A store `run` of random versions up to `last`.
    fn random(rng: &mut StdRng, parameters: &Parameters, layout: Layout, last: u64) -> Self {
        let dtype = if matches!(layout, Layout::Shards) { random_dtype(rng) } else { Dtype::Bf16 };
        let values = |rng: &mut StdRng, spec: &ParamSpec| random_bytes(rng, dtype, spec.shape.iter().product());
        let state: State = parameters.iter().map(|spec| (spec.name.clone(), values(rng, spec))).collect();
        let mut saved = Self { dir: tempfile::tempdir().unwrap(), dtype, states: vec![state], patches: Vec::new() };
        saved.save_whole(parameters, layout, 0);
        for version in 1..=last {
            let patch = random_patch(rng, parameters, dtype);
            let mut state = saved.states.last().unwrap().clone();
            for (name, (indices, values)) in &patch {
                for (&index, value) in indices.iter().zip(values.chunks_exact(dtype.size())) {
                    let tensor = state.get_mut(name).unwrap();
                    tensor[index as usize * dtype.size()..][..dtype.size()].copy_from_slice(value);
                }
            }
            match layout {
                Layout::Shards => write_shards(&saved.directory(version), version, version - 1, dtype, &patch),
                Layout::Patches(encoding) => write_patch(&saved.root(), version, encoding, &patch),
            }
            saved.states.push(state);
            saved.patches.push(patch);
        }
        saved
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn directory(&self, version: u64) -> PathBuf {
        self.root().join(format!("weight_v{version:06}"))
    }

    /// Saves the state of a version as a whole.
    fn save_whole(&self, parameters: &Parameters, layout: Layout, version: u64) {
        let path = match layout {
            Layout::Shards => self.directory(version).join("model.safetensors"),
            Layout::Patches(_) => self.root().join(format!("anchors/step_{version:06}.safetensors")),
        };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        write_safetensors(&path, &self.tensors(parameters, version));
    }

    fn tensors(&self, parameters: &Parameters, version: u64) -> Vec<Sent> {
        let state = &self.states[version as usize];
        parameters.iter().map(|s| Sent::new(&s.name, self.dtype, &s.shape, state[&s.name].clone())).collect()
    }

    fn open(&self, parameters: &Arc<Parameters>, version: u64, serving: Option<StoredVersion>) -> Result<DeclaredPush> {
        open_store("run", parameters, version, serving, &Sources::new(Some(self.dir.path().into())))
    }

    fn push(
        &self,
        parameters: &Arc<Parameters>,
        version: u64,
        serving: Option<StoredVersion>,
    ) -> Result<(VerifiedPush, UpdateKind)> {
        let declared = self.open(parameters, version, serving)?;
        let kind = declared.header().kind;
        Ok((staged(declared).finish()?, kind))
    }

    /// Asserts that a push, on top of the state of version `from`, gives the state of `version`.
    #[track_caller]
    fn check(&self, parameters: &Parameters, push: VerifiedPush, from: Option<u64>, version: u64) -> StoredVersion {
        let WeightUpdate::Stored(StoredUpdate { base, deltas, version: stored }) = push.update else {
            panic!("not of a store: {:?}", push.update)
        };
        let mut found: BTreeMap<String, Vec<f32>> = match (base.map(|base| *base), from) {
            (Some(WeightUpdate::Full(tensors)), None) => {
                parameters.iter().map(|spec| (spec.name.clone(), whole(&tensors, spec))).collect()
            }
            (None, Some(from)) => self.values(from),
            other => panic!("{other:?}"),
        };
        for delta in deltas {
            for name in delta.names() {
                let changes = delta.changes(name).unwrap();
                let values = changes.values.into_f32();
                let tensor = found.get_mut(name).unwrap();
                changes.indices.iter().zip(values.iter()).for_each(|(&i, value)| tensor[i as usize] = *value);
            }
        }
        assert_eq!(found, self.values(version));
        assert_eq!((stored.version, stored.digest), (version, push.digest));
        stored
    }

    fn values(&self, version: u64) -> BTreeMap<String, Vec<f32>> {
        let state = &self.states[version as usize];
        state.iter().map(|(name, bytes)| (name.clone(), floats(bytes, self.dtype))).collect()
    }
}

fn open_store(
    path: &str,
    parameters: &Arc<Parameters>,
    version: u64,
    serving: Option<StoredVersion>,
    sources: &Sources,
) -> Result<DeclaredPush> {
    let source = Source::DeltaStore(DeltaStore { path: path.into(), version, serving });
    let header = UpdateHeader { source, new_version: Some(version), ..UpdateHeader::new(UpdateKind::Delta) };
    declare(header, &[], parameters, sources)
}

fn random_patch(rng: &mut StdRng, parameters: &Parameters, dtype: Dtype) -> Patch {
    let specs: Vec<&ParamSpec> = parameters.iter().filter(|_| rng.random_bool(0.6)).collect();
    let patches = specs.into_iter().map(|spec| {
        let elements = spec.shape.iter().product::<usize>() as u64;
        let mut indices: Vec<u64> = (0..elements).filter(|_| rng.random_bool(0.2)).collect();
        if indices.is_empty() {
            indices.push(rng.random_range(0..elements));
        }
        let values = random_bytes(rng, dtype, indices.len());
        (spec.name.clone(), (indices, values))
    });
    patches.collect()
}

fn write_file(path: &Path, tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)]) {
    let views = tensors.iter().map(|(name, dtype, bytes)| {
        (name.clone(), TensorView::new(*dtype, vec![bytes.len() * 8 / dtype.bitsize()], bytes).unwrap())
    });
    // The writer makes no valid header of no tensors with metadata that is empty.
    let metadata = (!metadata.is_empty())
        .then(|| metadata.iter().map(|(key, value)| ((*key).to_string(), (*value).to_string())).collect());
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    safetensors::serialize_to_file(views, metadata, path).unwrap();
}

/// The payload of `push_delta`: gaps and values, compressed.
fn payload((indices, values): &(Vec<u64>, Vec<u8>)) -> Vec<u8> {
    let before = std::iter::once(0).chain(indices.iter().copied());
    let gaps = indices.iter().zip(before).flat_map(|(&index, before)| ((index - before) as u32).to_le_bytes());
    zstd::bulk::compress(&gaps.chain(values.iter().copied()).collect::<Vec<u8>>(), 1).unwrap()
}

fn index_json(version: u64, base: u64, dtype: Dtype, files: &[(String, String)]) -> serde_json::Value {
    let dtype = match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
    };
    serde_json::json!({
        "metadata": {
            "version": format!("{version:06}"),
            "base_version": format!("{base:06}"),
            "delta_encoding": "elements",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
            "dtype": dtype,
        },
        "weight_map": files.iter().cloned().collect::<BTreeMap<_, _>>(),
    })
}

/// Writes a delta into two files and an index.
fn write_shards(directory: &Path, version: u64, base: u64, dtype: Dtype, patch: &Patch) {
    let all: Vec<_> = patch.iter().map(|(name, changes)| (name.clone(), Stored::U8, payload(changes))).collect();
    let mut files = Vec::new();
    std::fs::create_dir_all(directory).unwrap();
    for (number, tensors) in all.chunks(all.len().div_ceil(2).max(1)).enumerate() {
        let file = format!("model-{number:05}-of-00002.safetensors");
        let sums: Vec<_> = tensors.iter().map(|(name, _, bytes)| (name, format!("{:032x}", xxh3_128(bytes)))).collect();
        let metadata: Vec<_> = sums.iter().map(|(name, sum)| (name.as_str(), sum.as_str())).collect();
        write_file(&directory.join(&file), tensors, &metadata);
        files.extend(tensors.iter().map(|(name, ..)| (name.clone(), file.clone())));
    }
    write_index(directory, &index_json(version, base, dtype, &files));
}

fn write_index(directory: &Path, index: &serde_json::Value) {
    std::fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn write_patch(root: &Path, version: u64, encoding: &str, patch: &Patch) {
    let mut tensors = Vec::new();
    for (name, (indices, values)) in patch {
        let skipped = indices.iter().enumerate().map(|(i, index)| match i {
            0 => *index,
            _ => index - indices[i - 1] - 1,
        });
        let (dtype, bytes) = match encoding {
            "raw" => (Stored::I32, indices.iter().flat_map(|index| (*index as i32).to_le_bytes()).collect()),
            "wide" => (Stored::U32, skipped.flat_map(|gap| (gap as u32).to_le_bytes()).collect()),
            _ => (Stored::U16, skipped.flat_map(|gap| (gap as u16).to_le_bytes()).collect()),
        };
        tensors.push((format!("{name}.idx"), dtype, bytes));
        tensors.push((format!("{name}.val"), Stored::BF16, values.clone()));
    }
    let (number, encoding) = (version.to_string(), if encoding == "wide" { "gap_delta" } else { encoding });
    let metadata = [("format", "sparse_weight_patch"), ("model_version", &number), ("encoding", encoding)];
    write_file(&root.join(format!("deltas/step_{version:06}.safetensors")), &tensors, &metadata);
}

#[test]
fn a_version_is_the_state_that_was_saved() {
    let parameters = model(false);
    for (seed, layout) in (0..).zip([
        Layout::Shards,
        Layout::Patches("gap_delta"),
        Layout::Shards,
        Layout::Patches("raw"),
        Layout::Shards,
        Layout::Patches("wide"),
    ]) {
        let saved = Saved::random(&mut rng(seed), &parameters, layout, 4);
        let mut serving: Vec<StoredVersion> = Vec::new();
        for version in 0..=4 {
            let (push, kind) = saved.push(&parameters, version, None).unwrap();
            assert_eq!((kind, push.parameters), (UpdateKind::Full, parameters.len()), "seed {seed}");
            serving.push(saved.check(&parameters, push, None, version));
        }
        // Whatever version serves, the same files give the same version, with the same digest.
        for from in 0..=4 {
            for version in from..=4 {
                let (push, kind) = saved.push(&parameters, version, Some(serving[from as usize])).unwrap();
                assert_eq!(kind, UpdateKind::Delta, "seed {seed}");
                let stored = saved.check(&parameters, push, Some(from), version);
                assert_eq!(stored, serving[version as usize], "seed {seed}: {from} to {version}");
            }
            // An older version is not behind one that serves: it begins with the whole one.
            if from > 0 {
                let (push, kind) = saved.push(&parameters, from - 1, Some(serving[from as usize])).unwrap();
                assert_eq!(kind, UpdateKind::Full, "seed {seed}");
                saved.check(&parameters, push, None, from - 1);
            }
        }
        // A whole version in the middle makes the ones before it unnecessary.
        saved.save_whole(&parameters, layout, 3);
        if matches!(layout, Layout::Shards) {
            std::fs::remove_dir_all(saved.directory(3)).unwrap();
            saved.save_whole(&parameters, layout, 3);
        }
        let (push, _) = saved.push(&parameters, 4, Some(serving[1])).unwrap();
        saved.check(&parameters, push, None, 4);
    }
}

#[test]
fn the_memory_of_a_chain_is_reserved_before_it_is_read() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(7), &parameters, Layout::Shards, 3);
    let (push, _) = saved.push(&parameters, 0, None).unwrap();
    let serving = Some(saved.check(&parameters, push, None, 0));
    let declared = saved.open(&parameters, 3, serving).unwrap();
    let decoded = |patch: &Patch| {
        let all = patch
            .values()
            .map(|changes| payload(changes).len() as u64 + decoded_bytes(changes.0.len() as u64, saved.dtype));
        all.sum::<u64>()
    };
    assert_eq!(declared.staging().staged, saved.patches.iter().map(decoded).sum::<u64>());
    let whole = saved.open(&parameters, 0, None).unwrap().staging();
    let both = saved.open(&parameters, 3, None).unwrap().staging();
    assert_eq!(both.staged - whole.staged, declared.staging().staged);
    assert_eq!(both.shadow, whole.shadow);
    // The declarations are charged as those of a checkpoint are.
    let traffic = Traffic::new(4 << 10);
    let sources = Sources::new(Some(saved.dir.path().into())).with_traffic(traffic.clone());
    let refused = open_store("run", &parameters, 3, None, &sources);
    assert!(matches!(refused, Err(Error::ResourceExhausted(_))), "{:?}", refused.err());
    assert_eq!(traffic.used(), 0);
}

#[test]
fn other_files_are_another_version() {
    let parameters = model(false);
    let mut rng = rng(8);
    let saved = Saved::random(&mut rng, &parameters, Layout::Shards, 2);
    let (push, _) = saved.push(&parameters, 1, None).unwrap();
    let serving = saved.check(&parameters, push, None, 1);
    // A trainer that began again has written another version 1.
    write_shards(&saved.directory(1), 1, 0, saved.dtype, &random_patch(&mut rng, &parameters, saved.dtype));
    let (_, kind) = saved.push(&parameters, 2, Some(serving)).unwrap();
    assert_eq!(kind, UpdateKind::Full);
}

#[test]
fn deltas_without_a_whole_version_change_the_checkpoint() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(9), &parameters, Layout::Shards, 2);
    std::fs::remove_dir_all(saved.directory(0)).unwrap();
    let (push, kind) = saved.push(&parameters, 2, Some(StoredVersion::CHECKPOINT)).unwrap();
    assert_eq!(kind, UpdateKind::Delta);
    saved.check(&parameters, push, Some(0), 2);
    match saved.open(&parameters, 2, None) {
        Err(Error::FailedPrecondition(why)) => assert!(why.contains("no version 0"), "{why}"),
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn stores_that_are_not_right_are_refused() {
    let parameters = model(false);
    let patch = || random_patch(&mut rng(11), &parameters, Dtype::Bf16);
    let fresh = |seed| Saved::random(&mut rng(seed), &parameters, Layout::Shards, 2);
    let is = |saved: &Saved, parts: &[&str]| {
        refused(saved.push(&parameters, 2, None), "source.directory", parts);
    };
    let missing = |saved: &Saved, what: &str| match saved.push(&parameters, 2, None) {
        Err(Error::NotFound(message)) => assert!(message.contains(what), "{message}"),
        other => panic!("{:?}", other.err()),
    };
    let shard = |version: u64| format!("weight_v{version:06}/model-00000-of-00002.safetensors");

    let saved = fresh(20);
    std::fs::remove_dir_all(saved.directory(1)).unwrap();
    missing(&saved, "weight_v000001");
    let saved = fresh(21);
    std::fs::remove_file(saved.root().join(shard(1))).unwrap();
    missing(&saved, &shard(1));
    match saved.push(&parameters, 3, None) {
        Err(Error::NotFound(message)) => assert!(message.contains("version 3 does not exist"), "{message}"),
        other => panic!("{:?}", other.err()),
    }

    // A byte that was changed, anywhere in the data of either delta.
    for version in [1, 2] {
        let saved = fresh(22);
        let path = saved.root().join(shard(version));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        lost(saved.push(&parameters, 2, None), &shard(version));
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        is(&saved, &[&shard(version), "not a whole safetensors file"]);
        // It is cut short between the declarations and the commit.
        std::fs::write(&path, &bytes).unwrap();
        let receiving = staged(saved.open(&parameters, 2, None).unwrap());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(9).unwrap();
        lost(receiving.finish(), &shard(version));
    }

    let with_index = |change: &dyn Fn(&mut serde_json::Value)| {
        let saved = fresh(23);
        let path = saved.directory(2).join("model.safetensors.index.json");
        let mut index: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        write_index(&saved.directory(2), &index);
        saved
    };
    let set = |key: &'static str, value: &'static str| with_index(&|index| index["metadata"][key] = value.into());
    is(&set("delta_encoding", "patch"), &["delta_encoding is \"patch\"", "elements"]);
    is(&set("compression_format", "lz4"), &["compression_format is \"lz4\"", "zstd"]);
    is(&set("checksum_format", "crc32"), &["checksum_format is \"crc32\""]);
    is(&set("dtype", "int8"), &["dtype is \"int8\""]);
    is(&set("version", "7"), &["is of version 7", "expected was version 2"]);
    is(&set("base_version", "2"), &["changes version 2"]);
    is(&set("base_version", "x"), &["base_version is \"x\""]);
    let escape = with_index(&|index| index["weight_map"]["model.norm.weight"] = "../../model.safetensors".into());
    is(&escape, &["is no name of a file"]);
    let other = with_index(&|index| {
        let name = index["weight_map"].as_object().unwrap().keys().next().unwrap().clone();
        index["weight_map"].as_object_mut().unwrap().remove(&name);
    });
    is(&other, &["does not have its tensor"]);
    let more = with_index(&|index| index["weight_map"]["w"] = "model-00000-of-00002.safetensors".into());
    is(&more, &["names tensors that their files do not have"]);
    let saved = fresh(24);
    std::fs::write(saved.directory(2).join("model.safetensors.index.json"), "{\"metadata\": 3}").unwrap();
    is(&saved, &["weight_v000002/model.safetensors.index.json", "not an index"]);

    let saved = fresh(25);
    let mut unknown = patch();
    unknown.insert("model.other.weight".into(), (vec![0], vec![0, 0]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &unknown);
    is(&saved, &["weight_v000002/", "no tensor \"model.other.weight\""]);
    let mut outside = patch();
    outside.insert(EMBEDDING.into(), (vec![5, 96], vec![0, 0, 0, 0]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &outside);
    is(&saved, &["weight_v000002/", EMBEDDING, "index 96 is outside its 96 elements"]);
    outside.insert(EMBEDDING.into(), (vec![5], vec![0x80, 0x7f]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &outside);
    is(&saved, &["weight_v000002/", EMBEDDING, "element 5 is not finite"]);
}

#[test]
fn nothing_outside_of_the_weights_directory_is_a_store() {
    let parameters = model(false);
    let layout = Layout::Shards;
    let (saved, outside) =
        (Saved::random(&mut rng(30), &parameters, layout, 1), Saved::random(&mut rng(31), &parameters, layout, 1));
    let sources = Sources::new(Some(saved.dir.path().into()));
    let open = |path: &str| open_store(path, &parameters, 1, None, &sources);
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, saved.dir.path().join(name)).unwrap();
    refused(open(outside.root().to_str().unwrap()), "source.directory", &["is outside --weights-dir"]);
    let up = format!("../{}/run", outside.dir.path().file_name().unwrap().to_str().unwrap());
    refused(open(&up), "source.directory", &["leads out of --weights-dir"]);
    link(&outside.root(), "link");
    refused(open("link"), "source.directory", &["leads out of --weights-dir"]);
    std::fs::remove_dir_all(saved.directory(0)).unwrap();
    link(&outside.directory(0), "run/weight_v000000");
    refused(open("run"), "source.directory", &["leads out of --weights-dir"]);
    std::fs::remove_file(saved.directory(0)).unwrap();
    link(Path::new("weight_v000001"), "run/weight_v000000");
    refused(open("run"), "source.directory", &["is of version 1", "expected was version 0"]);
    assert!(matches!(open("none"), Err(Error::NotFound(_))));
    let without = open_store("run", &parameters, 1, None, &Sources::default());
    refused(without, "source.directory", &["--weights-dir"]);
}

#[test]
fn compressed_changes_take_no_more_memory_than_they_declare() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(40), &parameters, Layout::Shards, 1);
    let write = |bytes: Vec<u8>| {
        let sum = format!("{:032x}", xxh3_128(&bytes));
        let file = "model-00000-of-00001.safetensors";
        let tensors = [(EMBEDDING.to_string(), Stored::U8, bytes)];
        write_file(&saved.directory(1).join(file), &tensors, &[(EMBEDDING, &sum)]);
        write_index(&saved.directory(1), &index_json(1, 0, Dtype::Bf16, &[(EMBEDDING.into(), file.into())]));
        saved.push(&parameters, 1, None)
    };
    // 64 MiB of zeros, of which the frame tells the size: more elements than the tensor has.
    let bomb = zstd::bulk::compress(&vec![0; 6 << 20], 1).unwrap();
    refused(write(bomb), "source.directory", &[EMBEDDING, "of its 96 elements"]);
    // A frame that does not tell it.
    let silent = zstd::stream::encode_all(&[0u8; 60][..], 1).unwrap();
    refused(write(silent), "source.directory", &[EMBEDDING, "declares its size"]);
    refused(write(vec![1, 2, 3]), "source.directory", &[EMBEDDING, "no zstd frame"]);
    refused(write(payload(&(vec![3], vec![0; 3]))), "source.directory", &[EMBEDDING, "not a multiple of the 6"]);
    // A frame that has more than it tells.
    let mut two = payload(&(vec![3], vec![0; 2]));
    two.extend(payload(&(vec![3], vec![0; 2])));
    refused(write(two), "source.directory", &[EMBEDDING, "does not decompress"]);
    write(payload(&(vec![3], vec![0; 2]))).unwrap();
}

#[test]
fn patches_that_are_not_right_are_refused() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(50), &parameters, Layout::Patches("gap_delta"), 1);
    let path = saved.root().join("deltas/step_000001.safetensors");
    let floats = |n: usize| (format!("{EMBEDDING}.val"), Stored::BF16, vec![0; 2 * n]);
    let write = |tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)]| {
        write_file(&path, tensors, metadata);
        saved.push(&parameters, 1, None)
    };
    let idx = |dtype, bytes: &[u8]| (format!("{EMBEDDING}.idx"), dtype, bytes.to_vec());
    let file = "deltas/step_000001.safetensors";
    let good = [idx(Stored::U16, &[5, 0]), floats(1)];
    write(&good, &[]).unwrap();
    write(&[], &[]).unwrap();
    write(&[idx(Stored::U16, &[]), floats(0)], &[]).unwrap();
    let check = |tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)], parts: &[&str]| {
        refused(write(tensors, metadata), "source.directory", &[&[file], parts].concat());
    };
    check(&good, &[("encoding", "nvcomp_cascaded")], &["nvcomp_cascaded", "raw, gap_delta"]);
    check(&good, &[("model_version", "2")], &["model_version is \"2\""]);
    check(&good, &[("encoding", "raw")], &["is stored as U16"]);
    check(&good[..1], &[], &["neither values"]);
    check(&good[1..], &[], &["has no indices"]);
    check(&[idx(Stored::U16, &[5, 0]), floats(2)], &[], &["different numbers"]);
    check(&[idx(Stored::U16, &[96, 0]), floats(1)], &[], &[EMBEDDING, "index 96 is outside"]);
    let raw = [("encoding", "raw")];
    let two =
        |first: i32, second: i32| [idx(Stored::I32, &[first.to_le_bytes(), second.to_le_bytes()].concat()), floats(2)];
    write(&two(3, 4), &raw).unwrap();
    check(&two(4, 3), &raw, &["index 3 follows a larger one"]);
    check(&two(4, 4), &raw, &["index 4 is repeated"]);
    check(&two(-1, 4), &raw, &["is outside"]);
    let wide = idx(Stored::U32, &u32::MAX.to_le_bytes());
    check(&[wide, floats(1)], &[], &["is outside"]);
}
