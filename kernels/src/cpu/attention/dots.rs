//! A task of attention in products of bfloat16 pairs, for a cache of bfloat16 on a processor (or an emulation) that has
//! an instruction for these. Queries are rounded to bfloat16 once, and so are the softmax weights; sums are float32.
//!
//! Tiles are cut anew for each unit, of the pairs whose turn it is: all that a tile needs lies by pair.

use super::Call;
use super::blocks::{Ahead, Blocks, gathered_len};
use super::dot_tile::{PAIRS_ALONE, PAIRS_BESIDE, Part, round_query, take};
use super::span::fold;
use super::task::{Next, Turn, each_turn, places_of, put};
use super::units::{SPAN, TilePairs, UNIT, state_len};
use super::work::Task;
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::kv_layout::KvLayout;
use half::bf16;
use std::ops::Range;

/// What the plan cuts tasks by.
pub(super) const TILE_PAIRS: TilePairs = TilePairs { alone: PAIRS_ALONE, beside: PAIRS_BESIDE };
const MOST_PAIRS: usize = TILE_PAIRS.most_of_task();

/// Float32 values of scratch that [`run`] needs: a unit's keys and values in whole vectors, for block sizes that are
/// not; two states and the query of each pair.
pub(super) fn scratch_len(layout: &KvLayout) -> usize {
    gathered_len(layout) + MOST_PAIRS * (2 * state_len(layout.head_dim) + query_len(layout.head_dim))
}

/// Float32 values of scratch that hold a query: whole vectors of 16 pairs of bfloat16; half of the last may be zeros.
fn query_len(head_dim: usize) -> usize {
    head_dim.div_ceil(2 * LANES) * LANES
}

/// Computes the outputs of the task's pairs, or their records.
pub(super) fn run<'a>(
    call: &Call<'a>,
    task: &Task,
    after: Next<'a>,
    records: &SharedSlice<'_, f32>,
    scratch: &mut [f32],
) {
    let layout = call.cache.layout();
    let (gathered, rest) = scratch.split_at_mut(gathered_len(layout));
    let mut pairs = Pairs::new(call, task, rest);
    let mut blocks = Blocks::new(call, task.kv_head as usize, gathered);
    each_turn(call, task, after, |turn| pairs.units(call, &mut blocks, &turn));
    put(call, task, pairs.results(call), records);
}

/// The pairs of a task.
struct Pairs<'a> {
    /// The first position that each sees and the one after its last.
    seen: [(usize, usize); MOST_PAIRS],
    /// To what the weights of the span that is being computed are relative, and those of the spans before it.
    reference: [f32; MOST_PAIRS],
    reference_before: [f32; MOST_PAIRS],
    /// `[pairs][state_len]`, of the span that is being computed, and of the spans before it.
    states: &'a mut [f32],
    states_before: &'a mut [f32],
    /// `[head_dim / 32][pairs][16]` pairs of bfloat16.
    queries: &'a [f32],
    count: usize,
}

impl<'a> Pairs<'a> {
    fn new(call: &Call<'_>, task: &Task, memory: &'a mut [f32]) -> Pairs<'a> {
        let head_dim = call.cache.layout().head_dim;
        let count = task.pairs as usize;
        let (states, rest) = memory.split_at_mut(count * state_len(head_dim));
        let (states_before, rest) = rest.split_at_mut(count * state_len(head_dim));
        let queries = &mut rest[..count * query_len(head_dim)];
        states.fill(0.0);
        let mut seen = [(0, 0); MOST_PAIRS];
        for (pair, place) in places_of(call, task).enumerate() {
            seen[pair] = place.seen;
            let query = &call.q.row(place.row)[place.column..][..head_dim];
            // Queries of rows to come are on their way meanwhile.
            round_query(call.isa, query, 4 * call.q.stride(), &mut queries.as_chunks_mut().0[pair..], count);
        }
        let none = [f32::NEG_INFINITY; MOST_PAIRS];
        Pairs { seen, reference: none, reference_before: none, states, states_before, queries, count }
    }

    /// Takes the turn's pairs over its positions.
    fn units(&mut self, call: &Call<'_>, blocks: &mut Blocks<'_, bf16>, turn: &Turn<'_>) {
        let each = self.seen[turn.pairs.clone()].iter();
        let each = each.map(|(from, end)| *from.max(&turn.positions.start)..*end.min(&turn.positions.end));
        let all = each.filter(|seen| !seen.is_empty()).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Range { start, end } = all.unwrap_or(0..0);
        for base in (start / UNIT * UNIT..end).step_by(UNIT) {
            let unit = blocks.find(turn.sequence, base, start.saturating_sub(base)..(end - base).min(UNIT));
            // What is needed next is on its way while the first tile multiplies: values during scores; during sums the
            // keys of the next unit, or of the sample whose turn is next.
            let next = if gathered_len(call.cache.layout()) > 0 {
                unit.keys
            } else if base + UNIT < end {
                blocks.keys_of(Next { sequence: turn.sequence, kv_head: blocks.kv_head, position: base + UNIT })
            } else {
                blocks.keys_of(turn.next)
            };
            let step = 2 * LANES * size_of::<bf16>();
            let ahead = [unit.values, next].map(|at| Ahead { at: at.map(<*const bf16>::cast), step });
            let mut ahead = Some(&ahead);
            let taking = self.taking(&turn.pairs, base);
            let count = taking.len();
            let tiles = if count <= PAIRS_ALONE { 1 } else { count.div_ceil(PAIRS_BESIDE) };
            for i in 0..tiles {
                let range = taking.start + count * i / tiles..taking.start + count * (i + 1) / tiles;
                if let Some(part) = self.part(call, range, base, &turn.positions) {
                    // SAFETY: `find` has found what any pair sees.
                    unsafe { take(call.isa, part, &unit, ahead.take()) };
                }
            }
            if (base + UNIT).is_multiple_of(SPAN) {
                self.fold(call, turn.pairs.clone());
            }
        }
    }

    /// Those of `pairs` from the first to the last that sees some of the unit at `base`.
    fn taking(&self, pairs: &Range<usize>, base: usize) -> Range<usize> {
        let sees = |pair: &usize| self.seen[*pair].0 < base + UNIT && base < self.seen[*pair].1;
        let first = pairs.clone().find(sees).unwrap_or(pairs.end);
        let last = pairs.clone().rfind(sees).unwrap_or(first);
        first..pairs.end.min(last + 1)
    }

    /// Pairs that take the unit at `base` as one tile, if any of them sees some of it.
    fn part(
        &mut self,
        call: &Call<'_>,
        pairs: Range<usize>,
        base: usize,
        positions: &Range<usize>,
    ) -> Option<Part<'_>> {
        let head_dim = call.cache.layout().head_dim;
        let whole = |seen: &(usize, usize)| seen.0 <= base && base + UNIT <= seen.1;
        let (mut seen, mut all) = ([(0, UNIT as u8); PAIRS_ALONE], 0..UNIT);
        // Most tiles of a long prompt see all of a unit: they are spared what follows.
        if positions.start > base || positions.end < base + UNIT || !self.seen[pairs.clone()].iter().all(whole) {
            let inside =
                |position: usize| position.clamp(positions.start, positions.end).saturating_sub(base).min(UNIT) as u8;
            for (seen, pair) in seen.iter_mut().zip(pairs.clone()) {
                *seen = (inside(self.seen[pair].0), inside(self.seen[pair].1));
            }
            let each = seen[..pairs.len()].iter().filter(|(from, end)| from < end);
            let each = each.map(|(from, end)| usize::from(*from)..usize::from(*end));
            all = each.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?;
        }
        let state_len = state_len(head_dim);
        Some(Part {
            queries: &self.queries[pairs.start * LANES..],
            query_step: self.count * LANES,
            head_dim,
            scale: call.shape.scale * std::f32::consts::LOG2_E,
            seen,
            positions: all,
            references: &mut self.reference[pairs.clone()],
            states: &mut self.states[pairs.start * state_len..pairs.end * state_len],
        })
    }

    /// Ends a span of these pairs.
    fn fold(&mut self, call: &Call<'_>, pairs: Range<usize>) {
        if pairs == (0..self.count)
            && self.reference_before[pairs.clone()].iter().all(|none| *none == f32::NEG_INFINITY)
        {
            // The first span of all: there is nothing to add it to.
            std::mem::swap(&mut self.states, &mut self.states_before);
            std::mem::swap(&mut self.reference, &mut self.reference_before);
            return self.states.fill(0.0);
        }
        let state_len = state_len(call.cache.layout().head_dim);
        let at = pairs.start * state_len..pairs.end * state_len;
        let (later, before) = (&mut self.states[at.clone()], &mut self.states_before[at]);
        fold(call.isa, &mut self.reference_before[pairs.clone()], before, &self.reference[pairs.clone()], later);
        later.fill(0.0);
        self.reference[pairs].fill(f32::NEG_INFINITY);
    }

    /// Ends the last span of all pairs: what weights are relative to, and the state of each.
    fn results(&mut self, call: &Call<'_>) -> impl Iterator<Item = (f32, &[f32])> {
        let state_len = state_len(call.cache.layout().head_dim);
        let Pairs { reference, reference_before, states, states_before, count, .. } = self;
        let (later, before) = (&mut reference[..*count], &mut reference_before[..*count]);
        if before.iter().any(|before| *before != f32::NEG_INFINITY) {
            fold(call.isa, before, states_before, later, states);
            before.iter().copied().zip(states_before.chunks_exact(state_len))
        } else {
            later.iter().copied().zip(states.chunks_exact(state_len))
        }
    }
}
