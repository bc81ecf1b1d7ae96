//! A task of attention in dot products of bfloat16 pairs, for a bfloat16 cache on a processor (or an emulation) that
//! has an instruction for these. Queries and softmax weights are rounded to bfloat16 once; sums are float32.
//!
//! The tiles are chosen again for each unit from the queries that see it. This is possible because all state is kept
//! per query.

use super::AttentionCall;
use super::blocks::{Blocks, PrefetchLines, gathered_len};
use super::dot_tile::{QUERIES_ALONE, QUERIES_BESIDE, QUERIES_TILE, RoundedQueries, round_query, take};
use super::plan::AttentionTask;
use super::span::fold;
use super::task::{KvPass, NextKeys, each_pass, places_of, put};
use super::tiles::{self, UnitTiles, tile_pairs};
use super::units::{SPAN, TileSize, UNIT, state_len};
use crate::cpu::isa::{Isa, Products};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::kv_layout::KvLayout;
use half::bf16;
use std::ops::Range;

/// The tile sizes that the plan uses to cut the call into tasks.
pub(super) const TILE_SIZE: TileSize = TileSize { alone: QUERIES_ALONE, beside: QUERIES_BESIDE };
const MOST_QUERIES: usize = TILE_SIZE.most_of_task();

/// Float32 values of scratch that [`run`] needs: copies of a unit's keys and values for block sizes that are not whole
/// vectors, and two softmax states and the rounded query for each query. Products of tiles need the unit in tiles, and
/// read the queries of a tile as 16 even if there are fewer.
pub(super) fn scratch_len(isa: Isa, layout: &KvLayout) -> usize {
    let head_dim = layout.head_dim;
    let of_queries = MOST_QUERIES * (2 * state_len(head_dim) + query_len(isa, head_dim));
    let of_tiles = if uses_tiles(isa) { tiles::scratch_len(head_dim) + QUERIES_TILE * LANES } else { 0 };
    gathered_len(layout) + of_tiles + of_queries
}

fn uses_tiles(isa: Isa) -> bool {
    isa.products() == Products::Tiles
}

/// Bfloat16 pairs in a vector of a rounded query.
fn query_pairs(isa: Isa, head_dim: usize) -> usize {
    if uses_tiles(isa) { tile_pairs(head_dim) } else { LANES }
}

/// Float32 values that hold one rounded query: whole vectors. The second half of the last one, or of each, may be
/// zeros.
fn query_len(isa: Isa, head_dim: usize) -> usize {
    head_dim.div_ceil(2 * query_pairs(isa, head_dim)) * LANES
}

/// Computes the outputs of the task's queries, or their partial results.
pub(super) fn run<'a>(
    call: &AttentionCall<'a>,
    task: &AttentionTask,
    after: NextKeys<'a>,
    partials: &SharedSlice<'_, f32>,
    scratch: &mut [f32],
) {
    let layout = call.cache.layout();
    let (gathered, rest) = scratch.split_at_mut(gathered_len(layout));
    let (of_tiles, rest) =
        rest.split_at_mut(if uses_tiles(call.isa) { tiles::scratch_len(layout.head_dim) } else { 0 });
    let mut tiles = match of_tiles {
        [] => None,
        scratch => Some(UnitTiles::new(call.isa, layout.head_dim, task.queries as usize, scratch)),
    };
    let mut queries = TaskQueries::new(call, task, rest);
    let mut blocks = Blocks::new(call, task.kv_head as usize, gathered);
    each_pass(call, task, after, |pass| queries.units(call, &mut blocks, tiles.as_mut(), &pass));
    put(call, task, queries.results(call), partials);
}

/// The queries of a task, and their softmax states.
struct TaskQueries<'a> {
    /// The first position that each query sees and the one after the last.
    seen: [(usize, usize); MOST_QUERIES],
    /// The reference scores that softmax weights are relative to, per query: of the span being computed, and of the
    /// spans before it.
    reference: [f32; MOST_QUERIES],
    reference_before: [f32; MOST_QUERIES],
    /// Softmax states `[queries][state_len]`: of the span being computed, and of the spans before it.
    states: &'a mut [f32],
    states_before: &'a mut [f32],
    /// The rounded queries: `[vector][queries][16]` pairs of bfloat16.
    q: &'a [f32],
    count: usize,
}

impl<'a> TaskQueries<'a> {
    fn new(call: &AttentionCall<'_>, task: &AttentionTask, memory: &'a mut [f32]) -> TaskQueries<'a> {
        let head_dim = call.cache.layout().head_dim;
        let count = task.queries as usize;
        let (states, rest) = memory.split_at_mut(count * state_len(head_dim));
        let (states_before, rest) = rest.split_at_mut(count * state_len(head_dim));
        let q = rest;
        states.fill(0.0);
        let mut seen = [(0, 0); MOST_QUERIES];
        for (query, place) in places_of(call, task).enumerate() {
            seen[query] = place.seen;
            let elements = &call.q.row(place.row)[place.column..][..head_dim];
            // The query four rows further on is prefetched.
            let (ahead, pairs) = (4 * call.q.stride(), query_pairs(call.isa, head_dim));
            round_query(call.isa, elements, ahead, &mut q.as_chunks_mut().0[query..], count, pairs);
        }
        let none = [f32::NEG_INFINITY; MOST_QUERIES];
        TaskQueries { seen, reference: none, reference_before: none, states, states_before, q, count }
    }

    /// Runs the queries of a pass over its positions, unit by unit.
    fn units(
        &mut self,
        call: &AttentionCall<'_>,
        blocks: &mut Blocks<'_, bf16>,
        mut tiles: Option<&mut UnitTiles<'_>>,
        pass: &KvPass<'_>,
    ) {
        let each = self.seen[pass.queries.clone()].iter();
        let each = each.map(|(from, end)| *from.max(&pass.positions.start)..*end.min(&pass.positions.end));
        let all = each.filter(|seen| !seen.is_empty()).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Range { start, end } = all.unwrap_or(0..0);
        for base in (start / UNIT * UNIT..end).step_by(UNIT) {
            let positions = start.saturating_sub(base)..(end - base).min(UNIT);
            let unit = blocks.find(pass.sequence, base, positions.clone());
            // The first tile of a unit prefetches what is read next: the unit's values while it computes scores, and
            // while it adds weighted values the keys of the next unit, or of the next pass.
            let next = if gathered_len(call.cache.layout()) > 0 {
                unit.keys
            } else if base + UNIT < end {
                blocks.keys_of(NextKeys { sequence: pass.sequence, kv_head: blocks.kv_head, position: base + UNIT })
            } else {
                blocks.keys_of(pass.next)
            };
            let step = 2 * LANES * size_of::<bf16>();
            let ahead = [unit.values, next].map(|at| PrefetchLines { at: at.map(<*const bf16>::cast), step });
            let mut ahead = Some(&ahead);
            if let (Some(tiles), Some(ahead)) = (&mut tiles, ahead) {
                // SAFETY: `find` has found all these positions.
                unsafe { tiles.pack(&unit, positions, ahead) };
            }
            let taking = self.taking(&pass.queries, base);
            let count = taking.len();
            let parts = match tiles {
                Some(_) => count.div_ceil(QUERIES_TILE),
                None if count <= QUERIES_ALONE => 1,
                None => count.div_ceil(QUERIES_BESIDE),
            };
            for i in 0..parts {
                let range = taking.start + count * i / parts..taking.start + count * (i + 1) / parts;
                match (self.active(call, range, base, &pass.positions), &mut tiles) {
                    (Some(active), Some(tiles)) => tiles.take(active),
                    // SAFETY: `find` has found all positions that any of the queries sees.
                    (Some(active), None) => unsafe { take(call.isa, active, &unit, ahead.take()) },
                    (None, _) => {}
                }
            }
            if (base + UNIT).is_multiple_of(SPAN) {
                self.fold(call, pass.queries.clone());
            }
        }
    }

    /// The queries from the first to the last of `queries` that sees a position of the unit at `base`.
    fn taking(&self, queries: &Range<usize>, base: usize) -> Range<usize> {
        let sees = |query: &usize| self.seen[*query].0 < base + UNIT && base < self.seen[*query].1;
        let first = queries.clone().find(sees).unwrap_or(queries.end);
        let last = queries.clone().rfind(sees).unwrap_or(first);
        first..queries.end.min(last + 1)
    }

    /// The kernel's view of `queries` for the unit at `base`, or `None` if none of them sees a position of it.
    fn active(
        &mut self,
        call: &AttentionCall<'_>,
        queries: Range<usize>,
        base: usize,
        positions: &Range<usize>,
    ) -> Option<RoundedQueries<'_>> {
        let head_dim = call.cache.layout().head_dim;
        let whole = |seen: &(usize, usize)| seen.0 <= base && base + UNIT <= seen.1;
        let (mut seen, mut all) = ([(0, UNIT as u8); QUERIES_TILE], 0..UNIT);
        // Most tiles of a long prompt see the whole unit: they skip the search for the visible positions.
        if positions.start > base || positions.end < base + UNIT || !self.seen[queries.clone()].iter().all(whole) {
            let inside =
                |position: usize| position.clamp(positions.start, positions.end).saturating_sub(base).min(UNIT) as u8;
            for (seen, query) in seen.iter_mut().zip(queries.clone()) {
                *seen = (inside(self.seen[query].0), inside(self.seen[query].1));
            }
            let each = seen[..queries.len()].iter().filter(|(from, end)| from < end);
            let each = each.map(|(from, end)| usize::from(*from)..usize::from(*end));
            all = each.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?;
        }
        let state_len = state_len(head_dim);
        Some(RoundedQueries {
            q: &self.q[queries.start * LANES..],
            q_step: self.count * LANES,
            head_dim,
            scale: call.shape.scale * std::f32::consts::LOG2_E,
            seen,
            positions: all,
            references: &mut self.reference[queries.clone()],
            states: &mut self.states[queries.start * state_len..queries.end * state_len],
        })
    }

    /// Ends a span of these queries: folds its states into those of the spans before it.
    fn fold(&mut self, call: &AttentionCall<'_>, queries: Range<usize>) {
        if queries == (0..self.count)
            && self.reference_before[queries.clone()].iter().all(|none| *none == f32::NEG_INFINITY)
        {
            // For the first span there is nothing to fold into, so the buffers are swapped.
            std::mem::swap(&mut self.states, &mut self.states_before);
            std::mem::swap(&mut self.reference, &mut self.reference_before);
            return self.states.fill(0.0);
        }
        let state_len = state_len(call.cache.layout().head_dim);
        let at = queries.start * state_len..queries.end * state_len;
        let (later, before) = (&mut self.states[at.clone()], &mut self.states_before[at]);
        fold(call.isa, &mut self.reference_before[queries.clone()], before, &self.reference[queries.clone()], later);
        later.fill(0.0);
        self.reference[queries].fill(f32::NEG_INFINITY);
    }

    /// Ends the last span of all queries, and returns the reference score and the softmax state of each.
    fn results(&mut self, call: &AttentionCall<'_>) -> impl Iterator<Item = (f32, &[f32])> {
        let state_len = state_len(call.cache.layout().head_dim);
        let TaskQueries { reference, reference_before, states, states_before, count, .. } = self;
        let (later, before) = (&mut reference[..*count], &mut reference_before[..*count]);
        if before.iter().any(|before| *before != f32::NEG_INFINITY) {
            fold(call.isa, before, states_before, later, states);
            before.iter().copied().zip(states_before.chunks_exact(state_len))
        } else {
            later.iter().copied().zip(states.chunks_exact(state_len))
        }
    }
}
