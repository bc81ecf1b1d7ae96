//! Every way to compute a call gives the same bits.

use half::bf16;

use super::plan::CudaAttentionPlan;
use super::*;
use crate::cpu::testing::Random;
use crate::step::{AttentionSequence, StepInput};

const PROCESSORS: usize = 132;

fn layout(dtype: StorageDtype, kv_heads: usize, head_dim: usize) -> KvLayout {
    KvLayout { blocks: 60, block_size: 16, kv_heads, head_dim, dtype }
}

/// Sequences `(rows, start)` behind each other, whose tables are parts of `blocks`.
fn sequences<'a>(parts: &[(usize, usize)], mut blocks: &'a [u32]) -> Vec<AttentionSequence<'a>> {
    let mut first_row = 0;
    let sequence = |(rows, start_position): &(usize, usize)| {
        let block_table;
        (block_table, blocks) = blocks.split_at((start_position + rows).div_ceil(16));
        first_row += rows;
        AttentionSequence {
            first_row: first_row - rows,
            rows: *rows,
            start_position: *start_position,
            visible: None,
            block_table,
        }
    };
    parts.iter().map(sequence).collect()
}

/// A cache of normal values.
pub(super) fn cache(context: &Context, layout: KvLayout, random: &mut Random) -> CudaKv {
    let cache = CudaKv::new(context, layout).unwrap();
    let values = random.normals(layout.blocks * layout.bytes_per_block() / layout.dtype.size(), 1.0);
    let narrow = || values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>();
    match layout.dtype {
        StorageDtype::Bf16 => context.copies.write(cache.keys(), &narrow()).unwrap(),
        StorageDtype::F32 => context.copies.write(cache.keys(), &values).unwrap(),
    }
    cache
}

#[test]
fn every_way_gives_the_same_bits() {
    let context = Arc::new(Context::open(0).unwrap());
    let (attention, staging) =
        (PagedAttention::load(&context, AttentionKernel::Invariant).unwrap(), Staging::new(&context.stream));
    let layers = [
        (StorageDtype::Bf16, 32, 3, None, None),
        (StorageDtype::Bf16, 80, 7, Some(100), None),
        (StorageDtype::F32, 48, 2, Some(300), None),
        (StorageDtype::Bf16, 80, 1, None, Some(270)),
        (StorageDtype::F32, 64, 1, None, Some(257)),
    ];
    for (seed, (dtype, head_dim, group, sliding_window, visible)) in layers.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let layout = layout(dtype, 2, head_dim);
        let cache = cache(&context, layout, &mut random);
        let blocks: Vec<u32> = (0..60).rev().collect();
        let parts = [(1, 299), (37, 240), (3, 0), (20, 250)];
        let (rows, width) = (61, 2 * group * head_dim);
        let tokens = vec![0; rows];
        let mut sequences = sequences(&parts, &blocks);
        // The tables of the others are too short.
        for sequence in sequences.iter_mut().filter(|s| s.block_table.len() * 16 >= 270) {
            sequence.visible = visible;
        }
        let input = StepInput {
            tokens: &tokens,
            positions: &[],
            axes: 1,
            slots: &[],
            sequences: &sequences,
            logits: &[],
            tasks: &[],
        };
        let step = CudaStep::upload(&context, &staging, &input, AttentionKernel::Invariant).unwrap();
        let shape = AttentionShape { heads: 2 * group, scale: 0.1, sliding_window };
        let rows_of = |values: &[f32]| {
            let memory = context.scratch.allocate(size_of_val(values)).unwrap();
            context.copies.write(memory.pointer, values).unwrap();
            (TensorRows { pointer: memory.pointer, rows, width, stride: width }, memory)
        };
        let (q, _q) = rows_of(&random.normals(rows * width, 1.0));
        let run = |way| {
            let (out, memory) = rows_of(&vec![f32::NAN; rows * width]);
            attention.attend_by(way, q, &shape, &step, &cache, out).unwrap();
            let mut bits = vec![0_u32; rows * width];
            context.copies.read(memory.pointer, &mut bits).unwrap();
            bits
        };
        let ways = step.plan.ways(&layout, &shape);
        let expected = run(ways[0]);
        for way in &ways[1..] {
            assert!(run(*way) == expected, "seed {seed}: {way:?} and {:?} differ", ways[0]);
        }
    }
}

/// The spans of a row without a largest score have no partial results: those of the call before must not be folded.
#[test]
fn a_row_whose_scores_are_no_numbers_has_no_results_of_another_call() {
    let context = Arc::new(Context::open(0).unwrap());
    let attention = PagedAttention::load(&context, AttentionKernel::Invariant).unwrap();
    let staging = Staging::new(&context.stream);
    for dtype in [StorageDtype::Bf16, StorageDtype::F32] {
        let mut random = Random::new(7);
        let layout = layout(dtype, 1, 64);
        let cache = cache(&context, layout, &mut random);
        let blocks: Vec<u32> = (0..60).collect();
        let sequences = sequences(&[(2, 600)], &blocks);
        let input = StepInput {
            tokens: &[0; 2],
            positions: &[],
            axes: 1,
            slots: &[],
            sequences: &sequences,
            logits: &[],
            tasks: &[],
        };
        let step = CudaStep::upload(&context, &staging, &input, AttentionKernel::Invariant).unwrap();
        let shape = AttentionShape { heads: 1, scale: 0.1, sliding_window: None };
        let mut queries = random.normals(2 * 64, 1.0);
        let memory = context.scratch.allocate(4 * size_of_val(&queries[..])).unwrap();
        let q = TensorRows { pointer: memory.pointer, rows: 2, width: 64, stride: 64 };
        let out = TensorRows { pointer: memory.pointer + size_of_val(&queries[..]) as u64, ..q };
        let run = |queries: &[f32], way| {
            context.copies.write(q.pointer, queries).unwrap();
            attention.attend_by(way, q, &shape, &step, &cache, out).unwrap();
            let mut values = vec![0.0_f32; 2 * 64];
            context.copies.read(out.pointer, &mut values).unwrap();
            values
        };
        for way in step.plan.ways(&layout, &shape) {
            let expected = run(&queries, way);
            assert!(expected.iter().all(|value| value.is_finite()), "{way:?}");
            let kept = std::mem::replace(&mut queries[3], f32::NAN);
            let values = run(&queries, way);
            queries[3] = kept;
            assert!(values[..64].iter().all(|value| value.is_nan()), "{way:?}: {values:?}");
            assert!(values[64..] == expected[64..], "{way:?}");
        }
    }
}

#[test]
fn few_queries_are_split_by_spans_and_many_share_what_they_read() {
    let way = |parts: &[(usize, usize)], dtype, head_dim, sliding_window| {
        let blocks = vec![0; 100_000];
        let plan = CudaAttentionPlan::write(&sequences(parts, &blocks), &mut Vec::new());
        let shape = AttentionShape { heads: 28, scale: 1.0, sliding_window };
        let CallPlan { tile, spans } = plan.way(&layout(dtype, 4, head_dim), &shape, PROCESSORS);
        (TILES[tile].kernel, spans)
    };
    assert_eq!(way(&[(1, 5000)], StorageDtype::Bf16, 128, None), ("attention_bf16_128_x1", 20));
    assert_eq!(way(&[(1, 5000)], StorageDtype::Bf16, 128, Some(1000)), ("attention_bf16_128_x1", 5));
    assert_eq!(way(&[(1, 255)], StorageDtype::Bf16, 128, None), ("attention_bf16_128_x1", 1), "one span");
    assert_eq!(way(&[(1, 5000); 200], StorageDtype::Bf16, 64, None), ("attention_bf16_64_x1", 1), "many sequences");
    assert_eq!(way(&[(1, 500), (512, 0)], StorageDtype::Bf16, 80, None), ("attention_bf16_128_x4", 2));
    assert_eq!(way(&[(512, 30000)], StorageDtype::Bf16, 96, None), ("attention_bf16_128_x4", 1), "too many results");
    assert_eq!(way(&[(9, 0)], StorageDtype::Bf16, 192, None), ("attention_bf16_256_x2", 1));
    assert_eq!(way(&[(9, 0)], StorageDtype::F32, 64, None), ("attention_f32", 1));
}

#[test]
fn padded_steps_of_as_many_rows_and_spans_are_launched_alike() {
    let blocks = vec![0; 1000];
    let launches = |lengths: &[usize]| {
        let parts: Vec<_> = lengths.iter().map(|len| (1, len - 1)).collect();
        let sequences = sequences(&parts, &blocks);
        let (mut words, layout) = (Vec::new(), layout(StorageDtype::Bf16, 2, 64));
        let plan = CudaAttentionPlan::write_padded(&sequences, 8, &mut words);
        let shape = AttentionShape { heads: 14, scale: 1.0, sliding_window: None };
        let way = plan.way(&layout, &shape, PROCESSORS);
        let needed = CudaAttentionPlan::write(&sequences, &mut Vec::new()).partials;
        assert!(needed <= plan.partials && plan.partials == 8 * plan.spans, "{lengths:?}");
        assert!(words.len() >= 7 * 8, "a sequence for each row");
        (way, plan.blocks(way.tile, &layout, &shape), plan.rows, plan.sequences(), plan.partials)
    };
    let expected = launches(&[1025]);
    assert_eq!(expected.0.spans, 8);
    for lengths in [&[2048, 1, 300][..], &[1025; 8], &[1, 1, 1, 1, 1500]] {
        assert_eq!(launches(lengths), expected, "{lengths:?}");
    }
    assert_ne!(launches(&[1024]), expected, "four spans");
}
