//! How one call is cut into register tiles and tasks.

use super::super::lanes::LANES;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::tile::{Format, most_rows, tile_width};
use super::format::LinearFormat;

/// Activations of a chunk that stay in the second-level cache (1 MiB or more) while a task's panels pass, with the
/// partial sums and the weights.
const CHUNK_BYTES: usize = 512 << 10;

/// Weights of a register tile that stay in the first-level cache (32 KiB, with the activations of the tile) while all
/// tiles of a chunk pass.
const BLOCK_BYTES: usize = 16 << 10;

/// As [`BLOCK_BYTES`] of widened weights, which many tiles read from the second-level cache: that costs less than
/// putting sums away after every block.
const WIDENED_BYTES: usize = 80 << 10;

/// The fewest tiles that are worth widening the weights for all of them first.
const WIDENED_FROM: usize = 8;

/// Register tiles of a chunk: more save little time in which weights are widened.
const MOST_TILES: usize = 12;

/// A task computes the rows of one chunk times one group of panels.
pub(super) struct Plan {
    /// Tiles of at most the register tile's rows.
    rows: Cut,
    pub tiles: usize,
    /// Chunks are runs of tiles.
    tiles_by_chunk: Cut,
    pub chunks: usize,
    /// Groups are runs of panels.
    panels: Cut,
    pub groups: usize,
    /// Panels side by side in a register tile.
    pub width: usize,
    pub steps: usize,
    /// Stored weights of a panel in a step.
    step_len: usize,
    /// Steps after which the next tile of the chunk takes its turn.
    pub block_steps: usize,
    /// Whether the weights of a block are widened before its tiles pass, and the values that this makes.
    pub widened: bool,
    pub copy_len: usize,
    pub leaves: usize,
    pub threads: usize,
}

impl Plan {
    /// For `rows >= 1` rows of activations.
    pub fn new<F: LinearFormat>(cpu: &Cpu, rows: usize, w: &PackedMatrix) -> Plan {
        let accumulators = cpu.isa().accumulators();
        let tiles = rows.div_ceil(most_rows(accumulators));
        let tile_rows = rows.div_ceil(tiles);
        let width = tile_width(tile_rows, accumulators);
        let steps = w.padded_k().div_ceil(F::PER_STEP);
        let step_len = w.panel_bytes() / size_of::<F::W>() / steps;
        let leaf_steps = steps / w.leaves();
        let widened = F::COPIES && tiles >= WIDENED_FROM;
        let panel_step = step_len * if widened { size_of::<<F::Wide as Format>::W>() } else { size_of::<F::W>() };
        let blocks = match tiles {
            1 => 1, // nothing comes back to the weights
            _ => leaf_steps.div_ceil(if widened { WIDENED_BYTES } else { BLOCK_BYTES } / (width * panel_step)),
        };
        let block_steps = leaf_steps.div_ceil(blocks);
        let copy_len = if widened { width * block_steps * step_len } else { 0 };
        let most_tiles = CHUNK_BYTES / (tile_rows * block_steps * size_of::<F::X>());
        let chunks = tiles.div_ceil(most_tiles.clamp(1, MOST_TILES));
        let (panels, threads) = (w.panels(), cpu.pool().threads());
        let groups = panels.div_ceil(width).next_multiple_of(threads).min(panels);
        Plan {
            rows: Cut::new(rows, tiles),
            tiles,
            tiles_by_chunk: Cut::new(tiles, chunks),
            chunks,
            panels: Cut::new(panels, groups),
            groups,
            width,
            steps,
            step_len,
            block_steps,
            widened,
            copy_len,
            leaves: w.leaves(),
            threads,
        }
    }

    /// Where a panel's weights of a step are.
    pub fn weight(&self, panel: usize, step: usize) -> usize {
        (panel * self.steps + step) * self.step_len
    }

    /// Bytes of a panel's weights of a step.
    pub fn step_bytes<F: Format>(&self) -> usize {
        self.step_len * size_of::<F::W>()
    }

    /// First row of a tile.
    pub fn row(&self, tile: usize) -> usize {
        self.rows.start(tile)
    }

    /// First tile of a chunk.
    pub fn tile(&self, chunk: usize) -> usize {
        self.tiles_by_chunk.start(chunk)
    }

    /// First panel of a group.
    pub fn panel(&self, group: usize) -> usize {
        self.panels.start(group)
    }

    /// Partial sums that wait for their sibling in the tree of leaves, and the one being added up.
    pub fn slots(&self) -> usize {
        self.leaves.ilog2() as usize + 1
    }

    /// Values of one partial sum: those of a chunk times a register tile's columns.
    pub fn slot_len(&self) -> usize {
        self.tiles_by_chunk.longest() * self.rows.longest() * self.width * LANES
    }
}

/// So many items in runs that are equal but for one item. Where a run starts takes no division: tiles ask for it.
struct Cut {
    each: usize,
    /// The first so many runs have one more.
    longer: usize,
}

impl Cut {
    fn new(items: usize, runs: usize) -> Cut {
        Cut { each: items / runs, longer: items % runs }
    }

    fn start(&self, run: usize) -> usize {
        run * self.each + run.min(self.longer)
    }

    fn longest(&self) -> usize {
        self.each + usize::from(self.longer > 0)
    }
}
