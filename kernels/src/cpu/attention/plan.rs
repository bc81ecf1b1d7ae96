//! Cuts a call into tasks: which rows and heads, of which sequences and positions, are computed together. Results do
//! not depend on it.

use super::units::{MOST_TILES, SPAN, TilePairs, UNIT, record_len};
use super::work::{Only, Plan, Split, Task};
use super::{AttentionSequence, AttentionShape};
use crate::kv_layout::KvLayout;
use std::ops::Range;

/// Tasks for each thread that are enough for dynamic pick-up to end together.
const TASKS_PER_THREAD: usize = 4;
/// Float32 values of records that a call may take: 8 MiB. Contexts so long and batches so wide have tasks enough.
const MOST_RECORDED: usize = 2 << 20;

/// The positions that row `row` of a sequence sees.
pub(super) fn seen(shape: &AttentionShape, s: &AttentionSequence<'_>, row: usize) -> (usize, usize) {
    let end = s.start_position + row + 1;
    (shape.sliding_window.map_or(0, |window| end.saturating_sub(window)), end)
}

/// A call that is to be cut.
pub(super) struct Planner<'a> {
    pub shape: &'a AttentionShape,
    pub sequences: &'a [AttentionSequence<'a>],
    pub layout: &'a KvLayout,
    pub tile: TilePairs,
    pub threads: usize,
}

impl Planner<'_> {
    /// Tasks of about the same cost are in the order of KV heads: what they share is then in the cache.
    pub fn plan(&self, plan: &mut Plan) {
        let Plan { tasks, splits, records } = plan;
        tasks.clear();
        splits.clear();
        *records = 0;
        let most_pairs = self.most_pairs();
        let mut first = 0;
        while first < self.sequences.len() {
            let (together, shared_units) = self.companions(first, most_pairs);
            let pairs: usize = self.sequences[first..][..together].iter().map(|s| self.pairs(s)).sum();
            for from in (0..pairs).step_by(most_pairs) {
                let to = pairs.min(from + most_pairs);
                let mut task = Task {
                    cost: 0,
                    kv_head: 0,
                    first_sequence: first as u32,
                    sequences: together as u32,
                    first_pair: from as u32,
                    pairs: (to - from) as u32,
                    shared_units,
                    only: None,
                };
                task.cost = self.cost(&task, 0..usize::MAX);
                tasks.extend((0..self.layout.kv_heads as u32).map(|kv_head| Task { kv_head, ..task }));
            }
            first += together;
        }
        self.split(plan);
        plan.tasks.sort_unstable_by_key(|t| {
            let span = t.only.map(|only| only.span);
            (std::cmp::Reverse(t.cost.max(1).ilog2()), t.kv_head, t.first_sequence, t.first_pair, span)
        });
    }

    /// Pairs of a task: as many as leave tasks enough, counting each span of a sequence as one.
    fn most_pairs(&self) -> usize {
        let spans = |s: &AttentionSequence<'_>| {
            let (from, to) = (seen(self.shape, s, 0).0, s.start_position + s.rows);
            to.div_ceil(SPAN) - from / SPAN
        };
        let work: usize = self.sequences.iter().map(|s| self.pairs(s) * spans(s)).sum();
        let enough = work * self.layout.kv_heads / (TASKS_PER_THREAD * self.threads);
        (enough / self.tile.beside * self.tile.beside).clamp(self.tile.alone, self.tile.most_of_task())
    }

    /// Makes one task for each span of tasks that are too large a part of the call.
    fn split(&self, plan: &mut Plan) {
        let total: u64 = plan.tasks.iter().map(|t| t.cost).sum();
        let most = if self.threads > 1 { total / (TASKS_PER_THREAD * self.threads) as u64 } else { total };
        for i in 0..plan.tasks.len() {
            let whole = plan.tasks[i];
            let Range { start, end } = self.spans(&whole);
            let (spans, first) = ((end - start) as u32, plan.records);
            let records = first + whole.pairs as usize * (end - start);
            if whole.cost <= most || spans < 2 || records * record_len(self.layout.head_dim) > MOST_RECORDED {
                continue;
            }
            plan.splits.push(Split { whole, spans, first_record: first as u32 });
            plan.records = records;
            let part = |span: u32| {
                let at = (start + span as usize) * SPAN;
                let only = Only { span: start as u32 + span, first_record: first as u32 + span * whole.pairs };
                Task { cost: self.cost(&whole, at..at + SPAN), only: Some(only), ..whole }
            };
            plan.tasks.extend((1..spans).map(part));
            plan.tasks[i] = part(0);
        }
    }

    fn members(&self, task: &Task) -> &[AttentionSequence<'_>] {
        &self.sequences[task.first_sequence as usize..][..task.sequences as usize]
    }

    fn pairs(&self, s: &AttentionSequence<'_>) -> usize {
        s.rows * (self.shape.heads / self.layout.kv_heads)
    }

    /// What pairs of `s` see at most, if they are those of the task; no pairs see nothing.
    fn seen(&self, task: &Task, s: &AttentionSequence<'_>) -> Range<usize> {
        let group = self.shape.heads / self.layout.kv_heads;
        let (first, end) = match task.sequences {
            1 => (task.first_pair as usize / group, (task.first_pair + task.pairs) as usize),
            _ => (0, s.rows * group),
        };
        if end == 0 { 0..0 } else { seen(self.shape, s, first).0..seen(self.shape, s, (end - 1) / group).1 }
    }

    /// Spans that any pair of the task sees.
    fn spans(&self, task: &Task) -> Range<usize> {
        let seen = self.members(task).iter().map(|s| self.seen(task, s));
        let all = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        all.start / SPAN..all.end.div_ceil(SPAN)
    }

    /// Products of the task in these positions; reading keys and values costs as much as those of two pairs.
    fn cost(&self, task: &Task, positions: Range<usize>) -> u64 {
        let inside = |seen: Range<usize>| seen.end.min(positions.end).saturating_sub(seen.start.max(positions.start));
        let shared = task.shared_units as usize * UNIT;
        let own = |s: &AttentionSequence<'_>| {
            let seen = self.seen(task, s);
            let pairs = if task.sequences > 1 { self.pairs(s) } else { task.pairs as usize };
            (pairs + 2) * inside(seen.start.max(shared)..seen.end)
        };
        let first = self.seen(task, &self.sequences[task.first_sequence as usize]);
        let together = (task.pairs as usize + 2) * inside(first.start..shared);
        (together + self.members(task).iter().map(own).sum::<usize>()) as u64
    }

    /// How many sequences from `first` on have the same blocks for a unit or more and fit into one task, and for how
    /// many units their blocks are the same: samples of one prompt.
    fn companions(&self, first: usize, most_pairs: usize) -> (usize, u32) {
        let s = &self.sequences[first];
        let (mut pairs, mut shared) = (self.pairs(s), whole_units(s));
        let (mut tiles, mut of_tile) = (1, pairs);
        let mut together = 1;
        for other in &self.sequences[first + 1..] {
            let more = self.pairs(other);
            pairs += more;
            if of_tile + more > self.tile.beside {
                (tiles, of_tile) = (tiles + 1, 0);
            }
            of_tile += more;
            let fits = more <= self.tile.alone && pairs <= most_pairs && tiles <= MOST_TILES;
            if s.rows == 0 || other.rows == 0 || self.pairs(s) > self.tile.alone || !fits {
                break;
            }
            // Blocks below both windows are never read.
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

/// Units of which the sequence's first row sees the last position.
fn whole_units(s: &AttentionSequence<'_>) -> usize {
    (s.start_position + 1) / UNIT
}
