//! The kernel of one unit in products of tiles: up to 16 queries attend to it, with the softmax weights of
//! [`dot_tile`](super::dot_tile).
//!
//! Keys and values are packed once for all tiles of queries that see the unit. A unit's weighted values are summed from
//! zero, and added to the softmax state.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::blocks::{KvUnit, PrefetchLines};
use super::dot_tile::{RoundedQueries, UNSEEN};
use super::units::{UNIT, VECTORS, state_len};
use crate::cpu::Isa;
use crate::cpu::amx::{TILE_PANELS, TILE_ROWS, TILE_SUMS, TileOperands, TileShape, TileUnit};
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use half::bf16;
use std::ops::Range;

/// Pairs of positions in a unit.
const UNIT_PAIRS: usize = UNIT / 2;

/// Bfloat16 pairs of a tile, the most of up to 16 that divide both a head (of a multiple of 16 values) and a unit.
pub(super) const fn tile_pairs(head_dim: usize) -> usize {
    if head_dim.is_multiple_of(2 * LANES) { LANES } else { LANES / 2 }
}

/// Length of the scratch of [`UnitTiles`] in float32 values: a unit's packed keys and values, and the products and
/// softmax weights of a query tile.
pub(super) fn scratch_len(head_dim: usize) -> usize {
    UNIT * head_dim + VECTORS * TILE_SUMS + UNIT_PAIRS / tile_pairs(head_dim) * TILE_ROWS * LANES
}

/// The tile unit and the packed keys and values of the unit of positions that it multiplies by.
pub(super) struct UnitTiles<'a> {
    isa: Isa,
    shape: TileShape,
    head_dim: usize,
    unit: TileUnit,
    /// Keys `[vector of positions][pair of elements][position]` and values `[vector of columns][pair of
    /// positions][column]`, each a bfloat16 pair.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// The products of a tile: `[vector][query][16]`.
    sums: &'a mut [f32],
    /// The softmax weights of a tile: `[step][query][16]`, of which the first are the step's pairs of positions.
    weights: &'a mut [f32],
}

impl<'a> UnitTiles<'a> {
    /// For tiles of up to `rows` queries; `scratch` has [`scratch_len`] values.
    pub fn new(isa: Isa, head_dim: usize, rows: usize, scratch: &'a mut [f32]) -> UnitTiles<'a> {
        let shape = TileShape { rows: rows.min(TILE_ROWS), pairs: tile_pairs(head_dim) };
        let (keys, rest) = scratch.split_at_mut(UNIT * head_dim / 2);
        let (values, rest) = rest.split_at_mut(UNIT * head_dim / 2);
        let (sums, weights) = rest.split_at_mut(VECTORS * TILE_SUMS);
        UnitTiles { isa, shape, head_dim, unit: TileUnit::new(isa, shape), keys, values, sums, weights }
    }

    /// Packs the `positions` of a unit that any query sees. Prefetches `ahead`: the first lines while it packs keys,
    /// the second ones while it packs values.
    ///
    /// # Safety
    /// The keys of every vector of the unit that contains one of the positions are readable, and the values of the
    /// positions.
    pub unsafe fn pack(&mut self, unit: &KvUnit<bf16>, positions: Range<usize>, ahead: &[PrefetchLines; 2]) {
        let (head_dim, isa) = (self.head_dim, self.isa);
        isa.dispatch(PackUnit { head_dim, keys: self.keys, values: self.values, unit, positions, ahead });
    }

    /// Adds the packed unit to the softmax states of a tile of queries.
    pub fn take(&mut self, active: RoundedQueries<'_>) {
        self.isa.dispatch(TakeUnit { tiles: self, active });
    }
}

struct PackUnit<'a> {
    head_dim: usize,
    keys: &'a mut [f32],
    values: &'a mut [f32],
    unit: &'a KvUnit<bf16>,
    positions: Range<usize>,
    ahead: &'a [PrefetchLines; 2],
}

impl Kernel for PackUnit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { head_dim, keys, values, unit, positions, ahead } = self;
        let (from, to) = (positions.start, positions.end);
        let (keys, values) = (keys.as_chunks_mut::<LANES>().0, values.as_chunks_mut::<LANES>().0);
        let step = unit.key_step;
        for vector in from / LANES..to.div_ceil(LANES) {
            let mut next = ahead[0].at[vector];
            let mut line = unit.keys[vector];
            for pair in 0..head_dim / 2 {
                L::prefetch_near(next);
                next = next.wrapping_add(ahead[0].step);
                // SAFETY: the caller of `pack` promises head_dim lines of 16, two adjacent ones of which are read as
                // one.
                let pairs: L = unsafe {
                    if step == LANES {
                        L::load(line.cast()).paired_halves()
                    } else {
                        L::load_paired(line, line.wrapping_add(step))
                    }
                };
                keys[vector * head_dim / 2 + pair] = pairs.to_array();
                line = line.wrapping_add(2 * step);
            }
        }
        for pair in 0..UNIT_PAIRS {
            let (t, vector) = (2 * pair, 2 * pair / LANES);
            let at = unit.values[vector].wrapping_add((t - vector * LANES) * head_dim);
            let seen = [(from..to).contains(&t), (from..to).contains(&(t + 1))];
            let mut next = ahead[1].at[vector].wrapping_add(pair % (LANES / 2) * (head_dim / LANES) * ahead[1].step);
            for column in (0..head_dim).step_by(2 * LANES) {
                L::prefetch_near(next);
                L::prefetch_near(next.wrapping_add(ahead[1].step));
                next = next.wrapping_add(2 * ahead[1].step);
                let even = if seen[0] { at.wrapping_add(column) } else { UNSEEN.as_ptr() };
                let odd = if seen[1] { at.wrapping_add(head_dim + column) } else { UNSEEN.as_ptr() };
                let first = column / LANES * UNIT_PAIRS + pair;
                // SAFETY: a seen position has head_dim values, of which 32 or the last 16 are read, and `UNSEEN` has
                // 32.
                unsafe {
                    if column + 2 * LANES <= head_dim {
                        let (low, high) = L::load(even.cast()).paired_with(L::load(odd.cast()));
                        (values[first], values[first + UNIT_PAIRS]) = (low.to_array(), high.to_array());
                    } else {
                        values[first] = L::load_paired(even, odd).to_array();
                    }
                }
            }
        }
    }
}

struct TakeUnit<'a, 'b, 'c> {
    tiles: &'a mut UnitTiles<'b>,
    active: RoundedQueries<'c>,
}

impl Kernel for TakeUnit<'_, '_, '_> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { tiles, mut active } = self;
        let (head_dim, pairs) = (tiles.head_dim, tiles.shape.pairs);
        let queries = active.references.len();
        for first in (0..VECTORS).step_by(TILE_PANELS) {
            let positions = first * LANES..(first + TILE_PANELS) * LANES;
            if active.positions.start < positions.end && positions.start < active.positions.end {
                let w = [first, first + 1].map(|vector| tiles.keys[vector * head_dim / 2 * LANES..].as_ptr().cast());
                let x = [active.q.as_ptr()];
                let operands = TileOperands { x, x_step: active.q_step, w, steps: head_dim / 2 / pairs };
                // SAFETY: `q` has `steps` blocks of 16 pairs for each query and for 16 more, and each vector of
                // positions has as many pairs of elements as a head.
                unsafe { tiles.unit.multiply(&operands, &mut tiles.sums[first * TILE_SUMS..][..2 * TILE_SUMS]) };
            }
        }
        let sums = tiles.sums.as_chunks::<LANES>().0;
        let weights = tiles.weights.as_chunks_mut::<LANES>().0;
        for m in 0..queries {
            let mut scores = [L::zero(); VECTORS];
            for v in 0..VECTORS {
                scores[v] = L::from_array(&sums[v * TILE_ROWS + m]);
            }
            let halves = active.softmax_weights(m, &mut scores);
            for half in 0..2 {
                let lanes = halves[half].to_array();
                if pairs == LANES {
                    weights[half * tiles.shape.rows + m] = lanes;
                    continue;
                }
                let (low, high) = lanes.split_at(pairs);
                for (i, part) in [low, high].into_iter().enumerate() {
                    weights[(2 * half + i) * tiles.shape.rows + m][..pairs].copy_from_slice(part);
                }
            }
        }
        let state_len = state_len(head_dim);
        let last = head_dim / LANES - 1;
        for column in (0..=last).step_by(TILE_PANELS) {
            let w = [column, last.min(column + 1)].map(|c| tiles.values[c * UNIT_PAIRS * LANES..].as_ptr().cast());
            let x = [tiles.weights.as_ptr()];
            let operands = TileOperands { x, x_step: tiles.shape.activations(), w, steps: UNIT_PAIRS / pairs };
            // SAFETY: weights and values have all pairs of positions of a unit.
            unsafe { tiles.unit.multiply(&operands, &mut tiles.sums[..2 * TILE_SUMS]) };
            let sums = tiles.sums.as_chunks::<LANES>().0;
            for m in 0..queries {
                let state = active.states[m * state_len + LANES..].as_chunks_mut::<LANES>().0;
                for (panel, c) in (column..=last).take(TILE_PANELS).enumerate() {
                    state[c] = L::from_array(&state[c]).add(L::from_array(&sums[panel * TILE_ROWS + m])).to_array();
                }
            }
        }
    }
}
