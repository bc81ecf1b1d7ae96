//! The sizes that attention is cut into.

use crate::cpu::lanes::LANES;
use crate::cpu::tile::most_rows;

/// Positions from one step of the online softmax to the next; absolute, so the same for every query.
pub(super) const UNIT: usize = 64;
/// Vectors of positions in a unit.
pub(super) const VECTORS: usize = UNIT / LANES;

/// Positions of a span: few enough that a long context is work for many threads, enough for folding to be little beside
/// eight units.
pub(super) const SPAN: usize = 8 * UNIT;

/// Float32 values of one pair's state: 16 partial sums of the exponentials, then the weighted sums of the values, all
/// relative to the largest score.
pub(super) const fn state_len(head_dim: usize) -> usize {
    LANES + head_dim
}

/// Float32 values of one pair's state in one span, kept for [`finish`](super::task::finish): the largest score on a
/// line of its own first.
pub(super) const fn record_len(head_dim: usize) -> usize {
    LANES + state_len(head_dim)
}

/// The most register tiles of a task.
pub(super) const MOST_TILES: usize = 20;

/// The most pairs of a register tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct TilePairs {
    /// Where the tile is its task's only one: many, as it widens keys and values for itself.
    pub alone: usize,
    /// Where the tile is one of several, for which keys and values are widened once: as many as leave registers for a
    /// whole unit's vectors side by side, which takes the fewest loads for a product.
    pub beside: usize,
}

impl TilePairs {
    pub fn new(accumulators: usize) -> TilePairs {
        let alone = most_rows(accumulators);
        let beside = accumulators / VECTORS;
        TilePairs { alone, beside: if beside >= VECTORS { beside } else { alone } }
    }

    /// The most pairs of a task: enough for what widening a unit costs to be little beside the products, few enough for
    /// queries and weights to stay in the second-level cache.
    pub const fn most_of_task(self) -> usize {
        MOST_TILES * self.beside
    }
}
