//! What every task of attention does, whichever arithmetic its tiles have: where its pairs are, in which order they take
//! which positions, and what becomes of the result.

use super::plan::{Task, seen};
use super::span::{SPAN, divide, record_len};
use super::{AttentionSequence, Call};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use std::ops::Range;

/// Positions from one step of the online softmax to the next; absolute, so the same for every query.
pub(super) const UNIT: usize = 64;
/// Vectors of positions in a unit.
pub(super) const VECTORS: usize = UNIT / LANES;

/// A pair's row and first column in the query and the output, and the positions that it sees.
pub(super) struct Place {
    pub row: usize,
    pub column: usize,
    /// The first position that it sees and the one after its last.
    pub seen: (usize, usize),
}

/// Where the pairs of a task are, in order.
pub(super) fn places_of<'a>(call: &'a Call<'_>, task: &Task) -> impl Iterator<Item = Place> + use<'a> {
    let layout = call.cache.layout();
    let group = call.shape.heads / layout.kv_heads;
    let (first_head, first_pair) = (task.kv_head as usize * group, task.first_pair as usize);
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let place = move |s: &AttentionSequence<'_>, pair: usize| Place {
        row: s.first_row + pair / group,
        column: (first_head + pair % group) * layout.head_dim,
        seen: seen(call.shape, s, pair / group),
    };
    let pairs = members.iter().enumerate().flat_map(move |(i, s)| {
        let from = if i == 0 { first_pair } else { 0 };
        (from..s.rows * group).map(move |pair| place(s, pair))
    });
    pairs.take(task.pairs as usize)
}

/// Writes the result of a pair.
pub(super) fn write(call: &Call<'_>, place: &Place, state: &[f32]) {
    // SAFETY: no other task has this row and head.
    let out = unsafe { call.out.part(place.row, place.column, call.cache.layout().head_dim) };
    divide(call.isa, state, out);
}

/// Pairs that take positions in the blocks of one sequence.
pub(super) struct Turn<'a> {
    pub sequence: &'a AttentionSequence<'a>,
    /// Among the task's.
    pub pairs: Range<usize>,
    /// As far as the pairs see them.
    pub positions: Range<usize>,
    /// Whose blocks are read after these, and from which position on.
    pub next: (&'a AttentionSequence<'a>, usize),
}

/// Calls `take` with the turns of a task in order: all pairs where the sequences share blocks, then those of each sequence.
pub(super) fn each_turn<'a>(call: &Call<'a>, task: &Task, mut take: impl FnMut(Turn<'a>)) {
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let all = task.only.map_or(0..usize::MAX, |only| only.span as usize * SPAN..(only.span as usize + 1) * SPAN);
    let shared = if members.len() > 1 { task.shared_units as usize * UNIT } else { usize::MAX };
    let own = all.start.max(shared);
    let (sequence, pairs) = (&members[0], 0..task.pairs as usize);
    take(Turn { sequence, pairs, positions: all.start..all.end.min(shared), next: (sequence, own.min(all.end)) });
    if members.len() > 1 {
        let mut first = 0;
        for (i, sequence) in members.iter().enumerate() {
            let end = first + sequence.rows * (call.shape.heads / call.cache.layout().kv_heads);
            let next = (members.get(i + 1).unwrap_or(sequence), own);
            take(Turn { sequence, pairs: first..end, positions: own..all.end, next });
            first = end;
        }
    }
}

/// Keeps the largest score and the state of each of the task's pairs if it is one of several that share rows, else writes
/// their results.
pub(super) fn put<'s>(
    call: &Call<'_>,
    task: &Task,
    states: impl Iterator<Item = (f32, &'s [f32])>,
    records: &SharedSlice<'_, f32>,
) {
    let Some(only) = task.only else {
        return places_of(call, task).zip(states).for_each(|(place, (_, state))| write(call, &place, state));
    };
    let len = record_len(call.cache.layout().head_dim);
    for (m, (largest, state)) in states.enumerate() {
        // SAFETY: no other task has this record.
        let record = unsafe { records.part((only.first_record as usize + m) * len, len) };
        record[0] = largest;
        record[LANES..].copy_from_slice(state);
    }
}
