//! Attention of a few pairs of (query row, head) over one unit of positions: kernels of one register tile.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::tile::{UNIT, VECTORS};
use crate::cpu::Isa;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::tile::{Element, most_rows};
use std::ops::Range;

/// Keys and values of a unit: by vector of 16 positions, `head_dim` lines of 16 keys, and 16 lines of `head_dim` values.
#[derive(Clone, Copy)]
pub(super) struct Unit<E> {
    /// The first position.
    pub base: usize,
    pub keys: [*const E; VECTORS],
    /// From one line of keys to the next.
    pub key_step: usize,
    pub values: [*const E; VECTORS],
}

/// Cache lines to ask for while a unit is computed: `head_dim` pieces of `step` bytes from each of these addresses.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub at: [*const u8; VECTORS],
    pub step: usize,
}

/// Softmax of each pair over the units so far.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub largest: f32,
    /// The sum of exponentials relative to the largest score.
    pub sum: f32,
    /// By what the last unit multiplied the sums that were relative to the largest score before it.
    pub rescale: f32,
}

impl Default for Softmax {
    fn default() -> Self {
        Softmax { largest: f32::NEG_INFINITY, sum: 0.0, rescale: 1.0 }
    }
}

/// Pairs of a tile that take a unit together.
pub(super) struct Part<'a> {
    /// `[head_dim]` lines of this part's pairs, `q_step` apart.
    pub q: &'a [f32],
    pub q_step: usize,
    /// Those inside the unit that any of the pairs sees, and that the kernel may read.
    pub positions: Range<usize>,
    pub head_dim: usize,
    pub scale: f32,
    /// The first position that each pair sees and the one after its last.
    pub seen: &'a [(usize, usize)],
    /// `[pairs][UNIT]`: scores, then their exponentials.
    pub weights: &'a mut [f32],
    /// `[pairs][head_dim]`.
    pub sums: &'a mut [f32],
    pub softmax: &'a mut [Softmax],
}

/// Fills the weights of a unit.
///
/// # Safety
/// The keys of every vector of the unit that has one of the part's positions are readable.
pub(super) unsafe fn score<E: Element>(isa: Isa, part: Part<'_>, unit: &Unit<E>, ahead: &Ahead) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match part.seen.len() {
                $($pairs => isa.dispatch(Score::<E, $pairs> { part, unit, ahead }),)*
                n => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// Adds the weighted values of a unit to the sums.
///
/// # Safety
/// The values of the part's positions in the unit are readable.
pub(super) unsafe fn weigh<E: Element>(isa: Isa, part: Part<'_>, unit: &Unit<E>, ahead: &Ahead) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match part.seen.len() {
                $($pairs => isa.dispatch(Weigh::<E, $pairs> { part, unit, ahead }),)*
                n => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12)
}

struct Score<'a, E, const MR: usize> {
    part: Part<'a>,
    unit: &'a Unit<E>,
    ahead: &'a Ahead,
}

impl<E: Element, const MR: usize> Score<'_, E, MR> {
    /// `weights[m][t] = scale * q[m] · k[t]` for the vectors `vector..end`, at most `NV` of them, side by side.
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
        for d in 0..self.part.head_dim {
            let mut lanes = [L::zero(); NV];
            for v in 0..NV {
                L::prefetch(ahead[v].wrapping_add(d * self.ahead.step));
                // SAFETY: a vector's keys are head_dim lines of 16.
                lanes[v] = unsafe { E::load::<L>(keys[v]) };
                keys[v] = keys[v].wrapping_add(self.unit.key_step);
            }
            for m in 0..MR {
                // SAFETY: the query holds head_dim lines, of MR pairs or more.
                let x = L::splat(unsafe { *q.add(m) });
                for v in 0..NV {
                    acc[m][v] = x.mul_add(lanes[v], acc[m][v]);
                }
            }
            q = q.wrapping_add(self.part.q_step);
        }
        let scale = L::splat(self.part.scale);
        for m in 0..MR {
            for v in 0..NV.min(end - vector) {
                let at = m * UNIT + (vector + v) * LANES;
                self.part.weights[at..at + LANES].copy_from_slice(&acc[m][v].mul(scale).to_array());
            }
        }
    }

    /// Hides what pair `m` does not see of the unit, and returns its largest score.
    #[inline(always)]
    fn largest<L: Lanes>(&mut self, m: usize) -> f32 {
        let (first, end) = self.part.seen[m];
        let (from, to) = (first.saturating_sub(self.unit.base), end.saturating_sub(self.unit.base).min(UNIT));
        let scores = &mut self.part.weights.as_chunks_mut::<UNIT>().0[m];
        if from > 0 || to < UNIT {
            for (i, score) in scores.iter_mut().enumerate() {
                *score = if i < from || i >= to { f32::NEG_INFINITY } else { *score };
            }
        }
        let (scores, _) = scores.as_chunks::<LANES>();
        let low = L::from_array(&scores[0]).max(L::from_array(&scores[1]));
        let high = L::from_array(&scores[2]).max(L::from_array(&scores[3]));
        low.max(high).largest()
    }

    /// Turns scores into weights relative to the largest score so far.
    #[inline(always)]
    fn exponentials<L: Lanes>(&mut self) {
        let (mut before, mut largest) = ([0.0; LANES], [0.0; LANES]);
        for m in 0..MR {
            before[m] = self.part.softmax[m].largest;
            let of_unit = self.largest::<L>(m);
            largest[m] = if of_unit > before[m] { of_unit } else { before[m] };
        }
        let rescale = L::from_array(&before).sub(L::from_array(&largest)).exp().to_array();
        for m in 0..MR {
            let (vectors, _) = self.part.weights[m * UNIT..(m + 1) * UNIT].as_chunks_mut::<LANES>();
            let softmax = &mut self.part.softmax[m];
            if largest[m] == f32::NEG_INFINITY {
                // It has seen nothing yet, and -inf less -inf is no number.
                softmax.rescale = 1.0;
                vectors.fill([0.0; LANES]);
                continue;
            }
            let mut lanes = [L::zero(); VECTORS];
            for v in 0..VECTORS {
                lanes[v] = L::from_array(&vectors[v]).sub(L::splat(largest[m])).exp();
                vectors[v] = lanes[v].to_array();
            }
            let sum = lanes[0].add(lanes[1]).add(lanes[2].add(lanes[3])).sum();
            *softmax = Softmax { largest: largest[m], sum: softmax.sum * rescale[m] + sum, rescale: rescale[m] };
        }
    }
}

impl<E: Element, const MR: usize> Kernel for Score<'_, E, MR> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more pairs");
        }
        let (mut vector, end) = (self.part.positions.start / LANES, self.part.positions.end.div_ceil(LANES));
        while vector < end {
            if MR * 4 <= L::ACCUMULATORS && end - vector > 2 {
                self.products::<L, 4>(vector, end);
                vector += 4;
            } else if MR * 2 <= L::ACCUMULATORS && end - vector > 1 {
                self.products::<L, 2>(vector, end);
                vector += 2;
            } else {
                self.products::<L, 1>(vector, end);
                vector += 1;
            }
        }
        self.exponentials::<L>();
    }
}

struct Weigh<'a, E, const MR: usize> {
    part: Part<'a>,
    unit: &'a Unit<E>,
    ahead: &'a Ahead,
}

impl<E: Element, const MR: usize> Weigh<'_, E, MR> {
    /// `sums[m][columns] = rescale[m] * sums[m][columns] + weights[m][t] * v[t][columns]` for the part's positions in
    /// order, `NV` vectors of columns.
    #[inline(always)]
    fn columns<L: Lanes, const NV: usize>(&mut self, column: usize) {
        let Range { start: from, end: to } = self.part.positions;
        let head_dim = self.part.head_dim;
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.part.sums[m * head_dim + column..].as_chunks::<LANES>();
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
                    L::prefetch(ahead.wrapping_add(v * self.ahead.step));
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
            let (sums, _) = self.part.sums[m * head_dim + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

impl<E: Element, const MR: usize> Kernel for Weigh<'_, E, MR> {
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

/// Widens `lines` lines of 16 to float32, `step` apart in the source and one after the other in `to`.
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

/// `out = sums / total`. Positions that only other pairs of a tile see added products with 0, which can only turn -0 into
/// 0: + 0 makes that so in any tile.
pub(super) fn divide(isa: Isa, sums: &[f32], total: f32, out: &mut [f32]) {
    isa.dispatch(Divide { sums, total, out });
}

struct Divide<'a> {
    sums: &'a [f32],
    total: f32,
    out: &'a mut [f32],
}

impl Kernel for Divide<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (sums, out) = (self.sums.as_chunks::<LANES>().0, self.out.as_chunks_mut::<LANES>().0);
        for i in 0..sums.len() {
            out[i] = L::from_array(&sums[i]).div(L::splat(self.total)).add(L::zero()).to_array();
        }
    }
}
