//! Ranks on fixture checkpoints, pushes to them, and what they hold and say.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_kernels::{Backend, DeviceOptions, Devices, StorageDtype};
use xxhash_rust::xxh3::xxh3_128;

use crate::comm::{Communicator, LocalGroup, SingleRank};
use crate::executor::{Executor, ModelRunner, RankWeights, Ranks};
use crate::model::config::ModelConfig;
use crate::model::{Build, Model, ModelLimits, ParamSlot, Parameterized, TowerShape, WorkspaceShape, kv_caches};
use crate::types::{
    Distribution, GroupKey, LogitsRow, LogitsTask, PlanSequence, PolicyWeights, Prompt, RequestKey, SampleKey,
    SamplingParams, StepPlan,
};
use crate::weights::{
    Adapter, Checkpoint, DeclaredPush, Delta, Dtype, ModelSource, ParamSpec, Parameters, Partition, ReceiveMode,
    ReceivingPush, ShadowWeights, Slice, Sources, TensorData, TensorEntry, Tensors, UpdateHeader, UpdateKind,
    WeightUpdate, matrix_shape,
};

pub const DTYPES: [StorageDtype; 2] = [StorageDtype::F32, StorageDtype::Bf16];
pub const MODELS: [&str; 13] = [
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "qwen_v1",
    "mistral",
    "smollm3",
    "phi3",
    "qwen3_moe",
    "glm4_moe",
    "llama-tied.gguf",
    "qwen2_5_vl",
    "internvl3",
];
pub const BLOCK_SIZE: usize = 16;
const BLOCKS: usize = 32;
const MAX_TOKENS: usize = 128;
const LIMITS: ModelLimits = ModelLimits { max_model_len: MAX_TOKENS, max_image_tokens: 64 };

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn random(seed: u64) -> ChaCha8Rng {
    println!("seed {seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// Numbers of ranks that divide the model, up to 4.
pub fn worlds(model: &str) -> Vec<usize> {
    let setup = Setup::open(&fixture(model), StorageDtype::F32, 1);
    [1, 2, 4].into_iter().filter(|&world| setup.config.check_tensor_parallel(world).is_ok()).collect()
}

/// A model, and how many ranks serve it in which precision.
pub struct Setup {
    pub config: ModelConfig,
    pub checkpoint: Arc<Checkpoint>,
    pub parameters: Arc<Parameters>,
    devices: Devices,
    weights: StorageDtype,
    world: usize,
}

impl Setup {
    pub fn open(model: &Path, weights: StorageDtype, world: usize) -> Self {
        Self::open_on(Backend::Cpu, model, weights, world)
    }

    pub fn open_on(backend: Backend, model: &Path, weights: StorageDtype, world: usize) -> Self {
        let files = ModelSource::parse(model.to_str().unwrap()).unwrap().open().unwrap();
        let config = ModelConfig::from_files(&files).unwrap();
        let options = DeviceOptions { threads: 2, ..DeviceOptions::default() };
        let devices = Devices::open(backend, world, &options).unwrap();
        let build = Build { device: devices.of_rank(0).clone(), partition: Partition::new(0, 1), weights };
        let mut specs = Vec::new();
        let visitor = &mut |spec: &ParamSpec, _: ParamSlot<'_>| {
            specs.push(spec.clone());
            Ok(())
        };
        Model::new(&config, &build, LIMITS).unwrap().visit(visitor).unwrap();
        let dtype = Dtype::from(weights);
        let parameters = Arc::new(Parameters::new(specs, dtype, world, config.tie_word_embeddings));
        println!("{} {weights:?} on {world} ranks", model.display());
        Self { config, checkpoint: Arc::new(files.checkpoint), parameters, devices, weights, world }
    }

    /// The build context of a rank's layers.
    pub fn build(&self, rank: usize) -> Build {
        let device = self.devices.of_rank(rank).clone();
        Build { device, partition: Partition::new(rank, self.world), weights: self.weights }
    }

    pub fn ranks(&self) -> Ranks {
        self.ranks_with(BLOCKS)
    }

    /// With a KV cache of so many blocks.
    pub fn ranks_with(&self, blocks: usize) -> Ranks {
        let comms: Vec<Box<dyn Communicator>> = match self.world {
            1 => vec![Box::new(SingleRank)],
            world => LocalGroup::create(world).into_iter().map(|g| Box::new(g) as _).collect(),
        };
        let makers = comms.into_iter().enumerate().map(|(rank, comm)| {
            let (config, checkpoint) = (self.config.clone(), self.checkpoint.clone());
            let build = self.build(rank);
            move || {
                let (ops, model) = (build.device.ops(), Model::new(&config, &build, LIMITS)?);
                let weights = RankWeights::load(&ops, model, build.clone(), checkpoint, &|_| ())?;
                let dtype = build.weights;
                let kv = kv_caches(&config, &build, dtype, blocks, BLOCK_SIZE);
                let max_image_tokens = LIMITS.max_image_tokens;
                let tower = |config| TowerShape {
                    config,
                    build: build.clone(),
                    max_image_tokens,
                    embedding_rows: 2 * max_image_tokens,
                    layer_rows: 64,
                };
                let tower = config.vision.clone().map(tower);
                let workspace = WorkspaceShape { config, build, max_batch_tokens: MAX_TOKENS, keeps_routing: false };
                ModelRunner::new(ops, || Ok(comm), weights, kv, (workspace, tower), BLOCK_SIZE, true)
            }
        });
        Ranks::start(self.devices.clone(), makers).unwrap()
    }

    /// The weights of the only rank.
    pub fn weights(&self) -> RankWeights {
        self.weights_of(&self.build(0))
    }

    /// The weights of the rank with this build.
    pub fn weights_of(&self, build: &Build) -> RankWeights {
        let model = Model::new(&self.config, build, LIMITS).unwrap();
        RankWeights::load(&build.device.ops(), model, build.clone(), self.checkpoint.clone(), &|_| ()).unwrap()
    }

    /// Every parameter as it serves.
    pub fn snapshot(&self, ranks: &mut Ranks) -> Vec<Vec<u8>> {
        self.parameters.iter().map(|spec| ranks.read(spec, 0..matrix_shape(&spec.shape).0).unwrap()).collect()
    }

    /// Names the parameters that serve other bytes.
    #[track_caller]
    pub fn assert_serves(&self, ranks: &mut Ranks, expected: &[Vec<u8>], what: &str) {
        let serving = self.snapshot(ranks);
        let differing = self.parameters.iter().zip(serving.iter().zip(expected)).filter(|(_, (a, b))| a != b);
        let names: Vec<&str> = differing.map(|(spec, _)| spec.name.as_str()).collect();
        assert!(names.is_empty(), "{what}: {} parameters differ: {names:?}", names.len());
    }

    /// Bytes of values of a parameter in serving precision.
    pub fn bytes(&self, spec: &ParamSpec, values: &[f32]) -> Vec<u8> {
        match spec.dtype(self.weights) {
            StorageDtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            StorageDtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// The values of a parameter's bytes in serving precision.
    pub fn values(&self, spec: &ParamSpec, bytes: &[u8]) -> Vec<f32> {
        match spec.dtype(self.weights) {
            StorageDtype::Bf16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
            StorageDtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        }
    }

    pub fn rounded(&self, spec: &ParamSpec, values: &[f32]) -> Vec<f32> {
        match spec.dtype(self.weights) {
            StorageDtype::Bf16 => values.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
            StorageDtype::F32 => values.to_vec(),
        }
    }

    /// Every parameter of the checkpoint, in serving precision.
    pub fn base(&self) -> Vec<Vec<f32>> {
        let read = |spec: &ParamSpec| {
            let rounded = |stored: TensorData<'_>| self.rounded(spec, &stored.into_f32());
            self.checkpoint.read(&spec.name, &Slice::whole(&spec.shape), rounded).unwrap()
        };
        self.parameters.iter().map(read).collect()
    }

    /// The serving weights after `adapter` is merged into `base`.
    pub fn merged(&self, base: &[Vec<f32>], adapter: &Adapter) -> Vec<Vec<u8>> {
        let merge = |(spec, values): (&ParamSpec, &Vec<f32>)| {
            let mut values = values.clone();
            adapter.merge("auto", &spec.name, &Slice::whole(&spec.shape), &mut values);
            self.bytes(spec, &values)
        };
        self.parameters.iter().zip(base).map(merge).collect()
    }

    /// Values of every parameter, of the size that weights have.
    pub fn random_values(&self, seed: u64) -> Vec<Vec<f32>> {
        let mut random = random(seed);
        let mut values = |spec: &ParamSpec| {
            let (offset, scale) = if spec.name.contains("norm") { (1.0, 0.2) } else { (0.0, 0.1) };
            let len = spec.shape.iter().product();
            (0..len).map(|_| offset + scale * (random.random::<f32>() - 0.5)).collect()
        };
        self.parameters.iter().map(&mut values).collect()
    }

    /// A LoRA adapter of the linear layers whose names end with one of `layers`.
    pub fn adapter(&self, seed: u64, layers: &[&str], rank: usize, scale: f32, use_dora: bool) -> Arc<Adapter> {
        let mut random = random(seed);
        let mut values = |len: usize| (0..len).map(|_| scale * (random.random::<f32>() - 0.5)).collect::<Vec<f32>>();
        let mut tensors = Vec::new();
        for spec in self.parameters.iter() {
            let Some(module) = spec.name.strip_suffix(".weight") else { continue };
            // Adapters of experts are compared with PEFT's merge (`tests/engine/weights.rs`).
            let is_expert = module.contains(".experts.");
            if !is_expert && layers.iter().any(|layer| module.ends_with(layer)) {
                let name = |what: &str| format!("base_model.model.{module}.{what}");
                let (rows, columns) = (spec.shape[0], spec.shape[1]);
                tensors.push((name("lora_A.weight"), vec![rank, columns], values(rank * columns)));
                tensors.push((name("lora_B.weight"), vec![rows, rank], values(rows * rank)));
                if use_dora {
                    let magnitudes = values(rows).iter().map(|x| 1.0 + x).collect();
                    tensors.push((name("lora_magnitude_vector"), vec![rows], magnitudes));
                }
            }
        }
        let config = serde_json::json!({
            "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_dora": use_dora, "target_modules": layers,
        });
        match self.push(UpdateKind::Lora, config.to_string(), &float_tensors(tensors)) {
            WeightUpdate::Lora(adapter) => adapter,
            other => panic!("{other:?}"),
        }
    }

    /// A FULL push of all parameters.
    pub fn full(&self, values: &[Vec<f32>]) -> Arc<Tensors> {
        match self.push(UpdateKind::Full, String::new(), &self.tensors(values)) {
            WeightUpdate::Full(tensors) => tensors,
            other => panic!("{other:?}"),
        }
    }

    /// A FULL push of all parameters, packed into what the ranks give for it.
    pub fn staged(&self, ranks: &mut Ranks, values: &[Vec<f32>]) -> ShadowWeights {
        let (tensors, mode) = (self.tensors(values), ReceiveMode::Pack(ranks.shadow_weights().unwrap()));
        let mut push = self.declared(UpdateKind::Full, String::new(), &tensors).receive(mode).unwrap();
        write_all(&mut push, &tensors);
        match push.finish().unwrap().update {
            WeightUpdate::Packed(shadow) => shadow,
            other => panic!("{other:?}"),
        }
    }

    /// The part of a FULL push that has arrived when the chosen parameters have.
    pub fn part(&self, values: &[Vec<f32>], chosen: impl Fn(&str) -> bool) -> Arc<Tensors> {
        let mut tensors = self.tensors(values);
        let mut push = self.declared(UpdateKind::Full, String::new(), &tensors).receive(ReceiveMode::InPlace).unwrap();
        for (entry, bytes) in &mut tensors {
            if !chosen(&entry.name) {
                bytes.clear();
            }
        }
        Arc::new(write_all(&mut push, &tensors))
    }

    fn tensors(&self, values: &[Vec<f32>]) -> Vec<(TensorEntry, Vec<u8>)> {
        let tensors = self.parameters.iter().zip(values);
        float_tensors(tensors.map(|(s, v)| (s.name.clone(), s.shape.clone(), v.clone())).collect())
    }

    /// A DELTA push: ascending (index, value) of some parameters.
    pub fn delta(&self, changes: &[(String, Vec<(u64, f32)>)]) -> Arc<Delta> {
        let tensor = |(name, changes): &(String, Vec<(u64, f32)>)| {
            let mut before = 0;
            let mut payload = Vec::new();
            for (index, _) in changes {
                payload.extend(((index - before) as u32).to_le_bytes());
                before = *index;
            }
            payload.extend(changes.iter().flat_map(|(_, value)| value.to_le_bytes()));
            let bytes = zstd::encode_all(&payload[..], 1).unwrap();
            let shape = self.parameters.get(name).unwrap().shape.clone();
            let payload = Some((changes.len() as u64, bytes.len() as u64));
            (TensorEntry { payload, ..entry(name, shape, &bytes) }, bytes)
        };
        let tensors: Vec<_> = changes.iter().map(tensor).collect();
        match self.push(UpdateKind::Delta, String::new(), &tensors) {
            WeightUpdate::Delta(delta) => delta,
            other => panic!("{other:?}"),
        }
    }

    /// The update of a push whose tensors are kept until its end.
    fn push(&self, kind: UpdateKind, adapter_config: String, tensors: &[(TensorEntry, Vec<u8>)]) -> WeightUpdate {
        let mut push = self.declared(kind, adapter_config, tensors).receive(ReceiveMode::Stage).unwrap();
        write_all(&mut push, tensors);
        push.finish().unwrap().update
    }

    fn declared(&self, kind: UpdateKind, adapter_config: String, tensors: &[(TensorEntry, Vec<u8>)]) -> DeclaredPush {
        let header = Arc::new(UpdateHeader { adapter_config, ..UpdateHeader::new(kind) });
        let entries = tensors.iter().map(|(entry, _)| entry.clone()).collect();
        DeclaredPush::open(header, entries, self.parameters.clone(), &Sources::default()).unwrap()
    }

    /// A directory with this model's files and other values.
    pub fn checkpoint_of(&self, model: &Path, values: &[Vec<f32>]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(model.join(file), dir.path().join(file)).unwrap();
        }
        let bytes: Vec<Vec<u8>> =
            values.iter().map(|v| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).collect();
        let views = self.parameters.iter().zip(&bytes).map(|(spec, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, spec.shape.clone(), bytes);
            (spec.name.clone(), view.unwrap())
        });
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
        dir
    }
}

/// The bytes of all parameters with these values, in serving precision.
pub fn bytes_of(setup: &Setup, values: &[Vec<f32>]) -> Vec<Vec<u8>> {
    setup.parameters.iter().zip(values).map(|(spec, values)| setup.bytes(spec, values)).collect()
}

/// Writes all tensors that have bytes. Returns those that are to be written in place.
fn write_all(push: &mut ReceivingPush, tensors: &[(TensorEntry, Vec<u8>)]) -> Tensors {
    let mut complete = Tensors::default();
    for (i, (_, bytes)) in tensors.iter().enumerate().filter(|(_, (_, bytes))| !bytes.is_empty()) {
        push.write(i as u32, 0, bytes).unwrap().into_iter().for_each(|tensors| complete.extend(tensors));
    }
    complete
}

fn float_tensors(tensors: Vec<(String, Vec<usize>, Vec<f32>)>) -> Vec<(TensorEntry, Vec<u8>)> {
    let tensor = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        (entry(&name, shape, &bytes), bytes)
    };
    tensors.into_iter().map(tensor).collect()
}

fn entry(name: &str, shape: Vec<usize>, bytes: &[u8]) -> TensorEntry {
    let digest = xxh3_128(bytes).to_be_bytes();
    let (digest, payload, allocation) = (Some(digest), None, None);
    TensorEntry { name: name.into(), dtype: Dtype::F32, shape, digest, payload, offset: 0, allocation }
}

/// A prompt of one sequence in its own blocks, every row of which is scored against the next token.
pub fn sequence(number: usize, tokens: &[u32], adapter: Option<u64>) -> PlanSequence {
    let blocks = MAX_TOKENS.min(tokens.len().next_multiple_of(BLOCK_SIZE)) / BLOCK_SIZE;
    let task = |offset: usize| LogitsTask {
        sample: SampleKey { group: GroupKey { request: RequestKey(0), prompt_index: 0 }, sample_index: 0 },
        params: Arc::new(SamplingParams { top_logprobs: 4, ..Default::default() }),
        seed: 1,
        output_index: 0,
        target: Some(tokens[(offset + 1) % tokens.len()]),
        forced: None,
        history: None,
        mask: None,
        bad: Vec::new(),
        top_of: Distribution::Raw,
        keeps_hidden: false,
        policy: None,
    };
    PlanSequence {
        start: 0,
        tokens: tokens.to_vec(),
        prompt: Prompt::from_tokens(tokens),
        embeddings: Vec::new(),
        block_table: (0..blocks).map(|b| (number * 4 + b) as u32).collect(),
        weights: PolicyWeights::with_adapter(adapter),
        logits: (0..tokens.len()).map(|offset| LogitsRow { offset, tasks: vec![task(offset)] }).collect(),
    }
}

/// Log-probabilities of every row of the sequences.
pub fn logprobs(ranks: &mut Ranks, sequences: Vec<PlanSequence>) -> Vec<f32> {
    ranks.launch(Arc::new(StepPlan { sequences, ..StepPlan::default() })).unwrap();
    let tokens = ranks.collect().unwrap().tokens;
    tokens.iter().flat_map(|t| t.top.iter().map(|top| top.1).chain([t.raw])).collect()
}

/// The bits of what a few sequences give.
pub fn outputs(ranks: &mut Ranks) -> Vec<u32> {
    let mut random = random(77);
    let mut tokens = |len: usize| (0..len).map(|_| random.random_range(0..512)).collect::<Vec<u32>>();
    let sequences = vec![sequence(0, &tokens(37), None), sequence(1, &tokens(1), None), sequence(2, &tokens(20), None)];
    logprobs(ranks, sequences).iter().map(|x| x.to_bits()).collect()
}
