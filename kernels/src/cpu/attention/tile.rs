//! A task of attention: pairs of (query row, head) that share a KV head, over all they see or a span of it.

use super::blocks::{Ahead, Blocks, Unit, gathered_len};
use super::span::fold;
use super::task::{Next, Place, Turn, each_turn, places_of, put};
use super::unit::{Part, Softmax, scale_lines, score, weigh, widen};
use super::units::{MOST_TILES, SPAN, TilePairs, UNIT, VECTORS, state_len};
use super::work::Task;
use super::{AttentionSequence, Call};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::cpu::tile::{Element, MOST_ROWS};
use crate::kv_layout::KvLayout;
use std::ops::Range;
use std::slice;

/// Float32 values of scratch that [`run`] needs: a unit's keys or values, widened; its keys and values in whole
/// vectors, for block sizes that are not; query, weights and two states of each pair.
pub(super) fn scratch_len(tile: TilePairs, layout: &KvLayout) -> usize {
    let pairs = tile.most_of_task().max(tile.alone);
    UNIT * layout.head_dim + gathered_len(layout) + pairs * pair_len(layout)
}

fn pair_len(layout: &KvLayout) -> usize {
    layout.head_dim + UNIT + 2 * state_len(layout.head_dim)
}

/// Computes the outputs of the task's pairs, or their records.
pub(super) fn run<'a, E: Element>(
    call: &Call<'a>,
    task: &Task,
    after: Next<'a>,
    tile: TilePairs,
    records: &SharedSlice<'_, f32>,
    scratch: &mut [f32],
) {
    let layout = call.cache.layout();
    let (wide, rest) = scratch.split_at_mut(UNIT * layout.head_dim);
    let (gathered, mut rest) = rest.split_at_mut(gathered_len(layout));
    let mut tiles = [const { None }; MOST_TILES];
    let (mut count, mut first, mut places) = (0, 0, places_of(call, task));
    while first < task.pairs as usize {
        let pairs = next_tile(call, task, tile, first);
        let (own, others) = rest.split_at_mut(pairs * pair_len(layout));
        rest = others;
        tiles[count] = Some(Tile::new(call, &mut places, first..first + pairs, own));
        (count, first) = (count + 1, first + pairs);
    }
    let mut work = Work::<E> {
        call,
        layout,
        blocks: Blocks::new(call, task.kv_head as usize, gathered),
        tiles: &mut tiles[..count],
        wide: wide.as_chunks_mut().0,
    };
    each_turn(call, task, after, |turn| work.units(&turn));
    put(call, task, tiles.iter_mut().flatten().flat_map(|tile| tile.results(call)), records);
}

/// How many pairs the tile has that begins at pair `first` of the task: as many as fit of one sequence's, or those of
/// whole sequences, which have positions of their own.
fn next_tile(call: &Call<'_>, task: &Task, tile: TilePairs, first: usize) -> usize {
    let pairs = task.pairs as usize;
    let most = if pairs <= tile.alone { tile.alone } else { tile.beside };
    if task.sequences == 1 {
        return most.min(pairs - first);
    }
    let group = call.shape.heads / call.cache.layout().kv_heads;
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let ends = members.iter().scan(0, |end, s| {
        *end += s.rows * group;
        Some(*end)
    });
    let mut own = ends.skip_while(|end| *end <= first).map(|end| end - first);
    let one = own.next().expect("a pair is some member's");
    own.take_while(|pairs| *pairs <= most).last().unwrap_or(one)
}

/// Pairs of one register tile.
struct Tile<'a> {
    /// Among the task's pairs.
    first: usize,
    pairs: usize,
    /// The first position that each sees and the one after its last.
    seen: [(usize, usize); MOST_ROWS],
    /// Those of its pairs whose turn it is, and the positions that any of these sees meanwhile.
    turn: (Range<usize>, Range<usize>),
    /// The softmax of each pair over the span that is being computed.
    softmax: [Softmax; MOST_ROWS],
    /// The largest scores of the spans before it.
    largest: [f32; MOST_ROWS],
    /// `[head_dim / 16][pairs][16]`.
    q: &'a mut [f32],
    /// `[pairs][UNIT]`.
    weights: &'a mut [f32],
    /// `[pairs][state_len]`, of the span that is being computed.
    states: &'a mut [f32],
    /// The same of the spans before it.
    totals: &'a mut [f32],
}

impl<'a> Tile<'a> {
    fn new(
        call: &Call<'_>,
        places: &mut impl Iterator<Item = Place>,
        pairs: Range<usize>,
        memory: &'a mut [f32],
    ) -> Tile<'a> {
        let head_dim = call.cache.layout().head_dim;
        let (q, rest) = memory.split_at_mut(pairs.len() * head_dim);
        let (weights, rest) = rest.split_at_mut(pairs.len() * UNIT);
        let (states, totals) = rest.split_at_mut(pairs.len() * state_len(head_dim));
        states.fill(0.0);
        let largest = [f32::NEG_INFINITY; MOST_ROWS];
        let (seen, softmax) = ([(0, 0); MOST_ROWS], [Softmax::default(); MOST_ROWS]);
        let (first, pairs) = (pairs.start, pairs.len());
        let turn = (0..0, 0..0);
        let mut tile = Tile { first, pairs, seen, turn, softmax, largest, q, weights, states, totals };
        // Exponentials are powers of two: that is one factor more, and one product less for each of them.
        let scale = call.shape.scale * std::f32::consts::LOG2_E;
        for (m, place) in places.take(pairs).enumerate() {
            tile.seen[m] = place.seen;
            let query = call.q.row(place.row)[place.column..][..head_dim].as_chunks().0;
            // Queries of rows to come are on their way meanwhile.
            let query = (query, 4 * call.q.stride());
            scale_lines(call.isa, query, scale, &mut tile.q.as_chunks_mut().0[m..], pairs);
        }
        tile
    }

    /// From now on it is the turn of its pairs among `range` of the task's, which take `positions` as far as they see
    /// them. Gives what any of them sees.
    fn take_turn(&mut self, range: &Range<usize>, positions: &Range<usize>) -> Range<usize> {
        let own = |pair: usize| pair.saturating_sub(self.first).min(self.pairs);
        let own = own(range.start)..own(range.end);
        let each = self.seen[own.clone()].iter();
        let each = each.map(|(from, end)| *from.max(&positions.start)..*end.min(&positions.end));
        let all = each.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        self.turn = (own, all.clone());
        all
    }

    /// The pairs whose turn it is, for a kernel that takes the unit at `base`, if any of them sees some of it.
    fn part(&mut self, base: usize, head_dim: usize) -> Option<Part<'_>> {
        let (range, seen) = self.turn.clone();
        let positions = seen.start.saturating_sub(base)..seen.end.saturating_sub(base).min(UNIT);
        if positions.is_empty() {
            return None;
        }
        let state_len = state_len(head_dim);
        Some(Part {
            positions,
            q: &self.q[range.start * LANES..],
            q_step: self.pairs * LANES,
            head_dim,
            seen: &self.seen[range.clone()],
            weights: &mut self.weights[range.start * UNIT..range.end * UNIT],
            states: &mut self.states[range.start * state_len..range.end * state_len],
            softmax: &mut self.softmax[range],
        })
    }

    /// Ends a span of the pairs whose turn it is.
    fn fold(&mut self, call: &Call<'_>) {
        let state_len = state_len(call.cache.layout().head_dim);
        for m in self.turn.0.clone() {
            let at = m * state_len..(m + 1) * state_len;
            let later = &mut self.states[at.clone()];
            let (before, total) = (slice::from_mut(&mut self.largest[m]), &mut self.totals[at]);
            fold(call.isa, before, total, &[self.softmax[m].largest], later);
            later.fill(0.0);
            self.softmax[m] = Softmax::default();
        }
    }

    /// Ends the last span of all pairs: largest score and state of each. Those that saw no span before it have nothing
    /// to fold.
    fn results(&mut self, call: &Call<'_>) -> impl Iterator<Item = (f32, &[f32])> {
        let state_len = state_len(call.cache.layout().head_dim);
        let Tile { largest, softmax, states, totals, .. } = self;
        let each = largest.iter_mut().zip(softmax).zip(states.chunks_exact(state_len));
        each.zip(totals.chunks_exact_mut(state_len)).map(|(((largest, softmax), state), total)| {
            if *largest == f32::NEG_INFINITY {
                return (softmax.largest, state);
            }
            fold(call.isa, slice::from_mut(largest), total, &[softmax.largest], state);
            (*largest, &*total)
        })
    }
}

/// Pairs of every tile that take units of the same blocks together.
struct Together<'a> {
    sequence: &'a AttentionSequence<'a>,
    next: Next<'a>,
    /// Which tiles.
    tiles: Range<usize>,
    end: usize,
    /// Whether more than one tile has such pairs.
    several: bool,
}

struct Work<'a, 'm, E> {
    call: &'a Call<'a>,
    layout: &'a KvLayout,
    blocks: Blocks<'a, E>,
    tiles: &'a mut [Option<Tile<'m>>],
    /// A unit's keys or values as float32: by vector, `head_dim` lines of 16.
    wide: &'a mut [[f32; LANES]],
}

impl<E: Element> Work<'_, '_, E> {
    /// Takes the turn's pairs over its positions.
    fn units(&mut self, turn: &Turn<'_>) {
        let Turn { sequence, pairs: range, positions, next } = turn;
        let before = |pair: usize| {
            self.tiles.partition_point(|tile| tile.as_ref().is_some_and(|tile| tile.first + tile.pairs <= pair))
        };
        let tiles = before(range.start)..before(range.end - 1) + 1;
        let (mut start, mut end, mut taking) = (usize::MAX, 0, 0);
        for tile in self.tiles[tiles.clone()].iter_mut().flatten() {
            let seen = tile.take_turn(range, positions);
            if !seen.is_empty() {
                (start, end, taking) = (start.min(seen.start), end.max(seen.end), taking + 1);
            }
        }
        let together = Together { sequence, next: *next, tiles: tiles.clone(), end, several: taking > 1 };
        for unit in start / UNIT..end.div_ceil(UNIT) {
            self.unit(&together, unit * UNIT, start.saturating_sub(unit * UNIT));
            if ((unit + 1) * UNIT).is_multiple_of(SPAN) {
                self.tiles[tiles.clone()].iter_mut().flatten().for_each(|tile| tile.fold(self.call));
            }
        }
    }

    /// The unit at `base`, of which positions from `from` on are seen.
    fn unit(&mut self, together: &Together<'_>, base: usize, from: usize) {
        let to = (together.end - base).min(UNIT);
        let found = self.blocks.find(together.sequence, base, from..to);
        // What is needed next is on its way while the first tile multiplies: values during scores; during sums the keys
        // of the next unit, or of the sample whose turn is next.
        let step = LANES * size_of::<E>();
        let values = Ahead { at: found.values.map(<*const E>::cast), step };
        let next = if gathered_len(self.layout) > 0 {
            found.keys
        } else if base + UNIT < together.end {
            self.blocks.keys_of(Next {
                sequence: together.sequence,
                kv_head: self.blocks.kv_head,
                position: base + UNIT,
            })
        } else {
            self.blocks.keys_of(together.next)
        };
        let keys = Ahead { at: next.map(<*const E>::cast), step };
        if !together.several || size_of::<E>() == size_of::<f32>() {
            // SAFETY: `find` has found what any pair sees.
            unsafe { self.score(together, &found, &values) };
            // SAFETY: as above.
            unsafe { self.weigh(together, &found, &keys) };
        } else {
            let vectors = from / LANES..to.div_ceil(LANES);
            let wide = self.widen(found.keys, found.key_step, vectors.clone());
            // SAFETY: `widen` has copied all that any pair sees.
            unsafe { self.score(together, &Unit { base, keys: wide, key_step: LANES, values: wide }, &values) };
            let wide = self.widen(found.values, LANES, vectors);
            // SAFETY: as above.
            unsafe { self.weigh(together, &Unit { base, keys: wide, key_step: LANES, values: wide }, &keys) };
        }
    }

    /// # Safety
    /// As for [`score`].
    unsafe fn score<X: Element>(&mut self, together: &Together<'_>, unit: &Unit<X>, ahead: &Ahead) {
        let mut ahead = Some(ahead);
        for tile in self.tiles[together.tiles.clone()].iter_mut().flatten() {
            if let Some(part) = tile.part(unit.base, self.layout.head_dim) {
                // SAFETY: the caller's promise.
                unsafe { score(self.call.isa, part, unit, ahead.take()) };
            }
        }
    }

    /// # Safety
    /// As for [`weigh`].
    unsafe fn weigh<X: Element>(&mut self, together: &Together<'_>, unit: &Unit<X>, ahead: &Ahead) {
        let mut ahead = Some(ahead);
        for tile in self.tiles[together.tiles.clone()].iter_mut().flatten() {
            if let Some(part) = tile.part(unit.base, self.layout.head_dim) {
                // SAFETY: the caller's promise.
                unsafe { weigh(self.call.isa, part, unit, ahead.take()) };
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
}
