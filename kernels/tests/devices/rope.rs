//! The rotation of heads, on every device: by the axes of positions, and in part.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rollout_kernels::{RotaryTables, StepInput};

use super::common::{self, Random, Rank, close, devices, reference, values_of};

#[test]
fn the_first_dimensions_of_each_head_are_rotated_and_the_others_stay() {
    let (reference, mut random, positions) = (reference(), Random::new(7), 50);
    let shapes = [(9, 3, 64, 32), (4, 2, 16, 12), (5, 14, 128, 96), (8, 3, 80, 2), (3, 2, 256, 128), (6, 2, 96, 96)];
    for ((rows, heads, head_dim, rotary_dim), axes) in shapes.into_iter().zip([1, 2, 3].into_iter().cycle()) {
        let (width, half) = (heads * head_dim, rotary_dim / 2);
        let x = random.normals(rows * width, 1.0);
        let tables = [0, 1].map(|_| random.normals(positions * half, 1.0));
        let at: Vec<u32> = (0..rows * axes).map(|_| random.below(positions) as u32).collect();
        let axis_of: Vec<u8> = (0..half).map(|_| random.below(axes) as u8).collect();
        let tokens = vec![0; rows];
        let rotated = |rank: &Rank| {
            let input = StepInput { tokens: &tokens, positions: &at, axes, ..common::NOTHING };
            let (step, x) = (rank.ops.prepare(input).unwrap(), rank.tensor(&x, rows, width));
            let [cos, sin] = tables.each_ref().map(|table| rank.device.upload(table).unwrap());
            let tables = RotaryTables { rotary_dim, cos: &cos, sin: &sin, axis_of: &axis_of };
            rank.ops.rope(&x, head_dim, &step, &tables).unwrap();
            values_of(&x)
        };
        let expected = rotated(&reference);
        for rank in devices() {
            let context = format!("{}, {rotary_dim} of {head_dim}", rank.name());
            for (i, (found, expected)) in rotated(&rank).into_iter().zip(&expected).enumerate() {
                match i % head_dim < rotary_dim {
                    true => close(found, *expected, 1e-6, &context),
                    false => assert!(found == x[i], "{context}: value {i}"),
                }
            }
        }
    }
}

#[test]
fn rows_are_rotated_by_the_positions_of_each_frequencys_axis() {
    let mut random = Random::new(6);
    let (rows, heads, positions) = (11, 2, 70);
    for (head_dim, axes) in [(16, 1), (80, 2), (128, 3), (256, 3), (2, 2)] {
        let (half, width) = (head_dim / 2, heads * head_dim);
        let x = random.normals(rows * width, 1.0);
        let tables = [0, 1].map(|_| random.normals(positions * half, 1.0));
        let at: Vec<u32> = (0..rows * axes).map(|_| random.below(positions) as u32).collect();
        let axis_of: Vec<u8> = (0..half).map(|_| random.below(axes) as u8).collect();
        for rank in devices() {
            let [cos, sin] = [&tables[0], &tables[1]].map(|table| rank.device.upload(table).unwrap());
            let rotated = |positions: &[u32], axes: usize, axis_of: &[u8]| {
                let input = StepInput { tokens: &[0; 11], positions, axes, ..common::NOTHING };
                let (step, x) = (rank.ops.prepare(input).unwrap(), rank.tensor(&x, rows, width));
                let tables = RotaryTables { rotary_dim: head_dim, cos: &cos, sin: &sin, axis_of };
                rank.ops.rope(&x, head_dim, &step, &tables).unwrap();
                values_of(&x)
            };
            let of_axis = |axis: usize| at.iter().skip(axis).step_by(axes).copied().collect::<Vec<u32>>();
            let alone: Vec<Vec<f32>> = (0..axes).map(|axis| rotated(&of_axis(axis), 1, &[])).collect();
            let context = format!("{}, {axes} axes, head_dim {head_dim}", rank.name());
            // Each pair of values is that of a rotation by the positions of its axis alone.
            for (i, found) in rotated(&at, axes, &axis_of).into_iter().enumerate() {
                assert!(found == alone[usize::from(axis_of[i % half])][i], "{context}: value {i}");
            }
            assert!(rotated(&at, axes, &[]) == alone[0], "{context}: the first axis");
            assert!(rotated(&at, axes, &vec![0; half]) == alone[0], "{context}: a table of zeros");
            let equal: Vec<u32> = of_axis(0).into_iter().flat_map(|position| vec![position; axes]).collect();
            assert!(rotated(&equal, axes, &axis_of) == alone[0], "{context}: equal axes");
        }
    }
}

#[test]
fn positions_and_axes_must_agree() {
    let rank = reference();
    let refused = |positions: &[u32], axes: usize, axis_of: &[u8]| {
        let rotate = || {
            let step = rank.ops.prepare(StepInput { tokens: &[0; 2], positions, axes, ..common::NOTHING }).unwrap();
            let (x, table) = (rank.zeros(2, 4), rank.device.upload(&[0.5; 8]).unwrap());
            let tables = RotaryTables { rotary_dim: 4, cos: &table, sin: &table, axis_of };
            rank.ops.rope(&x, 4, &step, &tables).unwrap();
        };
        let failed = catch_unwind(AssertUnwindSafe(rotate)).err()?;
        Some(failed.downcast::<String>().expect("a message").to_string())
    };
    assert_eq!(refused(&[0, 1, 2, 3], 2, &[1, 0]), None);
    for (positions, axes, axis_of, why) in [
        (&[][..], 0, &[][..], "0 axes: a position has 1 to 3"),
        (&[0; 8], 4, &[], "4 axes: a position has 1 to 3"),
        (&[0; 3], 2, &[], "3 positions for 2 rows of 2 axes"),
        (&[0; 4], 2, &[0], "an axis for each of 2 frequencies, not for 1"),
        (&[0; 4], 2, &[0, 2], "[0, 2]: positions have 2 axes"),
    ] {
        assert_eq!(refused(positions, axes, axis_of).as_deref(), Some(why));
    }
}
