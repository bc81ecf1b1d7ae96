//! Cuts a call into tasks: which queries, of which sequences and over which positions, one thread computes together.
//! Results do not depend on the cut.

use super::plan::{AttentionPlan, AttentionTask, SplitSpan, SplitTask};
use super::units::{MOST_TILES, SPAN, TileSize, UNIT, partial_len};
use super::{AttentionSequence, AttentionShape};
use crate::kv_layout::KvLayout;
use std::ops::Range;

/// Tasks per thread that are enough for all threads to finish at about the same time, as each claims the next free
/// task.
const TASKS_PER_THREAD: usize = 4;
/// The most float32 values of partial results in a call, 8 MiB. Contexts so long and batches so wide that they need
/// more have tasks enough without being split.
const MOST_PARTIAL_FLOATS: usize = 2 << 20;

/// The positions that row `row` of a sequence sees, as the first one and the one after the last.
pub(super) fn seen(shape: &AttentionShape, s: &AttentionSequence<'_>, row: usize) -> (usize, usize) {
    let end = s.end_of_row(row);
    (shape.sliding_window.map_or(0, |window| end.saturating_sub(window)), end)
}

/// A call of attention, and what the plan for it depends on.
pub(super) struct Planner<'a> {
    pub shape: &'a AttentionShape,
    pub sequences: &'a [AttentionSequence<'a>],
    pub layout: &'a KvLayout,
    pub tile: TileSize,
    pub threads: usize,
}

impl Planner<'_> {
    /// Fills `plan` with the call's tasks, costliest first. Tasks of about the same cost are ordered by KV head, so
    /// that tasks that run at the same time share keys and values in the cache.
    pub fn plan(&self, plan: &mut AttentionPlan) {
        let AttentionPlan { tasks, splits, partials } = plan;
        tasks.clear();
        splits.clear();
        *partials = 0;
        let most_queries = self.most_queries();
        let mut first = 0;
        while first < self.sequences.len() {
            let (together, shared_units) = self.companions(first, most_queries);
            let queries: usize = self.sequences[first..][..together].iter().map(|s| self.queries(s)).sum();
            for from in (0..queries).step_by(most_queries) {
                let to = queries.min(from + most_queries);
                let mut task = AttentionTask {
                    cost: 0,
                    kv_head: 0,
                    first_sequence: first as u32,
                    sequences: together as u32,
                    first_query: from as u32,
                    queries: (to - from) as u32,
                    shared_units,
                    only: None,
                };
                task.cost = self.cost(&task, 0..usize::MAX);
                tasks.extend((0..self.layout.kv_heads as u32).map(|kv_head| AttentionTask { kv_head, ..task }));
            }
            first += together;
        }
        self.split(plan);
        plan.tasks.sort_unstable_by_key(|t| {
            let span = t.only.map(|only| only.span);
            (std::cmp::Reverse(t.cost.max(1).ilog2()), t.kv_head, t.first_sequence, t.first_query, span)
        });
    }

    /// The most queries of a task that still leave enough tasks for all threads, where each span of a sequence counts
    /// as one.
    fn most_queries(&self) -> usize {
        let spans = |s: &AttentionSequence<'_>| {
            let (from, to) = (seen(self.shape, s, 0).0, s.end());
            to.div_ceil(SPAN) - from / SPAN
        };
        let work: usize = self.sequences.iter().map(|s| self.queries(s) * spans(s)).sum();
        let enough = work * self.layout.kv_heads / (TASKS_PER_THREAD * self.threads);
        (enough / self.tile.beside * self.tile.beside).clamp(self.tile.alone, self.tile.most_of_task())
    }

    /// Replaces every task that is too large a part of the call by one task per span.
    fn split(&self, plan: &mut AttentionPlan) {
        let total: u64 = plan.tasks.iter().map(|t| t.cost).sum();
        let most = if self.threads > 1 { total / (TASKS_PER_THREAD * self.threads) as u64 } else { total };
        for i in 0..plan.tasks.len() {
            let whole = plan.tasks[i];
            let Range { start, end } = self.spans(&whole);
            let (spans, first) = ((end - start) as u32, plan.partials);
            let partials = first + whole.queries as usize * (end - start);
            if whole.cost <= most || spans < 2 || partials * partial_len(self.layout.head_dim) > MOST_PARTIAL_FLOATS {
                continue;
            }
            plan.splits.push(SplitTask { whole, spans, first_partial: first as u32 });
            plan.partials = partials;
            let part = |span: u32| {
                let at = (start + span as usize) * SPAN;
                let only = SplitSpan { span: start as u32 + span, first_partial: first as u32 + span * whole.queries };
                AttentionTask { cost: self.cost(&whole, at..at + SPAN), only: Some(only), ..whole }
            };
            plan.tasks.extend((1..spans).map(part));
            plan.tasks[i] = part(0);
        }
    }

    fn members(&self, task: &AttentionTask) -> &[AttentionSequence<'_>] {
        &self.sequences[task.first_sequence as usize..][..task.sequences as usize]
    }

    fn queries(&self, s: &AttentionSequence<'_>) -> usize {
        s.rows * (self.shape.heads / self.layout.kv_heads)
    }

    /// The positions that any query of `s` in the task sees; empty if the task has no query of `s`.
    fn seen(&self, task: &AttentionTask, s: &AttentionSequence<'_>) -> Range<usize> {
        let group = self.shape.heads / self.layout.kv_heads;
        let (first, end) = match task.sequences {
            1 => (task.first_query as usize / group, (task.first_query + task.queries) as usize),
            _ => (0, s.rows * group),
        };
        if end == 0 { 0..0 } else { seen(self.shape, s, first).0..seen(self.shape, s, (end - 1) / group).1 }
    }

    /// The numbers of the spans of which any query of the task sees a position.
    fn spans(&self, task: &AttentionTask) -> Range<usize> {
        let seen = self.members(task).iter().map(|s| self.seen(task, s));
        let all = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        all.start / SPAN..all.end.div_ceil(SPAN)
    }

    /// The cost of the task's queries over `positions`, in products of one query with one position. Reading a
    /// position's key and value is counted as two products.
    fn cost(&self, task: &AttentionTask, positions: Range<usize>) -> u64 {
        let inside = |seen: Range<usize>| seen.end.min(positions.end).saturating_sub(seen.start.max(positions.start));
        let shared = task.shared_units as usize * UNIT;
        let own = |s: &AttentionSequence<'_>| {
            let seen = self.seen(task, s);
            let queries = if task.sequences > 1 { self.queries(s) } else { task.queries as usize };
            (queries + 2) * inside(seen.start.max(shared)..seen.end)
        };
        let first = self.seen(task, &self.sequences[task.first_sequence as usize]);
        let together = (task.queries as usize + 2) * inside(first.start..shared);
        (together + self.members(task).iter().map(own).sum::<usize>()) as u64
    }

    /// How many sequences from `first` on can share a task, and how many leading units their block tables have in
    /// common. They can if they have at least one unit in common, as samples of one prompt do, and if their queries fit
    /// into one task.
    fn companions(&self, first: usize, most_queries: usize) -> (usize, u32) {
        let s = &self.sequences[first];
        let (mut queries, mut shared) = (self.queries(s), whole_units(s));
        let (mut tiles, mut of_tile) = (1, queries);
        let mut together = 1;
        for other in &self.sequences[first + 1..] {
            let more = self.queries(other);
            queries += more;
            if of_tile + more > self.tile.beside {
                (tiles, of_tile) = (tiles + 1, 0);
            }
            of_tile += more;
            let fits = more <= self.tile.alone && queries <= most_queries && tiles <= MOST_TILES;
            if s.rows == 0 || other.rows == 0 || self.queries(s) > self.tile.alone || !fits {
                break;
            }
            // Blocks below the sliding windows of both sequences are never read, so they need not be equal.
            let unread =
                seen(self.shape, s, 0).0.min(seen(self.shape, other, 0).0) / UNIT * UNIT / self.layout.block_size;
            let equal = s.block_table.iter().zip(other.block_table).skip(unread).take_while(|(a, b)| a == b).count();
            let units = ((unread + equal) * self.layout.block_size / UNIT).min(shared).min(whole_units(other));
            if equal == 0 || units * UNIT <= seen(self.shape, other, 0).0.max(seen(self.shape, s, 0).0) {
                break;
            }
            (together, shared) = (together + 1, units);
        }
        (together, if together > 1 { shared as u32 } else { 0 })
    }
}

/// How many leading units the first row of the sequence sees to their last position.
fn whole_units(s: &AttentionSequence<'_>) -> usize {
    s.end_of_row(0) / UNIT
}
