//! Mixture-of-experts layers at the shape of a model of 1 billion parameters: 10 layers of 64 experts, of which a token
//! takes 8.

use candle_core::Tensor;
use criterion::{BenchmarkId, Criterion, Throughput};
use rollout_kernels::{
    Activations, Backend, Device, DeviceOptions, Matrix, MatrixShape, Ops, Router, Routing, RoutingShape, Scoring,
    StorageDtype, TensorView,
};

use super::values;

const EXPERTS: usize = 64;
const TOP_K: usize = 8;
const HIDDEN: usize = 1024;
const WIDTH: usize = 512;
/// Layers in turn: their weights, 200 MB each, exceed every cache.
const LAYERS: usize = 2;
const ROWS: usize = 1024;

/// The weights of one layer.
struct Layer {
    gate: Matrix,
    gate_up: Matrix,
    down: Matrix,
}

/// The operators of a rank with the buffers of a step.
struct Rank {
    device: Device,
    ops: Ops,
    x: Activations,
    logits: Activations,
    gate_up: Activations,
    gated: Activations,
    expert_out: Activations,
    out: Activations,
}

fn matrix(device: &Device, n: usize, k: usize) -> Matrix {
    let mut matrix = device.zeros(MatrixShape { dtype: StorageDtype::Bf16, n, k, leaves: 1 }).unwrap();
    let rows = values(16 * k);
    (0..n).step_by(16).for_each(|row| matrix.write_rows(row, TensorView::F32(&rows[..16.min(n - row) * k])));
    matrix
}

impl Rank {
    fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let device = Backend::Cpu.open(&DeviceOptions { threads, ..DeviceOptions::default() }).unwrap();
        let zeros = |rows: usize, width: usize| device.activations(rows, width).unwrap();
        let [gate_up, gated, expert_out] = [2 * WIDTH, WIDTH, HIDDEN].map(|width| zeros(ROWS * TOP_K, width));
        let [x, logits, out] = [HIDDEN, EXPERTS, HIDDEN].map(|width| zeros(ROWS, width));
        let source = Tensor::from_vec(values(ROWS * HIDDEN), (ROWS, HIDDEN), x.device()).unwrap();
        x.slice_set(&source, 0, 0).unwrap();
        Self { ops: device.ops(), device, x, logits, gate_up, gated, expert_out, out }
    }

    fn layer(&self) -> Layer {
        let matrix = |n: usize, k: usize| matrix(&self.device, n, k);
        Layer {
            gate: matrix(EXPERTS, HIDDEN),
            gate_up: matrix(EXPERTS * 2 * WIDTH, HIDDEN),
            down: matrix(EXPERTS * HIDDEN, WIDTH),
        }
    }

    fn routing(&self) -> Routing {
        let shape = RoutingShape { rows: ROWS, experts: EXPERTS, top_k: TOP_K, local: 0..EXPERTS, kept_layers: 0 };
        self.device.routing(shape).unwrap()
    }

    /// Routes `rows` rows to the experts from `first` on in turn, so that all have as many rows.
    fn route_evenly(&self, layer: &Layer, rows: usize, first: usize, routing: &mut Routing) {
        let forced: Vec<u16> = (0..rows * TOP_K).map(|i| ((first + i) % EXPERTS) as u16).collect();
        self.route(layer, rows, Some(&forced), routing);
        self.ops.group_by_expert(routing, 0..rows).unwrap();
    }

    fn route(&self, layer: &Layer, rows: usize, forced: Option<&[u16]>, routing: &mut Routing) {
        let router = Router { gate: &layer.gate, scoring: Scoring::Softmax, normalise: true, scale: 1.0, layer: 0 };
        let (x, logits) = (self.x.narrow(0, 0, rows).unwrap(), self.logits.narrow(0, 0, rows).unwrap());
        self.ops.route(&x, &router, forced, &logits, routing).unwrap();
    }

    fn products(&self, layer: &Layer, routing: &Routing) {
        let x = self.x.narrow(0, 0, routing.rows()).unwrap();
        self.ops.expert_linear_silu_mul(&x, &layer.gate_up, routing, &self.gate_up, &self.gated).unwrap();
        self.ops.expert_linear(&self.gated, &layer.down, routing, &self.expert_out).unwrap();
    }
}

/// The products of all experts beside those of as many dense layers with the rows of one expert each, and the other
/// operators of the block.
pub fn experts(c: &mut Criterion) {
    let rank = Rank::new();
    let layers: Vec<Layer> = (0..LAYERS).map(|_| rank.layer()).collect();
    let dense: Vec<[Matrix; 2]> =
        (0..EXPERTS).map(|_| [matrix(&rank.device, 2 * WIDTH, HIDDEN), matrix(&rank.device, HIDDEN, WIDTH)]).collect();
    let mut group = c.benchmark_group("experts/1b/Bf16");
    for rows in [1, 2, 8, 32, 128] {
        let tokens = rows * EXPERTS / TOP_K;
        let mut routing = rank.routing();
        rank.route_evenly(&layers[0], tokens, 0, &mut routing);
        group.throughput(Throughput::Elements((2 * rows * EXPERTS * 3 * WIDTH * HIDDEN) as u64));
        group.bench_function(BenchmarkId::new("grouped, rows of an expert", rows), |b| {
            b.iter(|| rank.products(&layers[0], &routing))
        });
        let part = |activations: &Activations, from: usize| activations.narrow(0, from, rows).unwrap();
        group.bench_function(BenchmarkId::new("dense layers in turn, rows", rows), |b| {
            b.iter(|| {
                for (i, [w, down]) in dense.iter().enumerate() {
                    let (x, gate_up) = (part(&rank.x, 0), part(&rank.gate_up, i * rows));
                    let (gated, out) = (part(&rank.gated, i * rows), part(&rank.expert_out, i * rows));
                    rank.ops.linear_silu_mul(&x, w, None, &gate_up, &gated).unwrap();
                    rank.ops.linear(&gated, down, None, &out).unwrap();
                }
            })
        });
    }
    // One sequence: other experts in each step, as many as come from memory.
    let mut routings: Vec<Routing> = (0..EXPERTS / TOP_K).map(|_| rank.routing()).collect();
    for (i, routing) in routings.iter_mut().enumerate() {
        rank.route_evenly(&layers[0], 1, i * TOP_K, routing);
    }
    group.throughput(Throughput::BytesDecimal((2 * LAYERS * EXPERTS * 3 * WIDTH * HIDDEN) as u64));
    group.bench_function("one sequence, active experts", |b| {
        b.iter(|| routings.iter().for_each(|routing| layers.iter().for_each(|layer| rank.products(layer, routing))))
    });
    group.finish();
    let mut group = c.benchmark_group("experts/1b");
    for rows in [1, 64, ROWS] {
        let mut routing = rank.routing();
        group.throughput(Throughput::Elements((2 * rows * EXPERTS * HIDDEN) as u64));
        group.bench_function(BenchmarkId::new("route", rows), |b| {
            b.iter(|| rank.route(&layers[0], rows, None, &mut routing))
        });
        rank.route_evenly(&layers[0], rows, 0, &mut routing);
        group.throughput(Throughput::BytesDecimal((4 * rows * (TOP_K + 1) * HIDDEN) as u64));
        let out = rank.out.narrow(0, 0, rows).unwrap();
        group.bench_function(BenchmarkId::new("combine", rows), |b| {
            b.iter(|| rank.ops.combine(&rank.expert_out, &routing, &out).unwrap())
        });
    }
}
