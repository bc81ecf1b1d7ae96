use super::super::activation::silu_mul;
use super::super::amx::TileShape;
use super::super::testing::require::{left_out, require};
use super::super::testing::{Random, bits, close, dot_pair};
use super::*;
use crate::backend::storage::MatrixImpl;
use crate::reference;
use crate::values::TensorView;
use crate::weights::MatrixShape;
use crate::weights::reduction_leaves;
use half::bf16;

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

struct Case {
    x: Vec<f32>,
    /// The weights `[n, k]` with the precision in which they are stored.
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    matrix: PackedMatrix,
}

fn pack(dtype: StorageDtype, n: usize, k: usize, leaves: usize, weights: &[f32]) -> PackedMatrix {
    let mut matrix = PackedMatrix::zeros(dtype, n, k, leaves);
    matrix.write_rows(0, TensorView::F32(weights));
    matrix
}

fn case(random: &mut Random, dtype: StorageDtype, m: usize, n: usize, k: usize) -> Case {
    let leaves = [1, reduction_leaves(k)][random.below(2)];
    let mut weights = random.normals(n * k, 1.0);
    if dtype == StorageDtype::Bf16 {
        weights.iter_mut().for_each(|w| *w = bf16::from_f32(*w).to_f32());
    }
    let bias = (random.below(2) == 1).then(|| random.normals(n, 1.0));
    Case { x: random.normals(m * k, 1.0), matrix: pack(dtype, n, k, leaves, &weights), weights, bias }
}

fn product(cpu: &Cpu, x: &[f32], matrix: &PackedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    let rows = Rows::dense(x, matrix.k());
    let mut out = vec![f32::NAN; rows.rows() * matrix.n()];
    linear(cpu, rows, matrix, bias, RowsMut::dense(&mut out, matrix.n()));
    out
}

/// One output in the order that the module documents: leaves in ascending order, then a balanced tree, then the bias. A
/// leaf adds one product after the other, or one pair of rounded products after the other, or tile after tile.
fn in_order(products: Products, x: &[f32], w: &[f32], leaves: usize, bias: Option<f32>) -> f32 {
    let leaf = x.len() / leaves;
    let pair = |values: &[f32]| [values[0], values.get(1).copied().unwrap_or(0.0)];
    let rounded = |x: &[f32]| pair(x).map(|x| bf16::from_f32(x).to_f32());
    let dot = |(x, w): (&[f32], &[f32])| match products {
        Products::Widened => x.iter().zip(w).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum)),
        Products::Pairs => x.chunks(2).zip(w.chunks(2)).fold(0.0_f32, |sum, (x, w)| dot_pair(sum, rounded(x), pair(w))),
        Products::Tiles => {
            let tile = 2 * TileShape::new(1, x.len().div_ceil(2)).pairs;
            x.chunks(tile).zip(w.chunks(tile)).fold(0.0_f32, |sum, (x, w)| {
                let of_tile = x.chunks(2).zip(w.chunks(2)).fold([0.0_f32; 2], |sums, (x, w)| {
                    let (x, w) = (rounded(x), pair(w));
                    [0, 1].map(|i| x[i].mul_add(w[i], sums[i]))
                });
                sum + (of_tile[0] + of_tile[1])
            })
        }
    };
    let mut sums: Vec<f32> = x.chunks(leaf).zip(w.chunks(leaf)).map(dot).collect();
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    bias.map_or(sums[0], |b| sums[0] + b)
}

impl Case {
    /// The expected bits of row `i` and column `j` of the product on an instruction set.
    fn expected(&self, isa: Isa, i: usize, j: usize) -> f32 {
        let is_bf16 = self.matrix.dtype() == StorageDtype::Bf16;
        self.expected_of(if is_bf16 { isa.products() } else { Products::Widened }, i, j)
    }

    fn expected_of(&self, products: Products, i: usize, j: usize) -> f32 {
        let k = self.matrix.k();
        let (x, w) = (&self.x[i * k..][..k], &self.weights[j * k..][..k]);
        in_order(products, x, w, self.matrix.leaves(), self.bias.as_ref().map(|b| b[j]))
    }
}

#[test]
fn linear_has_the_order_of_the_contract_on_every_isa_with_any_threads() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let (m, n, k) = (random.between(1, 40), random.between(1, 100), random.between(1, 150));
        let k = if random.below(2) == 0 { k } else { k.next_multiple_of(16) };
        let case = case(&mut random, DTYPES[seed as usize % 2], m, n, k);
        let bias = case.bias.as_deref();
        for isa in Isa::all() {
            let expected: Vec<f32> = (0..m * n).map(|i| case.expected(isa, i / n, i % n)).collect();
            for threads in [1, 2, 3] {
                let out = product(&Cpu::with_isa(threads, isa), &case.x, &case.matrix, bias);
                assert_eq!(bits(&out), bits(&expected), "{} {m} x {n} x {k}", isa.name());
            }
        }
    }
}

#[test]
fn many_tiles_have_the_order_of_the_contract() {
    for seed in 100..116 {
        let mut random = Random::new(seed);
        let (m, n, k) = (random.between(40, 200), random.between(1, 80), 2 * random.between(1, 400));
        let case = case(&mut random, DTYPES[usize::from(seed % 4 == 0)], m, n, k);
        let (stride, bias) = (n + random.below(20), case.bias.as_deref());
        for isa in Isa::all() {
            let mut out = vec![7.0; m * stride];
            let cpu = Cpu::with_isa(random.between(1, 4), isa);
            linear(&cpu, Rows::dense(&case.x, k), &case.matrix, bias, RowsMut::new(&mut out, m, n, stride));
            for i in [0, m - 1].into_iter().chain((0..20).map(|_| random.below(m))) {
                let (row, beyond) = out[i * stride..][..stride].split_at(n);
                let expected: Vec<f32> = (0..n).map(|j| case.expected(isa, i, j)).collect();
                assert_eq!(bits(row), bits(&expected), "seed {seed}, {}, row {i} of {m} x {n} x {k}", isa.name());
                assert!(beyond.iter().all(|x| *x == 7.0), "seed {seed}, {}: row {i} writes on", isa.name());
            }
        }
    }
}

#[test]
fn long_and_odd_reductions_have_the_order_of_the_contract() {
    for seed in 200..232 {
        let mut random = Random::new(seed);
        let (m, n) = (random.between(1, 30), random.between(1, 40));
        // The lengths are whole blocks of packed steps, one element more, and others.
        let k = [512, 513, 1024, 1025, random.between(700, 2100)][random.below(5)];
        let case = case(&mut random, DTYPES[usize::from(seed % 4 == 0)], m, n, k);
        let bias = case.bias.as_deref();
        for isa in Isa::all() {
            let expected: Vec<f32> = (0..m * n).map(|i| case.expected(isa, i / n, i % n)).collect();
            let out = product(&Cpu::with_isa(random.between(1, 3), isa), &case.x, &case.matrix, bias);
            assert_eq!(bits(&out), bits(&expected), "seed {seed}, {}, {m} x {n} x {k}", isa.name());
        }
    }
}

/// The product by the reference device.
fn reference(x: &[f32], weights: &[f32], n: usize, bias: Option<&[f32]>) -> Vec<f32> {
    let k = weights.len() / n;
    let mut w = reference::RowMajor::zeros(MatrixShape { dtype: StorageDtype::F32, n, k, leaves: 1 });
    w.write_columns(0, TensorView::F32(weights), k, 0);
    let mut out = vec![f32::NAN; x.len() / k * n];
    reference::linear(Rows::dense(x, k), &w, bias, RowsMut::dense(&mut out, n));
    out
}

#[test]
fn linear_is_the_reference() {
    for (seed, (m, n, k)) in [(3, 100, 700), (1, 40, 2100), (70, 33, 576)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        for dtype in DTYPES {
            let case = case(&mut random, dtype, m, n, k);
            for isa in Isa::all() {
                let rounds = isa.rounds_activations() && dtype == StorageDtype::Bf16;
                let seen = |x: &f32| if rounds { bf16::from_f32(*x).to_f32() } else { *x };
                let x: Vec<f32> = case.x.iter().map(seen).collect();
                let out = product(&Cpu::with_isa(2, isa), &case.x, &case.matrix, case.bias.as_deref());
                let expected = reference(&x, &case.weights, n, case.bias.as_deref());
                // The error of a sum is relative to the magnitudes of its terms.
                let sizes = |values: &[f32]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
                let sizes = reference(&sizes(&x), &sizes(&case.weights), n, Some(&vec![1.0; n]));
                for ((y, expected), size) in out.iter().zip(expected).zip(sizes) {
                    close(y / size, f64::from(expected / size), 1e-6, isa.name());
                }
            }
        }
    }
}

#[test]
fn rows_alone_are_rows_in_a_batch() {
    let mut random = Random::new(7);
    for isa in Isa::all() {
        for (dtype, (n, k)) in DTYPES.into_iter().zip([(50, 144), (81, 130)]) {
            let case = case(&mut random, dtype, 70, n, k);
            let bias = case.bias.as_deref();
            let whole = product(&Cpu::with_isa(2, isa), &case.x, &case.matrix, bias);
            let cpus = [1, 2, 3].map(|threads| Cpu::with_isa(threads, isa));
            for m in 1..=70 {
                let from = random.below(71 - m);
                let out = product(&cpus[m % 3], &case.x[from * k..][..m * k], &case.matrix, bias);
                assert_eq!(bits(&out), bits(&whole[from * n..][..m * n]), "{} {dtype:?} {m} rows", isa.name());
            }
        }
    }
}

#[test]
fn many_rows_and_a_long_reduction_pass_through_several_chunks_and_blocks() {
    let mut random = Random::new(8);
    for isa in Isa::all().into_iter().filter(|isa| isa.name() != "scalar") {
        for dtype in DTYPES {
            let (m, n, k) = (150, 40, 2064);
            let case = case(&mut random, dtype, m, n, k);
            let whole = product(&Cpu::with_isa(3, isa), &case.x, &case.matrix, None);
            for row in [0, 1, 77, 149] {
                let out = product(&Cpu::with_isa(1, isa), &case.x[row * k..][..k], &case.matrix, None);
                assert_eq!(bits(&out), bits(&whole[row * n..][..n]), "{} {dtype:?} row {row}", isa.name());
            }
        }
    }
}

#[test]
fn the_tree_of_shards_over_k_is_the_whole_matrix() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let (m, n, k) = (random.between(1, 20), random.between(1, 60), 16 * random.between(1, 30));
        let dtype = DTYPES[seed as usize % 2];
        let weights = random.normals(n * k, 1.0);
        let x = random.normals(m * k, 1.0);
        for isa in Isa::all() {
            let cpu = Cpu::with_isa(2, isa);
            let whole = product(&cpu, &x, &pack(dtype, n, k, 8, &weights), None);
            for ranks in [2, 4, 8] {
                let shard = |rank: usize| -> Vec<f32> {
                    let part = |row: &[f32]| row[rank * k / ranks..(rank + 1) * k / ranks].to_vec();
                    let x: Vec<f32> = x.chunks(k).flat_map(part).collect();
                    let weights: Vec<f32> = weights.chunks(k).flat_map(part).collect();
                    product(&cpu, &x, &pack(dtype, n, k / ranks, 8 / ranks, &weights), None)
                };
                let mut sums: Vec<Vec<f32>> = (0..ranks).map(shard).collect();
                while sums.len() > 1 {
                    let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
                    sums = sums.chunks(2).map(add).collect();
                }
                assert_eq!(bits(&sums[0]), bits(&whole), "{} ranks {ranks} of k = {k}", isa.name());
            }
        }
    }
}

#[test]
fn strides_leave_the_other_columns_alone() {
    let mut random = Random::new(9);
    let case = case(&mut random, StorageDtype::Bf16, 21, 40, 60);
    let cpu = Cpu::new(2);
    let expected = product(&cpu, &case.x, &case.matrix, None);
    let wide: Vec<f32> = case.x.chunks(60).flat_map(|row| [row, &[f32::NAN; 9]].concat()).collect();
    let mut out = vec![7.0; 21 * 50];
    linear(&cpu, Rows::new(&wide, 21, 60, 69), &case.matrix, None, RowsMut::new(&mut out, 21, 40, 50));
    for (out, expected) in out.chunks(50).zip(expected.chunks(40)) {
        assert_eq!((bits(&out[..40]), &out[40..]), (bits(expected), &[7.0; 10][..]));
    }
}

/// Tests the packing that only avx512_bf16 uses, with its instruction and with every emulation.
#[test]
fn rounded_activations_are_packed_as_pairs() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let (m, n, k) = (random.between(1, 30), random.between(1, 90), random.between(1, 90));
        let case = case(&mut random, StorageDtype::Bf16, m, n, k);
        let expected: Vec<f32> = (0..m * n).map(|i| case.expected_of(Products::Pairs, i / n, i % n)).collect();
        for isa in Isa::all() {
            let mut out = vec![f32::NAN; m * n];
            let (x, bias) = (Rows::dense(&case.x, k), case.bias.as_deref());
            run::<RoundedPairs>(&Cpu::with_isa(2, isa), x, &case.matrix, bias, RowsMut::dense(&mut out, n), false);
            assert_eq!(bits(&out), bits(&expected), "{} {m} x {n} x {k}", isa.name());
        }
    }
}

/// On a processor without the instruction there is nothing to compare; the tests above compare the emulations with
/// their definition.
#[test]
fn avx512_bf16_is_its_emulation() {
    let real = Isa::from_name("avx512_bf16");
    require!(real.is_some() || left_out("ROLLOUT_REQUIRE_ISA", "this processor lacks avx512_bf16"));
    let real = real.expect("it is there");
    for seed in 300..340 {
        let mut random = Random::new(seed);
        let (m, n, k) = (random.between(1, 80), random.between(1, 200), random.between(1, 600));
        let case = case(&mut random, StorageDtype::Bf16, m, n, k);
        let out = |isa: Isa| bits(&product(&Cpu::with_isa(2, isa), &case.x, &case.matrix, case.bias.as_deref()));
        for emulated in Isa::all().into_iter().filter(|isa| isa.name() == "avx512_bf16_emulated") {
            assert_eq!(out(emulated), out(real), "seed {seed}, {m} x {n} x {k}");
        }
    }
}

#[test]
fn gated_outputs_are_silu_mul_of_those_of_linear() {
    for seed in 0..80 {
        let mut random = Random::new(seed);
        let (m, gates, k) = (random.between(1, 60), 16 * random.between(1, 12), random.between(1, 90));
        let case = case(&mut random, DTYPES[seed as usize % 2], m, 2 * gates, k);
        let (bias, stride) = (case.bias.as_deref(), gates + random.below(20));
        for isa in Isa::all() {
            let cpu = Cpu::with_isa(random.between(1, 3), isa);
            let both = product(&cpu, &case.x, &case.matrix, bias);
            let mut expected = vec![f32::NAN; m * gates];
            silu_mul(&cpu, Rows::dense(&both, 2 * gates), RowsMut::dense(&mut expected, gates));
            let mut out = vec![7.0; m * stride];
            let views = (Rows::dense(&case.x, k), RowsMut::new(&mut out, m, gates, stride));
            linear_silu_mul(&cpu, views.0, &case.matrix, bias, views.1);
            for (out, expected) in out.chunks(stride).zip(expected.chunks(gates)) {
                assert_eq!(bits(&out[..gates]), bits(expected), "seed {seed}, {}, {m} x {gates} x {k}", isa.name());
                assert!(out[gates..].iter().all(|x| *x == 7.0), "seed {seed}, {}: writes on", isa.name());
            }
        }
    }
}
