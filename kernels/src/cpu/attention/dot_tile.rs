//! Attention of a few pairs of (query row, head) over one unit of positions in products of bfloat16 pairs: the kernel
//! of one register tile.
//!
//! Weights are relative to a reference that follows the largest score only when a score passes it by 2^8: float32 sums
//! have the room, and the sums need not be rescaled with each unit. The rule looks at nothing but the pair's own
//! scores.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::blocks::{Ahead, NOWHERE, Unit};
use super::units::{UNIT, VECTORS, state_len};
use crate::cpu::Isa;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use half::bf16;
use std::ops::Range;

/// The most pairs of a task's one tile: by two vectors of positions or columns they fill the registers of AVX-512, and
/// what is read from memory is read once.
pub(super) const PAIRS_ALONE: usize = 12;
/// The most pairs of one tile among several: by four vectors, which takes the fewest loads for a product.
pub(super) const PAIRS_BESIDE: usize = 6;
/// How far, as a power of two, a score may pass the reference of its pair.
const SLACK: f32 = 8.0;
/// The most vectors of positions or of columns side by side.
const WIDEST: usize = 4;
/// What stands for a position beside one that is seen, if nobody sees it: it need not have been written.
static UNSEEN: [bf16; WIDEST * LANES] = [bf16::ZERO; WIDEST * LANES];

/// Pairs of a tile that take a unit together.
pub(super) struct Part<'a> {
    /// `[head_dim / 32]` blocks, `query_step` apart, of 16 pairs of bfloat16 of each of this part's pairs.
    pub queries: &'a [f32],
    pub query_step: usize,
    pub head_dim: usize,
    /// Factor of `q · k` that makes scores powers of two.
    pub scale: f32,
    /// The first position of the unit that each pair sees and the one after its last.
    pub seen: [(u8, u8); PAIRS_ALONE],
    /// Those that any of the pairs sees.
    pub positions: Range<usize>,
    /// By pair the score that weights are relative to, as a power of two; `-inf` before the first.
    pub references: &'a mut [f32],
    /// `[pairs][state_len]`, see [`state_len`].
    pub states: &'a mut [f32],
}

/// Adds a unit to the states: weights and weighted values.
///
/// # Safety
/// The keys of every vector of the unit that has one of the part's positions are readable, and the values of these
/// positions.
pub(super) unsafe fn take(isa: Isa, part: Part<'_>, unit: &Unit<bf16>, ahead: Option<&[Ahead; 2]>) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match (part.references.len(), ahead) {
                $(
                    ($pairs, Some(ahead)) => isa.dispatch(Take::<$pairs, true> { part, unit, ahead }),
                    ($pairs, None) => isa.dispatch(Take::<$pairs, false> { part, unit, ahead: &[NOWHERE; 2] }),
                )*
                (n, _) => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12)
}

struct Take<'a, const MR: usize, const AHEAD: bool> {
    part: Part<'a>,
    unit: &'a Unit<bf16>,
    /// What is asked for during scores, and during sums.
    ahead: &'a [Ahead; 2],
}

impl<const MR: usize, const AHEAD: bool> Kernel for Take<'_, MR, AHEAD> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let mut scores = [[L::splat(f32::NEG_INFINITY); VECTORS]; MR];
        let (mut vector, end) = (self.part.positions.start / LANES, self.part.positions.end.div_ceil(LANES));
        while vector < end {
            if MR <= PAIRS_BESIDE && vector == 0 && end > 2 {
                self.products::<L, WIDEST>(vector, end, &mut scores);
                vector += WIDEST;
            } else if end - vector > 1 {
                self.products::<L, 2>(vector, end, &mut scores);
                vector += 2;
            } else {
                self.products::<L, 1>(vector, end, &mut scores);
                vector += 1;
            }
        }
        let mut weights = Weights([[0.0; UNIT / 2]; MR]);
        self.weights(&mut scores, &mut weights);
        let mut column = 0;
        while MR <= PAIRS_BESIDE && column + WIDEST * LANES <= self.part.head_dim {
            self.columns::<L, WIDEST>(column, &weights);
            column += WIDEST * LANES;
        }
        while column + 2 * LANES <= self.part.head_dim {
            self.columns::<L, 2>(column, &weights);
            column += 2 * LANES;
        }
        if column < self.part.head_dim {
            self.columns::<L, 1>(column, &weights);
        }
    }
}

/// `[pairs]` weights of a unit in order, pairs of bfloat16.
#[repr(align(64))]
struct Weights<const MR: usize>([[f32; UNIT / 2]; MR]);

impl<const MR: usize, const AHEAD: bool> Take<'_, MR, AHEAD> {
    /// `scores[m][t] = q[m] · k[t]` for `NV` vectors from `vector` on, side by side. Those from `end` on are not read:
    /// they get the scores of the last before it.
    #[inline(always)]
    fn products<L: Lanes, const NV: usize>(&self, vector: usize, end: usize, scores: &mut [[L; VECTORS]; MR]) {
        let [values, _] = self.ahead;
        let mut keys = [self.unit.keys[vector]; NV];
        let mut ahead = [values.at[vector]; NV];
        for v in 1..NV {
            let vector = (vector + v).min(end - 1);
            (keys[v], ahead[v]) = (self.unit.keys[vector], values.at[vector]);
        }
        let step = self.unit.key_step;
        let mut acc = [[L::zero(); NV]; MR];
        let (mut queries, mut left) = (self.part.queries.as_ptr(), self.part.head_dim / 2);
        while left > 0 {
            let lines = left.min(LANES);
            for d in 0..lines {
                let mut pairs = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead[v]);
                        ahead[v] = ahead[v].wrapping_add(values.step);
                    }
                    // SAFETY: a vector's keys are head_dim lines of 16, and head_dim is even; lines of which one
                    // follows the other are read as one.
                    pairs[v] = unsafe {
                        if step == LANES {
                            L::load(keys[v].cast()).paired_halves()
                        } else {
                            L::load_paired(keys[v], keys[v].wrapping_add(step))
                        }
                    };
                    keys[v] = keys[v].wrapping_add(2 * step);
                }
                for m in 0..MR {
                    // SAFETY: a block of the queries has 16 pairs of bfloat16 for each of MR pairs or more.
                    let x = L::splat(unsafe { *queries.add(m * LANES + d) });
                    for v in 0..NV {
                        acc[m][v] = acc[m][v].dot_pairs(x, pairs[v]);
                    }
                }
            }
            left -= lines;
            queries = queries.wrapping_add(self.part.query_step);
        }
        for m in 0..MR {
            for v in 0..NV {
                scores[m][vector + v] = acc[m][v];
            }
        }
    }

    /// Hides what pairs do not see, turns scores into weights, rounds these and adds them up as they were rounded.
    #[inline(always)]
    fn weights<L: Lanes>(&mut self, scores: &mut [[L; VECTORS]; MR], weights: &mut Weights<MR>) {
        let state_len = state_len(self.part.head_dim);
        let scale = L::splat(self.part.scale);
        let ones = L::splat(f32::from_bits(0x3f80_3f80));
        for m in 0..MR {
            let (from, end) = self.part.seen[m];
            let lanes = &mut scores[m];
            if from > 0 || end < UNIT as u8 {
                // Bits of a shift by 64 or more are gone.
                let below = |position: u8| u64::MAX.checked_shl(position.into()).map_or(u64::MAX, |bits| !bits);
                let seen = below(end) & !below(from);
                for v in 0..VECTORS {
                    let bits = (seen >> (v * LANES)) as u32 & 0xffff;
                    lanes[v] = lanes[v].or_where_unset(bits, f32::NEG_INFINITY);
                }
            }
            let most = lanes[0].max(lanes[1]).max(lanes[2].max(lanes[3]));
            let state = &mut self.part.states[m * state_len..(m + 1) * state_len];
            let reference = &mut self.part.references[m];
            if *reference == f32::NEG_INFINITY {
                *reference = most.largest() * self.part.scale;
            } else if most.mul_add(scale, L::splat(-*reference)).within(SLACK, f32::INFINITY) != 0 {
                let raised = most.largest() * self.part.scale;
                rescale::<L>(state, *reference - raised);
                *reference = raised;
            }
            // A pair that has seen nothing yet has hidden scores only, and -inf less -inf is no number.
            let less = L::splat(if *reference == f32::NEG_INFINITY { 0.0 } else { -*reference });
            for v in 0..VECTORS {
                lanes[v] = lanes[v].mul_add(scale, less).exp2();
            }
            let (low, high) = (L::rounded_pairs(lanes[0], lanes[1]), L::rounded_pairs(lanes[2], lanes[3]));
            let (to, _) = weights.0[m].as_chunks_mut::<LANES>();
            (to[0], to[1]) = (low.to_array(), high.to_array());
            let total = &mut state.as_chunks_mut::<LANES>().0[0];
            *total = L::from_array(total).dot_pairs(low, ones).dot_pairs(high, ones).to_array();
        }
    }

    /// `sums[m][columns] += weights[m][t] * v[t][columns]` for the part's positions, two at a time in order, `NV`
    /// vectors of columns.
    #[inline(always)]
    fn columns<L: Lanes, const NV: usize>(&mut self, column: usize, weights: &Weights<MR>) {
        let Range { start: from, end: to } = self.part.positions;
        let (head_dim, [_, keys]) = (self.part.head_dim, self.ahead);
        let state_len = state_len(head_dim);
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.part.states[m * state_len + LANES + column..].as_chunks::<LANES>();
            for v in 0..NV {
                acc[m][v] = L::from_array(&sums[v]);
            }
        }
        for vector in from / LANES..to.div_ceil(LANES) {
            let values = self.unit.values[vector].wrapping_add(column);
            let mut ahead = keys.at[vector].wrapping_add(column / LANES * keys.step);
            let (first, last) = (from.max(vector * LANES) / 2, to.min((vector + 1) * LANES).div_ceil(2));
            for pair in first..last {
                let t = 2 * pair;
                let at = values.wrapping_add((t - vector * LANES) * head_dim);
                let even = if t >= from { at } else { UNSEEN.as_ptr() };
                let odd = if t + 1 < to { at.wrapping_add(head_dim) } else { UNSEEN.as_ptr() };
                let mut pairs = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead.wrapping_add(v * keys.step));
                    }
                    let (even, odd) = (even.wrapping_add(v * LANES), odd.wrapping_add(v * LANES));
                    // SAFETY: positions of the part have head_dim values, and what stands for others has NV vectors.
                    unsafe {
                        if v % 2 == 0 && v + 1 < NV {
                            (pairs[v], pairs[v + 1]) = L::load(even.cast()).paired_with(L::load(odd.cast()));
                        } else if v % 2 == 0 {
                            pairs[v] = L::load_paired(even, odd);
                        }
                    }
                }
                ahead = ahead.wrapping_add(head_dim / LANES * keys.step);
                for m in 0..MR {
                    let x = L::splat(weights.0[m][pair]);
                    for v in 0..NV {
                        acc[m][v] = acc[m][v].dot_pairs(x, pairs[v]);
                    }
                }
            }
        }
        for m in 0..MR {
            let (sums, _) = self.part.states[m * state_len + LANES + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

/// Multiplies a state by a power of two.
#[inline(always)]
fn rescale<L: Lanes>(state: &mut [f32], power: f32) {
    let factor = L::splat(power).exp2();
    let (vectors, _) = state.as_chunks_mut::<LANES>();
    for i in 0..vectors.len() {
        vectors[i] = L::from_array(&vectors[i]).mul(factor).to_array();
    }
}

/// Rounds a query to bfloat16: pairs of 32 elements go to `to[0]`, of the next 32 to `to[step]`, and so on. Asks for
/// the query `ahead` float32 further on.
pub(super) fn round_query(isa: Isa, query: &[f32], ahead: usize, to: &mut [[f32; LANES]], step: usize) {
    isa.dispatch(RoundQuery { query, ahead, to, step });
}

struct RoundQuery<'a> {
    query: &'a [f32],
    ahead: usize,
    to: &'a mut [[f32; LANES]],
    step: usize,
}

impl Kernel for RoundQuery<'_> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (vectors, _) = self.query.as_chunks::<LANES>();
        for i in 0..vectors.len().div_ceil(2) {
            let low = &vectors[2 * i];
            L::prefetch_near(low.as_ptr().wrapping_add(self.ahead).cast());
            L::prefetch_near(low.as_ptr().wrapping_add(self.ahead + LANES).cast());
            let high = if 2 * i + 1 < vectors.len() { L::from_array(&vectors[2 * i + 1]) } else { L::zero() };
            self.to[i * self.step] = L::rounded_pairs(L::from_array(low), high).to_array();
        }
    }
}
