//! A task of attention in float32: queries that share a KV head attend to all positions that they see, or to one span.

use super::blocks::{Blocks, KvUnit, PrefetchLines, gathered_len};
use super::plan::AttentionTask;
use super::span::fold;
use super::task::{KvPass, NextKeys, QueryPlace, each_pass, places_of, put};
use super::unit::{ActiveQueries, Softmax, scale_lines, score, weigh, widen};
use super::units::{MOST_TILES, SPAN, TileSize, UNIT, VECTORS, state_len};
use super::{AttentionCall, AttentionSequence};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::cpu::tile::{MOST_ROWS, TileElement};
use crate::kv_layout::KvLayout;
use std::ops::Range;
use std::slice;

/// Float32 values of scratch that [`run`] needs: the keys or values of a unit, widened; copies of its keys and values
/// for block sizes that are not whole vectors; and the query, the softmax weights and two softmax states of each query.
pub(super) fn scratch_len(tile: TileSize, layout: &KvLayout) -> usize {
    let queries = tile.most_of_task().max(tile.alone);
    UNIT * layout.head_dim + gathered_len(layout) + queries * scratch_per_query(layout)
}

fn scratch_per_query(layout: &KvLayout) -> usize {
    layout.head_dim + UNIT + 2 * state_len(layout.head_dim)
}

/// Computes the outputs of the task's queries, or their partial results.
pub(super) fn run<'a, E: TileElement>(
    call: &AttentionCall<'a>,
    task: &AttentionTask,
    after: NextKeys<'a>,
    tile: TileSize,
    partials: &SharedSlice<'_, f32>,
    scratch: &mut [f32],
) {
    let layout = call.cache.layout();
    let (wide, rest) = scratch.split_at_mut(UNIT * layout.head_dim);
    let (gathered, mut rest) = rest.split_at_mut(gathered_len(layout));
    let mut tiles = [const { None }; MOST_TILES];
    let (mut count, mut first, mut places) = (0, 0, places_of(call, task));
    while first < task.queries as usize {
        let queries = next_tile(call, task, tile, first);
        let (own, others) = rest.split_at_mut(queries * scratch_per_query(layout));
        rest = others;
        tiles[count] = Some(AttentionTile::new(call, &mut places, first..first + queries, own));
        (count, first) = (count + 1, first + queries);
    }
    let mut task_tiles = TaskTiles::<E> {
        call,
        layout,
        blocks: Blocks::new(call, task.kv_head as usize, gathered),
        tiles: &mut tiles[..count],
        wide: wide.as_chunks_mut().0,
    };
    each_pass(call, task, after, |pass| task_tiles.units(&pass));
    put(call, task, tiles.iter_mut().flatten().flat_map(|tile| tile.results(call)), partials);
}

/// How many queries the tile has that begins at query `first` of the task. In a task of one sequence it is as many as
/// fit; in a task of several sequences it is those of whole sequences, since each has positions of its own.
fn next_tile(call: &AttentionCall<'_>, task: &AttentionTask, tile: TileSize, first: usize) -> usize {
    let queries = task.queries as usize;
    let most = if queries <= tile.alone { tile.alone } else { tile.beside };
    if task.sequences == 1 {
        return most.min(queries - first);
    }
    let group = call.shape.heads / call.cache.layout().kv_heads;
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let ends = members.iter().scan(0, |end, s| {
        *end += s.rows * group;
        Some(*end)
    });
    let mut own = ends.skip_while(|end| *end <= first).map(|end| end - first);
    let one = own.next().expect("a query is some member's");
    own.take_while(|queries| *queries <= most).last().unwrap_or(one)
}

/// The queries of one register tile, and their softmax states.
struct AttentionTile<'a> {
    /// The tile's first query, counted in the task.
    first: usize,
    queries: usize,
    /// The first position that each query sees and the one after the last.
    seen: [(usize, usize); MOST_ROWS],
    /// The current pass: the queries of the tile that take part, and the positions that any of them sees in it.
    pass: (Range<usize>, Range<usize>),
    /// The softmax of each query over the span being computed.
    softmax: [Softmax; MOST_ROWS],
    /// The largest score of each query in the spans before the current one.
    largest: [f32; MOST_ROWS],
    /// The queries: `[head_dim / 16][queries][16]`, scaled so that scores are exponents of 2.
    q: &'a mut [f32],
    /// Softmax weights of a unit: `[queries][UNIT]`.
    weights: &'a mut [f32],
    /// Softmax states of the span being computed: `[queries][state_len]`.
    states: &'a mut [f32],
    /// Softmax states of the spans before the current one: `[queries][state_len]`.
    totals: &'a mut [f32],
}

impl<'a> AttentionTile<'a> {
    fn new(
        call: &AttentionCall<'_>,
        places: &mut impl Iterator<Item = QueryPlace>,
        queries: Range<usize>,
        memory: &'a mut [f32],
    ) -> AttentionTile<'a> {
        let head_dim = call.cache.layout().head_dim;
        let (q, rest) = memory.split_at_mut(queries.len() * head_dim);
        let (weights, rest) = rest.split_at_mut(queries.len() * UNIT);
        let (states, totals) = rest.split_at_mut(queries.len() * state_len(head_dim));
        states.fill(0.0);
        let largest = [f32::NEG_INFINITY; MOST_ROWS];
        let (seen, softmax) = ([(0, 0); MOST_ROWS], [Softmax::default(); MOST_ROWS]);
        let (first, queries) = (queries.start, queries.len());
        let pass = (0..0, 0..0);
        let mut tile = AttentionTile { first, queries, seen, pass, softmax, largest, q, weights, states, totals };
        // Exponentials are powers of 2. The factor log2(e) goes into the queries here, which saves a product per
        // exponential.
        let scale = call.shape.scale * std::f32::consts::LOG2_E;
        for (m, place) in places.take(queries).enumerate() {
            tile.seen[m] = place.seen;
            let query = call.q.row(place.row)[place.column..][..head_dim].as_chunks().0;
            // The query four rows further on is prefetched.
            let query = (query, 4 * call.q.stride());
            scale_lines(call.isa, query, scale, &mut tile.q.as_chunks_mut().0[m..], queries);
        }
        tile
    }

    /// Starts a pass over `positions` for the tile's queries in `range`, which counts in the task. Returns the
    /// positions that any of them sees.
    fn begin_pass(&mut self, range: &Range<usize>, positions: &Range<usize>) -> Range<usize> {
        let own = |query: usize| query.saturating_sub(self.first).min(self.queries);
        let own = own(range.start)..own(range.end);
        let each = self.seen[own.clone()].iter();
        let each = each.map(|(from, end)| *from.max(&positions.start)..*end.min(&positions.end));
        let all = each.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        self.pass = (own, all.clone());
        all
    }

    /// The kernel's view of the queries of the current pass for the unit at `base`, or `None` if none of them sees a
    /// position of it.
    fn active(&mut self, base: usize, head_dim: usize) -> Option<ActiveQueries<'_>> {
        let (range, seen) = self.pass.clone();
        let positions = seen.start.saturating_sub(base)..seen.end.saturating_sub(base).min(UNIT);
        if positions.is_empty() {
            return None;
        }
        let state_len = state_len(head_dim);
        Some(ActiveQueries {
            positions,
            q: &self.q[range.start * LANES..],
            q_step: self.queries * LANES,
            head_dim,
            seen: &self.seen[range.clone()],
            weights: &mut self.weights[range.start * UNIT..range.end * UNIT],
            states: &mut self.states[range.start * state_len..range.end * state_len],
            softmax: &mut self.softmax[range],
        })
    }

    /// Ends a span of the queries of the current pass: folds its states into those of the spans before it.
    fn fold(&mut self, call: &AttentionCall<'_>) {
        let state_len = state_len(call.cache.layout().head_dim);
        for m in self.pass.0.clone() {
            let at = m * state_len..(m + 1) * state_len;
            let later = &mut self.states[at.clone()];
            let (before, total) = (slice::from_mut(&mut self.largest[m]), &mut self.totals[at]);
            fold(call.isa, before, total, &[self.softmax[m].largest], later);
            later.fill(0.0);
            self.softmax[m] = Softmax::default();
        }
    }

    /// Ends the last span of all queries, and returns the largest score and the softmax state of each. Queries that saw
    /// no earlier span have nothing to fold.
    fn results(&mut self, call: &AttentionCall<'_>) -> impl Iterator<Item = (f32, &[f32])> {
        let state_len = state_len(call.cache.layout().head_dim);
        let AttentionTile { largest, softmax, states, totals, .. } = self;
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

/// The tiles that take part in a pass, over the KV blocks of one sequence.
struct PassTiles<'a> {
    sequence: &'a AttentionSequence<'a>,
    next: NextKeys<'a>,
    /// The tiles, counted in the task.
    tiles: Range<usize>,
    end: usize,
    /// Whether more than one tile has queries that take part.
    several: bool,
}

struct TaskTiles<'a, 'm, E> {
    call: &'a AttentionCall<'a>,
    layout: &'a KvLayout,
    blocks: Blocks<'a, E>,
    tiles: &'a mut [Option<AttentionTile<'m>>],
    /// The keys or values of a unit as float32: for each vector of positions `head_dim` lines of 16.
    wide: &'a mut [[f32; LANES]],
}

impl<E: TileElement> TaskTiles<'_, '_, E> {
    /// Runs the queries of a pass over its positions, unit by unit.
    fn units(&mut self, pass: &KvPass<'_>) {
        let KvPass { sequence, queries: range, positions, next } = pass;
        let before = |query: usize| {
            self.tiles.partition_point(|tile| tile.as_ref().is_some_and(|tile| tile.first + tile.queries <= query))
        };
        let tiles = before(range.start)..before(range.end - 1) + 1;
        let (mut start, mut end, mut taking) = (usize::MAX, 0, 0);
        for tile in self.tiles[tiles.clone()].iter_mut().flatten() {
            let seen = tile.begin_pass(range, positions);
            if !seen.is_empty() {
                (start, end, taking) = (start.min(seen.start), end.max(seen.end), taking + 1);
            }
        }
        let pass_tiles = PassTiles { sequence, next: *next, tiles: tiles.clone(), end, several: taking > 1 };
        for unit in start / UNIT..end.div_ceil(UNIT) {
            self.unit(&pass_tiles, unit * UNIT, start.saturating_sub(unit * UNIT));
            if ((unit + 1) * UNIT).is_multiple_of(SPAN) {
                self.tiles[tiles.clone()].iter_mut().flatten().for_each(|tile| tile.fold(self.call));
            }
        }
    }

    /// Processes the unit at `base`, of which the positions before `from` are not seen.
    fn unit(&mut self, pass_tiles: &PassTiles<'_>, base: usize, from: usize) {
        let to = (pass_tiles.end - base).min(UNIT);
        let found = self.blocks.find(pass_tiles.sequence, base, from..to);
        // The first tile of a unit prefetches what is read next: the unit's values while it computes scores, and while
        // it adds weighted values the keys of the next unit, or of the next pass.
        let step = LANES * size_of::<E>();
        let values = PrefetchLines { at: found.values.map(<*const E>::cast), step };
        let next = if gathered_len(self.layout) > 0 {
            found.keys
        } else if base + UNIT < pass_tiles.end {
            self.blocks.keys_of(NextKeys {
                sequence: pass_tiles.sequence,
                kv_head: self.blocks.kv_head,
                position: base + UNIT,
            })
        } else {
            self.blocks.keys_of(pass_tiles.next)
        };
        let keys = PrefetchLines { at: next.map(<*const E>::cast), step };
        if !pass_tiles.several || size_of::<E>() == size_of::<f32>() {
            // SAFETY: `find` has found all positions that any of the queries sees.
            unsafe { self.score(pass_tiles, &found, &values) };
            // SAFETY: as above.
            unsafe { self.weigh(pass_tiles, &found, &keys) };
        } else {
            let vectors = from / LANES..to.div_ceil(LANES);
            let wide = self.widen(found.keys, found.key_step, vectors.clone());
            // SAFETY: `widen` has copied all positions that any of the queries sees.
            unsafe { self.score(pass_tiles, &KvUnit { base, keys: wide, key_step: LANES, values: wide }, &values) };
            let wide = self.widen(found.values, LANES, vectors);
            // SAFETY: as above.
            unsafe { self.weigh(pass_tiles, &KvUnit { base, keys: wide, key_step: LANES, values: wide }, &keys) };
        }
    }

    /// # Safety
    /// As for [`score`].
    unsafe fn score<X: TileElement>(&mut self, pass_tiles: &PassTiles<'_>, unit: &KvUnit<X>, ahead: &PrefetchLines) {
        let mut ahead = Some(ahead);
        for tile in self.tiles[pass_tiles.tiles.clone()].iter_mut().flatten() {
            if let Some(active) = tile.active(unit.base, self.layout.head_dim) {
                // SAFETY: the caller's promise.
                unsafe { score(self.call.isa, active, unit, ahead.take()) };
            }
        }
    }

    /// # Safety
    /// As for [`weigh`].
    unsafe fn weigh<X: TileElement>(&mut self, pass_tiles: &PassTiles<'_>, unit: &KvUnit<X>, ahead: &PrefetchLines) {
        let mut ahead = Some(ahead);
        for tile in self.tiles[pass_tiles.tiles.clone()].iter_mut().flatten() {
            if let Some(active) = tile.active(unit.base, self.layout.head_dim) {
                // SAFETY: the caller's promise.
                unsafe { weigh(self.call.isa, active, unit, ahead.take()) };
            }
        }
    }

    /// Widens the vectors of a unit, each `head_dim` lines of 16, to float32 copies.
    fn widen(&mut self, from: [*const E; VECTORS], step: usize, vectors: Range<usize>) -> [*const f32; VECTORS] {
        let lines = self.layout.head_dim;
        for vector in vectors {
            let to = &mut self.wide[vector * lines..][..lines];
            // SAFETY: a vector that `find` has found has that many lines.
            unsafe { widen(self.call.isa, from[vector], step, to) };
        }
        std::array::from_fn(|vector| self.wide[vector * lines..].as_ptr().cast())
    }
}
