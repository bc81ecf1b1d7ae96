//! What every task of attention does, whichever arithmetic its tiles have: where its pairs are, in which order they
//! take which positions, and what becomes of the result.

use super::plan::seen;
use super::span::{divide, fold};
use super::units::{SPAN, UNIT, record_len};
use super::work::{Split, Task};
use super::{AttentionSequence, Call};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::kv_layout::KvLayout;
use std::ops::Range;
use std::slice;

/// A pair's row and first column in the query and the output, and the positions that it sees.
pub(super) struct Place {
    pub row: usize,
    pub column: usize,
    /// The first position that it sees and the one after its last.
    pub seen: (usize, usize),
}

/// Where the pairs of a task are, in order.
pub(super) fn places_of<'a>(call: &'a Call<'_>, task: &Task) -> Places<'a> {
    let group = call.shape.heads / call.cache.layout().kv_heads;
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let (row, head) = (task.first_pair as usize / group, task.first_pair as usize % group);
    Places { call, members, row, head, first_head: task.kv_head as usize * group, group, left: task.pairs as usize }
}

/// An iterator, as plain as it can be: it is run for every query row.
pub(super) struct Places<'a> {
    call: &'a Call<'a>,
    /// The sequence of the next pair and those after it.
    members: &'a [AttentionSequence<'a>],
    row: usize,
    /// Among the heads of the group.
    head: usize,
    first_head: usize,
    group: usize,
    left: usize,
}

impl Iterator for Places<'_> {
    type Item = Place;

    #[inline]
    fn next(&mut self) -> Option<Place> {
        if self.left == 0 {
            return None;
        }
        while self.row == self.members[0].rows {
            (self.members, self.row) = (&self.members[1..], 0);
        }
        let (call, s) = (self.call, &self.members[0]);
        let column = (self.first_head + self.head) * call.cache.layout().head_dim;
        let place = Place { row: s.first_row + self.row, column, seen: seen(call.shape, s, self.row) };
        self.left -= 1;
        self.head += 1;
        if self.head == self.group {
            (self.head, self.row) = (0, self.row + 1);
        }
        Some(place)
    }
}

/// Writes the result of a pair.
fn write(call: &Call<'_>, place: &Place, state: &[f32]) {
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
    pub next: Next<'a>,
}

/// What a thread will probably read after a turn: keys of a head from a position on.
#[derive(Clone, Copy)]
pub(super) struct Next<'a> {
    pub sequence: &'a AttentionSequence<'a>,
    pub kv_head: usize,
    pub position: usize,
}

impl<'a> Next<'a> {
    /// What a task begins with.
    pub fn task(call: &Call<'a>, task: &Task) -> Next<'a> {
        let sequence = &call.sequences[task.first_sequence as usize];
        let group = call.shape.heads / call.cache.layout().kv_heads;
        let (from, _) = seen(call.shape, sequence, task.first_pair as usize / group);
        let position = from.max(task.only.map_or(0, |only| only.span as usize * SPAN));
        Next { sequence, kv_head: task.kv_head as usize, position }
    }
}

/// Calls `take` with the turns of a task in order: all pairs where the sequences share blocks, then those of each
/// sequence. `after` is what its thread will do next.
pub(super) fn each_turn<'a>(call: &Call<'a>, task: &Task, after: Next<'a>, mut take: impl FnMut(Turn<'a>)) {
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let all = task.only.map_or(0..usize::MAX, |only| only.span as usize * SPAN..(only.span as usize + 1) * SPAN);
    let (sequence, pairs) = (&members[0], 0..task.pairs as usize);
    if members.len() == 1 {
        return take(Turn { sequence, pairs, positions: all, next: after });
    }
    let shared = task.shared_units as usize * UNIT;
    let own = all.start.max(shared);
    let next = |sequence| Next { sequence, kv_head: task.kv_head as usize, position: own };
    take(Turn { sequence, pairs, positions: all.start..all.end.min(shared), next: next(sequence) });
    let mut first = 0;
    for (i, sequence) in members.iter().enumerate() {
        let end = first + sequence.rows * (call.shape.heads / call.cache.layout().kv_heads);
        let next = members.get(i + 1).map_or(after, next);
        take(Turn { sequence, pairs: first..end, positions: own..all.end, next });
        first = end;
    }
}

/// Keeps the largest score and the state of each of the task's pairs if it is one of several that share rows, else
/// writes their results.
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

/// Folds what the tasks of a split left in `records` and writes the results of its pairs.
pub(super) fn finish(call: &Call<'_>, split: &Split, records: &[f32], state: &mut [f32]) {
    let KvLayout { head_dim, .. } = *call.cache.layout();
    let pairs = split.whole.pairs as usize;
    for (m, place) in places_of(call, &split.whole).enumerate() {
        let mut largest = f32::NEG_INFINITY;
        for span in 0..split.spans as usize {
            let record = &records[(split.first_record as usize + span * pairs + m) * record_len(head_dim)..];
            let (head, later) = record[..record_len(head_dim)].split_at(LANES);
            fold(call.isa, slice::from_mut(&mut largest), state, &head[..1], later);
        }
        write(call, &place, state);
    }
}
