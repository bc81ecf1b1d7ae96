//! How one call is cut into register tiles and tasks.

use super::super::lanes::LANES;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::tile::{most_rows, tile_width};

/// Activations of a chunk that stay in the second-level cache (1 MiB or more) while a task's panels pass, with the
/// partial sums and the weights.
const CHUNK_BYTES: usize = 512 << 10;

/// Weights of a register tile that stay in the first-level cache (32 KiB, with the activations of the tile) while all
/// tiles of a chunk pass.
const BLOCK_BYTES: usize = 16 << 10;

/// Register tiles of a task side by side: they share a pass over the activations of the chunk.
const MOST_COLUMNS: usize = 4;

/// Tasks per thread, if there are columns enough: so many that a thread that is held up hands over most of its share.
const TASKS_PER_THREAD: usize = 8;

/// A task computes the rows of one chunk times one group of panels.
pub(super) struct Plan {
    pub rows: usize,
    /// Tiles of at most the register tile's rows, of equal height but for one row.
    pub tiles: usize,
    /// Runs of tiles.
    pub chunks: usize,
    pub panels: usize,
    /// Panels side by side in a register tile.
    pub width: usize,
    /// Runs of panels, equal but for one panel.
    pub groups: usize,
    pub steps: usize,
    /// Steps after which the next tile of the chunk takes its turn.
    pub block_steps: usize,
    pub leaves: usize,
}

impl Plan {
    /// For `rows >= 1` rows of activations, of `x_bytes` for each step of `per_step` elements of the reduction.
    pub fn new(cpu: &Cpu, rows: usize, w: &PackedMatrix, per_step: usize, x_bytes: usize) -> Plan {
        let accumulators = cpu.isa().accumulators();
        let tiles = rows.div_ceil(most_rows(accumulators));
        let tile_rows = rows.div_ceil(tiles);
        let width = tile_width(tile_rows, accumulators);
        let steps = w.padded_k().div_ceil(per_step);
        let leaf_steps = steps / w.leaves();
        let blocks = match tiles {
            1 => 1, // nothing comes back to the weights
            _ => leaf_steps.div_ceil(BLOCK_BYTES / (width * w.panel_bytes() / steps)),
        };
        let block_steps = leaf_steps.div_ceil(blocks);
        let chunks = tiles.div_ceil((CHUNK_BYTES / (tile_rows * block_steps * x_bytes)).clamp(1, 8));
        let panels = w.panels();
        let threads = cpu.pool().threads();
        let columns = match tiles {
            1 => 1,
            _ => (panels * chunks / (TASKS_PER_THREAD * threads * width)).clamp(1, MOST_COLUMNS),
        };
        let groups = panels.div_ceil(width * columns).next_multiple_of(threads).min(panels);
        Plan { rows, tiles, chunks, panels, width, groups, steps, block_steps, leaves: w.leaves() }
    }

    /// First row of a tile.
    pub fn row(&self, tile: usize) -> usize {
        self.rows * tile / self.tiles
    }

    /// First tile of a chunk.
    pub fn tile(&self, chunk: usize) -> usize {
        self.tiles * chunk / self.chunks
    }

    /// First panel of a group.
    pub fn panel(&self, group: usize) -> usize {
        self.panels * group / self.groups
    }

    /// Partial sums that wait for their sibling in the tree of leaves, and the one being added up.
    pub fn slots(&self) -> usize {
        self.leaves.ilog2() as usize + 1
    }

    /// Values of one partial sum: those of a chunk times a group of panels.
    pub fn slot_len(&self) -> usize {
        self.columns() * self.column_len()
    }

    /// Register tiles side by side in a task.
    fn columns(&self) -> usize {
        self.panels.div_ceil(self.groups).div_ceil(self.width)
    }

    /// Values of one register tile's columns for a chunk.
    pub fn column_len(&self) -> usize {
        let tiles = self.tiles.div_ceil(self.chunks);
        tiles * self.rows.div_ceil(self.tiles) * self.width * LANES
    }
}
