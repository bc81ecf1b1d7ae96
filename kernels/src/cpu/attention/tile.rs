//! One register tile of attention: up to 12 pairs of (query row, head) that share a KV head, over all they see.

#![allow(clippy::needless_range_loop)] // no closures, as in `cpu::tile`

use super::super::isa::{Isa, Kernel};
use super::super::kv::KvLayout;
use super::super::lanes::{LANES, Lanes};
use super::super::storage::Mapping;
use super::super::tile::{Element, Operands, Single, accumulate, most_rows};
use super::{AttentionSequence, Call, Task};

/// Positions from one step of the online softmax to the next; absolute, so the same for every query.
const UNIT: usize = 64;
/// Vectors of positions in a unit.
const VECTORS: usize = UNIT / LANES;

/// Float32 values that [`run`] needs: query, results and weights of the pairs, and a unit's keys and values for block
/// sizes that are not whole vectors.
pub(super) fn scratch_len(most_pairs: usize, layout: &KvLayout) -> usize {
    let gathered = if layout.block_size.is_multiple_of(LANES) { 0 } else { 2 * UNIT * layout.head_dim };
    most_pairs * (2 * layout.head_dim + UNIT) + gathered
}

pub(super) struct TileTask<'a> {
    pub call: &'a Call<'a>,
    pub task: &'a Task,
    pub keys: &'a Mapping,
    pub values: &'a Mapping,
}

/// Computes the outputs of the task's pairs.
pub(super) fn run<E: Element>(isa: Isa, task: &TileTask<'_>, scratch: &mut [f32]) {
    macro_rules! pairs {
        ($($pairs:literal)*) => {
            match task.task.pairs {
                $($pairs => isa.dispatch(Tile::<E, $pairs>::new(task, scratch)),)*
                n => unreachable!("no attention tile of {n} pairs"),
            }
        };
    }
    pairs!(1 2 3 4 5 6 7 8 9 10 11 12);
}

struct Tile<'a, E, const MR: usize> {
    task: &'a TileTask<'a>,
    sequence: &'a AttentionSequence<'a>,
    layout: &'a KvLayout,
    keys: &'a [E],
    values: &'a [E],
    /// `[head_dim][MR]`.
    q: &'a mut [f32],
    /// `[MR][UNIT]`: scores, then their exponentials.
    weights: &'a mut [f32],
    /// `[MR][head_dim]`.
    sums: &'a mut [f32],
    /// A unit's keys `[vector][head_dim][16]` and values `[position][head_dim]`, if blocks are not whole vectors.
    gathered: (&'a mut [E], &'a mut [E]),
    /// The first position that a pair sees, and the one after its last.
    seen: [(usize, usize); MR],
}

/// The keys and values of the vectors `first..` of a unit that any pair sees.
struct Unit<E> {
    keys: [*const E; VECTORS],
    key_step: usize,
    values: [*const E; VECTORS],
    /// Positions inside the unit.
    from: usize,
    to: usize,
}

/// Softmax of each pair over the units so far: the largest score and the sum of exponentials relative to it.
struct Running {
    largest: [f32; LANES],
    sum: [f32; LANES],
}

impl<'a, E: Element, const MR: usize> Tile<'a, E, MR> {
    fn new(task: &'a TileTask<'a>, scratch: &'a mut [f32]) -> Self {
        let TileTask { call, task: part, keys, values } = *task;
        let layout = call.cache.layout();
        let sequence = &call.sequences[part.sequence as usize];
        let (q, rest) = scratch.split_at_mut(MR * layout.head_dim);
        let (sums, rest) = rest.split_at_mut(MR * layout.head_dim);
        let (weights, gathered) = rest.split_at_mut(MR * UNIT);
        // SAFETY: E is no larger than float32, as aligned, and any bits are a value of it.
        let gathered = unsafe { gathered.align_to_mut::<E>().1 };
        let half = gathered.len() / 2;
        let group = call.shape.heads / layout.kv_heads;
        let seen = std::array::from_fn(|m| {
            let end = sequence.start_position + (part.first_pair as usize + m) / group + 1;
            (call.shape.sliding_window.map_or(0, |w| end.saturating_sub(w)), end)
        });
        Tile {
            task,
            sequence,
            layout,
            keys: keys.as_slice(),
            values: values.as_slice(),
            q,
            weights,
            sums,
            gathered: gathered.split_at_mut(half),
            seen,
        }
    }

    /// Row and first column of a pair.
    fn place(&self, m: usize) -> (usize, usize) {
        let group = self.task.call.shape.heads / self.layout.kv_heads;
        let pair = self.task.task.first_pair as usize + m;
        let head = self.task.task.kv_head as usize * group + pair % group;
        (self.sequence.first_row + pair / group, head * self.layout.head_dim)
    }

    /// Finds the keys and values of unit `unit` that any pair sees.
    fn unit(&mut self, unit: usize) -> Unit<E> {
        let (head_dim, block_size) = (self.layout.head_dim, self.layout.block_size);
        let base = unit * UNIT;
        let from = self.seen[0].0.saturating_sub(base); // pairs are in the order of their positions
        let to = (self.seen[MR - 1].1 - base).min(UNIT);
        let whole = block_size.is_multiple_of(LANES);
        let mut found = Unit {
            keys: [std::ptr::null(); VECTORS],
            key_step: if whole { block_size } else { LANES },
            values: [std::ptr::null(); VECTORS],
            from,
            to,
        };
        for vector in from / LANES..to.div_ceil(LANES) {
            if !whole {
                self.gather(base, vector, from, to);
                found.keys[vector] = self.gathered.0[vector * LANES * head_dim..].as_ptr();
                found.values[vector] = self.gathered.1[vector * LANES * head_dim..].as_ptr();
                continue;
            }
            let (start, offset) = self.slot(base + vector * LANES);
            found.keys[vector] = self.keys[start..][..self.layout.head_len()][offset..].as_ptr();
            found.values[vector] = self.values[start..][..self.layout.head_len()][offset * head_dim..].as_ptr();
        }
        found
    }

    /// Where this KV head's part of a position's block starts, and the position's offset in the block.
    fn slot(&self, position: usize) -> (usize, usize) {
        let block = self.sequence.block_table[position / self.layout.block_size] as usize;
        let start = (block * self.layout.kv_heads + self.task.task.kv_head as usize) * self.layout.head_len();
        (start, position % self.layout.block_size)
    }

    /// Copies the seen positions of a vector to where whole vectors of them lie together.
    fn gather(&mut self, base: usize, vector: usize, from: usize, to: usize) {
        let (head_dim, block_size) = (self.layout.head_dim, self.layout.block_size);
        for t in from.max(vector * LANES)..to.min((vector + 1) * LANES) {
            let (start, offset) = self.slot(base + t);
            let keys = &mut self.gathered.0[vector * LANES * head_dim..][..LANES * head_dim];
            let source = self.keys[start..][..head_dim * block_size][offset..].iter().step_by(block_size);
            keys[t % LANES..].iter_mut().step_by(LANES).zip(source).for_each(|(to, from)| *to = *from);
            let source = &self.values[start + offset * head_dim..][..head_dim];
            self.gathered.1[t * head_dim..][..head_dim].copy_from_slice(source);
        }
    }

    /// `weights[m][t] = scale * q[m] · k[t]` for the unit's vectors, `NV` of them side by side.
    #[inline(always)]
    fn score<L: Lanes, const NV: usize>(&mut self, unit: &Unit<E>) {
        let (first, end) = (unit.from / LANES, unit.to.div_ceil(LANES));
        let scale = L::splat(self.task.call.shape.scale);
        for vector in (first..end).step_by(NV) {
            let mut w = [unit.keys[vector]; NV];
            for v in 0..NV {
                w[v] = unit.keys[(vector + v).min(end - 1)];
            }
            let operands: Operands<Single<E>, NV> = Operands {
                x: self.q.as_ptr(),
                x_row: 1,
                x_step: MR,
                w,
                w_step: unit.key_step,
                next: self.q.as_ptr().cast(),
            };
            let mut acc = [[L::zero(); NV]; MR];
            // SAFETY: the query holds head_dim steps of MR; a vector's keys are head_dim lines of 16, a block size apart.
            unsafe { accumulate::<L, _, MR, NV>(&mut acc, self.layout.head_dim, &operands) };
            for m in 0..MR {
                for v in 0..NV.min(end - vector) {
                    let at = m * UNIT + (vector + v) * LANES;
                    self.weights[at..at + LANES].copy_from_slice(&acc[m][v].mul(scale).to_array());
                }
            }
        }
    }

    /// Hides what pair `m` does not see of the unit at `base`, and returns its largest score.
    #[inline(always)]
    fn largest<L: Lanes>(&mut self, m: usize, base: usize) -> f32 {
        let (from, to) = (self.seen[m].0.saturating_sub(base), self.seen[m].1.saturating_sub(base).min(UNIT));
        let scores = &mut self.weights.as_chunks_mut::<UNIT>().0[m];
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

    /// Turns scores into weights relative to the largest score so far, and returns by what the sums of each pair must be
    /// multiplied to be relative to that too.
    #[inline(always)]
    fn softmax<L: Lanes>(&mut self, base: usize, running: &mut Running) -> [f32; LANES] {
        let mut largest = running.largest;
        for m in 0..MR {
            let of_unit = self.largest::<L>(m, base);
            largest[m] = if of_unit > largest[m] { of_unit } else { largest[m] };
        }
        let mut rescale = L::from_array(&running.largest).sub(L::from_array(&largest)).exp().to_array();
        for m in 0..MR {
            let (vectors, _) = self.weights[m * UNIT..(m + 1) * UNIT].as_chunks_mut::<LANES>();
            if largest[m] == f32::NEG_INFINITY {
                // It has seen nothing yet, and -inf less -inf is no number.
                rescale[m] = 1.0;
                vectors.fill([0.0; LANES]);
                continue;
            }
            let mut lanes = [L::zero(); VECTORS];
            for v in 0..VECTORS {
                lanes[v] = L::from_array(&vectors[v]).sub(L::splat(largest[m])).exp();
                vectors[v] = lanes[v].to_array();
            }
            let sum = lanes[0].add(lanes[1]).add(lanes[2].add(lanes[3])).sum();
            running.sum[m] = running.sum[m] * rescale[m] + sum;
        }
        running.largest = largest;
        rescale
    }

    /// `sums[m][columns] = rescale[m] * sums[m][columns] + weights[m][t] * v[t][columns]` for the unit's positions in order, `NV` vectors of columns.
    #[inline(always)]
    fn weigh<L: Lanes, const NV: usize>(&mut self, unit: &Unit<E>, rescale: &[f32; LANES], column: usize) {
        let head_dim = self.layout.head_dim;
        let mut acc = [[L::zero(); NV]; MR];
        for m in 0..MR {
            let (sums, _) = self.sums[m * head_dim + column..].as_chunks::<LANES>();
            for v in 0..NV {
                acc[m][v] = L::from_array(&sums[v]).mul(L::splat(rescale[m]));
            }
        }
        for vector in unit.from / LANES..unit.to.div_ceil(LANES) {
            let (from, to) = (unit.from.max(vector * LANES), unit.to.min((vector + 1) * LANES));
            let x = self.weights[from..].as_ptr();
            let mut w = [unit.values[vector].wrapping_add((from - vector * LANES) * head_dim + column); NV];
            for v in 1..NV {
                w[v] = w[0].wrapping_add(v * LANES);
            }
            let operands: Operands<Single<E>, NV> =
                Operands { x, x_row: UNIT, x_step: 1, w, w_step: head_dim, next: self.q.as_ptr().cast() };
            // SAFETY: weights are MR rows of UNIT; a vector's values are 16 lines of head_dim.
            unsafe { accumulate::<L, _, MR, NV>(&mut acc, to - from, &operands) };
        }
        for m in 0..MR {
            let (sums, _) = self.sums[m * head_dim + column..].as_chunks_mut::<LANES>();
            for v in 0..NV {
                sums[v] = acc[m][v].to_array();
            }
        }
    }
}

impl<E: Element, const MR: usize> Kernel for Tile<'_, E, MR> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if const { MR > most_rows(L::ACCUMULATORS) } {
            unreachable!("the plan has no tile of more pairs");
        }
        let head_dim = self.layout.head_dim;
        let mut q: [&[f32]; MR] = [&[]; MR];
        for m in 0..MR {
            let (row, column) = self.place(m);
            q[m] = &self.task.call.q.row(row)[column..][..head_dim];
        }
        for (d, line) in self.q.as_chunks_mut::<MR>().0.iter_mut().enumerate() {
            for m in 0..MR {
                line[m] = q[m][d];
            }
        }
        self.sums.fill(0.0);
        let mut running = Running { largest: [f32::NEG_INFINITY; LANES], sum: [0.0; LANES] };
        for u in self.seen[0].0 / UNIT..self.seen[MR - 1].1.div_ceil(UNIT) {
            let unit = self.unit(u);
            if MR * 4 <= L::ACCUMULATORS {
                self.score::<L, 4>(&unit);
            } else if MR * 2 <= L::ACCUMULATORS {
                self.score::<L, 2>(&unit);
            } else {
                self.score::<L, 1>(&unit);
            }
            let rescale = self.softmax::<L>(u * UNIT, &mut running);
            let mut column = 0;
            while MR * 4 <= L::ACCUMULATORS && column + 4 * LANES <= head_dim {
                self.weigh::<L, 4>(&unit, &rescale, column);
                column += 4 * LANES;
            }
            while MR * 2 <= L::ACCUMULATORS && column + 2 * LANES <= head_dim {
                self.weigh::<L, 2>(&unit, &rescale, column);
                column += 2 * LANES;
            }
            while column < head_dim {
                self.weigh::<L, 1>(&unit, &rescale, column);
                column += LANES;
            }
        }
        for m in 0..MR {
            let (row, column) = self.place(m);
            // SAFETY: no other task has this row and head.
            let out = unsafe { self.task.call.out.part(row, column, head_dim) };
            let sums = &self.sums[m * head_dim..][..head_dim];
            // Positions that only other pairs of the tile see added products with 0, which can only turn -0 into 0: + 0
            // makes that so in any tile.
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum / running.sum[m] + 0.0);
        }
    }
}
