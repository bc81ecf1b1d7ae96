//! Measures operators at the shapes of SmolLM2-135M and Qwen2.5-0.5B, and the machine's limits in the same run.
//!
//! `Gelem/s` are GFLOP/s. Linear layers of one row, which memory limits, are given in GB/s of weights. All processors
//! that the process may use are used (`taskset -c 0 cargo bench ...` for one). A filter picks benchmarks:
//! `cargo bench -p rollout-kernels --bench operators -- linear`. `make bench-operators` makes a table of all results.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use rollout_kernels::cpu::logits::{
    BINS, Bins, LogitBound, Measure, Row, candidates_of_bin, histogram, sum_exp, summarise,
};
use rollout_kernels::cpu::{
    Cpu, Isa, KvBlocks, PackedMatrix, Rows, RowsMut, add_rms_norm, linear, paged_attention, rope, silu_mul,
};
use rollout_kernels::{
    AttentionSequence, AttentionShape, KvLayout, RotaryPositions, StorageDtype, TensorView, reduction_leaves,
};
use std::hint::black_box;
use std::ops::Range;
use std::time::Duration;

#[path = "operators/experts.rs"]
mod experts;

struct Model {
    name: &'static str,
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
}

const MODELS: [Model; 2] = [
    Model {
        name: "smollm2-135m",
        layers: 30,
        hidden: 576,
        intermediate: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab: 49152,
    },
    Model {
        name: "qwen2.5-0.5b",
        layers: 24,
        hidden: 896,
        intermediate: 4864,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        vocab: 151936,
    },
];

fn cpu() -> Cpu {
    Cpu::new(std::thread::available_parallelism().map_or(1, usize::from))
}

/// Random values in `-0.1..0.1`.
fn values(len: usize) -> Vec<f32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_769) as f32 / u32::MAX as f32 - 0.5) * 0.2).collect()
}

fn peaks_before(c: &mut Criterion) {
    peaks(c, "before");
}

/// Measures the peaks again after the operators, because other load on this machine can make it slow for minutes.
fn peaks_after(c: &mut Criterion) {
    peaks(c, "after");
}

/// Measures the most multiply-adds that registers allow, and reads from cache and from memory.
fn peaks(c: &mut Criterion, when: &str) {
    const STEPS: usize = 200_000;
    let cpu = cpu();
    let threads = cpu.pool().threads();
    let mut group = c.benchmark_group(format!("peaks {when}/{}/{threads} threads", cpu.isa().name()));
    group.throughput(Throughput::Elements((threads * STEPS * PEAK_FLOP_PER_STEP) as u64));
    group.bench_function("f32 multiply-add", |b| {
        b.iter(|| cpu.pool().run(threads, |_| _ = black_box(multiply_adds(black_box(STEPS)))))
    });
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
        group.throughput(Throughput::Elements((threads * STEPS * 2 * PEAK_FLOP_PER_STEP) as u64));
        group.bench_function("bf16 dot", |b| {
            // SAFETY: the features are there.
            b.iter(|| cpu.pool().run(threads, |_| _ = black_box(unsafe { bf16_dots(black_box(STEPS)) })))
        });
    }
    for mebibytes in [1, 2, 4, 8, 16, 32, 64, 512] {
        let data = vec![1_u64; mebibytes << 17];
        group.throughput(Throughput::BytesDecimal((mebibytes << 20) as u64));
        group.bench_function(BenchmarkId::new("read MiB", mebibytes), |b| {
            let part = |t: usize| &data[data.len() * t / threads..data.len() * (t + 1) / threads];
            b.iter(|| cpu.pool().run(threads, |t| _ = black_box(sum(part(t)))))
        });
    }
}

/// Sum of all words, read with vectors as wide as those of the kernels.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there.
        return unsafe { sum_avx512(words) };
    }
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_si512(); 4];
    for lines in words.as_chunks::<32>().0 {
        for (sum, line) in sums.iter_mut().zip(lines.as_chunks::<8>().0) {
            // SAFETY: a line has 64 bytes.
            *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
        }
    }
    sums.into_iter().fold(0, |total, sum| total.wrapping_add(_mm512_reduce_add_epi64(sum) as u64))
}

#[cfg(target_arch = "x86_64")]
const PEAK_FLOP_PER_STEP: usize = 12 * 16 * 2;

#[cfg(target_arch = "x86_64")]
fn multiply_adds(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    #[target_feature(enable = "avx512f")]
    fn avx512(steps: usize, x: f32, y: f32) -> f32 {
        let (mut acc, x, y) = ([_mm512_set1_ps(1.0); 12], _mm512_set1_ps(x), _mm512_set1_ps(y));
        for _ in 0..steps {
            acc.iter_mut().for_each(|a| *a = _mm512_fmadd_ps(*a, x, y));
        }
        _mm512_reduce_add_ps(acc.into_iter().fold(x, |a, b| _mm512_add_ps(a, b)))
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(steps: usize, x: f32, y: f32) -> f32 {
        let (mut acc, x, y) = ([_mm256_set1_ps(1.0); 12], _mm256_set1_ps(x), _mm256_set1_ps(y));
        for _ in 0..2 * steps {
            acc.iter_mut().for_each(|a| *a = _mm256_fmadd_ps(*a, x, y));
        }
        _mm256_cvtss_f32(acc.into_iter().fold(x, |a, b| _mm256_add_ps(a, b)))
    }
    let (x, y) = (black_box(0.999), black_box(0.001));
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there.
        unsafe { avx512(steps, x, y) }
    } else {
        assert!(is_x86_feature_detected!("fma"), "the peak is measured with fused multiply-adds");
        // SAFETY: avx2 comes with fma.
        unsafe { avx2(steps, x, y) }
    }
}

/// Runs `steps` steps of products of bfloat16 pairs, each with twice the FLOPs of a step of float32 multiply-adds.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_dots(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    let mut acc = [_mm512_set1_ps(1.0); 12];
    let small = _mm512_set1_ps(black_box(0.001));
    let x = _mm512_cvtne2ps_pbh(small, small);
    for _ in 0..steps {
        acc.iter_mut().for_each(|a| *a = _mm512_dpbf16_ps(*a, x, x));
    }
    _mm512_reduce_add_ps(acc.into_iter().fold(small, |a, b| _mm512_add_ps(a, b)))
}

#[cfg(not(target_arch = "x86_64"))]
const PEAK_FLOP_PER_STEP: usize = 64 * 2;

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(steps: usize) -> f32 {
    let mut acc = [1.0_f32; 64];
    let (x, y) = (black_box(0.999), black_box(0.001));
    for _ in 0..steps {
        acc.iter_mut().for_each(|a| *a = a.mul_add(x, y));
    }
    acc.iter().sum()
}

fn linears(c: &mut Criterion) {
    let cpu = cpu();
    for model in &MODELS {
        let head = model.head_dim * (model.heads + 2 * model.kv_heads);
        let layers = [
            ("qkv", head, model.hidden, 1),
            ("o", model.hidden, model.head_dim * model.heads, reduction_leaves(model.head_dim * model.heads)),
            ("gate_up", 2 * model.intermediate, model.hidden, 1),
            ("down", model.hidden, model.intermediate, reduction_leaves(model.intermediate)),
            ("lm_head", model.vocab, model.hidden, 1),
        ];
        for dtype in [StorageDtype::Bf16, StorageDtype::F32] {
            for (layer, n, k, leaves) in layers {
                if dtype == StorageDtype::F32 && layer != "gate_up" {
                    continue; // one layer shows the float32 path
                }
                let row = values(k);
                let matrix = || {
                    let mut w = PackedMatrix::zeros(dtype, n, k, leaves);
                    (0..n).for_each(|i| w.write_rows(i, TensorView::F32(&row)));
                    w
                };
                let weights: Vec<PackedMatrix> = (0..model.copies(layer)).map(|_| matrix()).collect();
                let mut group = c.benchmark_group(format!("linear/{}/{layer}/{dtype:?}", model.name));
                // First one layer again and again, which reads from the cache if it fits; then all layers of the model
                // in turn, as a step does.
                for (copies, rows) in [(1, &[1, 8, 16, 64, 512, 1024][..]), (model.layers, &[1, 16, 64])] {
                    if copies > weights.len() {
                        continue;
                    }
                    for &m in rows {
                        if layer == "lm_head" && m > 64 {
                            continue; // logits are computed for the last rows only
                        }
                        let (x, mut out) = (values(m * k), vec![0.0; m * n]);
                        let in_turn = &weights[..copies];
                        group.throughput(match m {
                            1 => Throughput::BytesDecimal(in_turn.iter().map(|w| w.bytes() as u64).sum()),
                            _ => Throughput::Elements(2 * (copies * m * n * k) as u64),
                        });
                        group.bench_function(BenchmarkId::new(named(copies, "rows"), m), |b| {
                            b.iter(|| {
                                for w in in_turn {
                                    linear(&cpu, Rows::dense(&x, k), w, None, RowsMut::dense(&mut out, n));
                                }
                            })
                        });
                    }
                }
            }
        }
    }
}

impl Model {
    /// Number of matrices of the kind `layer` in the model.
    fn copies(&self, layer: &str) -> usize {
        if layer == "lm_head" { 1 } else { self.layers }
    }
}

/// Name of a benchmark: `what`, with a note if `layers` layers are measured in turn.
fn named(layers: usize, what: &str) -> String {
    if layers == 1 { what.into() } else { format!("{layers} layers in turn, {what}") }
}

/// The sequences of one attention call: `groups * samples`. Each has `shared` positions in blocks of its group and
/// `own` positions in blocks of its own, and the last `rows` of its positions are computed.
struct Sequences {
    name: &'static str,
    groups: usize,
    samples: usize,
    shared: usize,
    own: usize,
    rows: usize,
    in_turn: bool,
}

const BLOCK: usize = 16;

/// The workloads W1, W3 and W4 of `benches/workloads.py`, half way through their samples.
const SEQUENCES: [Sequences; 7] = [
    Sequences { name: "decode 1x256", groups: 1, samples: 1, shared: 0, own: 256, rows: 1, in_turn: false },
    Sequences { name: "decode 32x256", groups: 32, samples: 1, shared: 0, own: 256, rows: 1, in_turn: false },
    Sequences { name: "decode 8x4096", groups: 8, samples: 1, shared: 0, own: 4096, rows: 1, in_turn: false },
    Sequences { name: "prefill 512", groups: 1, samples: 1, shared: 0, own: 512, rows: 512, in_turn: false },
    Sequences { name: "prefill 1024 (W3)", groups: 1, samples: 1, shared: 0, own: 1024, rows: 1024, in_turn: false },
    Sequences { name: "decode 8x8x(128+64) (W1)", groups: 8, samples: 8, shared: 128, own: 64, rows: 1, in_turn: true },
    Sequences {
        name: "decode 16x(1024+64) (W4)",
        groups: 1,
        samples: 16,
        shared: 1024,
        own: 64,
        rows: 1,
        in_turn: true,
    },
];

impl Sequences {
    fn blocks(&self) -> usize {
        self.groups * (self.shared + self.samples * self.own) / BLOCK
    }

    /// Block table of each sequence. Blocks that are neighbours in a sequence are not neighbours in memory.
    fn tables(&self) -> Vec<Vec<u32>> {
        let shared_blocks = self.groups * self.shared / BLOCK;
        let own_of = |i: usize, s: usize| (shared_blocks + i * self.groups * self.samples + s) as u32;
        (0..self.groups * self.samples)
            .map(|s| {
                let shared = (0..self.shared / BLOCK).map(|i| (i * self.groups + s / self.samples) as u32);
                shared.chain((0..self.own / BLOCK).map(|i| own_of(i, s))).collect()
            })
            .collect()
    }
}

fn attention(c: &mut Criterion) {
    let cpu = cpu();
    for model in &MODELS {
        let mut group = c.benchmark_group(format!("attention/{}", model.name));
        for case in &SEQUENCES {
            for dtype in [StorageDtype::Bf16, StorageDtype::F32] {
                let Model { heads, kv_heads, head_dim, .. } = *model;
                let blocks = case.blocks();
                let slots: Vec<u32> = (0..(blocks * BLOCK) as u32).collect();
                let kv = values(slots.len() * kv_heads * head_dim);
                let kv = Rows::dense(&kv, kv_heads * head_dim);
                let cache = || {
                    let mut cache = KvBlocks::new(KvLayout { blocks, block_size: BLOCK, kv_heads, head_dim, dtype });
                    cache.write(&cpu, kv, kv, &slots);
                    cache
                };
                let layers = if case.in_turn { model.layers } else { 1 };
                let caches: Vec<KvBlocks> = (0..layers).map(|_| cache()).collect();
                let (tables, rows, length) = (case.tables(), case.rows, case.shared + case.own);
                let sequence = |s: usize| AttentionSequence {
                    first_row: s * rows,
                    rows,
                    start_position: length - rows,
                    visible: None,
                    block_table: &tables[s],
                };
                let batch: Vec<AttentionSequence> = (0..tables.len()).map(sequence).collect();
                let width = heads * head_dim;
                let (q, mut out) = (values(batch.len() * rows * width), vec![0.0; batch.len() * rows * width]);
                let shape = AttentionShape { heads, scale: 0.125, sliding_window: None };
                let seen: usize = (length - rows + 1..=length).sum::<usize>() * batch.len() * layers;
                group.throughput(Throughput::Elements(4 * (seen * width) as u64));
                group.bench_function(BenchmarkId::new(named(layers, case.name), format!("{dtype:?}")), |b| {
                    b.iter(|| {
                        for cache in &caches {
                            let (q, out) = (Rows::dense(&q, width), RowsMut::dense(&mut out, width));
                            paged_attention(&cpu, q, &shape, &batch, cache, out)
                        }
                    })
                });
            }
        }
    }
}

/// Writes the keys and values of a step into the caches of all layers in turn, in GB/s read and written: for a chunk of
/// a prompt, and for one row of each of 64 samples.
fn kv_write(c: &mut Criterion) {
    let cpu = cpu();
    for model in &MODELS {
        let Model { layers, kv_heads, head_dim, .. } = *model;
        let width = kv_heads * head_dim;
        let mut group = c.benchmark_group(format!("KV write/{}", model.name));
        for (rows, positions_apart) in [(1024_usize, 1), (64, BLOCK)] {
            let blocks = (rows * positions_apart).div_ceil(BLOCK);
            let slots: Vec<u32> = (0..rows).map(|row| (row * positions_apart) as u32).collect();
            let (keys, values) = (values(rows * width), values(rows * width));
            let layout = KvLayout { blocks, block_size: BLOCK, kv_heads, head_dim, dtype: StorageDtype::Bf16 };
            let mut caches: Vec<KvBlocks> = (0..layers).map(|_| KvBlocks::new(layout)).collect();
            for copies in [1, layers] {
                let in_turn = &mut caches[..copies];
                group.throughput(Throughput::BytesDecimal((2 * (4 + 2) * copies * rows * width) as u64));
                group.bench_function(BenchmarkId::new(named(copies, "rows"), rows), |b| {
                    b.iter(|| {
                        for cache in in_turn.iter_mut() {
                            cache.write(&cpu, Rows::dense(&keys, width), Rows::dense(&values, width), &slots);
                        }
                    })
                });
            }
        }
    }
}

/// Operators that are limited by memory or by the cost of starting threads, in GB/s read and written.
fn elementwise(c: &mut Criterion) {
    let cpu = cpu();
    for model in &MODELS {
        let mut group = c.benchmark_group(format!("elementwise/{}", model.name));
        for m in [1, 16, 64, 1024] {
            let (hidden, inner) = (model.hidden, model.intermediate);
            let (x, mut residual, mut out) = (values(m * hidden), values(m * hidden), vec![0.0; m * hidden]);
            let weight = values(hidden);
            group.throughput(Throughput::BytesDecimal(16 * (m * hidden) as u64));
            group.bench_function(BenchmarkId::new("add_rms_norm", m), |b| {
                b.iter(|| {
                    let (residual, out) = (RowsMut::dense(&mut residual, hidden), RowsMut::dense(&mut out, hidden));
                    add_rms_norm(&cpu, residual, Rows::dense(&x, hidden), None, &weight, 1e-5, out)
                })
            });
            let (gate_up, mut out) = (values(2 * m * inner), vec![0.0; m * inner]);
            group.throughput(Throughput::BytesDecimal(12 * (m * inner) as u64));
            group.bench_function(BenchmarkId::new("silu_mul", m), |b| {
                b.iter(|| silu_mul(&cpu, Rows::dense(&gate_up, 2 * inner), RowsMut::dense(&mut out, inner)))
            });
            let (width, head_dim) = (model.heads * model.head_dim, model.head_dim);
            let (mut q, table) = (values(m * width), values(m * head_dim / 2));
            let positions: Vec<u32> = (0..m as u32).collect();
            let positions = RotaryPositions { positions: &positions, axes: 1, axis_of: &[] };
            group.throughput(Throughput::BytesDecimal(8 * (m * width) as u64));
            group.bench_function(BenchmarkId::new("rope", m), |b| {
                b.iter(|| rope(&cpu, RowsMut::dense(&mut q, width), head_dim, head_dim, positions, &table, &table))
            });
        }
    }
}

/// The sampler's passes over 64 rows of logits on one thread, in GB/s of logits. The rows are flat, which is the most
/// expensive case.
fn logits(c: &mut Criterion) {
    const ROWS: usize = 64;
    let isa = Isa::detect();
    for model in &MODELS {
        let data = values(ROWS * model.vocab);
        let (mut maxima, mut sums, mut out) = (Vec::new(), Vec::new(), Vec::new());
        let mut group = c.benchmark_group(format!("logits/{}", model.name));
        group.throughput(Throughput::BytesDecimal((4 * ROWS * model.vocab) as u64));
        let mut pass = |name: &str, f: &mut dyn FnMut(&Row<'_>, &mut Vec<f32>)| {
            group.bench_function(name, |b| {
                b.iter(|| {
                    for logits in data.chunks(model.vocab) {
                        let (max, _) = summarise(isa, logits, 1.0, &mut maxima, &mut sums);
                        f(&Row { logits, maxima: &maxima, max }, &mut sums);
                    }
                })
            });
        };
        pass("maxima and sums", &mut |_, _| ());
        pass("… and sums at another scale", &mut |row, sums| _ = sum_exp(isa, row, 1.5, LogitBound::NONE, sums));
        pass("… and a histogram", &mut |row, _| {
            black_box(histogram(isa, row, Bins::new(row.max, 0.25), Measure::Mass(1.0)));
        });
        pass("… and the tokens of a cell", &mut |row, _| {
            candidates_of_bin(isa, row, Bins::new(row.max, 0.25), BINS / 2, 1.0, &mut out);
        });
    }
}

/// Packing of weights, as a checkpoint's load and a push do it, in GB/s of packed weights.
fn weights(c: &mut Criterion) {
    let cpu = cpu();
    let (n, k) = (4864, 896);
    let source = values(n * k);
    let rounded: Vec<bf16> = source.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut w = PackedMatrix::zeros(StorageDtype::Bf16, n, k, 1);
    let mut group = c.benchmark_group("weights/4864x896");
    group.throughput(Throughput::BytesDecimal(w.bytes() as u64));
    let part = |rows: Range<usize>| rows.start * k..rows.end * k;
    group.bench_function("write float32", |b| {
        b.iter(|| w.fill_rows(cpu.pool(), 0..n, &|rows, out| out.copy_from_slice(&source[part(rows)])))
    });
    group.bench_function("write bfloat16", |b| {
        let widen = |rows: Range<usize>, out: &mut [f32]| {
            rollout_kernels::host::to_f32(TensorView::Bf16(&rounded[part(rows)]), StorageDtype::Bf16, out);
        };
        b.iter(|| w.fill_rows(cpu.pool(), 0..n, &widen))
    });
    group.bench_function("read bfloat16 on one thread", |b| b.iter(|| w.read_rows(0..n)));
}

/// The cost of an operator's span while no subscriber listens.
fn span(c: &mut Criterion) {
    let open = |n: usize| tracing::trace_span!("linear", n, flop = 2 * n).entered();
    c.bench_function("span that nobody listens to", |b| b.iter(|| open(black_box(576))));
}

criterion_group! {
    name = operators;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(300));
    targets = span, peaks_before, linears, experts::experts, attention, kv_write, elementwise, logits, weights, peaks_after
}
criterion_main!(operators);
