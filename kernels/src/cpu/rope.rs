//! Rotary position embedding in the half-split form of Hugging Face's `rotate_half`.

use super::isa::Kernel;
use super::lanes::Lanes;
use super::pool::Cpu;
use super::rows::RowsMut;
use crate::rotary::RotaryPositions;

/// Rotates the first `rotary_dim` elements of each head of the rows of `x` in place: element `i` of their first half
/// and element `i` of their second half, by the angle of the row's position for frequency `i`. `cos` and `sin` are
/// `[max_positions, rotary_dim / 2]`.
///
/// # Panics
/// If shapes do not agree, `rotary_dim` is odd or beyond `head_dim`, or a position is not in the tables.
pub fn rope(
    cpu: &Cpu,
    x: RowsMut<'_>,
    head_dim: usize,
    rotary_dim: usize,
    positions: RotaryPositions<'_>,
    cos: &[f32],
    sin: &[f32],
) {
    assert!(rotary_dim >= 2 && rotary_dim.is_multiple_of(2), "rotary_dim {rotary_dim} is not even");
    assert!(rotary_dim <= head_dim, "rotary_dim {rotary_dim} of heads of {head_dim}");
    assert!(x.width().is_multiple_of(head_dim), "{} columns are no heads of {head_dim}", x.width());
    let RotaryPositions { positions: all, axes, axis_of } = positions;
    assert_eq!(all.len(), x.rows() * axes, "positions for every row");
    assert_eq!(cos.len(), sin.len(), "length of the tables");
    let (half, rows, width) = (rotary_dim / 2, x.rows(), x.width());
    assert!(axis_of.is_empty() || axis_of.len() == half, "an axis for every frequency");
    let x = x.share();
    cpu.for_ranges(rows, 2 * width, |from, to| {
        // One row's cosines and sines. They are gathered if its frequencies have different positions.
        let (mut row_cos, mut row_sin) = (vec![0.0; axis_of.len()], vec![0.0; axis_of.len()]);
        for i in from..to {
            // SAFETY: each row is in one range.
            let row = unsafe { x.row(i) };
            if axis_of.is_empty() {
                let position = positions.position(i, 0);
                let angles = position * half..(position + 1) * half;
                cpu.isa().dispatch(Rotate { row, head_dim, cos: &cos[angles.clone()], sin: &sin[angles] });
            } else {
                for j in 0..half {
                    let angle = positions.position(i, j) * half + j;
                    (row_cos[j], row_sin[j]) = (cos[angle], sin[angle]);
                }
                cpu.isa().dispatch(Rotate { row, head_dim, cos: &row_cos, sin: &row_sin });
            }
        }
    });
}

struct Rotate<'a> {
    row: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let half = self.cos.len();
        for head in self.row.chunks_exact_mut(self.head_dim) {
            let (first, second) = head[..2 * half].split_at_mut(half);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(self.cos).zip(self.sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::super::testing::{Random, close};
    use super::*;
    use crate::reference;

    #[test]
    fn rope_is_the_reference_inside_wider_rows_and_the_same_bits_on_every_isa() {
        let mut random = Random::new(5);
        let shapes = [
            (1, 1, 16, 16),
            (9, 3, 64, 64),
            (40, 2, 80, 80),
            (5, 14, 128, 128),
            (3, 1, 2, 2),
            (7, 3, 128, 64),
            (6, 2, 16, 12),
            (4, 5, 96, 72),
            (2, 2, 32, 2),
        ];
        for (rows, heads, head_dim, rotary_dim) in shapes {
            let half = rotary_dim / 2;
            let (stride, max) = (heads * head_dim + 7, 50);
            let old = random.normals(rows * stride, 1.0);
            let (cos, sin) = (random.normals(max * half, 1.0), random.normals(max * half, 1.0));
            let axes = random.between(1, 3);
            let positions: Vec<u32> = (0..rows * axes).map(|_| random.below(max) as u32).collect();
            let frequencies = if axes == 1 { 0 } else { half };
            let axis_of: Vec<u8> = (0..frequencies).map(|_| random.below(axes) as u8).collect();
            let positions = RotaryPositions { positions: &positions, axes, axis_of: &axis_of };
            let mut expected = old.clone();
            let view = RowsMut::new(&mut expected, rows, heads * head_dim, stride);
            reference::rope(view, head_dim, rotary_dim, positions, &cos, &sin);
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut x = old.clone();
                let cpu = Cpu::with_isa(threads, isa);
                let view = RowsMut::new(&mut x, rows, heads * head_dim, stride);
                rope(&cpu, view, head_dim, rotary_dim, positions, &cos, &sin);
                for (i, (y, expected)) in x.iter().zip(&expected).enumerate() {
                    let (column, rotated) = (i % stride, i % stride % head_dim < rotary_dim);
                    match column < heads * head_dim && rotated {
                        true => close(*y, f64::from(*expected), 1e-6, isa.name()),
                        false => assert_eq!(*y, old[i]),
                    }
                }
                assert_eq!(first.get_or_insert(x.clone()), &x, "{}", isa.name());
            }
        }
    }
}
