//! Attention of a few pairs of (query row, head) over one unit of positions: kernels of one register tile.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::blocks::{Ahead, NOWHERE, Unit};
use super::units::{UNIT, VECTORS, state_len};
use crate::cpu::Isa;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::tile::{Element, most_rows};
use std::ops::Range;

/// Softmax of a pair over the units of a span so far.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    /// The largest score, a power of two as all scores are.
    pub largest: f32,
    /// By what the last unit multiplied the sums that were relative to the largest score before it.
    pub rescale: f32,
}

impl Default for Softmax {
    fn default() -> Self {
        Softmax { largest: f32::NEG_INFINITY, rescale: 1.0 }
    }
}

/// Pairs of a tile that take a unit together.
pub(super) struct Part<'a> {
    /// `[head_dim / 16]` blocks, `q_step` apart, of 16 elements of each of this part's pairs, times the factor that
    /// makes scores powers of two.
    pub q: &'a [f32],
    pub q_step: usize,
    /// Those inside the unit that any of the pairs sees, and that the kernel may read.
    pub positions: Range<usize>,
    pub head_dim: usize,
    /// The first position that each pair sees and the one after its last.
    pub seen: &'a [(usize, usize)],
    /// `[pairs][UNIT]`: scores, then `2^(score - largest)`.
    pub weights: &'a mut [f32],
    /// `[pairs][state_len]`, see [`state_len`].
    pub states: &'a mut [f32],
    pub softmax: &'a mut [Softmax],
}

/// Fills the weights of a unit.
///
/// # Safety
/// The keys of every vector of the unit that has one of the part's positions are readable.
pub(super) unsafe fn score<E: Element>(isa: Isa, part: Part<'_>, unit: &Unit<E>, ahead: Option<&Ahead>) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match (part.seen.len(), ahead) {
                $(
                    ($pairs, Some(ahead)) => isa.dispatch(Score::<E, $pairs, true> { part, unit, ahead }),
                    ($pairs, None) => isa.dispatch(Score::<E, $pairs, false> { part, unit, ahead: &NOWHERE }),
                )*
                (n, _) => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds the weighted values of a unit to the sums.
///
/// # Safety
/// The values of the part's positions in the unit are readable.
pub(super) unsafe fn weigh<E: Element>(isa: Isa, part: Part<'_>, unit: &Unit<E>, ahead: Option<&Ahead>) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match (part.seen.len(), ahead) {
                $(
                    ($pairs, Some(ahead)) => isa.dispatch(Weigh::<E, $pairs, true> { part, unit, ahead }),
                    ($pairs, None) => isa.dispatch(Weigh::<E, $pairs, false> { part, unit, ahead: &NOWHERE }),
                )*
                (n, _) => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12)
}

struct Score<'a, E, const MR: usize, const AHEAD: bool> {
    part: Part<'a>,
    unit: &'a Unit<E>,
    ahead: &'a Ahead,
}

impl<E: Element, const MR: usize, const AHEAD: bool> Score<'_, E, MR, AHEAD> {
    /// `weights[m][t] = q[m] · k[t]` for `NV` vectors from `vector` on, side by side. Those from `end` on are not read:
    /// they get the scores of the last before it.
    #[inline(always)]
    fn products<L: Lanes, const NV: usize>(&mut self, vector: usize, end: usize) {
        let mut keys = [self.unit.keys[vector]; NV];
        let mut ahead = [self.ahead.at[vector]; NV];
        for v in 1..NV {
            let vector = (vector + v).min(end - 1);
            (keys[v], ahead[v]) = (self.unit.keys[vector], self.ahead.at[vector]);
        }
        let mut acc = [[L::zero(); NV]; MR];
        let mut q = self.part.q.as_ptr();
        for _ in 0..self.part.head_dim / LANES {
            for d in 0..LANES {
                let mut lanes = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead[v]);
                        ahead[v] = ahead[v].wrapping_add(self.ahead.step);
                    }
                    // SAFETY: a vector's keys are head_dim lines of 16.
                    lanes[v] = unsafe { E::load::<L>(keys[v]) };
                    keys[v] = keys[v].wrapping_add(self.unit.key_step);
                }
                for m in 0..MR {
                    // SAFETY: the query holds head_dim / 16 blocks, of MR lines or more.
                    let x = L::splat(unsafe { *q.add(m * LANES + d) });
                    for v in 0..NV {
                        acc[m][v] = x.mul_add(lanes[v], acc[m][v]);
                    }
                }
            }
            q = q.wrapping_add(self.part.q_step);
        }
        for (weights, acc) in self.part.weights.as_chunks_mut::<UNIT>().0.iter_mut().zip(&acc) {
            let (vectors, _) = weights.as_chunks_mut::<LANES>();
            for v in 0..NV {
                vectors[vector + v] = acc[v].to_array();
            }
        }
    }

    /// Hides what pairs do not see of the unit.
    #[inline(always)]
    fn hide(&mut self) {
        let base = self.unit.base;
        let rows = self.part.weights.as_chunks_mut::<UNIT>().0.iter_mut();
        for (scores, (first, end)) in rows.zip(self.part.seen) {
            let [from, to] = [*first, *end].map(|position| position.saturating_sub(base).min(UNIT) as u32);
            if from > 0 || to < UNIT as u32 {
                for (i, score) in (0_u32..).zip(scores) {
                    *score = if i < from || i >= to { f32::NEG_INFINITY } else { *score };
                }
            }
        }
    }

    /// Turns scores into weights relative to the largest score so far.
    #[inline(always)]
    fn exponentials<L: Lanes>(&mut self) {
        let state_len = state_len(self.part.head_dim);
        let (rows, softmax) = (&mut self.part.weights.as_chunks_mut::<UNIT>().0[..MR], &mut self.part.softmax[..MR]);
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
                // It has seen nothing yet, and -inf less -inf is no number.
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
            let total = &mut self.part.states[m * state_len..].as_chunks_mut::<LANES>().0[0];
            *total = L::from_array(total).mul_add(L::splat(rescale[m]), sum).to_array();
            softmax[m] = Softmax { largest: largest[m], rescale: rescale[m] };
        }
    }
}

impl<E: Element, const MR: usize, const AHEAD: bool> Kernel for Score<'_, E, MR, AHEAD> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more pairs");
        }
        let (mut vector, end) = (self.part.positions.start / LANES, self.part.positions.end.div_ceil(LANES));
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
    part: Part<'a>,
    unit: &'a Unit<E>,
    ahead: &'a Ahead,
}

impl<E: Element, const MR: usize, const AHEAD: bool> Weigh<'_, E, MR, AHEAD> {
    /// `sums[m][columns] = rescale[m] * sums[m][columns] + weights[m][t] * v[t][columns]` for the part's positions in
    /// order, `NV` vectors of columns.
    #[inline(always)]
    fn columns<L: Lanes, const NV: usize>(&mut self, column: usize) {
        let Range { start: from, end: to } = self.part.positions;
        let head_dim = self.part.head_dim;
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.part.states[m * state_len(head_dim) + LANES + column..].as_chunks::<LANES>();
            for v in 0..NV {
                acc[m][v] = L::from_array(&sums[v]).mul(L::splat(self.part.softmax[m].rescale));
            }
        }
        for vector in from / LANES..to.div_ceil(LANES) {
            let (from, to) = (from.max(vector * LANES), to.min((vector + 1) * LANES));
            let mut values = self.unit.values[vector].wrapping_add((from - vector * LANES) * head_dim + column);
            let mut ahead = self.ahead.at[vector].wrapping_add(column * self.ahead.step);
            let weights = self.part.weights[..MR * UNIT].as_ptr();
            for t in from..to {
                let mut lanes = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead.wrapping_add(v * self.ahead.step));
                    }
                    // SAFETY: `t` is one of the part's positions, and its values are head_dim long.
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
            let (sums, _) = self.part.states[m * state_len(head_dim) + LANES + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

impl<E: Element, const MR: usize, const AHEAD: bool> Kernel for Weigh<'_, E, MR, AHEAD> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more pairs");
        }
        let head_dim = self.part.head_dim;
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

/// Widens lines of 16 to float32, `step` apart in the source and one after the other in `to`.
///
/// # Safety
/// The lines are readable.
pub(super) unsafe fn widen<E: Element>(isa: Isa, from: *const E, step: usize, to: &mut [[f32; LANES]]) {
    isa.dispatch(Widen { from, step, to });
}

struct Widen<'a, E> {
    from: *const E,
    step: usize,
    to: &'a mut [[f32; LANES]],
}

impl<E: Element> Kernel for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mut from = self.from;
        for line in self.to {
            // SAFETY: the promise to `widen`.
            *line = unsafe { E::load::<L>(from) }.to_array();
            from = from.wrapping_add(self.step);
        }
    }
}

/// Multiplies lines of 16 by a factor; `step` lines from one to the next where they go. Asks for the lines `ahead`
/// float32 further on.
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
