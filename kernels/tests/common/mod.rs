//! Devices, random inputs and comparisons.

#[path = "../../src/cpu/testing/random.rs"]
mod random;

use candle_core::Tensor;
use half::bf16;
pub use random::Random;
use rollout_kernels::cpu::Isa;
use rollout_kernels::{
    Activations, AttentionSequence, Backend, BlockCopy, Device, DeviceOptions, Ops, StepInput, StorageDtype,
    TokenLogprobs,
};

/// A step without rows.
pub const NOTHING: StepInput<'static> =
    StepInput { tokens: &[], positions: &[], axes: 1, slots: &[], sequences: &[], logits: &[], tasks: &[] };

/// A device with its operators.
pub struct Rank {
    pub device: Device,
    pub ops: Ops,
}

fn rank(backend: Backend, kernel: &str) -> Rank {
    let device = backend.open(&DeviceOptions { threads: 2, kernel, ..DeviceOptions::default() }).unwrap();
    Rank { ops: device.ops(), device }
}

/// Every device but the reference, with each of its kernels that this machine can run.
pub fn devices() -> Vec<Rank> {
    let cpus = Isa::all().into_iter().map(|isa| rank(Backend::Cpu, isa.name()));
    cpus.chain(cuda()).collect()
}

/// The first GPU, where the tests are built for one: a card or the emulator.
pub fn cuda() -> Option<Rank> {
    #[cfg(feature = "cuda")]
    return Some(rank(Backend::Cuda, "auto"));
    #[cfg(not(feature = "cuda"))]
    None
}

pub fn reference() -> Rank {
    rank(Backend::Reference, "auto")
}

impl Rank {
    pub fn name(&self) -> &'static str {
        self.device.kernel()
    }

    /// Whether activations that meet bfloat16 are rounded to it.
    pub fn rounds_activations(&self) -> bool {
        self.name() == "cuda" || Isa::from_name(self.name()).is_some_and(Isa::rounds_activations)
    }

    /// These activations as they are multiplied with bfloat16.
    pub fn seen(&self, x: &[f32]) -> Vec<f32> {
        let rounds = self.rounds_activations();
        x.iter().map(|x| if rounds { bf16::from_f32(*x).to_f32() } else { *x }).collect()
    }

    pub fn zeros(&self, rows: usize, width: usize) -> Activations {
        self.device.activations(rows, width).unwrap()
    }

    pub fn tensor(&self, values: &[f32], rows: usize, width: usize) -> Activations {
        let tensor = self.zeros(rows, width);
        let source = Tensor::from_slice(values, (rows, width), tensor.device()).unwrap();
        tensor.slice_set(&source, 0, 0).unwrap();
        tensor
    }
}

pub fn values_of(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// A value as a matrix of this type holds it.
pub fn stored(x: f32, dtype: StorageDtype) -> f32 {
    if dtype == StorageDtype::Bf16 { bf16::from_f32(x).to_f32() } else { x }
}

/// `found` is within `tolerance`, relative to `expected` where that is above 1.
#[track_caller]
pub fn close(found: f32, expected: f32, tolerance: f32, what: &str) {
    let error = (found - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1.0), "{what}: {found}, expected {expected}, error {error:e}");
}

/// A device's answer is the reference's for the same token.
#[track_caller]
pub fn of_device(rank: &Rank, seed: u64, found: &TokenLogprobs, expected: &TokenLogprobs) {
    let near = |a: f32, b: f32| a == b || (a - b).abs() < 1e-5;
    let tops = |top: &[(u32, f32)]| top.iter().map(|(token, _)| *token).collect::<Vec<_>>();
    let top_is_near = found.top.iter().zip(&expected.top).all(|(a, b)| near(a.1, b.1));
    let is_same = near(found.raw, expected.raw) && near(found.processed, expected.processed);
    let context = format!("{} seed {seed}: {found:?}, expected {expected:?}", rank.name());
    assert!(found.token == expected.token && is_same && top_is_near, "{context}");
    assert_eq!(tops(&found.top), tops(&expected.top), "{context}");
    assert_eq!(found.rank, expected.rank, "{context}");
    assert_eq!(found.returned.is_some(), expected.returned.is_some(), "{context}");
    if let (Some(found), Some(expected)) = (&found.returned, &expected.returned) {
        let entropies = near(found.raw_entropy, expected.raw_entropy) && near(found.entropy, expected.entropy);
        let (found, expected) = (&found.support, &expected.support);
        assert!(entropies && near(found.log_mass, expected.log_mass), "{context}");
        assert_eq!((found.size, &found.ids), (expected.size, &expected.ids), "{context}");
    }
}

/// Queries, keys and values of two sequences whose blocks are dealt out at random; those of the second are written to
/// other blocks first and copied.
pub struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
    pub blocks: usize,
    pub dtype: StorageDtype,
    pub window: Option<usize>,
    /// Of both sequences.
    pub rows: usize,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// Where keys and values are written before the copies.
    pub first_slots: Vec<u32>,
    pub copies: Vec<BlockCopy>,
    lengths: [usize; 2],
    tables: [Vec<u32>; 2],
    /// Tokens that all rows of each sequence see; those up to a row's own if `None`.
    visible: [Option<usize>; 2],
}

impl Case {
    pub fn new(random: &mut Random) -> Self {
        let head_dim = [16, 32, 64, 80, 96, 128, 256][random.below(7)];
        let (kv_heads, group) = (random.between(1, 3), random.between(1, 8));
        let (heads, block_size) = (kv_heads * group, [16, 5, 32][random.below(3)]);
        let lengths = [random.between(1, 140), random.between(1, 140)];
        let rows = lengths[0] + lengths[1];
        let needed = lengths.map(|len| len.div_ceil(block_size));
        let blocks = needed[0] + 2 * needed[1] + random.between(1, 5);
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        random.shuffle(&mut free);
        let tables = needed.map(|blocks| free.split_off(free.len() - blocks));
        let written = free.split_off(free.len() - needed[1]);
        let slots = |table: &[u32], len: usize| -> Vec<u32> {
            let slot = |t: usize| table[t / block_size] * block_size as u32 + (t % block_size) as u32;
            (0..len).map(slot).collect()
        };
        let first_slots = [slots(&tables[0], lengths[0]), slots(&written, lengths[1])].concat();
        let copy = |(i, (src, dst)): (usize, (&u32, &u32))| BlockCopy {
            src: *src,
            dst: *dst,
            tokens: block_size.min(lengths[1] - i * block_size),
        };
        let copies = written.iter().zip(&tables[1]).enumerate().map(copy).collect();
        let mut case = Self {
            heads,
            kv_heads,
            head_dim,
            block_size,
            blocks,
            dtype: [StorageDtype::Bf16, StorageDtype::F32][random.below(2)],
            window: (random.below(2) == 0).then(|| random.between(1, 150)),
            rows,
            q: random.normals(rows * heads * head_dim, 1.0),
            k: random.normals(rows * kv_heads * head_dim, 1.0),
            v: random.normals(rows * kv_heads * head_dim, 1.0),
            first_slots,
            copies,
            lengths,
            tables,
            visible: [None; 2],
        };
        if case.window.is_none() {
            case.visible = lengths.map(|len| (random.below(3) > 0).then(|| random.between(1, len)));
        }
        case
    }

    pub fn sequences(&self) -> Vec<AttentionSequence<'_>> {
        let [first, second] = self.lengths;
        let sequence = |first_row, rows, i: usize| AttentionSequence {
            first_row,
            rows,
            start_position: 0,
            visible: self.visible[i],
            block_table: &self.tables[i],
        };
        vec![sequence(0, first, 0), sequence(first, second, 1)]
    }
}
