//! A task of attention: pairs of (query row, head) that share a KV head, over all they see.

use super::plan::{Task, seen};
use super::unit::{Ahead, Part, Softmax, Unit, divide, score, weigh, widen};
use super::{AttentionSequence, Call};
use crate::cpu::kv::KvLayout;
use crate::cpu::lanes::LANES;
use crate::cpu::tile::{Element, MOST_ROWS};
use std::ops::Range;

/// Positions from one step of the online softmax to the next; absolute, so the same for every query.
pub(super) const UNIT: usize = 64;
/// Vectors of positions in a unit.
pub(super) const VECTORS: usize = UNIT / LANES;
/// The most register tiles of a task: enough for what widening a unit costs to be little beside the products, few enough
/// for queries and weights to stay in the first-level cache beside a unit's keys or values.
pub(super) const MOST_TILES: usize = 4;

/// Float32 values that [`run`] needs: a unit's keys or values, widened; its keys and values in whole vectors, for block
/// sizes that are not; query, results and weights of the pairs.
pub(super) fn scratch_len(most_pairs: usize, layout: &KvLayout) -> usize {
    UNIT * layout.head_dim + gathered_len(layout) + MOST_TILES * most_pairs * (2 * layout.head_dim + UNIT)
}

fn gathered_len(layout: &KvLayout) -> usize {
    if layout.block_size.is_multiple_of(LANES) { 0 } else { 2 * UNIT * layout.head_dim }
}

/// Computes the outputs of the task's pairs.
pub(super) fn run<E: Element>(call: &Call<'_>, task: &Task, most_pairs: usize, scratch: &mut [f32]) {
    let layout = call.cache.layout();
    let group = call.shape.heads / layout.kv_heads;
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let (wide, rest) = scratch.split_at_mut(UNIT * layout.head_dim);
    let (gathered, mut rest) = rest.split_at_mut(gathered_len(layout));
    // SAFETY: E is no larger than float32, as aligned, and any bits are a value of it.
    let gathered = unsafe { gathered.align_to_mut::<E>().1 };
    let half = gathered.len() / 2;
    let (pairs, count) = (task.pairs as usize, (task.pairs as usize).div_ceil(most_pairs));
    let mut tiles: [Tile<'_>; MOST_TILES] = Default::default();
    for (i, tile) in tiles[..count].iter_mut().enumerate() {
        let (from, to) = (pairs * i / count, pairs * (i + 1) / count);
        let (own, others) = rest.split_at_mut((to - from) * (2 * layout.head_dim + UNIT));
        rest = others;
        *tile = Tile::new(call, members, task.kv_head as usize, task.first_pair as usize + from, to - from, own);
    }
    let mut work = Work::<E> {
        call,
        layout,
        kv_head: task.kv_head as usize,
        keys: call.cache.keys().as_slice(),
        values: call.cache.values().as_slice(),
        tiles: &mut tiles[..count],
        wide: wide.as_chunks_mut().0,
        gathered: gathered.split_at_mut(half),
    };
    let shared = task.shared_units as usize * UNIT;
    work.units(&members[0], 0..most_pairs, if members.len() > 1 { 0..shared } else { 0..usize::MAX });
    if members.len() > 1 {
        let mut first = 0;
        for s in members {
            work.units(s, first..first + s.rows * group, shared..usize::MAX);
            first += s.rows * group;
        }
    }
    tiles[..count].iter().for_each(|tile| tile.write(call));
}

/// Pairs of one register tile.
#[derive(Default)]
struct Tile<'a> {
    pairs: usize,
    /// Row and first column of each pair.
    places: [(usize, usize); MOST_ROWS],
    /// The first position that each sees and the one after its last.
    seen: [(usize, usize); MOST_ROWS],
    softmax: [Softmax; MOST_ROWS],
    /// `[head_dim][pairs]`.
    q: &'a mut [f32],
    /// `[pairs][UNIT]`.
    weights: &'a mut [f32],
    /// `[pairs][head_dim]`.
    sums: &'a mut [f32],
}

impl<'a> Tile<'a> {
    /// The pairs `first..first + pairs` of those of all members.
    fn new(
        call: &Call<'_>,
        members: &[AttentionSequence<'_>],
        kv_head: usize,
        mut first: usize,
        pairs: usize,
        memory: &'a mut [f32],
    ) -> Tile<'a> {
        let head_dim = call.cache.layout().head_dim;
        let group = call.shape.heads / call.cache.layout().kv_heads;
        let (q, rest) = memory.split_at_mut(pairs * head_dim);
        let (sums, weights) = rest.split_at_mut(pairs * head_dim);
        sums.fill(0.0);
        let mut tile = Tile { pairs, q, weights, sums, ..Tile::default() };
        let mut members = members.iter();
        let mut s = members.next().expect("a task has a sequence");
        for m in 0..pairs {
            while first == s.rows * group {
                (s, first) = (members.next().expect("the members have the task's pairs"), 0);
            }
            let (row, column) = (s.first_row + first / group, (kv_head * group + first % group) * head_dim);
            tile.places[m] = (row, column);
            tile.seen[m] = seen(call.shape, s, first / group);
            let query = &call.q.row(row)[column..][..head_dim];
            tile.q[m..].iter_mut().step_by(pairs).zip(query).for_each(|(cell, x)| *cell = *x);
            first += 1;
        }
        tile
    }

    /// The pairs of `range` for a kernel that takes these positions of a unit.
    fn part(&mut self, range: &Range<usize>, positions: Range<usize>, call: &Call<'_>) -> Part<'_> {
        let head_dim = call.cache.layout().head_dim;
        let range = range.start..range.end.min(self.pairs);
        Part {
            positions,
            q: &self.q[range.start..],
            q_step: self.pairs,
            head_dim,
            scale: call.shape.scale,
            seen: &self.seen[range.clone()],
            weights: &mut self.weights[range.start * UNIT..range.end * UNIT],
            sums: &mut self.sums[range.start * head_dim..range.end * head_dim],
            softmax: &mut self.softmax[range],
        }
    }

    fn write(&self, call: &Call<'_>) {
        let head_dim = call.cache.layout().head_dim;
        for m in 0..self.pairs {
            let (row, column) = self.places[m];
            // SAFETY: no other task has this row and head.
            let out = unsafe { call.out.part(row, column, head_dim) };
            divide(call.isa, &self.sums[m * head_dim..][..head_dim], self.softmax[m].sum, out);
        }
    }
}

/// Pairs of every tile that take units of the same blocks together.
struct Together<'a> {
    sequence: &'a AttentionSequence<'a>,
    range: Range<usize>,
    /// Of each tile: the first position that any of its pairs sees and the one after the last.
    seen: [(usize, usize); MOST_TILES],
    end: usize,
}

struct Work<'a, 'm, E> {
    call: &'a Call<'a>,
    layout: &'a KvLayout,
    kv_head: usize,
    keys: &'a [E],
    values: &'a [E],
    tiles: &'a mut [Tile<'m>],
    /// A unit's keys or values as float32: by vector, `head_dim` lines of 16.
    wide: &'a mut [[f32; LANES]],
    /// A unit's keys `[vector][head_dim][16]` and values `[position][head_dim]`, if blocks are not whole vectors.
    gathered: (&'a mut [E], &'a mut [E]),
}

impl<E: Element> Work<'_, '_, E> {
    /// Takes the pairs of `range` of every tile over those of the positions that they see, in the blocks of `sequence`.
    fn units(&mut self, sequence: &AttentionSequence<'_>, range: Range<usize>, positions: Range<usize>) {
        let mut seen = [(usize::MAX, 0); MOST_TILES];
        for (tile, all) in self.tiles.iter().zip(&mut seen) {
            for (from, end) in &tile.seen[range.start..range.end.min(tile.pairs)] {
                *all = (all.0.min(*from), all.1.max(*end));
            }
            *all = (all.0.max(positions.start), all.1.min(positions.end));
        }
        let from = seen.iter().map(|s| s.0).min().expect("a task has a tile");
        let end = seen.iter().map(|s| s.1).max().expect("a task has a tile");
        let together = Together { sequence, range, seen, end };
        for unit in from / UNIT..end.div_ceil(UNIT) {
            self.unit(&together, unit * UNIT, from.saturating_sub(unit * UNIT));
        }
    }

    /// The unit at `base`, of which positions from `from` on are seen.
    fn unit(&mut self, together: &Together<'_>, base: usize, from: usize) {
        let found = self.find(together, base, from);
        // What is needed next is on its way while the processor multiplies: values during scores, the next unit's keys
        // during sums.
        let step = LANES * size_of::<E>();
        let values = Ahead { at: found.values.map(<*const E>::cast), step };
        let last = base + UNIT >= together.end || gathered_len(self.layout) > 0;
        let next = if last { found.keys } else { self.find(together, base + UNIT, 0).keys };
        let keys = Ahead { at: next.map(<*const E>::cast), step };
        if self.tiles.len() > 1 && size_of::<E>() < size_of::<f32>() {
            let vectors = from / LANES..(together.end - base).min(UNIT).div_ceil(LANES);
            let wide = self.widen(found.keys, found.key_step, vectors.clone());
            // SAFETY: `widen` has copied all that any pair sees.
            unsafe { self.score(together, &Unit { base, keys: wide, key_step: LANES, values: wide }, &values) };
            let wide = self.widen(found.values, LANES, vectors);
            // SAFETY: as above.
            unsafe { self.weigh(together, &Unit { base, keys: wide, key_step: LANES, values: wide }, &keys) };
        } else {
            // SAFETY: `find` has found what any pair sees.
            unsafe { self.score(together, &found, &values) };
            // SAFETY: as above.
            unsafe { self.weigh(together, &found, &keys) };
        }
    }

    /// # Safety
    /// As for [`score`].
    unsafe fn score<X: Element>(&mut self, together: &Together<'_>, unit: &Unit<X>, ahead: &Ahead) {
        for (tile, seen) in self.tiles.iter_mut().zip(&together.seen) {
            let positions = seen.0.saturating_sub(unit.base)..seen.1.saturating_sub(unit.base).min(UNIT);
            if !positions.is_empty() {
                // SAFETY: the caller's promise.
                unsafe { score(self.call.isa, tile.part(&together.range, positions, self.call), unit, ahead) };
            }
        }
    }

    /// # Safety
    /// As for [`weigh`].
    unsafe fn weigh<X: Element>(&mut self, together: &Together<'_>, unit: &Unit<X>, ahead: &Ahead) {
        for (tile, seen) in self.tiles.iter_mut().zip(&together.seen) {
            let positions = seen.0.saturating_sub(unit.base)..seen.1.saturating_sub(unit.base).min(UNIT);
            if !positions.is_empty() {
                // SAFETY: the caller's promise.
                unsafe { weigh(self.call.isa, tile.part(&together.range, positions, self.call), unit, ahead) };
            }
        }
    }

    /// Copies vectors of a unit, each `head_dim` lines of 16, to where they are float32.
    fn widen(&mut self, from: [*const E; VECTORS], step: usize, vectors: Range<usize>) -> [*const f32; VECTORS] {
        let lines = self.layout.head_dim;
        for vector in vectors {
            let to = &mut self.wide[vector * lines..][..lines];
            // SAFETY: a vector that was found has that many lines.
            unsafe { widen(self.call.isa, from[vector], step, to) };
        }
        std::array::from_fn(|vector| self.wide[vector * lines..].as_ptr().cast())
    }

    /// Keys and values of the unit at `base` from its position `from` to the last that is seen; vectors without any of
    /// these lead nowhere.
    fn find(&mut self, together: &Together<'_>, base: usize, from: usize) -> Unit<E> {
        let (sequence, to) = (together.sequence, (together.end - base).min(UNIT));
        let KvLayout { head_dim, block_size, .. } = *self.layout;
        let whole = gathered_len(self.layout) == 0;
        let key_step = if whole { block_size } else { LANES };
        let (keys, values) = ([self.keys.as_ptr(); VECTORS], [self.values.as_ptr(); VECTORS]);
        let mut found = Unit { base, keys, key_step, values };
        for vector in from / LANES..to.div_ceil(LANES) {
            if !whole {
                self.gather(sequence, base, from.max(vector * LANES)..to.min((vector + 1) * LANES));
                found.keys[vector] = self.gathered.0[vector * LANES * head_dim..].as_ptr();
                found.values[vector] = self.gathered.1[vector * LANES * head_dim..].as_ptr();
                continue;
            }
            let (start, offset) = self.slot(sequence, base + vector * LANES);
            found.keys[vector] = self.keys[start..][..self.layout.head_len()][offset..].as_ptr();
            found.values[vector] = self.values[start..][..self.layout.head_len()][offset * head_dim..].as_ptr();
        }
        found
    }

    /// Where this KV head's part of a position's block starts, and the position's offset in the block.
    fn slot(&self, sequence: &AttentionSequence<'_>, position: usize) -> (usize, usize) {
        let block = sequence.block_table[position / self.layout.block_size] as usize;
        let start = (block * self.layout.kv_heads + self.kv_head) * self.layout.head_len();
        (start, position % self.layout.block_size)
    }

    /// Copies positions of a vector to where whole vectors of them lie together.
    fn gather(&mut self, sequence: &AttentionSequence<'_>, base: usize, positions: Range<usize>) {
        let KvLayout { head_dim, block_size, .. } = *self.layout;
        for t in positions {
            let (start, offset) = self.slot(sequence, base + t);
            let keys = &mut self.gathered.0[t / LANES * LANES * head_dim..][..LANES * head_dim];
            let source = self.keys[start..][..head_dim * block_size][offset..].iter().step_by(block_size);
            keys[t % LANES..].iter_mut().step_by(LANES).zip(source).for_each(|(to, from)| *to = *from);
            let source = &self.values[start + offset * head_dim..][..head_dim];
            self.gathered.1[t * head_dim..][..head_dim].copy_from_slice(source);
        }
    }
}
