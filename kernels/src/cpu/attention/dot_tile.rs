//! The bfloat16 kernel of one register tile: a few queries attend to one unit of positions in dot products of bfloat16
//! pairs.
//!
//! Softmax weights are relative to a reference score, which is raised to the largest score only when a score exceeds it
//! by a factor of 2^8. Float32 sums have room for that, and most units need not rescale them. The rule depends on
//! nothing but the query's own scores.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::blocks::{KvUnit, NO_LINES, PrefetchLines};
use super::units::{UNIT, VECTORS, state_len};
use crate::cpu::Isa;
use crate::cpu::amx::TILE_ROWS;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use half::bf16;
use std::ops::Range;

/// The most queries of a tile that is the only one of its task. With two vectors of positions or columns each they fill
/// the registers of AVX-512, and memory is read once.
pub(super) const QUERIES_ALONE: usize = 12;
/// The most queries of a tile that is one of several. Each takes four vectors of positions or columns, which needs the
/// fewest loads per product.
pub(super) const QUERIES_BESIDE: usize = 6;
/// The most queries of a tile where products are those of AMX.
pub(super) const QUERIES_TILE: usize = TILE_ROWS;
/// How far a score may exceed the reference of its query, as an exponent of 2.
const SLACK: f32 = 8.0;
/// The most vectors of positions or of columns side by side.
const WIDEST: usize = 4;
/// Zeros in place of an unseen position that is paired with a seen one: its values in the cache may never have been
/// written.
pub(super) static UNSEEN: [bf16; WIDEST * LANES] = [bf16::ZERO; WIDEST * LANES];

/// The queries of a tile that attend to a unit, rounded to bfloat16, and their softmax states.
pub(super) struct RoundedQueries<'a> {
    /// The rounded queries: `[head_dim / 32]` blocks, `q_step` apart, of 16 bfloat16 pairs of each query.
    pub q: &'a [f32],
    pub q_step: usize,
    pub head_dim: usize,
    /// The factor of `q · k` that makes scores exponents of 2.
    pub scale: f32,
    /// The positions of the unit that each query sees, as the first one and the one after the last.
    pub seen: [(u8, u8); QUERIES_TILE],
    /// The positions of the unit that any of the queries sees.
    pub positions: Range<usize>,
    /// The score that each query's softmax weights are relative to, as an exponent of 2; `-inf` before the first unit.
    pub references: &'a mut [f32],
    /// The softmax states `[queries][state_len]`, see [`state_len`].
    pub states: &'a mut [f32],
}

/// Adds a unit to the softmax states: scores, softmax weights, then weighted values. The first tile of a unit
/// prefetches `ahead`.
///
/// # Safety
/// The keys of every vector of the unit that contains one of the active positions are readable, and the values of these
/// positions.
pub(super) unsafe fn take(
    isa: Isa,
    active: RoundedQueries<'_>,
    unit: &KvUnit<bf16>,
    ahead: Option<&[PrefetchLines; 2]>,
) {
    macro_rules! queries {
        ($($queries:literal)*) => {
            match (active.references.len(), ahead) {
                $(
                    ($queries, Some(ahead)) => isa.dispatch(AttendUnit::<$queries, true> { active, unit, ahead }),
                    ($queries, None) => isa.dispatch(AttendUnit::<$queries, false> { active, unit, ahead: &[NO_LINES; 2] }),
                )*
                (n, _) => unreachable!("no attention tile of {n} queries"),
            }
        };
    }
    queries!(1 2 3 4 5 6 7 8 9 10 11 12)
}

struct AttendUnit<'a, const MR: usize, const AHEAD: bool> {
    active: RoundedQueries<'a>,
    unit: &'a KvUnit<bf16>,
    /// The lines prefetched while scores are computed, and those prefetched while weighted values are added.
    ahead: &'a [PrefetchLines; 2],
}

impl<const MR: usize, const AHEAD: bool> Kernel for AttendUnit<'_, MR, AHEAD> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let mut scores = [[L::splat(f32::NEG_INFINITY); VECTORS]; MR];
        let (mut vector, end) = (self.active.positions.start / LANES, self.active.positions.end.div_ceil(LANES));
        while vector < end {
            if MR <= QUERIES_BESIDE && vector == 0 && end > 2 {
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
        let mut weights = SoftmaxWeights([[0.0; UNIT / 2]; MR]);
        self.weights(&mut scores, &mut weights);
        let mut column = 0;
        while MR <= QUERIES_BESIDE && column + WIDEST * LANES <= self.active.head_dim {
            self.columns::<L, WIDEST>(column, &weights);
            column += WIDEST * LANES;
        }
        while column + 2 * LANES <= self.active.head_dim {
            self.columns::<L, 2>(column, &weights);
            column += 2 * LANES;
        }
        if column < self.active.head_dim {
            self.columns::<L, 1>(column, &weights);
        }
    }
}

/// Softmax weights of a unit, `[queries]` of bfloat16 pairs in the order of positions.
#[repr(align(64))]
struct SoftmaxWeights<const MR: usize>([[f32; UNIT / 2]; MR]);

impl<const MR: usize, const AHEAD: bool> AttendUnit<'_, MR, AHEAD> {
    /// Computes the scores `scores[m][t] = q[m] · k[t]` of `NV` vectors of positions, from `vector` on. Vectors from
    /// `end` on are not read: they get the scores of the last vector before it.
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
        let (mut q, mut left) = (self.active.q.as_ptr(), self.active.head_dim / 2);
        while left > 0 {
            let lines = left.min(LANES);
            for d in 0..lines {
                let mut pairs = [L::zero(); NV];
                for v in 0..NV {
                    if AHEAD {
                        L::prefetch_near(ahead[v]);
                        ahead[v] = ahead[v].wrapping_add(values.step);
                    }
                    // SAFETY: the keys of a vector are head_dim lines of 16, and head_dim is even; two adjacent lines
                    // are read as one.
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
                    // SAFETY: a block of `q` has 16 bfloat16 pairs for each of MR queries or more.
                    let x = L::splat(unsafe { *q.add(m * LANES + d) });
                    for v in 0..NV {
                        acc[m][v] = acc[m][v].dot_pairs(x, pairs[v]);
                    }
                }
            }
            left -= lines;
            q = q.wrapping_add(self.active.q_step);
        }
        for m in 0..MR {
            for v in 0..NV {
                scores[m][vector + v] = acc[m][v];
            }
        }
    }

    /// Turns scores into softmax weights, see [`RoundedQueries::softmax_weights`].
    #[inline(always)]
    fn weights<L: Lanes>(&mut self, scores: &mut [[L; VECTORS]; MR], weights: &mut SoftmaxWeights<MR>) {
        for m in 0..MR {
            let [low, high] = self.active.softmax_weights(m, &mut scores[m]);
            let (to, _) = weights.0[m].as_chunks_mut::<LANES>();
            (to[0], to[1]) = (low.to_array(), high.to_array());
        }
    }

    /// Adds weighted values to `NV` vectors of columns: `sums[m][columns] += Σ weights[m][t] * v[t][columns]` over the
    /// active positions `t`, two at a time in order.
    #[inline(always)]
    fn columns<L: Lanes, const NV: usize>(&mut self, column: usize, weights: &SoftmaxWeights<MR>) {
        let Range { start: from, end: to } = self.active.positions;
        let (head_dim, [_, keys]) = (self.active.head_dim, self.ahead);
        let state_len = state_len(head_dim);
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.active.states[m * state_len + LANES + column..].as_chunks::<LANES>();
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
                    // SAFETY: active positions have head_dim values, and `UNSEEN` has NV vectors.
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
            let (sums, _) = self.active.states[m * state_len + LANES + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

impl RoundedQueries<'_> {
    /// Hides positions that query `m` does not see, turns its scores into softmax weights, rounds these to bfloat16
    /// pairs and adds the rounded ones to the sum of exponentials.
    #[inline(always)]
    pub fn softmax_weights<L: Lanes>(&mut self, m: usize, lanes: &mut [L; VECTORS]) -> [L; 2] {
        let state_len = state_len(self.head_dim);
        let scale = L::splat(self.scale);
        let ones = L::splat(f32::from_bits(0x3f80_3f80));
        let (from, end) = self.seen[m];
        if from > 0 || end < UNIT as u8 {
            // A shift by 64 or more would overflow: all bits are below such a position.
            let below = |position: u8| u64::MAX.checked_shl(position.into()).map_or(u64::MAX, |bits| !bits);
            let seen = below(end) & !below(from);
            for v in 0..VECTORS {
                let bits = (seen >> (v * LANES)) as u32 & 0xffff;
                lanes[v] = lanes[v].or_where_unset(bits, f32::NEG_INFINITY);
            }
        }
        let most = lanes[0].max(lanes[1]).max(lanes[2].max(lanes[3]));
        let state = &mut self.states[m * state_len..(m + 1) * state_len];
        let reference = &mut self.references[m];
        if *reference == f32::NEG_INFINITY {
            *reference = most.largest() * self.scale;
        } else if most.mul_add(scale, L::splat(-*reference)).within(SLACK, f32::INFINITY) != 0 {
            let raised = most.largest() * self.scale;
            rescale::<L>(state, *reference - raised);
            *reference = raised;
        }
        // A query that has seen nothing yet has only hidden scores, and `-inf - -inf` would be NaN.
        let less = L::splat(if *reference == f32::NEG_INFINITY { 0.0 } else { -*reference });
        for v in 0..VECTORS {
            lanes[v] = lanes[v].mul_add(scale, less).exp2();
        }
        let (low, high) = (L::rounded_pairs(lanes[0], lanes[1]), L::rounded_pairs(lanes[2], lanes[3]));
        let total = &mut state.as_chunks_mut::<LANES>().0[0];
        *total = L::from_array(total).dot_pairs(low, ones).dot_pairs(high, ones).to_array();
        [low, high]
    }
}

/// Multiplies a softmax state by `2^power`.
#[inline(always)]
fn rescale<L: Lanes>(state: &mut [f32], power: f32) {
    let factor = L::splat(power).exp2();
    let (vectors, _) = state.as_chunks_mut::<LANES>();
    for i in 0..vectors.len() {
        vectors[i] = L::from_array(&vectors[i]).mul(factor).to_array();
    }
}

/// Rounds a query to bfloat16 pairs: its first `pairs` (8 or 16) go to `to[0]`, the next ones to `to[step]`, and so on.
/// Prefetches the query `ahead` float32 values further on.
pub(super) fn round_query(isa: Isa, query: &[f32], ahead: usize, to: &mut [[f32; LANES]], step: usize, pairs: usize) {
    isa.dispatch(RoundQuery { query, ahead, to, step, pairs });
}

struct RoundQuery<'a> {
    query: &'a [f32],
    ahead: usize,
    to: &'a mut [[f32; LANES]],
    step: usize,
    pairs: usize,
}

impl Kernel for RoundQuery<'_> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (vectors, _) = self.query.as_chunks::<LANES>();
        let of_line = 2 * self.pairs / LANES;
        for i in 0..vectors.len().div_ceil(of_line) {
            let low = &vectors[of_line * i];
            L::prefetch_near(low.as_ptr().wrapping_add(self.ahead).cast());
            L::prefetch_near(low.as_ptr().wrapping_add(self.ahead + LANES).cast());
            let has_second = of_line == 2 && 2 * i + 1 < vectors.len();
            let high = if has_second { L::from_array(&vectors[2 * i + 1]) } else { L::zero() };
            self.to[i * self.step] = L::rounded_pairs(L::from_array(low), high).to_array();
        }
    }
}
