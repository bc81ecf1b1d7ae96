//! The sizes of units, spans, softmax states and register tiles of attention.

use crate::cpu::lanes::LANES;
use crate::cpu::tile::most_rows;

/// Positions of a unit, which is one step of the online softmax. Units begin at multiples of 64
/// of the absolute position, so they are the same for every query.
pub(super) const UNIT: usize = 64;
/// Vectors of positions in a unit.
pub(super) const VECTORS: usize = UNIT / LANES;

/// Positions of a span. It is short enough for a long context to be work for many threads, and long enough (8 units)
/// for the folding of spans to cost little.
pub(super) const SPAN: usize = 8 * UNIT;

/// Float32 values of one query's softmax state: 16 partial sums of the exponentials, then `head_dim` weighted sums of
/// the values, all relative to the largest score so far.
pub(super) const fn state_len(head_dim: usize) -> usize {
    LANES + head_dim
}

/// Float32 values of the partial result of one query over one span, kept for [`finish`](super::task::finish): the
/// largest score on a cache line of its own, then the softmax state.
pub(super) const fn partial_len(head_dim: usize) -> usize {
    LANES + state_len(head_dim)
}

/// The most register tiles of a task.
pub(super) const MOST_TILES: usize = 20;

/// The most queries of a register tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileSize {
    /// For a tile that is the only one of its task. It widens keys and values for itself, so more queries share that
    /// cost.
    pub alone: usize,
    /// For a tile that is one of several, for which keys and values are widened once. It leaves registers for all
    /// vectors of a unit side by side, which takes the fewest loads per product.
    pub beside: usize,
}

impl TileSize {
    pub fn new(accumulators: usize) -> TileSize {
        let alone = most_rows(accumulators);
        let beside = accumulators / VECTORS;
        TileSize { alone, beside: if beside >= VECTORS { beside } else { alone } }
    }

    /// The most queries of a task. They are enough for the cost of widening a unit to be small beside the products, and
    /// few enough for queries and softmax weights to stay in the second-level cache.
    pub const fn most_of_task(self) -> usize {
        MOST_TILES * self.beside
    }
}
