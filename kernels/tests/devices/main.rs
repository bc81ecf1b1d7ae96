//! Every operator of every device against the reference device, on random inputs (a failure prints its seed).

mod adapters;
#[path = "../common/mod.rs"]
mod common;
mod divergences;
mod experts;
mod rope;
mod vision;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Case, Random, Rank, close, devices, of_device, reference, values_of};
use half::f16;
use rollout_kernels::{
    AttentionKernel, AttentionSequence, AttentionShape, Backend, DeviceOptions, Distribution, Dtype, KvCache, KvLayout,
    LoraDelta, LowRank, Magnitude, Matrix, MatrixShape, Merge, MergeBase, Padding, Replacement, RotaryTables, RowTasks,
    SamplingTask, StepInput, StorageDtype, TaskReturns, TensorData, TensorView, TokenLogprobs, WeightChange,
    reduction_leaves,
};

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

/// The message of the panic in `run`, if there is one.
fn panics(run: impl FnOnce()) -> Option<String> {
    let failed = catch_unwind(AssertUnwindSafe(run)).err()?;
    Some(failed.downcast::<String>().map_or_else(|_| "no message".into(), |message| *message))
}

/// A matrix of these weights.
fn matrix(rank: &Rank, shape: MatrixShape, weights: &[f32]) -> Matrix {
    let mut matrix = rank.device.zeros(shape).unwrap();
    matrix.write_rows(0, TensorView::F32(weights));
    matrix
}

/// All values of a matrix.
fn stored(matrix: &Matrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.n() * matrix.k()];
    matrix.read_f32(0, &mut values);
    values
}

#[test]
fn attention_that_a_device_has_not_is_refused() {
    let refused = Backend::ALL.iter().filter(|backend| !cfg!(feature = "flash-attn") || backend.name() != "cuda");
    for backend in refused {
        let options = DeviceOptions { attention: AttentionKernel::Flash, ..DeviceOptions::default() };
        let error = backend.open(&options).err().expect("it has it not").to_string();
        assert!(error.contains("--attention flash"), "{error}");
    }
}

#[test]
fn linear_layers_are_those_of_the_reference() {
    let reference = reference();
    let shapes = [(3, 100, 700), (1, 40, 2100), (70, 33, 576), (5, 64, 35), (9, 160, 1176)];
    for (seed, (m, n, k)) in shapes.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        for dtype in DTYPES {
            let leaves = [1, reduction_leaves(k)][random.below(2)];
            let shape = MatrixShape { dtype, n, k, leaves };
            let (x, weights, bias) = (random.normals(m * k, 1.0), random.normals(n * k, 1.0), random.normals(n, 1.0));
            for rank in devices() {
                // Some devices round the input to bfloat16 before they multiply.
                let seen = if dtype == StorageDtype::Bf16 { rank.seen(&x) } else { x.clone() };
                let product = |rank: &Rank, x: &[f32], weights: &[f32], bias: &[f32]| {
                    let (x, out) = (rank.tensor(x, m, k), rank.zeros(m, n));
                    let bias = rank.device.upload(bias).unwrap();
                    rank.ops.linear(&x, &matrix(rank, shape, weights), Some(&bias), &out).unwrap();
                    values_of(&out)
                };
                let found = product(&rank, &x, &weights, &bias);
                let expected = product(&reference, &seen, &weights, &bias);
                // Sums are as exact as what they add is large.
                let size = |values: &[f32]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
                let sizes = product(&reference, &size(&seen), &size(&weights), &vec![1.0; n]);
                for i in 0..m * n {
                    close(found[i] / sizes[i], expected[i] / sizes[i], 1e-6, rank.name());
                }
            }
        }
    }
}

#[test]
fn gated_layers_are_those_of_the_reference() {
    let reference = reference();
    let mut random = Random::new(1);
    for (rows, width) in [(1, 1), (3, 16), (2, 37), (5, 1536), (1, 4864), (40, 1000)] {
        let gate_up = random.normals(rows * 2 * width, 3.0);
        let k = 24;
        let (x, weights) = (random.normals(rows * k, 1.0), random.normals(2 * width * k, 0.3));
        let shape = MatrixShape { dtype: StorageDtype::F32, n: 2 * width, k, leaves: 1 };
        let run = |rank: &Rank| {
            let (alone, fused) = (rank.zeros(rows, width), rank.zeros(rows, width));
            rank.ops.silu_mul(&rank.tensor(&gate_up, rows, 2 * width), &alone).unwrap();
            let (x, w, between) =
                (rank.tensor(&x, rows, k), matrix(rank, shape, &weights), rank.zeros(rows, 2 * width));
            rank.ops.linear_silu_mul(&x, &w, None, &between, &fused).unwrap();
            (values_of(&alone), values_of(&fused))
        };
        let expected = run(&reference);
        for rank in devices() {
            let found = run(&rank);
            for (found, expected) in found.0.iter().zip(&expected.0) {
                close(*found, *expected, 1e-6, rank.name());
            }
            for (found, expected) in found.1.iter().zip(&expected.1) {
                close(*found, *expected, 1e-5, rank.name());
            }
        }
    }
}

#[test]
fn norms_are_those_of_the_reference() {
    let reference = reference();
    let mut random = Random::new(2);
    for (rows, heads, head_dim) in [(1, 1, 1), (3, 1, 16), (4, 5, 20), (7, 9, 64), (33, 7, 128), (2, 1, 4097)] {
        let width = heads * head_dim;
        let (x, residual, bias) =
            (random.normals(rows * width, 2.0), random.normals(rows * width, 1.0), random.normals(width, 1.0));
        let (weight, head_weight) = (random.normals(width, 1.0), random.normals(head_dim, 1.0));
        let run = |rank: &Rank| {
            let upload = |values: &[f32]| rank.device.upload(values).unwrap();
            let (weight, bias, head_weight) = (upload(&weight), upload(&bias), upload(&head_weight));
            let (tensor, out) = (|values: &[f32]| rank.tensor(values, rows, width), rank.zeros(rows, width));
            let mut results = Vec::new();
            rank.ops.rms_norm(&tensor(&x), &weight, 1e-5, &out).unwrap();
            results.push(values_of(&out));
            for bias in [None, Some(&bias)] {
                let residual = tensor(&residual);
                rank.ops.add_rms_norm(&residual, &tensor(&x), bias, &weight, 1e-6, &out).unwrap();
                results.extend([values_of(&residual), values_of(&out)]);
            }
            let wide = rank.tensor(&[&x[..], &x].concat(), rows, 2 * width);
            rank.ops.rms_norm_heads(&wide.narrow(1, 0, width).unwrap(), &head_weight, 1e-6).unwrap();
            results.push(values_of(&wide));
            results
        };
        let expected = run(&reference);
        for rank in devices() {
            for (found, expected) in run(&rank).iter().flatten().zip(expected.iter().flatten()) {
                close(*found, *expected, 2e-6, rank.name());
            }
        }
    }
}

#[test]
fn rows_and_their_rotations_are_those_of_the_reference() {
    let reference = reference();
    let mut random = Random::new(5);
    let shapes = [(1, 1, 16), (9, 3, 64), (40, 2, 80), (5, 14, 128), (3, 1, 2), (6, 2, 256), (7, 2, 80), (8, 3, 128)];
    for ((rows, heads, head_dim), axes) in shapes.into_iter().zip([1, 2, 3].into_iter().cycle()) {
        let (width, positions, vocab, first_token) = (heads * head_dim, 50, 90, 20);
        let x = random.normals(rows * (width + 6), 1.0);
        let [cos, sin] = [0, 1].map(|_| random.normals(positions * head_dim / 2, 1.0));
        let at: Vec<u32> = (0..rows * axes).map(|_| random.below(positions) as u32).collect();
        let frequencies = if axes == 1 { 0 } else { head_dim / 2 };
        let axis_of: Vec<u8> = (0..frequencies).map(|_| random.below(axes) as u8).collect();
        let tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
        let table = random.normals(40 * width, 1.0);
        let chosen: Vec<u32> = (0..random.between(1, rows)).map(|_| random.below(rows) as u32).collect();
        let added_to: Vec<u32> = (0..rows as u32).filter(|row| chosen.contains(row)).collect();
        let mut put_in = added_to.clone();
        random.shuffle(&mut put_in);
        let wanted: Vec<RowTasks> = chosen.iter().map(|row| RowTasks { row: *row, tasks: 0..0 }).collect();
        let input = StepInput { tokens: &tokens, positions: &at, axes, logits: &wanted, ..common::NOTHING };
        let run = |rank: &Rank| {
            let step = rank.ops.prepare(input).unwrap();
            let [cos, sin] = [&cos, &sin].map(|table| rank.device.upload(table).unwrap());
            let wide = rank.tensor(&x, rows, width + 6);
            let tables = RotaryTables { rotary_dim: head_dim, cos: &cos, sin: &sin, axis_of: &axis_of };
            rank.ops.rope(&wide.narrow(1, 0, width).unwrap(), head_dim, &step, &tables).unwrap();
            let shape = MatrixShape { dtype: StorageDtype::F32, n: 40, k: width, leaves: 1 };
            let (embedded, selected) = (rank.zeros(rows, width), rank.zeros(chosen.len(), width));
            rank.ops.embed(&matrix(rank, shape, &table), first_token, &step, &embedded).unwrap();
            rank.ops.select_logits_rows(&embedded, &step, 0..chosen.len(), &selected).unwrap();
            let again = rank.zeros(chosen.len(), width);
            rank.ops.select_rows(&embedded, &chosen, &again).unwrap();
            let added = rank.tensor(&x[..rows * width], rows, width);
            rank.ops.add_rows(&again, &added_to, &added).unwrap();
            rank.ops.add(&selected, &added.narrow(0, 0, chosen.len()).unwrap()).unwrap();
            let put = rank.tensor(&x[..rows * width], rows, width);
            rank.ops.put_rows(&again, &put_in, &put).unwrap();
            [wide, embedded, selected, again, added, put].map(|tensor| values_of(&tensor))
        };
        let expected = run(&reference);
        for rank in devices() {
            let found = run(&rank);
            assert!(found[1..] == expected[1..], "{}: rows are copied and added exactly", rank.name());
            for (found, expected) in found[0].iter().zip(&expected[0]) {
                close(*found, *expected, 1e-6, rank.name());
            }
        }
    }
}

/// Attention over a cache that a device has written and copied blocks in: values and, in their place, sums of weighted
/// magnitudes.
fn attend(rank: &Rank, case: &Case, q: &[f32], v: &[f32]) -> Vec<f32> {
    let Case { heads, kv_heads, head_dim, block_size, blocks, rows, .. } = *case;
    let layout = KvLayout { blocks, block_size, kv_heads, head_dim, dtype: case.dtype };
    let mut cache: KvCache = rank.device.kv_cache(layout);
    cache.restore().unwrap();
    let sequences: Vec<AttentionSequence<'_>> = case.sequences();
    let tokens = vec![0; rows];
    let input = StepInput { tokens: &tokens, slots: &case.first_slots, ..common::NOTHING };
    let step = rank.ops.prepare(input).unwrap();
    let (k, v) = (rank.tensor(&case.k, rows, kv_heads * head_dim), rank.tensor(v, rows, kv_heads * head_dim));
    rank.ops.write_kv(&k, &v, &step, &mut cache).unwrap();
    rank.ops.copy_blocks(&mut cache, &case.copies).unwrap();
    let step = rank.ops.prepare(StepInput { tokens: &tokens, sequences: &sequences, ..common::NOTHING }).unwrap();
    let (q, out) = (rank.tensor(q, rows, heads * head_dim), rank.zeros(rows, heads * head_dim));
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { heads, scale, sliding_window: case.window };
    rank.ops.paged_attention(&q, &shape, &step, &cache, &out).unwrap();
    values_of(&out)
}

#[test]
fn attention_is_that_of_the_reference() {
    let reference = reference();
    for seed in 0..16 {
        let mut random = Random::new(seed);
        let case = Case::new(&mut random);
        for rank in devices() {
            let rounds = rank.rounds_activations() && case.dtype == StorageDtype::Bf16;
            let seen = if rounds { rank.seen(&case.q) } else { case.q.clone() };
            let found = attend(&rank, &case, &case.q, &case.v);
            let expected = attend(&reference, &case, &seen, &case.v);
            let magnitudes = case.v.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let magnitudes = attend(&reference, &case, &seen, &magnitudes);
            // A device that rounds the softmax weights is off by half a unit of their last place.
            let half = if rounds { half::bf16::EPSILON.to_f32() / 2.0 } else { 0.0 };
            for i in 0..found.len() {
                let distance = 3e-6 * expected[i].abs().max(1.0) + half * (magnitudes[i] + expected[i].abs());
                let error = (found[i] - expected[i]).abs();
                assert!(error <= distance, "{} seed {seed}: {} for {}", rank.name(), found[i], expected[i]);
            }
        }
    }
}

#[test]
fn sequences_that_are_not_causal_see_some_tokens_and_have_no_window() {
    let rank = reference();
    let refused = |visible: usize, sliding_window: Option<usize>, is_padded: bool| {
        let attend = || {
            let mut cache = rank.device.kv_cache(KvLayout {
                blocks: 1,
                block_size: 16,
                kv_heads: 1,
                head_dim: 16,
                dtype: DTYPES[1],
            });
            cache.restore().unwrap();
            let sequence = AttentionSequence {
                first_row: 0,
                rows: 1,
                start_position: 0,
                visible: Some(visible),
                block_table: &[0],
            };
            let input = StepInput { tokens: &[0], sequences: &[sequence], ..common::NOTHING };
            let padding = Padding { most_rows: 1, vocabulary: 1, variant: None };
            let step =
                if is_padded { rank.ops.prepare_padded(input, padding) } else { rank.ops.prepare(input) }.unwrap();
            let (q, out) = (rank.zeros(1, 16), rank.zeros(1, 16));
            let shape = AttentionShape { heads: 1, scale: 1.0, sliding_window };
            rank.ops.paged_attention(&q, &shape, &step, &cache, &out).unwrap();
        };
        let failed = catch_unwind(AssertUnwindSafe(attend)).err()?;
        Some(*failed.downcast::<&str>().expect("a message"))
    };
    assert_eq!(refused(9, None, false), None);
    assert_eq!(refused(0, None, false), Some("the rows of a sequence see no tokens"));
    assert_eq!(refused(9, Some(4), false), Some("a sliding window is of causal attention"));
    assert_eq!(refused(9, None, true), Some("the sequences of a padded step are causal"));
}

/// Random changes of a weight `[rows, cols]`.
fn changes(random: &mut Random, rows: usize, cols: usize) -> Vec<WeightChange> {
    let rank = random.between(1, 9);
    let mut low_rank = |roundings: Vec<Dtype>, magnitude: Option<Magnitude>| LowRank {
        rank,
        cols,
        a: TensorData::F32(random.normals(rank * cols, 1.0).into()),
        b: TensorData::F32(random.normals(rows * rank, 0.1).into()),
        product: Dtype::F32,
        scaling: 0.7,
        roundings,
        magnitude,
        linear: true,
    };
    let plain = low_rank(vec![], None);
    let rounded = low_rank(vec![Dtype::F16], None);
    let of_experts = low_rank(vec![Dtype::F16], None);
    let [a, b] = [&of_experts.a, &of_experts.b]
        .map(|factor| TensorData::F16(factor.part_f32(0..factor.len()).iter().map(|x| f16::from_f32(*x)).collect()));
    let of_experts = LowRank { a, b, product: Dtype::F16, ..of_experts };
    let lengths = (0..rows).map(|row| 1.0 + row as f32 / 100.0).collect();
    let dora = low_rank(vec![], Some(Magnitude { lengths, sum: Dtype::F32, factor: Dtype::F32 }));
    let replacement = || Some(Replacement { values: TensorData::F32(vec![0.25; rows * cols].into()), cols });
    let of = |delta| WeightChange { replacement: None, delta: Some(LoraDelta::LowRank(delta)) };
    vec![
        of(plain),
        of(rounded),
        of(of_experts),
        of(dora),
        WeightChange { replacement: replacement(), delta: None },
        WeightChange { replacement: None, delta: None },
    ]
}

#[test]
fn stored_merged_and_copied_weights_are_those_of_the_reference() {
    let reference = reference();
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let dtype = DTYPES[seed as usize % 2];
        let (rows, cols) = (random.between(1, 60), random.between(2, 90));
        let (first, columns) = (random.below(5), random.below(cols / 2)..cols);
        let shape = MatrixShape { dtype, n: first + rows + 3, k: columns.len(), leaves: 1 };
        let base: Vec<f32> = random.normals(rows * cols, 1.0).into_iter().map(|x| common::stored(x, dtype)).collect();
        let elements: Vec<(usize, usize, f32)> =
            (0..9).map(|i| (first + random.below(rows), random.below(shape.k), i as f32 / 3.0)).collect();
        for change in changes(&mut random, rows, cols) {
            let read = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>, out: &mut [f32]| {
                let rows = base.chunks_exact(cols).take(rows.end).skip(rows.start);
                out.chunks_exact_mut(columns.len()).zip(rows).for_each(|(out, row)| {
                    out.copy_from_slice(&row[columns.clone()]);
                });
            };
            let run = |rank: &Rank| {
                let mut w = rank.device.zeros(shape).unwrap();
                let merge =
                    |base| Merge { change: &change, base, rows: 0..rows, columns: columns.clone(), width: cols };
                rank.ops.merge_rows(&mut w, first, &merge(MergeBase::Read(&read))).unwrap();
                let merged = stored(&w);
                let whole = rank.tensor(&base, rows, cols);
                rank.ops.merge_rows(&mut w, first, &merge(MergeBase::WholeRows(&whole))).unwrap();
                assert!(stored(&w) == merged, "{}: the same base as whole rows", rank.name());
                let mut copy = rank.device.zeros(MatrixShape { n: rows, ..shape }).unwrap();
                let mut local = vec![0.0; rows * shape.k];
                read(0..rows, columns.clone(), &mut local);
                rank.ops
                    .store_rows(&mut copy, 0..rows, &|rows, store| {
                        store(TensorView::F32(&local[rows.start * shape.k..rows.end * shape.k]));
                    })
                    .unwrap();
                if !change.needs_whole_rows() {
                    rank.ops.merge_rows(&mut w, first, &merge(MergeBase::Matrix(&copy))).unwrap();
                    assert!(stored(&w) == merged, "{}: the same base as a matrix", rank.name());
                }
                rank.ops.copy_rows(&w, first..first + rows, &mut copy).unwrap();
                rank.ops
                    .write_elements(&mut w, first..first + rows, &|rows, write| {
                        let mine = elements.iter().filter(|(row, _, _)| rows.contains(row));
                        mine.for_each(|(row, column, value)| write(*row, *column, *value));
                    })
                    .unwrap();
                let unpacked = rank.zeros(shape.n, shape.k);
                rank.ops.unpack(&w, &unpacked).unwrap();
                assert!(values_of(&unpacked) == stored(&w), "{}: unpacked", rank.name());
                [merged, stored(&copy), stored(&w)].concat()
            };
            let expected = run(&reference);
            for rank in devices() {
                for (found, expected) in run(&rank).iter().zip(&expected) {
                    // One unit in the last place of what is stored, where rounding goes the other way.
                    let unit = if dtype == StorageDtype::Bf16 { 1.0 / 128.0 } else { 2e-6 };
                    let roundings = if change.low_rank().is_some_and(|l| !l.roundings.is_empty()) { 1e-3 } else { 0.0 };
                    let size = expected.abs();
                    let most = (unit * size + 2e-6).min(unit * size.max(1.0)) + roundings * size.max(1.0);
                    let error = (found - expected).abs();
                    assert!(error <= most, "{} seed {seed}: {found}, expected {expected}", rank.name());
                }
            }
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_reference() {
    let reference = reference();
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let (rows, vocab) = (random.between(1, 70), [12, 128, 777, 3000][random.below(4)]);
        let logits = random.normals(rows * vocab, 2.5);
        let (bias, allowed) = ([(1, 2.0), (5, -3.0)], (0..vocab as u32).step_by(2).collect::<Vec<_>>());
        let mask: Vec<u32> = (0..vocab / 32 + 1).map(|_| random.next() as u32 | 1 << 4).collect();
        let (prompt, output) = ([0, 1, 1, 5], [6, 1, 1, 3, 0]);
        let mut tasks = Vec::new();
        let mut wanted = Vec::new();
        for row in 0..rows {
            let first = tasks.len();
            for _ in 0..random.between(1, 3) {
                let is = |random: &mut Random| random.below(3) == 0;
                tasks.push(SamplingTask {
                    temperature: [1.0, 0.6, 0.0, 2.5][random.below(4)],
                    top_k: [0, 3, 50][random.below(3)],
                    top_p: [1.0, 0.8, 0.95][random.below(3)],
                    min_p: [0.0, 0.05][random.below(2)],
                    repetition_penalty: 1.3,
                    presence_penalty: 0.4,
                    frequency_penalty: 0.3,
                    logit_bias: if is(&mut random) { &bias } else { &[] },
                    allowed: if is(&mut random) { Some(&allowed) } else { None },
                    mask: if is(&mut random) { Some(&mask) } else { None },
                    banned: if is(&mut random) { [&[2], &[0, 4_000_000], &[], &[3]] } else { [&[], &[], &[], &[]] },
                    history: if is(&mut random) { Some((&prompt, &output)) } else { None },
                    seed: random.next(),
                    output_index: random.below(100) as u32,
                    target: if is(&mut random) { Some(random.below(vocab) as u32) } else { None },
                    top_logprobs: random.below(6) as u32,
                    logprobs_of: if is(&mut random) { &[5, 0] } else { &[] },
                    top_of: [Distribution::Raw, Distribution::Processed][random.below(2)],
                    returns: TaskReturns {
                        entropy: is(&mut random),
                        support: if is(&mut random) { Some([0, 10, 5000][random.below(3)]) } else { None },
                    },
                });
            }
            wanted.push(RowTasks { row: row as u32, tasks: first..tasks.len() });
        }
        let tokens = vec![0; rows];
        let answers = |rank: &Rank, tasks: &[SamplingTask<'_>]| -> Vec<TokenLogprobs> {
            let input = StepInput { tokens: &tokens, logits: &wanted, tasks, ..common::NOTHING };
            let step = rank.ops.prepare(input).unwrap();
            let logits = rank.tensor(&logits, rows, vocab);
            let middle = rows / 2;
            let parts = [0..middle, middle..rows].into_iter().filter(|part| !part.is_empty());
            let sample = |part: std::ops::Range<usize>| {
                let logits = logits.narrow(0, part.start, part.len()).unwrap();
                rank.ops.sample(&logits, &step, part).unwrap().read().unwrap()
            };
            parts.map(sample).flat_map(|sampled| sampled.tokens).collect()
        };
        let expected = answers(&reference, &tasks);
        for rank in devices() {
            let found = answers(&rank, &tasks);
            assert_eq!(found.len(), tasks.len());
            // The same uniform number draws the same token, unless it falls where rounding decides.
            let differ = found.iter().zip(&expected).filter(|(found, expected)| found.token != expected.token).count();
            assert!(differ * 100 <= tasks.len(), "{}: {differ} of {} tokens differ", rank.name(), tasks.len());
            let chosen = tasks.iter().zip(&found);
            let scored: Vec<_> =
                chosen.map(|(task, found)| SamplingTask { target: Some(found.token), ..*task }).collect();
            for (found, expected) in found.iter().zip(answers(&reference, &scored)) {
                of_device(&rank, seed, found, &expected);
            }
        }
    }
}
