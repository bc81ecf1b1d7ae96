//! Steps that are captured as CUDA graphs and replayed: they have the bits of eager steps, whatever happens between.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;

use candle_core::{Error, Tensor};
use rollout_kernels::{
    Activations, AttentionSequence, AttentionShape, DeviceBuffer, HostCollective, KvCache, KvLayout, Matrix,
    MatrixShape, Ops, Padding, RotaryTables, Step, StepInput, StorageDtype, TensorView,
};

use crate::common::{NOTHING, Random, Rank, cuda, values_of};

const HEAD_DIM: usize = 16;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = HEADS * HEAD_DIM;
const KV_WIDTH: usize = KV_HEADS * HEAD_DIM;
const BLOCK_SIZE: usize = 16;
const VOCAB: usize = 50;
const POSITIONS: usize = 600;
/// Rows of the buffers: no bucket.
const MOST_ROWS: usize = 301;
const PADDING: Padding = Padding { most_rows: MOST_ROWS, vocabulary: VOCAB, variant: None };
/// Sequences, and blocks of each.
const SEQUENCES: usize = 21;
const BLOCKS: usize = POSITIONS / BLOCK_SIZE + 1;

/// One layer with its weights, its cache and its buffers.
struct Layer {
    weights: [Matrix; 4],
    table: Matrix,
    angles: [DeviceBuffer; 2],
    cache: KvCache,
    /// Inputs, queries, keys, values and outputs.
    buffers: [Activations; 5],
}

/// A layer and its device.
struct Bench {
    rank: Rank,
    layer: Layer,
}

/// A sequence that grows.
#[derive(Clone)]
struct Sequence {
    len: usize,
    table: Vec<u32>,
}

fn sequences(random: &mut Random) -> Vec<Sequence> {
    let mut blocks: Vec<u32> = (0..(SEQUENCES * BLOCKS) as u32).collect();
    random.shuffle(&mut blocks);
    blocks.chunks_exact(BLOCKS).map(|table| Sequence { len: 0, table: table.to_vec() }).collect()
}

impl Layer {
    fn new(rank: &Rank, dtype: StorageDtype) -> Self {
        let mut random = Random::new(7);
        let mut matrix = |n: usize, k: usize| {
            let mut matrix = rank.device.zeros(MatrixShape { dtype, n, k, leaves: 1 }).unwrap();
            matrix.write_rows(0, TensorView::F32(&random.normals(n * k, 0.2)));
            matrix
        };
        let weights = [WIDTH, KV_WIDTH, KV_WIDTH, WIDTH].map(|n| matrix(n, WIDTH));
        let table = matrix(VOCAB, WIDTH);
        let angles = [f32::cos, f32::sin].map(|f| {
            let values: Vec<f32> = (0..POSITIONS * HEAD_DIM / 2).map(|i| f(i as f32 / 7.0)).collect();
            rank.device.upload(&values).unwrap()
        });
        let mut cache = rank.device.kv_cache(KvLayout {
            blocks: SEQUENCES * BLOCKS,
            block_size: BLOCK_SIZE,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            dtype: if dtype == StorageDtype::Bf16 { StorageDtype::Bf16 } else { StorageDtype::F32 },
        });
        cache.restore().unwrap();
        let buffers = [WIDTH, WIDTH, KV_WIDTH, KV_WIDTH, WIDTH].map(|width| rank.zeros(MOST_ROWS, width));
        Self { weights, table, angles, cache, buffers }
    }

    fn forward(&mut self, ops: &Ops, step: &Step<'_>) -> Result<(), Error> {
        let part = |buffer: &Activations| Tensor::narrow(buffer, 0, 0, step.rows()).unwrap();
        let [hidden, q, k, v, out] = self.buffers.each_ref().map(part);
        let ([wq, wk, wv, wo], [cos, sin]) = (&self.weights, &self.angles);
        ops.embed(&self.table, 0, step, &hidden)?;
        ops.linear(&hidden, wq, None, &q)?;
        ops.linear(&hidden, wk, None, &k)?;
        ops.linear(&hidden, wv, None, &v)?;
        let tables = RotaryTables { rotary_dim: HEAD_DIM, cos, sin, axis_of: &[] };
        ops.rope(&q, HEAD_DIM, step, &tables)?;
        ops.rope(&k, HEAD_DIM, step, &tables)?;
        ops.write_kv(&k, &v, step, &mut self.cache)?;
        let shape = AttentionShape { heads: HEADS, scale: 0.3, sliding_window: None };
        ops.paged_attention(&q, &shape, step, &self.cache, &out)?;
        ops.linear(&out, wo, None, &q)
    }
}

/// A rank alone, which agrees with itself.
struct OneRank;

impl HostCollective for OneRank {
    fn world(&self) -> usize {
        1
    }

    fn all_reduce_min(&self, mine: u32) -> u32 {
        mine
    }
}

impl Bench {
    fn new(dtype: StorageDtype) -> Self {
        let rank = cuda().unwrap();
        Self { layer: Layer::new(&rank, dtype), rank }
    }

    /// A step over further tokens of sequences. `each` is called whenever its operators are.
    fn step(&mut self, parts: &[(&Sequence, &[u32])], is_padded: bool, mut each: impl FnMut()) -> Vec<f32> {
        let (mut tokens, mut positions, mut slots, mut all) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (Sequence { len, table }, next) in parts {
            let (first_row, rows) = (tokens.len(), next.len());
            all.push(AttentionSequence { first_row, rows, start_position: *len, visible: None, block_table: table });
            tokens.extend_from_slice(next);
            for position in *len..len + rows {
                positions.push(position as u32);
                slots.push(table[position / BLOCK_SIZE] * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
            }
        }
        let input = StepInput { tokens: &tokens, positions: &positions, slots: &slots, sequences: &all, ..NOTHING };
        let Self { rank: Rank { ops, .. }, layer } = self;
        let step = if is_padded { ops.prepare_padded(input, PADDING) } else { ops.prepare(input) }.unwrap();
        assert!(step.rows() >= tokens.len() && step.rows() <= MOST_ROWS);
        let forward = || {
            each();
            layer.forward(ops, &step)
        };
        ops.capture_or_replay(&step, &OneRank, forward).unwrap();
        values_of(&layer.buffers[1].narrow(0, 0, tokens.len()).unwrap())
    }

    /// As [`Bench::step`], padded; also whether the operators were called.
    fn padded(&mut self, parts: &[(&Sequence, &[u32])]) -> (Vec<f32>, bool) {
        let mut is_called = false;
        let out = self.step(parts, true, || is_called = true);
        (out, is_called)
    }

    fn eager(&mut self, parts: &[(&Sequence, &[u32])]) -> Vec<f32> {
        self.step(parts, false, || ())
    }
}

/// Gives each of `sequences` so many tokens, the same in both.
fn fill(benches: [&mut Bench; 2], sequences: &mut [Sequence], lengths: &[usize], random: &mut Random) {
    let tokens: Vec<Vec<u32>> =
        lengths.iter().map(|len| (0..*len).map(|_| random.below(VOCAB) as u32).collect()).collect();
    for bench in benches {
        for (sequence, tokens) in sequences.iter().zip(&tokens) {
            for (chunk, i) in tokens.chunks(MOST_ROWS).zip(0..) {
                let part = Sequence { len: i * MOST_ROWS, ..sequence.clone() };
                bench.eager(&[(&part, chunk)]);
            }
        }
    }
    sequences.iter_mut().zip(lengths).for_each(|(sequence, len)| sequence.len = *len);
}

/// Two benches, and sequences of which one is about to be longer than a span, and one than two.
fn start(dtype: StorageDtype, random: &mut Random) -> (Bench, Bench, Vec<Sequence>) {
    let (mut ours, mut other) = (Bench::new(dtype), Bench::new(dtype));
    let mut sequences = sequences(random);
    let mut lengths: Vec<usize> = (0..SEQUENCES).map(|_| random.between(1, 40)).collect();
    (lengths[0], lengths[1]) = (250, 506);
    fill([&mut ours, &mut other], &mut sequences, &lengths, random);
    (ours, other, sequences)
}

#[test]
fn replayed_steps_have_the_bits_of_eager_ones() {
    for (seed, dtype) in [StorageDtype::Bf16, StorageDtype::F32].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (mut ours, mut other, mut sequences) = start(dtype, &mut random);
        let mut replayed = 0;
        for round in 0..60 {
            // Some batch, several times.
            let mut chosen: Vec<usize> = (0..SEQUENCES).collect();
            random.shuffle(&mut chosen);
            chosen.truncate([1, 2, 3, 5, 7, 8, 9, 12, 16, 21][random.below(10)]);
            for _ in 0..random.between(1, 4) {
                let tokens: Vec<[u32; 1]> = chosen.iter().map(|_| [random.below(VOCAB) as u32]).collect();
                let parts: Vec<_> = chosen.iter().zip(&tokens).map(|(i, token)| (&sequences[*i], &token[..])).collect();
                let expected = other.eager(&parts);
                let (found, is_called) = ours.padded(&parts);
                assert!(found == expected, "seed {seed}, {dtype:?}, round {round}: {} rows differ", chosen.len());
                replayed += usize::from(!is_called);
                chosen.iter().for_each(|i| sequences[*i].len += 1);
            }
        }
        println!("{dtype:?}: {replayed} steps were replayed");
        assert!(replayed > 0);
    }
}

#[test]
fn a_shape_runs_eagerly_once_is_captured_once_and_then_replayed_until_graphs_are_dropped() {
    let mut random = Random::new(3);
    let (mut ours, mut other, mut sequences) = start(StorageDtype::Bf16, &mut random);
    let mut calls = |ours: &mut Bench, chosen: &[usize], times: usize| -> Vec<bool> {
        let mut one = || {
            let parts: Vec<_> = chosen.iter().map(|i| (&sequences[*i], &[3][..])).collect();
            let expected = other.eager(&parts);
            let (found, is_called) = ours.padded(&parts);
            assert!(found == expected, "{chosen:?}");
            chosen.iter().for_each(|i| sequences[*i].len += 1);
            is_called
        };
        (0..times).map(|_| one()).collect()
    };
    assert_eq!(calls(&mut ours, &[4, 5, 6], 4), [true, true, false, false]);
    assert_eq!(calls(&mut ours, &[7, 8, 9, 10], 1), [false], "as many rows, with padding");
    assert_eq!(calls(&mut ours, &[7, 8, 9, 10, 11], 3), [true, true, false]);
    assert_eq!(calls(&mut ours, &[0, 8, 9], 5), [false, false, false, false, false], "one span");
    // The sequence has 255 tokens, and then more than one span.
    assert_eq!(calls(&mut ours, &[0, 8, 9], 5), [false, true, true, false, false], "two spans");
    ours.rank.ops.drop_graphs();
    assert_eq!(calls(&mut ours, &[4, 5, 6], 3), [true, true, false]);
    ours.rank.ops.release();
    assert_eq!(calls(&mut ours, &[4, 5, 6], 3), [true, true, false], "after memory was given back");
    // More rows than before: what operators keep grows, and moves.
    let (x, wide) = (ours.rank.zeros(2000, WIDTH), ours.rank.zeros(2000, WIDTH));
    ours.rank.ops.linear(&x, &ours.layer.weights[0], None, &wide).unwrap();
    assert_eq!(calls(&mut ours, &[4, 5, 6], 3), [true, true, false], "after it has grown");
}

#[test]
fn a_graph_is_of_steps_with_as_many_axes() {
    let (rank, mut random) = (cuda().unwrap(), Random::new(11));
    let values: Vec<f32> = random.normals(POSITIONS * HEAD_DIM / 2, 1.0);
    let (angles, x) = (rank.device.upload(&values).unwrap(), random.normals(MOST_ROWS * WIDTH, 1.0));
    let rotated = rank.zeros(MOST_ROWS, WIDTH);
    let step = |rows: usize, axes: usize, is_padded: bool| {
        let (tokens, at): (_, Vec<u32>) =
            (vec![1; rows], (0..rows * axes).map(|i| (i * 37 % POSITIONS) as u32).collect());
        let sequence =
            |first_row| AttentionSequence { first_row, rows: 1, start_position: 0, visible: None, block_table: &[0] };
        let all: Vec<_> = (0..rows).map(sequence).collect();
        let input = StepInput { tokens: &tokens, positions: &at, axes, sequences: &all, ..NOTHING };
        let step = if is_padded { rank.ops.prepare_padded(input, PADDING) } else { rank.ops.prepare(input) }.unwrap();
        let axis_of: Vec<u8> = (0..HEAD_DIM / 2).map(|i| (i % axes) as u8).collect();
        let mut is_called = false;
        rotated.slice_set(&rank.tensor(&x, MOST_ROWS, WIDTH), 0, 0).unwrap();
        let rotate = || {
            is_called = true;
            let x = rotated.narrow(0, 0, step.rows()).unwrap();
            let tables = RotaryTables { rotary_dim: HEAD_DIM, cos: &angles, sin: &angles, axis_of: &axis_of };
            rank.ops.rope(&x, HEAD_DIM, &step, &tables)
        };
        rank.ops.capture_or_replay(&step, &OneRank, rotate).unwrap();
        (values_of(&rotated.narrow(0, 0, rows).unwrap()), is_called)
    };
    for axes in 1..=3 {
        for (round, rows) in [12, 11, 13, 16].into_iter().enumerate() {
            let (found, is_called) = step(rows, axes, true);
            assert!(found == step(rows, axes, false).0, "{rows} rows, {axes} axes");
            assert_eq!(is_called, round < 2, "{rows} rows, {axes} axes: eager, captured, then replayed");
        }
    }
}

#[test]
fn the_graphs_that_were_used_last_are_kept() {
    let rank = cuda().unwrap();
    let table = rank.device.zeros(MatrixShape { dtype: StorageDtype::F32, n: 4, k: 4, leaves: 1 }).unwrap();
    let out = rank.zeros(1000, 4);
    let is_called = |rows: usize| {
        let tokens = vec![1; rows];
        let sequence =
            |first_row| AttentionSequence { first_row, rows: 1, start_position: 0, visible: None, block_table: &[0] };
        let all: Vec<_> = (0..rows).map(sequence).collect();
        let input = StepInput { tokens: &tokens, sequences: &all, ..NOTHING };
        let step = rank.ops.prepare_padded(input, Padding { most_rows: 1000, ..PADDING }).unwrap();
        let mut is_called = false;
        let embed = || {
            is_called = true;
            rank.ops.embed(&table, 0, &step, &out.narrow(0, 0, step.rows()).unwrap())
        };
        rank.ops.capture_or_replay(&step, &OneRank, embed).unwrap();
        is_called
    };
    for shape in 1..=70 {
        assert_eq!([(); 3].map(|()| is_called(8 * shape)), [true, true, false], "{shape}");
        assert!(!is_called(8), "the first is used all the time");
        is_called(8 * shape);
    }
    assert!(!is_called(8 * 70) && !is_called(8 * 10), "of the last 64");
    assert!(is_called(8 * 3), "a shape that was not used for long");
}

#[test]
fn a_replay_checks_its_step() {
    let mut random = Random::new(5);
    let (mut ours, _, sequences) = start(StorageDtype::Bf16, &mut random);
    let outside = [(SEQUENCES * BLOCKS) as u32; BLOCKS];
    for (table, len) in [(&outside[..], 3), (&sequences[4].table[..1], BLOCK_SIZE)] {
        (0..3).for_each(|_| drop(ours.padded(&[(&sequences[4], &[1])])));
        let all = [AttentionSequence { first_row: 0, rows: 1, start_position: len, visible: None, block_table: table }];
        let input = StepInput { tokens: &[1], positions: &[0], slots: &[0], sequences: &all, ..NOTHING };
        let step = ours.rank.ops.prepare_padded(input, PADDING).unwrap();
        let captured = || -> Result<(), Error> { panic!("the step is not replayed") };
        let failed = catch_unwind(AssertUnwindSafe(|| ours.rank.ops.capture_or_replay(&step, &OneRank, captured)));
        let why = failed.expect_err("the step is wrong");
        let why = why.downcast_ref::<String>().expect("a message of the check");
        assert!(why.contains("block"), "{why}");
    }
}

#[test]
fn an_error_of_a_launch_is_returned_to_the_caller() {
    let rank = cuda().unwrap();
    let sequences = [AttentionSequence { first_row: 0, rows: 1, start_position: 0, visible: None, block_table: &[0] }];
    let input = StepInput { tokens: &[1], sequences: &sequences, ..NOTHING };
    for _ in 0..4 {
        let step = rank.ops.prepare_padded(input, PADDING).unwrap();
        let error = rank.ops.capture_or_replay(&step, &OneRank, || Err(Error::Msg("no".into()))).unwrap_err();
        assert_eq!(error.to_string(), "no");
    }
}

#[test]
fn other_threads_write_weights_during_a_capture() {
    let mut random = Random::new(6);
    let (mut ours, mut other, mut sequences) = start(StorageDtype::Bf16, &mut random);
    // Used by an operator, so that a write waits for them.
    let mut used = ours.rank.device.zeros(ours.layer.weights[0].shape()).unwrap();
    let (x, out) = (ours.rank.zeros(1, WIDTH), ours.rank.zeros(1, WIDTH));
    ours.rank.ops.linear(&x, &used, None, &out).unwrap();
    let values = random.normals(WIDTH * WIDTH, 1.0);
    let (now, is_now) = channel();
    let now = &now;
    std::thread::scope(|scope| {
        let (used, values) = (&mut used, &values);
        scope.spawn(move || {
            for _ in 0..2 {
                is_now.recv().unwrap();
                used.write_rows(0, TensorView::F32(values));
            }
        });
        for round in 0..6 {
            let parts = [(&sequences[4], &[9][..]), (&sequences[5], &[8])];
            let expected = other.eager(&parts);
            let found = ours.step(&parts, true, || {
                now.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            });
            assert!(found == expected, "round {round}");
            sequences.iter_mut().for_each(|sequence| sequence.len += usize::from(sequence.len < 100));
        }
    });
    let mut read = vec![0.0; WIDTH * WIDTH];
    used.read_f32(0, &mut read);
    let stored: Vec<f32> = values.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
    assert!(read == stored, "the values that were written during a capture");
}

#[test]
fn a_device_is_opened_during_a_capture() {
    let mut random = Random::new(8);
    let (mut ours, mut other, sequences) = start(StorageDtype::F32, &mut random);
    let (now, is_now) = channel();
    let opening = std::thread::spawn(move || is_now.iter().inspect(|()| drop(cuda().unwrap())).count());
    for round in 0..4 {
        let parts = [(&sequences[4], &[9][..])];
        let expected = other.eager(&parts);
        let found = ours.step(&parts, true, || {
            now.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
        assert!(found == expected, "round {round}");
    }
    drop(now);
    assert_eq!(opening.join().unwrap(), 2, "eager once and captured once");
}
