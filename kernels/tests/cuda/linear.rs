//! Linear layers.

use candle_core::Tensor;
use rollout_kernels::{DeviceBuffer, Matrix, MatrixShape, StorageDtype, TensorView};

use crate::common::{Random, Rank, cuda, values_of};

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];
/// Around the rows of each tile.
const ROWS: [usize; 8] = [1, 2, 5, 16, 17, 64, 100, 130];

/// A matrix of `columns` of weights that are `width` wide.
fn shard(rank: &Rank, shape: MatrixShape, weights: &[f32], width: usize, first_column: usize) -> Matrix {
    let mut matrix = rank.device.zeros(shape).unwrap();
    let rows = weights.chunks_exact(width).flat_map(|row| &row[first_column..first_column + shape.k]);
    matrix.write_rows(0, TensorView::F32(&rows.copied().collect::<Vec<_>>()));
    matrix
}

fn product(rank: &Rank, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>) -> Vec<f32> {
    let out = rank.zeros(x.dims()[0], w.n());
    rank.ops.linear(x, w, bias, &out).unwrap();
    values_of(&out)
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let rank = cuda().unwrap();
    for (seed, (n, k, leaves)) in [(70, 208, 1), (40, 208, 8), (300, 48, 1), (9, 35, 1)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let most = *ROWS.last().unwrap();
        let (x, weights, bias) = (random.normals(most * k, 1.0), random.normals(n * k, 1.0), random.normals(n, 1.0));
        let bias = rank.device.upload(&bias).unwrap();
        for dtype in DTYPES {
            let w = shard(&rank, MatrixShape { dtype, n, k, leaves }, &weights, k, 0);
            let whole = product(&rank, &rank.tensor(&x, most, k), &w, Some(&bias));
            for rows in ROWS {
                let first = random.between(0, most - rows);
                let x = rank.tensor(&x[first * k..(first + rows) * k], rows, k);
                let again = product(&rank, &x, &w, Some(&bias));
                assert!(again == whole[first * n..(first + rows) * n], "seed {seed}, {dtype:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn shards_add_up_to_the_bits_of_the_whole() {
    let rank = cuda().unwrap();
    for (seed, (rows, n, k)) in [(1, 40, 256), (20, 33, 208), (70, 64, 1008)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (x, weights) = (random.normals(rows * k, 1.0), random.normals(n * k, 1.0));
        for dtype in DTYPES {
            let of_rank = |ranks: usize, i: usize| {
                let shape = MatrixShape { dtype, n, k: k / ranks, leaves: 8 / ranks };
                let x = rank.tensor(&x, rows, k);
                let columns = x.narrow(1, i * shape.k, shape.k).unwrap();
                product(&rank, &columns, &shard(&rank, shape, &weights, k, i * shape.k), None)
            };
            let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>();
            let whole = of_rank(1, 0);
            let halves = add(of_rank(2, 0), of_rank(2, 1));
            let quarters = add(add(of_rank(4, 0), of_rank(4, 1)), add(of_rank(4, 2), of_rank(4, 3)));
            assert!(halves == whole, "seed {seed}, {dtype:?}: two shards");
            assert!(quarters == whole, "seed {seed}, {dtype:?}: four shards");
        }
    }
}

#[test]
fn views_have_the_bits_of_dense_rows_and_leave_their_neighbours() {
    let rank = cuda().unwrap();
    let (rows, n, k, wide) = (6, 21, 64, 75);
    let mut random = Random::new(0);
    let (x, weights) = (random.normals(rows * wide, 1.0), random.normals(n * k, 1.0));
    let dense: Vec<f32> = x.chunks_exact(wide).flat_map(|row| &row[3..3 + k]).copied().collect();
    for dtype in DTYPES {
        let w = shard(&rank, MatrixShape { dtype, n, k, leaves: 4 }, &weights, k, 0);
        let expected = product(&rank, &rank.tensor(&dense, rows, k), &w, None);
        let (x, out) = (rank.tensor(&x, rows, wide), rank.tensor(&vec![7.0; rows * wide], rows, wide));
        let to = out.narrow(1, 5, n).unwrap();
        rank.ops.linear(&x.narrow(1, 3, k).unwrap(), &w, None, &to).unwrap();
        for (row, expected) in values_of(&out).chunks_exact(wide).zip(expected.chunks_exact(n)) {
            assert!(row[5..5 + n] == *expected, "{dtype:?}");
            assert!(row[..5].iter().chain(&row[5 + n..]).all(|x| *x == 7.0), "{dtype:?}: {row:?}");
        }
    }
}

#[test]
fn gated_layers_have_the_bits_of_their_two_steps() {
    let rank = cuda().unwrap();
    for (seed, (rows, width, k)) in [(1, 48, 64), (40, 33, 80), (130, 70, 48)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (x, weights) = (random.normals(rows * k, 1.0), random.normals(2 * width * k, 0.3));
        let bias = rank.device.upload(&random.normals(2 * width, 1.0)).unwrap();
        for dtype in DTYPES {
            let w = shard(&rank, MatrixShape { dtype, n: 2 * width, k, leaves: 1 }, &weights, k, 0);
            let (x, between) = (rank.tensor(&x, rows, k), rank.zeros(rows, 2 * width));
            let (fused, apart) = (rank.zeros(rows, width), rank.zeros(rows, width));
            rank.ops.linear(&x, &w, Some(&bias), &between).unwrap();
            rank.ops.silu_mul(&between, &apart).unwrap();
            rank.ops.linear_silu_mul(&x, &w, Some(&bias), &between, &fused).unwrap();
            assert!(values_of(&fused) == values_of(&apart), "seed {seed}, {dtype:?}");
        }
    }
}

#[test]
fn the_same_product_again_has_the_same_bits() {
    let rank = cuda().unwrap();
    let (rows, n, k) = (33, 96, 512);
    let mut random = Random::new(0);
    let (x, weights) = (random.normals(rows * k, 1.0), random.normals(n * k, 1.0));
    for dtype in DTYPES {
        let w = shard(&rank, MatrixShape { dtype, n, k, leaves: 8 }, &weights, k, 0);
        let x = rank.tensor(&x, rows, k);
        let expected = product(&rank, &x, &w, None);
        // The operators take their memory again, where other values may have been.
        rank.ops.release();
        let _between = rank.tensor(&[f32::NAN; 4096], 1, 4096);
        assert!(product(&rank, &x, &w, None) == expected, "{dtype:?}");
    }
}
