//! Several adapters of one layer in one job have the bits of each alone.

use rollout_kernels::{AdapterFactors, AdapterRows, MatrixShape, StorageDtype, UpFactor};

use crate::common::{Random, Rank, devices, values_of};
use crate::matrix;

#[test]
fn adapters_in_one_job_have_the_bits_of_each_alone() {
    let mut jobs = 0;
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let (rows, k, n) = (random.between(2, 40), random.between(1, 90), random.between(1, 70));
        let count = random.between(2, 6);
        // Each row has one adapter or none, and each adapter one or two projections with columns of the output.
        let users: Vec<usize> = (0..rows).map(|_| random.below(count + 1)).collect();
        let x = random.normals(rows * k, 1.0);
        let before = random.normals(rows * n, 1.0);
        let split = random.between(1, n);
        let factors = |random: &mut Random| {
            let of = |random: &mut Random, first_column: usize, width: usize| {
                let rank = random.between(1, 20);
                (rank, first_column, width, random.normals(width * rank, 1.0))
            };
            let mut up = vec![of(random, 0, split)];
            if split < n && random.below(2) == 0 {
                up.push(of(random, split, n - split));
            }
            let ranks: usize = up.iter().map(|(rank, ..)| rank).sum();
            (random.normals(ranks * k, 1.0), up)
        };
        let adapters: Vec<_> = (0..count).map(|_| factors(random)).collect();
        let own: Vec<Vec<u32>> = (0..count)
            .map(|adapter| (0..rows as u32).filter(|row| users[*row as usize] == adapter).collect())
            .collect();
        let scratch_rows = random.between(0, 8);
        for rank in devices() {
            let shape = |n: usize, k: usize| MatrixShape { dtype: StorageDtype::F32, n, k, leaves: 1 };
            let resident: Vec<AdapterFactors> = adapters
                .iter()
                .map(|(a, up)| {
                    let mut first_rank = 0;
                    let up = up.iter().map(|(own_rank, first_column, width, b)| {
                        let b = matrix(&rank, shape(*width, *own_rank), b);
                        first_rank += own_rank;
                        UpFactor { b, first_rank: first_rank - own_rank, first_column: *first_column }
                    });
                    let up: Vec<UpFactor> = up.collect();
                    AdapterFactors { a: matrix(&rank, shape(first_rank, k), a), up }
                })
                .collect();
            let x = rank.tensor(&x, rows, k);
            let expected = one_after_the_other(&rank, &resident, &own, &x, rank.tensor(&before, rows, n));
            let groups: Vec<AdapterRows<'_>> =
                resident.iter().zip(&own).map(|(factors, rows)| AdapterRows { factors, rows }).collect();
            let scratch = [0; 3].map(|_| rank.zeros(1, 2 * scratch_rows.max(1) * 130));
            let out = rank.tensor(&before, rows, n);
            let [selected, ranks, products] = &scratch;
            if rank.ops.add_adapters(&x, &groups, [selected, ranks, products], &out).unwrap() {
                assert_eq!(values_of(&out), expected, "{} seed {seed}", rank.name());
                jobs += 1;
            } else {
                assert_eq!(values_of(&out), before, "{} seed {seed}: nothing is done", rank.name());
            }
        }
    }
    assert!(jobs > 0, "no device has the job");
}

/// The outputs after each adapter alone.
fn one_after_the_other(
    rank: &Rank,
    adapters: &[AdapterFactors],
    own: &[Vec<u32>],
    x: &candle_core::Tensor,
    out: rollout_kernels::Activations,
) -> Vec<f32> {
    for (AdapterFactors { a, up }, rows) in adapters.iter().zip(own).filter(|(_, rows)| !rows.is_empty()) {
        let selected = rank.zeros(rows.len(), x.dim(1).unwrap());
        rank.ops.select_rows(x, rows, &selected).unwrap();
        let ranks = rank.zeros(rows.len(), a.n());
        rank.ops.linear(&selected, a, None, &ranks).unwrap();
        for UpFactor { b, first_rank, first_column } in up {
            let product = rank.zeros(rows.len(), b.n());
            rank.ops.linear(&ranks.narrow(1, *first_rank, b.k()).unwrap(), b, None, &product).unwrap();
            rank.ops.add_rows(&product, rows, &out.narrow(1, *first_column, b.n()).unwrap()).unwrap();
        }
    }
    values_of(&out)
}
