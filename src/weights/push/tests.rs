//! Random pushes, compared with a direct copy of their values, and pushes that must be refused.

mod adapters;
mod device_memory;
mod experts;
mod headers;
mod names;
mod owners;
mod packing;
mod payloads;
mod qwen_v1;
mod segments;
mod sources;
mod stores;
mod stores_refused;
mod streams;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_128;

use super::*;
use crate::error::{Error, Result};
use crate::weights::{
    Allocation, Dtype, ParamSpec, Partition, ShardRule, Slice, TensorData, TransitBytes, matrix_shape,
};

const HIDDEN: usize = 8;
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// A model of two layers, with biases on queries, keys and values, in bfloat16 on two ranks.
fn model(tied_head: bool) -> Arc<Parameters> {
    let mut specs = vec![ParamSpec::new(EMBEDDING, [12, HIDDEN], ShardRule::Rows)];
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize], rule| {
            specs.push(ParamSpec::new(format!("model.layers.{layer}.{name}"), shape, rule));
        };
        for (name, heads) in [("q", 4), ("k", 2), ("v", 2)] {
            let rule = ShardRule::Heads { heads, head_dim: 2 };
            add(&format!("self_attn.{name}_proj.weight"), &[heads * 2, HIDDEN], rule);
            add(&format!("self_attn.{name}_proj.bias"), &[heads * 2], rule);
        }
        add("self_attn.o_proj.weight", &[HIDDEN, 8], ShardRule::Columns);
        add("mlp.gate_proj.weight", &[10, HIDDEN], ShardRule::Rows);
        add("mlp.up_proj.weight", &[10, HIDDEN], ShardRule::Rows);
        add("mlp.down_proj.weight", &[HIDDEN, 10], ShardRule::Columns);
        add("input_layernorm.weight", &[HIDDEN], ShardRule::Replicated);
    }
    if !tied_head {
        specs.push(ParamSpec::new(HEAD, [12, HIDDEN], ShardRule::Rows));
    }
    Arc::new(Parameters::new(specs, Dtype::Bf16, 2, tied_head))
}

/// A tensor with its bytes as they are sent.
#[derive(Clone)]
struct Sent {
    entry: TensorEntry,
    bytes: Vec<u8>,
}

impl Sent {
    fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        let digest = xxh3_128(&bytes).to_be_bytes();
        let (name, shape, payload, allocation) = (name.into(), shape.to_vec(), None, None);
        let entry = TensorEntry { name, dtype, shape, digest: Some(digest), payload, offset: 0, allocation };
        Self { entry, bytes }
    }

    /// A tensor of random finite values of a random dtype.
    fn random(rng: &mut StdRng, name: &str, shape: &[usize]) -> Self {
        let dtype = random_dtype(rng);
        let values = random_bytes(rng, dtype, shape.iter().product());
        Self::new(name, dtype, shape, values)
    }

    /// The same tensor with other bytes and their digest.
    fn with(&self, bytes: Vec<u8>) -> Self {
        let digest = xxh3_128(&bytes).to_be_bytes();
        Self { entry: TensorEntry { digest: Some(digest), ..self.entry.clone() }, bytes }
    }

    fn renamed(&self, name: &str) -> Self {
        Self { entry: TensorEntry { name: name.into(), ..self.entry.clone() }, bytes: self.bytes.clone() }
    }

    fn values(&self) -> Vec<f32> {
        floats(&self.bytes, self.entry.dtype)
    }
}

fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let value = |b: &[u8]| match dtype {
        Dtype::F32 => f32::from_le_bytes(b.try_into().unwrap()),
        Dtype::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

fn random_dtype(rng: &mut StdRng) -> Dtype {
    [Dtype::F32, Dtype::F16, Dtype::Bf16][rng.random_range(0..3)]
}

/// The bytes of `n` random finite values.
fn random_bytes(rng: &mut StdRng, dtype: Dtype, n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < n * dtype.size() {
        let value: Vec<u8> = (0..dtype.size()).map(|_| rng.random()).collect();
        if floats(&value, dtype)[0].is_finite() {
            bytes.extend(value);
        }
    }
    bytes
}

/// A random tensor for every parameter, in random order.
fn random_push(rng: &mut StdRng, parameters: &Parameters) -> Vec<Sent> {
    let mut push: Vec<Sent> = parameters.iter().map(|spec| Sent::random(rng, &spec.name, &spec.shape)).collect();
    push.shuffle(rng);
    push
}

fn entries(push: &[Sent]) -> Vec<TensorEntry> {
    push.iter().map(|sent| sent.entry.clone()).collect()
}

fn total(push: &[Sent]) -> u64 {
    push.iter().map(|sent| sent.bytes.len() as u64).sum()
}

/// Declares a push with this header, whose tensors are those of `push`.
fn declare(
    header: UpdateHeader,
    push: &[Sent],
    parameters: &Arc<Parameters>,
    sources: &Sources,
) -> Result<DeclaredPush> {
    DeclaredPush::open(Arc::new(header), entries(push), parameters.clone(), sources)
}

fn open(kind: UpdateKind, push: &[Sent], parameters: &Arc<Parameters>) -> Result<DeclaredPush> {
    declare(UpdateHeader::new(kind), push, parameters, &Sources::default())
}

/// A push of which `first` tensors are declared with the header.
fn open_first(kind: UpdateKind, push: &[Sent], first: usize, parameters: &Arc<Parameters>) -> DeclaredPush {
    let header = UpdateHeader { total_bytes: Some(total(push)), ..UpdateHeader::new(kind) };
    declare(header, &push[..first], parameters, &Sources::default()).unwrap()
}

/// Receives a push whose tensors are kept until its end.
fn staged(push: DeclaredPush) -> ReceivingPush {
    push.receive(ReceiveMode::Stage).unwrap()
}

fn in_place(push: DeclaredPush) -> ReceivingPush {
    push.receive(ReceiveMode::InPlace).unwrap()
}

/// Receives a push whose tensors are sent whole, one after the other.
fn receive(kind: UpdateKind, push: &[Sent], parameters: &Arc<Parameters>) -> Result<VerifiedPush> {
    let mut receiving = staged(open(kind, push, parameters)?);
    for (i, sent) in push.iter().enumerate() {
        receiving.write(i as u32, 0, &sent.bytes)?;
    }
    receiving.finish()
}

fn full(received: VerifiedPush) -> Arc<Tensors> {
    match received.update {
        WeightUpdate::Full(tensors) => tensors,
        other => panic!("not a FULL push: {other:?}"),
    }
}

/// All values of a parameter, in float32.
fn whole(tensors: &Tensors, spec: &ParamSpec) -> Vec<f32> {
    let values = tensors.read(&spec.name, &Slice::whole(&spec.shape)).unwrap_or_else(|| panic!("no {}", spec.name));
    values.into_f32().into_owned()
}

fn write_safetensors(path: &std::path::Path, push: &[Sent]) {
    let views = push.iter().map(|sent| {
        let dtype = match sent.entry.dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
        };
        let view = safetensors::tensor::TensorView::new(dtype, sent.entry.shape.clone(), &sent.bytes).unwrap();
        (sent.entry.name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The field and the text of `result`, which must be `InvalidArgument`.
#[track_caller]
fn invalid<T>(result: Result<T>) -> (String, String) {
    match result {
        Err(Error::InvalidArgument { field, message }) => (field, message),
        Err(other) => panic!("not InvalidArgument: {other:?}"),
        Ok(_) => panic!("no error"),
    }
}

/// Asserts that `result` is `InvalidArgument` on this field, with all these parts in its text.
#[track_caller]
fn refused<T>(result: Result<T>, on: &str, parts: &[&str]) {
    let (field, message) = invalid(result);
    assert_eq!(field, on, "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing in {message:?}");
    }
}

/// Asserts that `result` is `DataLoss` naming `what`, without a digest in its text.
#[track_caller]
fn lost<T>(result: Result<T>, what: &str) {
    match result {
        Err(Error::DataLoss(message)) => {
            assert!(message.contains(what), "{what:?} is missing in {message:?}");
            let word = |word: &str| word.len() > 15 && word.chars().all(|c| c.is_ascii_hexdigit());
            assert!(!message.split_whitespace().any(word), "a digest of what was read is in {message:?}");
        }
        Err(other) => panic!("not DataLoss: {other:?}"),
        Ok(_) => panic!("no error"),
    }
}
