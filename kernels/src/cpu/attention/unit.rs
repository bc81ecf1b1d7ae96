//! The float32 kernels of one register tile: a few queries attend to one unit of positions.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::blocks::{KvUnit, NO_LINES, PrefetchLines};
use super::units::{UNIT, VECTORS, state_len};
use crate::cpu::Isa;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::tile::{TileElement, most_rows};
use std::ops::Range;

/// The online softmax of one query over the units of a span so far.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    /// The largest score so far. Scores are exponents of 2, not of e.
    pub largest: f32,
    /// The factor by which the last unit multiplied the earlier sums, which were relative to the largest score before
    /// it.
    pub rescale: f32,
}

impl Default for Softmax {
    fn default() -> Self {
        Softmax { largest: f32::NEG_INFINITY, rescale: 1.0 }
    }
}

/// The queries of a tile that attend to a unit, and their softmax states.
pub(super) struct ActiveQueries<'a> {
    /// The queries times the factor that makes scores exponents of 2: `[head_dim / 16]` blocks, `q_step` apart, of 16
    /// elements of each query.
    pub q: &'a [f32],
    pub q_step: usize,
    /// The positions of the unit that any of the queries sees; the kernel reads no others.
    pub positions: Range<usize>,
    pub head_dim: usize,
    /// The absolute positions that each query sees, as the first one and the one after the last.
    pub seen: &'a [(usize, usize)],
    /// `[queries][UNIT]`: first the scores, then the softmax weights `2^(score - largest)`.
    pub weights: &'a mut [f32],
    /// The softmax states `[queries][state_len]`, see [`state_len`].
    pub states: &'a mut [f32],
    pub softmax: &'a mut [Softmax],
}

/// Computes the softmax weights of a unit. The first tile of a unit prefetches `ahead`.
///
/// # Safety
/// The keys of every vector of the unit that contains one of the active positions are readable.
pub(super) unsafe fn score<E: TileElement>(
    isa: Isa,
    active: ActiveQueries<'_>,
    unit: &KvUnit<E>,
    ahead: Option<&PrefetchLines>,
) {
    macro_rules! queries {
        ($($queries:literal)*) => {
            match (active.seen.len(), ahead) {
                $(
                    ($queries, Some(ahead)) => isa.dispatch(Score::<E, $queries, true> { active, unit, ahead }),
                    ($queries, None) => isa.dispatch(Score::<E, $queries, false> { active, unit, ahead: &NO_LINES }),
                )*
                (n, _) => unreachable!("no attention tile of {n} queries"),
            }
        };
    }
    queries!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds the weighted values of a unit to the sums. The first tile of a unit prefetches `ahead`.
///
/// # Safety
/// The values of the active positions of the unit are readable.
pub(super) unsafe fn weigh<E: TileElement>(
    isa: Isa,
    active: ActiveQueries<'_>,
    unit: &KvUnit<E>,
    ahead: Option<&PrefetchLines>,
) {
    macro_rules! queries {
        ($($queries:literal)*) => {
            match (active.seen.len(), ahead) {
                $(
                    ($queries, Some(ahead)) => isa.dispatch(Weigh::<E, $queries, true> { active, unit, ahead }),
                    ($queries, None) => isa.dispatch(Weigh::<E, $queries, false> { active, unit, ahead: &NO_LINES }),
                )*
                (n, _) => unreachable!("no attention tile of {n} queries"),
            }
        };
    }
    queries!(1 2 3 4 5 6 7 8 9 10 11 12)
}

struct Score<'a, E, const MR: usize, const AHEAD: bool> {
    active: ActiveQueries<'a>,
    unit: &'a KvUnit<E>,
    ahead: &'a PrefetchLines,
}

impl<E: TileElement, const MR: usize, const AHEAD: bool> Score<'_, E, MR, AHEAD> {
    /// Computes the scores `weights[m][t] = q[m] · k[t]` of `NV` vectors of positions, from `vector` on. Vectors from
    /// `end` on are not read: they get the scores of the last vector before it.
    #[inline(always)]
    fn products<L: Lanes, const NV: usize>(&mut self, vector: usize, end: usize) {
        let mut keys = [self.unit.keys[vector]; NV];
        let mut ahead = [self.ahead.at[vector]; NV];
        for v in 1..NV {
            let vector = (vector + v).min(end - 1);
            (keys[v], ahead[v]) = (self.unit.keys[vector], self.ahead.at[vector]);
        }
        let mut acc = [[L::zero(); NV]; MR];
        let mut q = self.active.q.as_ptr();
        for _ in 0..self.active.head_dim / LANES {
            for d in 0..LANES {
                let mut lanes = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead[v]);
                        ahead[v] = ahead[v].wrapping_add(self.ahead.step);
                    }
                    // SAFETY: the keys of a vector of positions are head_dim lines of 16.
                    lanes[v] = unsafe { E::load::<L>(keys[v]) };
                    keys[v] = keys[v].wrapping_add(self.unit.key_step);
                }
                for m in 0..MR {
                    // SAFETY: `q` has head_dim / 16 blocks, each of MR lines of 16 or more.
                    let x = L::splat(unsafe { *q.add(m * LANES + d) });
                    for v in 0..NV {
                        acc[m][v] = x.mul_add(lanes[v], acc[m][v]);
                    }
                }
            }
            q = q.wrapping_add(self.active.q_step);
        }
        for (weights, acc) in self.active.weights.as_chunks_mut::<UNIT>().0.iter_mut().zip(&acc) {
            let (vectors, _) = weights.as_chunks_mut::<LANES>();
            for v in 0..NV {
                vectors[vector + v] = acc[v].to_array();
            }
        }
    }

    /// Sets the scores of positions that a query does not see to `-inf`.
    #[inline(always)]
    fn hide(&mut self) {
        let base = self.unit.base;
        let rows = self.active.weights.as_chunks_mut::<UNIT>().0.iter_mut();
        for (scores, (first, end)) in rows.zip(self.active.seen) {
            let [from, to] = [*first, *end].map(|position| position.saturating_sub(base).min(UNIT) as u32);
            if from > 0 || to < UNIT as u32 {
                for (i, score) in (0_u32..).zip(scores) {
                    *score = if i < from || i >= to { f32::NEG_INFINITY } else { *score };
                }
            }
        }
    }

    /// Turns scores into softmax weights relative to the largest score so far, and adds these to the sum of
    /// exponentials.
    #[inline(always)]
    fn exponentials<L: Lanes>(&mut self) {
        let state_len = state_len(self.active.head_dim);
        let (rows, softmax) =
            (&mut self.active.weights.as_chunks_mut::<UNIT>().0[..MR], &mut self.active.softmax[..MR]);
        let (mut before, mut largest) = ([0.0; LANES], [0.0; LANES]);
        for m in 0..MR {
            before[m] = softmax[m].largest;
            let (scores, _) = rows[m].as_chunks::<LANES>();
            let low = L::from_array(&scores[0]).max(L::from_array(&scores[1]));
            let high = L::from_array(&scores[2]).max(L::from_array(&scores[3]));
            let of_unit = low.max(high).largest();
            largest[m] = if of_unit > before[m] { of_unit } else { before[m] };
        }
        let rescale = L::from_array(&before).sub(L::from_array(&largest)).exp2().to_array();
        for m in 0..MR {
            let (vectors, _) = rows[m].as_chunks_mut::<LANES>();
            if largest[m] == f32::NEG_INFINITY {
                // The query has seen no position yet, and `-inf - -inf` would be NaN.
                softmax[m].rescale = 1.0;
                vectors.fill([0.0; LANES]);
                continue;
            }
            let mut lanes = [L::zero(); VECTORS];
            for v in 0..VECTORS {
                lanes[v] = L::from_array(&vectors[v]).sub(L::splat(largest[m])).exp2();
                vectors[v] = lanes[v].to_array();
            }
            let sum = lanes[0].add(lanes[1]).add(lanes[2].add(lanes[3]));
            let total = &mut self.active.states[m * state_len..].as_chunks_mut::<LANES>().0[0];
            *total = L::from_array(total).mul_add(L::splat(rescale[m]), sum).to_array();
            softmax[m] = Softmax { largest: largest[m], rescale: rescale[m] };
        }
    }
}

impl<E: TileElement, const MR: usize, const AHEAD: bool> Kernel for Score<'_, E, MR, AHEAD> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more queries");
        }
        let (mut vector, end) = (self.active.positions.start / LANES, self.active.positions.end.div_ceil(LANES));
        while vector < end {
            if MR * VECTORS <= L::ACCUMULATORS && vector == 0 && end > 2 {
                self.products::<L, VECTORS>(vector, end);
                vector += VECTORS;
            } else if MR * 2 <= L::ACCUMULATORS && end - vector > 1 {
                self.products::<L, 2>(vector, end);
                vector += 2;
            } else {
                self.products::<L, 1>(vector, end);
                vector += 1;
            }
        }
        self.hide();
        self.exponentials::<L>();
    }
}

struct Weigh<'a, E, const MR: usize, const AHEAD: bool> {
    active: ActiveQueries<'a>,
    unit: &'a KvUnit<E>,
    ahead: &'a PrefetchLines,
}

impl<E: TileElement, const MR: usize, const AHEAD: bool> Weigh<'_, E, MR, AHEAD> {
    /// Adds weighted values to `NV` vectors of columns:
    /// `sums[m][columns] = rescale[m] * sums[m][columns] + Σ weights[m][t] * v[t][columns]` over the active positions
    /// `t`, in order.
    #[inline(always)]
    fn columns<L: Lanes, const NV: usize>(&mut self, column: usize) {
        let Range { start: from, end: to } = self.active.positions;
        let head_dim = self.active.head_dim;
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.active.states[m * state_len(head_dim) + LANES + column..].as_chunks::<LANES>();
            for v in 0..NV {
                acc[m][v] = L::from_array(&sums[v]).mul(L::splat(self.active.softmax[m].rescale));
            }
        }
        for vector in from / LANES..to.div_ceil(LANES) {
            let (from, to) = (from.max(vector * LANES), to.min((vector + 1) * LANES));
            let mut values = self.unit.values[vector].wrapping_add((from - vector * LANES) * head_dim + column);
            let mut ahead = self.ahead.at[vector].wrapping_add(column * self.ahead.step);
            let weights = self.active.weights[..MR * UNIT].as_ptr();
            for t in from..to {
                let mut lanes = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead.wrapping_add(v * self.ahead.step));
                    }
                    // SAFETY: `t` is an active position, of which all head_dim values are readable.
                    lanes[v] = unsafe { E::load::<L>(values.wrapping_add(v * LANES)) };
                }
                for m in 0..MR {
                    // SAFETY: weights are MR rows of UNIT.
                    let x = L::splat(unsafe { *weights.add(m * UNIT + t) });
                    for v in 0..NV {
                        acc[m][v] = x.mul_add(lanes[v], acc[m][v]);
                    }
                }
                values = values.wrapping_add(head_dim);
                ahead = ahead.wrapping_add(NV * self.ahead.step);
            }
        }
        for m in 0..MR {
            let (sums, _) = self.active.states[m * state_len(head_dim) + LANES + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

impl<E: TileElement, const MR: usize, const AHEAD: bool> Kernel for Weigh<'_, E, MR, AHEAD> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more queries");
        }
        let head_dim = self.active.head_dim;
        let mut column = 0;
        while MR * 4 <= L::ACCUMULATORS && column + 4 * LANES <= head_dim {
            self.columns::<L, 4>(column);
            column += 4 * LANES;
        }
        while MR * 2 <= L::ACCUMULATORS && column + 2 * LANES <= head_dim {
            self.columns::<L, 2>(column);
            column += 2 * LANES;
        }
        while column < head_dim {
            self.columns::<L, 1>(column);
            column += LANES;
        }
    }
}

/// Widens lines of 16 elements to float32. Lines are `step` elements apart in `from` and adjacent in `to`.
///
/// # Safety
/// All lines are readable.
pub(super) unsafe fn widen<E: TileElement>(isa: Isa, from: *const E, step: usize, to: &mut [[f32; LANES]]) {
    isa.dispatch(WidenLines { from, step, to });
}

struct WidenLines<'a, E> {
    from: *const E,
    step: usize,
    to: &'a mut [[f32; LANES]],
}

impl<E: TileElement> Kernel for WidenLines<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mut from = self.from;
        for line in self.to {
            // SAFETY: the caller of `widen` promises that all lines are readable.
            *line = unsafe { E::load::<L>(from) }.to_array();
            from = from.wrapping_add(self.step);
        }
    }
}

/// Multiplies lines of 16 float32 by a factor and writes them `step` lines apart. Prefetches the lines `ahead` float32
/// values further on.
pub(super) fn scale_lines(
    isa: Isa,
    (from, ahead): (&[[f32; LANES]], usize),
    factor: f32,
    to: &mut [[f32; LANES]],
    step: usize,
) {
    isa.dispatch(ScaleLines { from, ahead, factor, to, step });
}

struct ScaleLines<'a> {
    from: &'a [[f32; LANES]],
    ahead: usize,
    factor: f32,
    to: &'a mut [[f32; LANES]],
    step: usize,
}

impl Kernel for ScaleLines<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for i in 0..self.from.len() {
            L::prefetch_near(self.from[i].as_ptr().wrapping_add(self.ahead).cast());
            self.to[i * self.step] = L::from_array(&self.from[i]).mul(L::splat(self.factor)).to_array();
        }
    }
}
