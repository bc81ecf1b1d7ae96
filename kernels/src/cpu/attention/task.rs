//! The parts of an attention task that both kinds share: where its queries are in the input and output, in which
//! order they pass over which positions, and where the results go.

use super::plan::{AttentionTask, SplitTask};
use super::planner::seen;
use super::span::{divide, fold};
use super::units::{SPAN, UNIT, partial_len};
use super::{AttentionCall, AttentionSequence};
use crate::cpu::lanes::LANES;
use crate::cpu::rows::SharedSlice;
use crate::kv_layout::KvLayout;
use std::ops::Range;
use std::slice;

/// Where a query is in the query tensor and the output, and the positions that it sees.
pub(super) struct QueryPlace {
    pub row: usize,
    pub column: usize,
    /// The first position that the query sees and the one after the last.
    pub seen: (usize, usize),
}

/// The places of a task's queries, in order.
pub(super) fn places_of<'a>(call: &'a AttentionCall<'_>, task: &AttentionTask) -> QueryPlaces<'a> {
    let group = call.shape.heads / call.cache.layout().kv_heads;
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let (row, head) = (task.first_query as usize / group, task.first_query as usize % group);
    QueryPlaces {
        call,
        members,
        row,
        head,
        first_head: task.kv_head as usize * group,
        group,
        left: task.queries as usize,
    }
}

/// The iterator behind [`places_of`]. It is kept simple because it runs for every query.
pub(super) struct QueryPlaces<'a> {
    call: &'a AttentionCall<'a>,
    /// The sequence of the next query and the sequences after it.
    members: &'a [AttentionSequence<'a>],
    row: usize,
    /// The next query's head, counted in its group of query heads that share the KV head.
    head: usize,
    first_head: usize,
    group: usize,
    left: usize,
}

impl Iterator for QueryPlaces<'_> {
    type Item = QueryPlace;

    #[inline]
    fn next(&mut self) -> Option<QueryPlace> {
        if self.left == 0 {
            return None;
        }
        while self.row == self.members[0].rows {
            (self.members, self.row) = (&self.members[1..], 0);
        }
        let (call, s) = (self.call, &self.members[0]);
        let column = (self.first_head + self.head) * call.cache.layout().head_dim;
        let place = QueryPlace { row: s.first_row + self.row, column, seen: seen(call.shape, s, self.row) };
        self.left -= 1;
        self.head += 1;
        if self.head == self.group {
            (self.head, self.row) = (0, self.row + 1);
        }
        Some(place)
    }
}

/// Writes the output of a query.
fn write(call: &AttentionCall<'_>, place: &QueryPlace, state: &[f32]) {
    // SAFETY: no other task has this row and head.
    let out = unsafe { call.out.part(place.row, place.column, call.cache.layout().head_dim) };
    divide(call.isa, state, out);
}

/// One pass of a task: some of its queries attend to a range of positions in the KV blocks of one sequence.
pub(super) struct KvPass<'a> {
    pub sequence: &'a AttentionSequence<'a>,
    /// The queries that take part, counted in the task.
    pub queries: Range<usize>,
    /// The range of positions. Each query takes those that it sees.
    pub positions: Range<usize>,
    pub next: NextKeys<'a>,
}

/// The keys that a thread will probably read after a pass: those of a KV head from a position of a sequence on.
#[derive(Clone, Copy)]
pub(super) struct NextKeys<'a> {
    pub sequence: &'a AttentionSequence<'a>,
    pub kv_head: usize,
    pub position: usize,
}

impl<'a> NextKeys<'a> {
    /// The keys that a task reads first.
    pub fn of_task(call: &AttentionCall<'a>, task: &AttentionTask) -> NextKeys<'a> {
        let sequence = &call.sequences[task.first_sequence as usize];
        let group = call.shape.heads / call.cache.layout().kv_heads;
        let (from, _) = seen(call.shape, sequence, task.first_query as usize / group);
        let position = from.max(task.only.map_or(0, |only| only.span as usize * SPAN));
        NextKeys { sequence, kv_head: task.kv_head as usize, position }
    }
}

/// Calls `take` with the passes of a task in order: all its queries over the units that the sequences share, then the
/// queries of each sequence over its own. `after` is what the thread will probably read after the task.
pub(super) fn each_pass<'a>(
    call: &AttentionCall<'a>,
    task: &AttentionTask,
    after: NextKeys<'a>,
    mut take: impl FnMut(KvPass<'a>),
) {
    let members = &call.sequences[task.first_sequence as usize..][..task.sequences as usize];
    let all = task.only.map_or(0..usize::MAX, |only| only.span as usize * SPAN..(only.span as usize + 1) * SPAN);
    let (sequence, queries) = (&members[0], 0..task.queries as usize);
    if members.len() == 1 {
        return take(KvPass { sequence, queries, positions: all, next: after });
    }
    let shared = task.shared_units as usize * UNIT;
    let own = all.start.max(shared);
    let next = |sequence| NextKeys { sequence, kv_head: task.kv_head as usize, position: own };
    take(KvPass { sequence, queries, positions: all.start..all.end.min(shared), next: next(sequence) });
    let mut first = 0;
    for (i, sequence) in members.iter().enumerate() {
        let end = first + sequence.rows * (call.shape.heads / call.cache.layout().kv_heads);
        let next = members.get(i + 1).map_or(after, next);
        take(KvPass { sequence, queries: first..end, positions: own..all.end, next });
        first = end;
    }
}

/// Stores the largest score and the state of each query as a partial result if the task is one span of a split task;
/// otherwise writes the outputs.
pub(super) fn put<'s>(
    call: &AttentionCall<'_>,
    task: &AttentionTask,
    states: impl Iterator<Item = (f32, &'s [f32])>,
    partials: &SharedSlice<'_, f32>,
) {
    let Some(only) = task.only else {
        return places_of(call, task).zip(states).for_each(|(place, (_, state))| write(call, &place, state));
    };
    let len = partial_len(call.cache.layout().head_dim);
    for (m, (largest, state)) in states.enumerate() {
        // SAFETY: no other task has this partial result.
        let partial = unsafe { partials.part((only.first_partial as usize + m) * len, len) };
        partial[0] = largest;
        partial[LANES..].copy_from_slice(state);
    }
}

/// Folds the partial results of a split task in the order of the spans and writes the outputs of its queries.
pub(super) fn finish(call: &AttentionCall<'_>, split: &SplitTask, partials: &[f32], state: &mut [f32]) {
    let KvLayout { head_dim, .. } = *call.cache.layout();
    let queries = split.whole.queries as usize;
    for (m, place) in places_of(call, &split.whole).enumerate() {
        let mut largest = f32::NEG_INFINITY;
        for span in 0..split.spans as usize {
            let partial = &partials[(split.first_partial as usize + span * queries + m) * partial_len(head_dim)..];
            let (head, later) = partial[..partial_len(head_dim)].split_at(LANES);
            fold(call.isa, slice::from_mut(&mut largest), state, &head[..1], later);
        }
        write(call, &place, state);
    }
}
