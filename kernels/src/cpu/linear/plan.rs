//! How one call is cut into register tiles and tasks.

use super::super::lanes::LANES;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::tile::tile_width;
use super::format::LinearFormat;
use super::register::TALLEST;

/// Activations of a chunk that stay in the second-level cache (1 MiB or more) while a task's panels pass, with the
/// partial sums and the weights.
const CHUNK_BYTES: usize = 512 << 10;

/// Weights of a register tile that all tiles of a chunk pass before the next block. The first tile leaves them in the
/// second-level cache: reading them from there costs less than putting sums away after every block.
const BLOCK_BYTES: usize = 48 << 10;

/// As [`BLOCK_BYTES`], of widened weights.
const WIDENED_BYTES: usize = 128 << 10;

/// The fewest tiles that are worth it that the first leaves widened weights for the others.
const WIDENED_FROM: usize = 3;

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
    /// Groups are runs of panels, of gated layers of the gates' with as many of what they gate.
    panels: Cut,
    pub groups: usize,
    /// Panels side by side in a register tile.
    pub width: usize,
    /// The first panel of what is gated.
    pub gated: Option<usize>,
    pub steps: usize,
    /// Stored weights of a panel in a step.
    pub step_len: usize,
    /// After so many steps of so many leaves the next tile of the chunk takes its turn: of parts of one leaf, or of
    /// whole ones.
    pub block_steps: usize,
    pub block_leaves: usize,
    /// Whether the first tile leaves the weights of a block widened, and the values that this makes.
    pub widened: bool,
    pub copy_len: usize,
    /// Where there are several tiles: each asks for one of so many parts of every panel of the next block.
    pub parts: usize,
    pub leaves: usize,
    pub threads: usize,
}

impl Plan {
    /// For `rows >= 1` rows of activations.
    pub fn new<F: LinearFormat>(cpu: &Cpu, rows: usize, w: &PackedMatrix, gated: bool) -> Plan {
        let halves = if gated { 2 } else { 1 };
        let accumulators = cpu.isa().accumulators();
        let tiles = rows.div_ceil(if accumulators >= 2 * TALLEST { TALLEST } else { accumulators / halves });
        let tile_rows = rows.div_ceil(tiles);
        let width = tile_width(tile_rows, accumulators);
        let steps = w.padded_k().div_ceil(F::PER_STEP);
        let step_len = F::PER_STEP * LANES;
        let leaf_steps = steps / w.leaves();
        let widened = F::COPIES && tiles >= WIDENED_FROM;
        let (block_bytes, size) = if widened { (WIDENED_BYTES, 4) } else { (BLOCK_BYTES, size_of::<F::W>()) };
        let (leaves, fitting) = (w.leaves(), (block_bytes / (width * step_len * size)).max(1));
        let (block_steps, block_leaves) = match tiles {
            1 => (leaf_steps, leaves), // nothing comes back to the weights
            // The blocks are of equal length, as each asks for the next one: the leaves are a power of two.
            _ => {
                let block_leaves = (fitting / leaf_steps).clamp(1, leaves);
                (leaf_steps.div_ceil(leaf_steps.div_ceil(fitting)), 1 << block_leaves.ilog2())
            }
        };
        let copy_len = if widened { width * block_leaves * block_steps * step_len } else { 0 };
        let most_tiles = CHUNK_BYTES / (tile_rows * block_leaves * block_steps * size_of::<F::X>());
        let chunks = tiles.div_ceil(most_tiles.clamp(1, MOST_TILES));
        let (panels, threads) = (w.panels() / halves, cpu.pool().threads());
        let groups = panels.div_ceil(width / halves).next_multiple_of(threads).min(panels);
        Plan {
            rows: Cut::new(rows, tiles),
            tiles,
            tiles_by_chunk: Cut::new(tiles, chunks),
            chunks,
            panels: Cut::new(panels, groups),
            groups,
            width,
            gated: gated.then_some(panels),
            steps,
            step_len,
            block_steps,
            block_leaves,
            widened,
            copy_len,
            parts: (tiles / chunks / width).max(1),
            leaves,
            threads,
        }
    }

    /// Where a panel's weights of a step are.
    pub fn weight(&self, panel: usize, step: usize) -> usize {
        (panel * self.steps + step) * self.step_len
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

    /// The panel that is number `v` of a group's register tile. A group may have one less: its last one is then
    /// computed again and dropped.
    pub fn tile_panel(&self, group: usize, v: usize) -> usize {
        let last = self.panel(group + 1) - 1;
        match self.gated {
            None => last.min(self.panel(group) + v),
            Some(first) if v >= self.width / 2 => first + last.min(self.panel(group) + v - self.width / 2),
            Some(_) => last.min(self.panel(group) + v),
        }
    }

    /// Vectors of columns that a register tile gives.
    pub fn outputs(&self) -> usize {
        if self.gated.is_some() { self.width / 2 } else { self.width }
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
