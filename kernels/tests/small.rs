//! Every operator once, on inputs so small that Miri runs this file in minutes (`make miri`). Miri has only the scalar
//! instruction set; elsewhere all others must give the same bits. Sizes are odd on purpose: each loop has a remainder.

use std::ops::Range;

use candle_core::Tensor;
use rollout_kernels::cpu::{Isa, Products};
use rollout_kernels::{
    Activations, AttentionSequence, AttentionShape, Backend, BlockCopy, Device, DeviceOptions, Distribution, Dtype,
    KvLayout, LoraDelta, LowRank, Matrix, MatrixShape, Merge, MergeBase, NOT_FORCED, Ops, Patches, RotaryTables,
    Router, RoutingShape, RowTasks, SamplingTask, Scoring, StepInput, StorageDtype, TaskReturns, TensorData,
    TensorView, WeightChange, reduction_leaves,
};

const EMPTY: StepInput<'static> =
    StepInput { tokens: &[], positions: &[], axes: 1, slots: &[], sequences: &[], logits: &[], tasks: &[] };

/// The same values each time, in `-1.0..1.0`.
fn values(len: usize) -> Vec<f32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// A rank of the CPU with its operators, and the values that they have given so far.
struct Rank {
    device: Device,
    ops: Ops,
    found: Vec<f32>,
}

impl Rank {
    fn new(kernel: &str, threads: usize) -> Self {
        let device = Backend::Cpu.open(&DeviceOptions { threads, kernel, ..DeviceOptions::default() }).unwrap();
        Self { ops: device.ops(), device, found: Vec::new() }
    }

    fn zeros(&self, rows: usize, width: usize) -> Activations {
        self.device.activations(rows, width).unwrap()
    }

    fn tensor(&self, rows: usize, width: usize) -> Activations {
        let tensor = self.zeros(rows, width);
        let source = Tensor::from_vec(values(rows * width), (rows, width), tensor.device()).unwrap();
        tensor.slice_set(&source, 0, 0).unwrap();
        tensor
    }

    fn matrix(&self, dtype: StorageDtype, n: usize, k: usize) -> Matrix {
        let mut matrix = self.device.zeros(MatrixShape { dtype, n, k, leaves: reduction_leaves(k) }).unwrap();
        matrix.write_rows(0, TensorView::F32(&values(n * k)));
        matrix
    }

    fn keep(&mut self, tensor: &Tensor) {
        self.found.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }

    /// Plain and gated linear layers.
    fn linear(&mut self, dtype: StorageDtype, rows: usize) {
        let (n, k) = (38, 36);
        let (x, w, bias) = (self.tensor(rows, k), self.matrix(dtype, n, k), self.device.upload(&values(n)).unwrap());
        let (out, gated) = (self.zeros(rows, n), self.zeros(rows, n / 2));
        self.ops.linear(&x, &w, None, &out).unwrap();
        self.keep(&out);
        self.ops.linear_silu_mul(&x, &w, Some(&bias), &out, &gated).unwrap();
        self.keep(&gated);
        let activated = self.zeros(rows, k / 2);
        self.ops.silu_mul(&x, &activated).unwrap();
        self.keep(&activated);
    }

    /// Operators that work row by row: embedding, norms, rotary embedding, selection.
    fn rows(&mut self) {
        let (rows, head_dim, width, vocab) = (3, 18, 36, 7);
        let weight = self.device.upload(&values(width)).unwrap();
        let head_weight = self.device.upload(&values(head_dim)).unwrap();
        let table = self.device.upload(&values(5 * head_dim / 2)).unwrap();
        let embeddings = self.matrix(StorageDtype::Bf16, vocab, width);
        let wanted = [RowTasks { row: 2, tasks: 0..0 }];
        let input = StepInput {
            tokens: &[3, 9, 0],
            positions: &[4, 0, 1, 3, 2, 2, 1, 4, 0],
            axes: 3,
            logits: &wanted,
            ..EMPTY
        };
        let step = self.ops.prepare(input).unwrap();
        let (x, embedded) = (self.tensor(rows, width), self.zeros(rows, width));
        let (out, selected) = (self.zeros(rows, width), self.zeros(1, width));
        self.ops.embed(&embeddings, 0, &step, &embedded).unwrap();
        self.keep(&embedded);
        self.ops.add_rms_norm(&x, &embedded, Some(&weight), &weight, 1e-5, &out).unwrap();
        self.keep(&out);
        self.ops.rms_norm(&x, &weight, 1e-5, &out).unwrap();
        self.ops.rms_norm_heads(&out, &head_weight, 1e-5).unwrap();
        let axis_of = &[0, 2, 1, 2, 0, 0, 1, 1, 2];
        let tables = RotaryTables { rotary_dim: head_dim, cos: &table, sin: &table, axis_of };
        self.ops.rope(&out, head_dim, &step, &tables).unwrap();
        self.ops.select_logits_rows(&out, &step, 0..1, &selected).unwrap();
        self.ops.select_rows(&out, &[1], &selected).unwrap();
        self.ops.add_rows(&selected, &[0], &out).unwrap();
        self.ops.put_rows(&selected, &[2], &out).unwrap();
        self.keep(&out);
    }

    /// The operators that only a vision tower has: patches of a picture, GELU, layer norm and scaled sum.
    fn vision(&mut self) {
        let pixels: Vec<u8> = (0..4 * 5 * 3).map(|i| (i * 37 % 256) as u8).collect();
        let (mean, std, corners) = ([120.5, 3.0, 200.0], [60.0, 70.0, 80.5], [[0, 2], [1, 1]]);
        let patches = Patches { rgb: &pixels, width: 5, side: 3, frames: 2, mean, std, corners: &corners };
        let out = self.zeros(2, 54);
        self.ops.patches(&patches, &out).unwrap();
        self.keep(&out);
        self.ops.gelu(&out).unwrap();
        self.keep(&out);
        let (scale, normed) = (self.device.upload(&values(54)).unwrap(), self.zeros(2, 54));
        self.ops.layer_norm(&out, &scale, &scale, 1e-6, &normed).unwrap();
        self.ops.add_scaled(&normed, &scale, &out).unwrap();
        self.keep(&out);
    }

    /// Attention of two sequences that share a block, one of them with several rows, over a cache with a copied block.
    fn attention(&mut self, dtype: StorageDtype, sliding_window: Option<usize>) {
        let (heads, kv_heads, head_dim, block_size) = (4, 2, 16, 5);
        let mut cache = self.device.kv_cache(KvLayout { blocks: 5, block_size, kv_heads, head_dim, dtype });
        cache.restore().unwrap();
        let slots: Vec<u32> = (0..20).collect();
        let tokens = vec![0; slots.len()];
        let (k, v) = (self.tensor(slots.len(), kv_heads * head_dim), self.tensor(slots.len(), kv_heads * head_dim));
        let step = self.ops.prepare(StepInput { tokens: &tokens, slots: &slots, ..EMPTY }).unwrap();
        self.ops.write_kv(&k, &v, &step, &mut cache).unwrap();
        self.ops.copy_blocks(&mut cache, &[BlockCopy { src: 2, dst: 4, tokens: 4 }]).unwrap();
        let sequence = |first_row, rows, start_position, block_table| AttentionSequence {
            first_row,
            rows,
            start_position,
            visible: None,
            block_table,
        };
        let sequences = [sequence(0, 3, 6, &[1, 4][..]), sequence(3, 1, 8, &[1, 3][..])];
        let step = self.ops.prepare(StepInput { tokens: &[0; 4], sequences: &sequences, ..EMPTY }).unwrap();
        let (q, out) = (self.tensor(4, heads * head_dim), self.zeros(4, heads * head_dim));
        let shape = AttentionShape { heads, scale: 0.25, sliding_window };
        self.ops.paged_attention(&q, &shape, &step, &cache, &out).unwrap();
        self.keep(&out);
    }

    /// Writing, copying, merging and reading weights.
    fn weights(&mut self, dtype: StorageDtype) {
        let (n, k, rank, rows) = (19, 21, 3, 2..18);
        let mut w = self.device.zeros(MatrixShape { dtype, n, k, leaves: 1 }).unwrap();
        let all = values(n * k);
        let part = |rows: Range<usize>| TensorView::F32(&all[rows.start * k..rows.end * k]);
        self.ops.store_rows(&mut w, 0..n, &|rows, store| store(part(rows))).unwrap();
        let delta = LowRank {
            rank,
            cols: k,
            a: TensorData::F32(values(rank * k).into()),
            b: TensorData::F32(values(rows.len() * rank).into()),
            product: Dtype::F32,
            scaling: 0.5,
            roundings: vec![],
            magnitude: None,
            linear: true,
        };
        let change = WeightChange { replacement: None, delta: Some(LoraDelta::LowRank(delta)) };
        let mut copy = self.device.zeros(MatrixShape { dtype, n: rows.len(), k, leaves: 1 }).unwrap();
        self.ops.copy_rows(&w, rows.clone(), &mut copy).unwrap();
        let merge =
            Merge { change: &change, base: MergeBase::Matrix(&copy), rows: 0..rows.len(), columns: 0..k, width: k };
        self.ops.merge_rows(&mut w, rows.start, &merge).unwrap();
        let element = (17, 20, 0.125);
        self.ops
            .write_elements(&mut w, rows, &|rows, write| {
                if rows.contains(&element.0) {
                    write(element.0, element.1, element.2);
                }
            })
            .unwrap();
        let out = self.zeros(n, k);
        self.ops.unpack(&w, &out).unwrap();
        let mut stored = vec![f32::NAN; n * k];
        w.read_f32(0, &mut stored);
        assert_eq!(out.flatten_all().unwrap().to_vec1::<f32>().unwrap(), stored);
        self.found.extend(stored);
    }

    /// Greedy and filtered sampling, and the scores of a given token.
    fn sampling(&mut self) {
        let task = |temperature, top_p, target| SamplingTask {
            temperature,
            top_k: 5,
            top_p,
            min_p: 0.0,
            repetition_penalty: 1.1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: &[(1, 2.0)],
            allowed: None,
            mask: (top_p < 1.0).then_some(&[0xffff_0f3a, 7]),
            banned: [&[2], &[], &[], &[]],
            history: None,
            seed: 7,
            output_index: 3,
            target,
            top_logprobs: 2,
            logprobs_of: &[],
            top_of: Distribution::Processed,
            returns: TaskReturns { entropy: true, support: Some(3) },
        };
        let tasks = [task(0.0, 1.0, None), task(0.8, 0.9, None), task(1.0, 1.0, Some(4))];
        let wanted = [RowTasks { row: 0, tasks: 0..2 }, RowTasks { row: 1, tasks: 2..3 }];
        let step = self.ops.prepare(StepInput { tokens: &[0; 2], logits: &wanted, tasks: &tasks, ..EMPTY }).unwrap();
        for token in self.ops.sample(&self.tensor(2, 70), &step, 0..2).unwrap().read().unwrap().tokens {
            self.found.extend([token.token as f32, token.raw, token.processed, token.rank as f32]);
            let returned = token.returned.expect("it was asked for");
            self.found.extend([returned.raw_entropy, returned.entropy, returned.support.log_mass]);
            self.found.extend(returned.support.ids.iter().map(|id| *id as f32));
            self.found.extend(token.top.iter().flat_map(|(token, logprob)| [*token as f32, *logprob]));
        }
    }

    /// A block of experts with a router, forced and free rows, and a shared expert, in two runs of rows.
    fn experts(&mut self, dtype: StorageDtype, is_sigmoid: bool) {
        let (rows, hidden, width, experts, top_k) = (3, 16, 16, 6, 2);
        let shape = RoutingShape { rows, experts, top_k, local: 0..3, kept_layers: 0 };
        let mut routing = self.device.routing(shape).unwrap();
        let (gate, bias) = (self.matrix(dtype, experts, hidden), self.device.upload(&values(experts)).unwrap());
        let scoring = if is_sigmoid { Scoring::Sigmoid { bias: &bias } } else { Scoring::Softmax };
        let router = Router { gate: &gate, scoring, normalise: is_sigmoid, scale: 1.5, layer: 0 };
        let (x, logits, out) = (self.tensor(rows, hidden), self.zeros(rows, experts), self.zeros(rows, hidden));
        let forced = [NOT_FORCED, NOT_FORCED, 5, 1, 0, 2];
        self.ops.route(&x, &router, Some(&forced), &logits, &mut routing).unwrap();
        self.found.extend(routing.read_experts(0..rows).unwrap().into_iter().map(f32::from));
        self.found.extend(routing.read_weights(0..rows).unwrap());
        let shape = |n, k| MatrixShape { dtype, n, k, leaves: 1 };
        let matrices = [shape(3 * 2 * width, hidden), shape(3 * hidden, width)].map(|shape| {
            let mut matrix = self.device.zeros(shape).unwrap();
            matrix.write_rows(0, TensorView::F32(&values(shape.n * shape.k)));
            matrix
        });
        let [gate_up, down] = &matrices;
        let pairs = routing.shape().most_pairs(2);
        let (between, gated, expert_out) =
            (self.zeros(pairs, 2 * width), self.zeros(pairs, width), self.zeros(pairs, hidden));
        for chunk in [0..2, 2..3] {
            self.ops.group_by_expert(&mut routing, chunk).unwrap();
            self.ops.expert_linear_silu_mul(&x, gate_up, &routing, &between, &gated).unwrap();
            self.ops.expert_linear(&gated, down, &routing, &expert_out).unwrap();
            self.ops.combine(&expert_out, &routing, &out).unwrap();
        }
        self.ops.add_gated(&self.tensor(rows, 1), &x, &out).unwrap();
        self.keep(&out);
    }

    /// The bits of all values so far.
    fn bits(&self) -> Vec<u32> {
        self.found.iter().map(|x| x.to_bits()).collect()
    }

    /// The bits of what all operators give.
    fn run(mut self) -> Vec<u32> {
        for (dtype, rows) in [(StorageDtype::Bf16, 1), (StorageDtype::F32, 5)] {
            self.linear(dtype, rows);
            self.weights(dtype);
            self.experts(dtype, rows > 1);
        }
        self.rows();
        self.vision();
        self.attention(StorageDtype::Bf16, None);
        self.attention(StorageDtype::F32, Some(7));
        self.sampling();
        self.bits()
    }
}

#[test]
fn every_operator_has_the_same_bits_on_every_kernel_and_number_of_threads() {
    // Threads that wait for work spin, which takes Miri's time from those that have some.
    let threads = if cfg!(miri) { 1..=1 } else { 1..=3 };
    for products in [Products::Widened, Products::Pairs, Products::Tiles] {
        let isas = Isa::all().into_iter().filter(|isa| isa.products() == products);
        let ranks = isas.flat_map(|isa| threads.clone().map(move |threads| (isa.name(), threads)));
        let mut results = ranks.map(|(kernel, threads)| (Rank::new(kernel, threads).run(), kernel, threads));
        let (expected, ..) = results.next().expect("every processor can run all kinds");
        for (found, kernel, threads) in results {
            assert!(found == expected, "{kernel} on {threads} threads");
        }
    }
}

#[test]
fn threads_share_an_operator() {
    let [alone, together] = [1, 2].map(|threads| {
        let mut rank = Rank::new("scalar", threads);
        rank.linear(StorageDtype::F32, 1);
        rank.bits()
    });
    assert!(alone == together);
}
