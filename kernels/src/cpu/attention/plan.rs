//! Cuts a call into tasks: which rows and heads, of which sequences, are computed together. Results do not depend on it.

use super::tile::{MOST_TILES, UNIT};
use super::{AttentionSequence, AttentionShape};
use crate::cpu::kv::KvLayout;

/// Pairs of (row, head of a group) of one KV head. Either some of one sequence's, in up to [`MOST_TILES`] register tiles
/// that take each unit of keys and values one after the other, or all of several sequences', in one tile as far as they
/// share blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    cost: u64,
    pub kv_head: u32,
    pub first_sequence: u32,
    pub sequences: u32,
    /// Of the first sequence.
    pub first_pair: u32,
    pub pairs: u32,
    /// Units that lie in the same blocks for all the sequences, and whole below the end of what each sees.
    pub shared_units: u32,
}

/// The positions that row `row` of a sequence sees.
pub(super) fn seen(shape: &AttentionShape, s: &AttentionSequence<'_>, row: usize) -> (usize, usize) {
    let end = s.start_position + row + 1;
    (shape.sliding_window.map_or(0, |window| end.saturating_sub(window)), end)
}

/// The tasks of a call, costliest first, so that threads end together. Among tasks of about the same cost those of one
/// KV head are neighbours: what they share is then in the cache.
pub(super) fn plan(
    shape: &AttentionShape,
    sequences: &[AttentionSequence<'_>],
    layout: &KvLayout,
    most_pairs: usize,
    threads: usize,
    tasks: &mut Vec<Task>,
) {
    /// Tasks for each thread that are enough for dynamic pick-up to end together.
    const TASKS_PER_THREAD: usize = 8;
    tasks.clear();
    let group = shape.heads / layout.kv_heads;
    let pairs: usize = sequences.iter().map(|s| s.rows * group).sum();
    let tiles = (pairs * layout.kv_heads / most_pairs / (TASKS_PER_THREAD * threads)).clamp(1, MOST_TILES);
    let mut push = |cost: usize, task: Task| {
        let cost = cost as u64;
        tasks.extend((0..layout.kv_heads as u32).map(|kv_head| Task { cost, kv_head, ..task }));
    };
    let mut rest = sequences;
    while let Some(s) = rest.first() {
        let first_sequence = (sequences.len() - rest.len()) as u32;
        let (together, shared_units) = companions(shape, rest, layout, most_pairs);
        let pairs: usize = rest[..together].iter().map(|s| s.rows * group).sum();
        let parts = if together > 1 { 1 } else { pairs.div_ceil(tiles * most_pairs) };
        for i in 0..parts {
            let (from, to) = (pairs * i / parts, pairs * (i + 1) / parts);
            let last = if together > 1 { s.rows - 1 } else { (to - 1) / group };
            let (seen_from, seen_to) = seen(shape, s, last);
            // The cost of a tile has a part for reading keys and values besides that of its pairs.
            let cost = (to - from + 2) * (seen_to - seen_from);
            let (first_pair, pairs) = (from as u32, (to - from) as u32);
            let sequences = together as u32;
            push(cost, Task { cost: 0, kv_head: 0, first_sequence, sequences, first_pair, pairs, shared_units });
        }
        rest = &rest[together..];
    }
    tasks.sort_unstable_by_key(|t| (std::cmp::Reverse(t.cost.ilog2()), t.kv_head, t.first_sequence, t.first_pair));
}

/// How many of the leading sequences have the same blocks for a unit or more and fit into one tile, and for how many
/// units their blocks are the same: samples of one prompt.
fn companions(
    shape: &AttentionShape,
    sequences: &[AttentionSequence<'_>],
    layout: &KvLayout,
    most_pairs: usize,
) -> (usize, u32) {
    let group = shape.heads / layout.kv_heads;
    let first = &sequences[0];
    let (mut pairs, mut shared) = (first.rows * group, whole_units(first));
    let mut together = 1;
    for s in &sequences[1..] {
        pairs += s.rows * group;
        if first.rows == 0 || s.rows == 0 || pairs > most_pairs {
            break;
        }
        // Blocks below both windows are never read.
        let unread = seen(shape, first, 0).0.min(seen(shape, s, 0).0) / UNIT * UNIT / layout.block_size;
        let equal = first.block_table.iter().zip(s.block_table).skip(unread).take_while(|(a, b)| a == b).count();
        let units = ((unread + equal) * layout.block_size / UNIT).min(shared).min(whole_units(s));
        if equal == 0 || units * UNIT <= seen(shape, s, 0).0.max(seen(shape, first, 0).0) {
            break;
        }
        (together, shared) = (together + 1, units);
    }
    (together, if together > 1 { shared as u32 } else { 0 })
}

/// Units of which the sequence's first row sees the last position.
fn whole_units(s: &AttentionSequence<'_>) -> usize {
    (s.start_position + 1) / UNIT
}
