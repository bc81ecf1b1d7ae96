//! Every shard rule: the parts of all ranks make up the whole.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::error::Error;

fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// The text of the `Config` error that `result` must be.
fn config_error<T>(result: Result<T>) -> String {
    match result {
        Err(Error::Config(message)) => message,
        Err(other) => panic!("not a Config error: {other:?}"),
        Ok(_) => panic!("no error"),
    }
}

/// Which ranks hold each element of a parameter of this shape, in row-major order.
fn holders(rule: ShardRule, shape: &[usize], world: usize) -> Vec<Vec<usize>> {
    let (rows, cols) = matrix_shape(shape);
    let mut holders = vec![Vec::new(); rows * cols];
    for rank in 0..world {
        let slice = rule.slice(shape, rank, world).unwrap();
        for row in slice.rows {
            slice.cols.clone().for_each(|col| holders[row * cols + col].push(rank));
        }
    }
    holders
}

#[test]
fn shards_of_every_rule_make_up_the_whole() {
    for seed in 0..200 {
        let mut rng = rng(seed);
        let world = rng.random_range(1..=4);
        let (a, b, head_dim) = (rng.random_range(1..5), rng.random_range(1..9), rng.random_range(1..5));
        let context = format!("seed {seed}: world {world}, {a}, {b}, head_dim {head_dim}");
        let all: Vec<usize> = (0..world).collect();
        for holders in holders(ShardRule::Replicated, &[a, b], world) {
            assert_eq!(holders, all, "{context}");
        }
        for (i, holders) in holders(ShardRule::Rows, &[a * world, b], world).into_iter().enumerate() {
            assert_eq!(holders, [i / (a * b)], "{context}");
        }
        for (i, holders) in holders(ShardRule::Rows, &[a * world], world).into_iter().enumerate() {
            assert_eq!(holders, [i / a], "{context}");
        }
        // The last rank of several may have fewer rows, but has some.
        let rows = a * world - rng.random_range(0..a.min(world));
        for (i, holders) in holders(ShardRule::PaddedRows, &[rows, b], world).into_iter().enumerate() {
            assert_eq!(holders, [i / (a * b)], "{context}, {rows} rows");
        }
        for (i, holders) in holders(ShardRule::Columns, &[b, a * world], world).into_iter().enumerate() {
            assert_eq!(holders, [i % (a * world) / a], "{context}");
        }
        let many = ShardRule::Heads { heads: a * world, head_dim };
        for (i, holders) in holders(many, &[a * world * head_dim, b], world).into_iter().enumerate() {
            assert_eq!(holders, [i / (b * head_dim) / a], "{context}");
        }
        let experts = a * world;
        for index in 0..experts {
            let rule = ShardRule::OneRank { index, of: experts };
            for holders in holders(rule, &[b, head_dim], world) {
                assert_eq!(holders, [index / a], "{context}, expert {index}");
            }
        }
        // Fewer heads than ranks: `a` ranks share each head.
        let few = ShardRule::Heads { heads: world, head_dim };
        for (i, holders) in holders(few, &[world * head_dim], a * world).into_iter().enumerate() {
            let head = i / head_dim;
            assert_eq!(holders, (head * a..(head + 1) * a).collect::<Vec<_>>(), "{context}");
        }
    }
}

#[test]
fn query_heads_meet_their_key_heads() {
    for (heads, kv_heads, world) in [(8, 4, 1), (8, 4, 4), (8, 2, 4), (16, 4, 8), (9, 3, 3), (9, 3, 9), (8, 1, 8)] {
        for rank in 0..world {
            let kv = head_range(kv_heads, rank, world).unwrap();
            for q in head_range(heads, rank, world).unwrap() {
                assert!(
                    kv.contains(&(q * kv_heads / heads)),
                    "query head {q} of {heads}/{kv_heads}, rank {rank}/{world}"
                );
            }
        }
    }
}

#[test]
fn indivisible_shapes_are_refused_with_the_numbers() {
    let rows = config_error(ShardRule::Rows.slice(&[10, 3], 0, 4));
    assert_eq!(rows, "the 10 rows of shape [10, 3] cannot be divided evenly among 4 ranks");
    let columns = ParamSpec::new("model.layers.0.mlp.down_proj.weight", [3, 10], ShardRule::Columns);
    let columns = config_error(columns.slice(0, 3));
    assert!(columns.starts_with("model.layers.0.mlp.down_proj.weight: the 10 columns"), "{columns}");
    assert!(config_error(ShardRule::Columns.slice(&[12], 0, 3)).contains("must be a matrix"));
    let few = config_error(ShardRule::PaddedRows.slice(&[5, 3], 0, 4));
    assert_eq!(few, "the 5 rows of shape [5, 3], 2 for each of 4 ranks, leave none for the last");
    let heads = ShardRule::Heads { heads: 3, head_dim: 4 };
    assert_eq!(config_error(heads.slice(&[12, 5], 0, 2)), "3 heads cannot be divided among 2 ranks");
    assert!(config_error(heads.slice(&[13, 5], 0, 1)).contains("[13, 5] is not 3 heads of 4 rows"));
}
