//! Rotary position embedding in the half-split form of Hugging Face's `rotate_half`.

use super::isa::Kernel;
use super::lanes::Lanes;
use super::pool::Cpu;
use super::rows::RowsMut;

/// Rotates the heads of each row of `x` in place: element `i` of a head's first half and element `i` of its second half
/// are rotated by the angle of `(positions[row], i)`. `cos` and `sin` are `[max_positions, head_dim / 2]`.
///
/// # Panics
/// If shapes do not agree, or a position is not in the tables.
pub fn rope(cpu: &Cpu, x: RowsMut<'_>, head_dim: usize, positions: &[u32], cos: &[f32], sin: &[f32]) {
    assert!(head_dim >= 2 && head_dim.is_multiple_of(2), "head_dim {head_dim} is not even");
    assert!(x.width().is_multiple_of(head_dim), "{} columns are no heads of {head_dim}", x.width());
    assert_eq!(positions.len(), x.rows(), "a position for every row");
    assert_eq!(cos.len(), sin.len(), "length of the tables");
    let (half, rows, width) = (head_dim / 2, x.rows(), x.width());
    let x = x.share();
    cpu.for_ranges(rows, 2 * width, |from, to| {
        for (i, position) in (from..to).zip(&positions[from..to]) {
            let angle = *position as usize * half..(*position as usize + 1) * half;
            let (cos, sin) = (&cos[angle.clone()], &sin[angle]);
            // SAFETY: each row is in one range.
            let row = unsafe { x.row(i) };
            cpu.isa().dispatch(Rotate { row, cos, sin });
        }
    });
}

struct Rotate<'a> {
    row: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let half = self.cos.len();
        for head in self.row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
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
        for (rows, heads, head_dim) in [(1, 1, 16), (9, 3, 64), (40, 2, 80), (5, 14, 128), (3, 1, 2)] {
            let (stride, max) = (heads * head_dim + 7, 50);
            let old = random.normals(rows * stride, 1.0);
            let (cos, sin) = (random.normals(max * head_dim / 2, 1.0), random.normals(max * head_dim / 2, 1.0));
            let positions: Vec<u32> = (0..rows).map(|_| random.below(max) as u32).collect();
            let mut expected = old.clone();
            let view = RowsMut::new(&mut expected, rows, heads * head_dim, stride);
            reference::rope(view, head_dim, &positions, &cos, &sin);
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut x = old.clone();
                let cpu = Cpu::with_isa(threads, isa);
                let view = RowsMut::new(&mut x, rows, heads * head_dim, stride);
                rope(&cpu, view, head_dim, &positions, &cos, &sin);
                for (i, (y, expected)) in x.iter().zip(&expected).enumerate() {
                    match i % stride < heads * head_dim {
                        true => close(*y, f64::from(*expected), 1e-6, isa.name()),
                        false => assert_eq!(*y, old[i]),
                    }
                }
                assert_eq!(first.get_or_insert(x.clone()), &x, "{}", isa.name());
            }
        }
    }
}
