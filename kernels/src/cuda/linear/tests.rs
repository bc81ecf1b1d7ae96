//! Every way to compute a product gives the same bits.

use std::sync::Arc;

use super::plan::ExpertsSize;
use super::*;
use crate::backend::storage::MatrixImpl;
use crate::cpu::testing::Random;
use crate::cuda::activation::Activation;
use crate::cuda::arena::ArenaAllocation;
use crate::cuda::experts::{CudaRouting, ExpertKernels};
use crate::routing::Routing;
use crate::routing_shape::RoutingShape;
use crate::values::TensorView;

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

struct Device {
    context: Arc<Context>,
    linear: Gemm,
}

/// Rows on the device, and the memory they are in.
struct Values {
    memory: ArenaAllocation,
    rows: TensorRows,
}

impl Device {
    fn open() -> Self {
        let context = Arc::new(Context::open(0).unwrap());
        Self { linear: Gemm::load(&context).unwrap(), context }
    }

    /// Rows of `width` of the values, `stride` apart.
    fn rows(&self, values: &[f32], width: usize, stride: usize) -> Values {
        let memory = self.context.scratch.allocate(size_of_val(values)).unwrap();
        self.context.copies.write(memory.pointer, values).unwrap();
        let rows = TensorRows { pointer: memory.pointer, rows: values.len() / stride, width, stride };
        Values { memory, rows }
    }

    fn matrix(&self, shape: MatrixShape, weights: &[f32]) -> CudaMatrix {
        let mut matrix = CudaMatrix::zeros(&self.context, shape).unwrap();
        matrix.write_columns(0, TensorView::F32(weights), shape.k, 0);
        matrix
    }

    /// The bits of a product with `n` columns.
    fn product(&self, plan: GemmPlan, x: &Values, w: &CudaMatrix, bias: &Values, n: usize) -> Vec<u32> {
        let out = self.rows(&vec![f32::NAN; x.rows.rows * n], n, n);
        self.linear.run(plan, x.rows, w, bias.rows.pointer, out.rows).unwrap();
        self.bits(&out)
    }

    fn bits(&self, values: &Values) -> Vec<u32> {
        let mut bits = vec![0; values.rows.rows * values.rows.width];
        self.context.copies.read(values.memory.pointer, &mut bits).unwrap();
        bits
    }
}

fn size(dtype: StorageDtype, m: usize, n: usize, leaves: usize) -> GemmSize {
    GemmSize { dtype, m, n, leaves, is_gated: false }
}

/// The sums in the order that the module documents, for float32: a chain for each leaf, then a balanced tree.
fn in_order(x: &[f32], w: &[f32], leaves: usize) -> f32 {
    if leaves > 1 {
        let ((x, more_x), (w, more_w)) = (x.split_at(x.len() / 2), w.split_at(w.len() / 2));
        return in_order(x, w, leaves / 2) + in_order(more_x, more_w, leaves / 2);
    }
    x.iter().zip(w).fold(0.0, |sum, (x, w)| x.mul_add(*w, sum))
}

#[test]
fn every_plan_gives_the_same_bits() {
    let device = Device::open();
    let cases =
        [(1, 33, 32, 1), (7, 70, 208, 2), (33, 129, 240, 8), (65, 40, 152, 4), (130, 131, 35, 1), (20, 40, 2100, 2)];
    for (seed, (m, n, k, leaves)) in cases.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (x, weights, bias) = (random.normals(m * k, 1.0), random.normals(n * k, 1.0), random.normals(n, 1.0));
        for dtype in DTYPES {
            let w = device.matrix(MatrixShape { dtype, n, k, leaves }, &weights);
            let (x, bias) = (device.rows(&x, k, k), device.rows(&bias, n, n));
            let plans = GemmPlan::all(size(dtype, m, n, leaves), device.linear.limits);
            assert!(plans.len() > 1, "{plans:?}");
            let expected = device.product(plans[0], &x, &w, &bias, n);
            for plan in &plans[1..] {
                let same = device.product(*plan, &x, &w, &bias, n) == expected;
                assert!(same, "seed {seed}, {dtype:?}: {plan:?} and {:?} differ", plans[0]);
            }
        }
    }
}

#[test]
fn every_gated_plan_gives_the_bits_of_the_two_steps() {
    let device = Device::open();
    let activation = Activation::load(&device.context).unwrap();
    for (seed, (m, n, k)) in [(1, 33, 48), (40, 70, 700), (130, 129, 80)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (x, weights) = (random.normals(m * k, 1.0), random.normals(2 * n * k, 0.3));
        let bias = device.rows(&random.normals(2 * n, 1.0), 2 * n, 2 * n);
        let w = device.matrix(MatrixShape { dtype: StorageDtype::Bf16, n: 2 * n, k, leaves: 1 }, &weights);
        let x = device.rows(&x, k, k);
        let [between, out] = [2 * n, n].map(|width| device.rows(&vec![f32::NAN; m * width], width, width));
        device.linear.product(x.rows, &w, bias.rows.pointer, between.rows).unwrap();
        activation.silu_mul(between.rows, out.rows).unwrap();
        let expected = device.bits(&out);
        let plans =
            GemmPlan::all(GemmSize { is_gated: true, ..size(StorageDtype::Bf16, m, n, 1) }, device.linear.limits);
        assert!(plans.len() > 1, "{plans:?}");
        for plan in plans {
            assert!(device.product(plan, &x, &w, &bias, n) == expected, "seed {seed}: {plan:?}");
        }
    }
}

/// A routing of rows that take these experts, all of them grouped.
fn routing(device: &Device, shape: RoutingShape, chosen: &[u16]) -> Routing {
    let storage = CudaRouting::new(&device.context, &shape).unwrap();
    device.context.copies.write(storage.experts(), chosen).unwrap();
    let rows = shape.rows;
    let mut routing = Routing::new(shape, Box::new(storage));
    routing.set_routed(rows);
    routing.set_grouped(0..rows);
    ExpertKernels::load(&device.context).unwrap().group(&routing).unwrap();
    routing
}

#[test]
fn every_tile_of_experts_gives_the_bits_of_a_product_of_the_expert_alone() {
    let device = Device::open();
    // Rows, experts, and how many each takes: few, many for one tile, and experts for several rounds of a warp.
    for (seed, (rows, experts, top_k)) in [(1, 8, 2), (300, 4, 2), (40, 70, 3)].into_iter().enumerate() {
        let (mut random, n, k) = (Random::new(seed as u64), 33, 40);
        let mut numbers: Vec<u16> = (0..experts as u16).collect();
        let mut choose = || {
            random.shuffle(&mut numbers);
            // Experts that no row takes are between others.
            numbers.iter().copied().filter(|expert| expert % 3 != 1).take(top_k).collect::<Vec<_>>()
        };
        let chosen: Vec<u16> = (0..rows).flat_map(|_| choose()).collect();
        let shape = RoutingShape { rows, experts, top_k, local: 0..experts, kept_layers: 0 };
        let routing = routing(&device, shape, &chosen);
        let mut pairs: Vec<usize> = (0..chosen.len()).collect();
        pairs.sort_by_key(|entry| chosen[*entry]);
        let x = random.normals(pairs.len() * k, 1.0);
        let x = device.rows(&x, k, k);
        for (dtype, is_gated) in [(DTYPES[0], false), (DTYPES[0], true), (DTYPES[1], false)] {
            let part = if is_gated { 2 * n } else { n };
            let weights = random.normals(experts * part * k, 0.5);
            let w = device.matrix(MatrixShape { dtype, n: experts * part, k, leaves: 1 }, &weights);
            let mut expected = Vec::new();
            for (expert, weights) in weights.chunks_exact(part * k).enumerate() {
                let count = pairs.iter().filter(|i| usize::from(chosen[**i]) == expert).count();
                let first = expected.len() / n;
                let input = TensorRows { rows: count, ..x.rows.rows_from(first) };
                let out = device.rows(&vec![f32::NAN; count * n], n, n);
                let w = device.matrix(MatrixShape { dtype, n: part, k, leaves: 1 }, weights);
                if is_gated {
                    device.linear.gated(input, &w, 0, out.rows).unwrap();
                } else {
                    device.linear.product(input, &w, 0, out.rows).unwrap();
                }
                expected.extend(device.bits(&out));
            }
            let size = ExpertsSize { dtype, experts, pairs: pairs.len(), rows: 1, n, is_gated };
            let tiles = size.all(device.linear.limits);
            assert!(tiles.len() > 1, "{tiles:?}");
            for tile in tiles {
                let out = device.rows(&vec![f32::NAN; pairs.len() * n], n, n);
                let input = device.linear.pairs(x.rows, 0, &w, &routing, pairs.len()).unwrap();
                device.linear.multiply_pairs(tile, size, &input, &w, &routing, out.rows).unwrap();
                assert!(device.bits(&out) == expected, "seed {seed}: {}", TILES[tile].kernel);
            }
        }
    }
}

#[test]
fn experts_have_as_many_tiles_as_their_pairs_can_fill() {
    let tiles = |experts, pairs, kernel: &str| {
        let size = ExpertsSize { dtype: StorageDtype::Bf16, experts, pairs, rows: 1, n: 1, is_gated: false };
        size.tiles(TILES.iter().find(|tile| tile.kernel == kernel).unwrap())
    };
    // One pair each; seven of one pair, and one of the other 25; as many as are not whole.
    assert_eq!(tiles(128, 8, "bf16_16x32_leaf"), 8);
    assert_eq!(tiles(8, 32, "bf16_16x32_leaf"), 7 + 25usize.div_ceil(16));
    assert_eq!(tiles(128, 4096, "bf16_32x64_leaf"), 252);
    assert_eq!(tiles(32, 0, "bf16_32x64_leaf"), 0);
}

#[test]
fn float32_products_are_sums_in_the_documented_order() {
    let device = Device::open();
    for (seed, (m, n, k, leaves)) in [(3, 9, 40, 4), (2, 5, 35, 1), (1, 4, 128, 8)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (x, weights, bias) = (random.normals(m * k, 1.0), random.normals(n * k, 1.0), random.normals(n, 1.0));
        let w = device.matrix(MatrixShape { dtype: StorageDtype::F32, n, k, leaves }, &weights);
        let plan = GemmPlan::of(size(StorageDtype::F32, m, n, leaves), device.linear.limits);
        let found = device.product(plan, &device.rows(&x, k, k), &w, &device.rows(&bias, n, n), n);
        for (i, found) in found.into_iter().enumerate() {
            let (row, column) = (i / n, i % n);
            let sum = in_order(&x[row * k..][..k], &weights[column * k..][..k], leaves) + bias[column];
            assert_eq!(f32::from_bits(found), sum, "seed {seed}: row {row}, column {column}");
        }
    }
}

#[test]
fn strided_rows_give_the_bits_of_dense_ones() {
    let device = Device::open();
    let mut random = Random::new(0);
    let (m, n, k, stride) = (6, 20, 64, 71);
    let (wide, weights, bias) = (random.normals(m * stride, 1.0), random.normals(n * k, 1.0), random.normals(n, 1.0));
    let dense: Vec<f32> = wide.chunks_exact(stride).flat_map(|row| &row[..k]).copied().collect();
    for dtype in DTYPES {
        let w = device.matrix(MatrixShape { dtype, n, k, leaves: 4 }, &weights);
        let plan = GemmPlan::of(size(dtype, m, n, 4), device.linear.limits);
        let bias = device.rows(&bias, n, n);
        let found = device.product(plan, &device.rows(&wide, k, stride), &w, &bias, n);
        assert!(found == device.product(plan, &device.rows(&dense, k, k), &w, &bias, n), "{dtype:?}");
    }
}

#[test]
fn large_products_take_large_tiles_and_small_ones_all_multiprocessors() {
    let tile = |m, n, leaves, shared| {
        let limits = GemmLimits { processors: 132, shared };
        let plan = GemmPlan::of(size(StorageDtype::Bf16, m, n, leaves), limits);
        (TILES[plan.tile].kernel, plan.splits)
    };
    let [a100, h100] = [163 << 10, 227 << 10];
    assert_eq!(tile(1, 37888, 1, h100), ("bf16_16x32_leaf", 1));
    assert_eq!(tile(1, 3584, 8, h100), ("bf16_16x32_leaves", 4));
    assert_eq!(tile(1, 896, 8, h100), ("bf16_16x32_leaf", 8));
    assert_eq!(tile(64, 37888, 1, h100), ("bf16_64x64_leaf", 1));
    assert_eq!(tile(4096, 37888, 1, h100), ("bf16_128x256_leaf", 1));
    assert_eq!(tile(4096, 3584, 8, h100), ("bf16_128x128_leaves", 1));
    assert_eq!(tile(4096, 3584, 8, a100), ("bf16_64x128_leaves", 1));
    assert_eq!(tile(4096, 3584, 8, 99 << 10), ("bf16_64x128_leaves", 1));
}
