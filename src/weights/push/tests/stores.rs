//! Versions of delta stores, compared with the states that were saved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype as Stored;
use safetensors::tensor::TensorView;

use super::super::delta::decoded_bytes;
use super::*;
use crate::memory::Traffic;
use crate::weights::{DeltaStore, ServingWeights, StoredUpdate, StoredVersion};

/// Values of each parameter, all of one dtype.
pub(super) type State = BTreeMap<String, Vec<u8>>;
/// Indices and new values of the changed elements of each tensor.
pub(super) type Patch = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

/// A store with a whole version 0 and deltas after it, with the state of each version.
pub(super) struct Saved {
    pub(super) dir: tempfile::TempDir,
    dtype: Dtype,
    pub(super) states: Vec<State>,
    patches: Vec<Patch>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    Shards,
    /// TRL's, with this encoding of the indices.
    Patches(&'static str),
    /// slime's, with this encoding of changed bytes.
    Bytes(&'static str),
}

/// A policy that serves.
#[derive(Debug)]
struct Serving(State, Arc<Parameters>);

impl ServingWeights for Serving {
    fn read(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        let row_bytes = matrix_shape(&self.1.get(parameter).unwrap().shape).1 * 2;
        Ok(self.0[parameter][rows.start * row_bytes..rows.end * row_bytes].to_vec())
    }
}

impl Saved {
    /// A store `run` of random versions up to `last`.
    pub(super) fn random(rng: &mut StdRng, parameters: &Parameters, layout: Layout, last: u64) -> Self {
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
                Layout::Bytes(encoding) => {
                    let changed =
                        patch.keys().map(|name| (name.clone(), [&saved.states.last().unwrap()[name], &state[name]]));
                    write_bytes(&saved.directory(version), version, encoding, &changed.collect::<Vec<_>>());
                }
            }
            saved.states.push(state);
            saved.patches.push(patch);
        }
        saved
    }

    pub(super) fn root(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(super) fn directory(&self, version: u64) -> PathBuf {
        self.root().join(format!("weight_v{version:06}"))
    }

    /// Saves the state of a version as a whole.
    fn save_whole(&self, parameters: &Parameters, layout: Layout, version: u64) {
        let path = match layout {
            Layout::Shards | Layout::Bytes(_) => self.directory(version).join("model.safetensors"),
            Layout::Patches(_) => self.root().join(format!("anchors/step_{version:06}.safetensors")),
        };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        write_safetensors(&path, &self.tensors(parameters, version));
    }

    fn tensors(&self, parameters: &Parameters, version: u64) -> Vec<Sent> {
        let state = &self.states[version as usize];
        parameters.iter().map(|s| Sent::new(&s.name, self.dtype, &s.shape, state[&s.name].clone())).collect()
    }

    pub(super) fn open(
        &self,
        parameters: &Arc<Parameters>,
        version: u64,
        serving: Option<StoredVersion>,
    ) -> Result<DeclaredPush> {
        let mut sources = Sources::new(Some(self.dir.path().into()));
        if let Some(StoredVersion { version, .. }) = serving {
            let serving = Serving(self.states[version as usize].clone(), parameters.clone());
            sources = sources.with_serving(Arc::new(serving));
        }
        open_store("run", parameters, version, serving, &sources)
    }

    pub(super) fn push(
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
    pub(super) fn check(
        &self,
        parameters: &Parameters,
        push: VerifiedPush,
        from: Option<u64>,
        version: u64,
    ) -> StoredVersion {
        let WeightUpdate::Stored(StoredUpdate { base, deltas, version: stored }) = push.update else {
            panic!("not of a store: {:?}", push.update)
        };
        let mut found: BTreeMap<String, Vec<f32>> = match (base.map(|base| *base), from) {
            (Some(WeightUpdate::Full(tensors)), _) => {
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

pub(super) fn open_store(
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

pub(super) fn random_patch(rng: &mut StdRng, parameters: &Parameters, dtype: Dtype) -> Patch {
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

pub(super) fn write_file(path: &Path, tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)]) {
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
pub(super) fn payload((indices, values): &(Vec<u64>, Vec<u8>)) -> Vec<u8> {
    let before = std::iter::once(0).chain(indices.iter().copied());
    let gaps = indices.iter().zip(before).flat_map(|(&index, before)| ((index - before) as u32).to_le_bytes());
    zstd::bulk::compress(&gaps.chain(values.iter().copied()).collect::<Vec<u8>>(), 1).unwrap()
}

pub(super) fn index_json(version: u64, base: u64, dtype: Dtype, files: &[(String, String)]) -> serde_json::Value {
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
pub(super) fn write_shards(directory: &Path, version: u64, base: u64, dtype: Dtype, patch: &Patch) {
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

pub(super) fn write_index(directory: &Path, index: &serde_json::Value) {
    std::fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Writes what slime's `UpdateWeightFromDiskDelta` writes: for each tensor its changed bytes, and a digest of the new
/// ones.
pub(super) fn write_bytes(directory: &Path, version: u64, encoding: &str, changed: &[(String, [&Vec<u8>; 2])]) {
    let file = "model-00000-of-00001.safetensors";
    let encoded = changed.iter().map(|(name, [old, new])| {
        let pairs = || old.iter().zip(new.iter());
        let raw: Vec<u8> = if encoding == "xor" {
            pairs().map(|(old, new)| old ^ new).collect()
        } else {
            let places = || pairs().enumerate().filter(|(_, (old, new))| old != new);
            let count = (places().count() as u32).to_le_bytes();
            let positions = places().flat_map(|(place, _)| (place as u32).to_le_bytes());
            count.into_iter().chain(positions).chain(places().map(|(_, (_, new))| *new)).collect()
        };
        (name.clone(), Stored::U8, zstd::bulk::compress(&raw, 1).unwrap())
    });
    let sums: Vec<_> = changed.iter().map(|(name, [_, new])| (name, format!("{:032x}", xxh3_128(new)))).collect();
    let metadata: Vec<_> = sums.iter().map(|(name, sum)| (name.as_str(), sum.as_str())).collect();
    write_file(&directory.join(file), &encoded.collect::<Vec<_>>(), &metadata);
    let files: Vec<_> = changed.iter().map(|(name, _)| (name.clone(), file.to_string())).collect();
    let mut index = index_json(version, version - 1, Dtype::Bf16, &files);
    index["metadata"]["delta_encoding"] = encoding.into();
    index["metadata"].as_object_mut().unwrap().remove("dtype");
    write_index(directory, &index);
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
        Layout::Bytes("xor"),
        Layout::Bytes("overwrite"),
    ]) {
        let of_bytes = matches!(layout, Layout::Bytes(_));
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
                // Changes of bytes are applied to whole tensors, so that such a push brings every parameter.
                let is_whole = of_bytes && from < version;
                assert_eq!(kind, if is_whole { UpdateKind::Full } else { UpdateKind::Delta }, "seed {seed}");
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
        if !matches!(layout, Layout::Patches(_)) {
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
fn the_memory_of_patched_tensors_is_reserved() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(64), &parameters, Layout::Bytes("xor"), 2);
    let whole = saved.open(&parameters, 0, None).unwrap().staging();
    let patched = saved.open(&parameters, 2, None).unwrap().staging();
    // Four tensors at a time, of which the largest has 192 bytes, each with what is read and decoded.
    let most = 4 * ((192 + (16 << 20) + (8 << 20)) as u64);
    let more = patched.staged - whole.staged;
    assert!(more > most && more < most + (4 << 10), "{more}");
}
