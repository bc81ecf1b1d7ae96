//! The arithmetic of the tile unit in vectors of 16 lanes, each of which is a column.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::{TILE_PANELS, TILE_ROWS, TileOperands, TileShape};

/// Stores the products of all tiles of the operands, as [`TileUnit::multiply`](super::TileUnit::multiply) does.
///
/// # Safety
/// The operands are readable for all their steps.
pub(super) unsafe fn multiply<const R: usize>(
    isa: Isa,
    shape: TileShape,
    operands: &TileOperands<R>,
    sums: &mut [f32],
) {
    isa.dispatch(Multiply { shape, operands, sums });
}

struct Multiply<'a, const R: usize> {
    shape: TileShape,
    operands: &'a TileOperands<R>,
    sums: &'a mut [f32],
}

impl<const R: usize> Kernel for Multiply<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { shape, operands, sums } = self;
        let (lines, _) = sums.as_chunks_mut::<LANES>();
        for tile in 0..R {
            for panel in 0..TILE_PANELS {
                for row in 0..shape.rows {
                    let mut sum = L::zero();
                    for step in 0..operands.steps {
                        let x = operands.x[tile].wrapping_add(step * operands.x_step + row * LANES);
                        let w = operands.w[panel].wrapping_add(step * shape.weights());
                        let (mut first, mut second) = (L::zero(), L::zero());
                        for pair in 0..shape.pairs {
                            // SAFETY: the pair is one of this step, for all of which `multiply` may read the operands.
                            let (x, w) = unsafe { (L::splat(*x.add(pair)), L::load_pairs(w.add(2 * LANES * pair))) };
                            let x = x.widened_halves();
                            first = x.0.flush_denormals().mul_add(w.0.flush_denormals(), first).flush_denormals();
                            second = x.1.flush_denormals().mul_add(w.1.flush_denormals(), second).flush_denormals();
                        }
                        sum = sum.add(first.add(second).flush_denormals()).flush_denormals();
                    }
                    lines[(tile * TILE_PANELS + panel) * TILE_ROWS + row] = sum.to_array();
                }
            }
        }
    }
}
