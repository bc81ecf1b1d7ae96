//! How one call of a linear layer is cut into register tiles and tasks.

use super::super::lanes::LANES;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::tile::tile_width;
use super::format::LinearFormat;
use super::register::TALLEST;

/// Bytes of a chunk's activations in one block of `k`. They stay in the second-level cache (1 MiB or more), beside the
/// partial sums and the weights, while the panels of a task pass.
const CHUNK_BYTES: usize = 512 << 10;

/// Bytes of a register tile's weights in one block of `k`. The first tile of a chunk leaves them in the second-level
/// cache, where reading them costs the other tiles less than storing partial sums more often would.
const K_BLOCK_BYTES: usize = 48 << 10;

/// Bytes of a register tile's weights in one block of `k` where the first tile widens them to float32.
const WIDENED_K_BLOCK_BYTES: usize = 128 << 10;

/// The fewest tiles for which it is worth it that the first one stores widened weights for the others.
const WIDENED_FROM: usize = 3;

/// The most register tiles of a chunk. More would save little of the time that widening weights takes.
const MOST_TILES: usize = 12;

/// The panels of a matrix that a product takes: all of them, or those of one expert.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub first: usize,
    pub count: usize,
    /// The first panel of the product that comes next.
    pub next: usize,
    pub padded_k: usize,
    pub leaves: usize,
}

impl Panels {
    pub fn all(w: &PackedMatrix) -> Panels {
        Panels { first: 0, count: w.panels(), next: 0, padded_k: w.padded_k(), leaves: w.leaves() }
    }
}

/// The cut of a linear layer. A task computes the rows of one chunk times one group of panels.
pub(super) struct LinearPlan {
    /// Runs of rows, one for each register tile.
    rows: EvenSplit,
    pub tiles: usize,
    /// Runs of tiles, one for each chunk.
    tiles_by_chunk: EvenSplit,
    pub chunks: usize,
    /// Runs of panels, one for each group. In a gated layer these are panels of the gates, and the group also has the
    /// corresponding panels of the values that they gate.
    panels: EvenSplit,
    pub groups: usize,
    /// The first panel of the weights, and that of the weights that the thread's next product probably takes.
    first_panel: usize,
    next_panel: usize,
    /// Panels side by side in a register tile.
    pub width: usize,
    /// The first panel of the values that the gates of a gated layer multiply; `None` in other layers.
    pub gated: Option<usize>,
    pub steps: usize,
    /// Stored weights of a panel in one step.
    pub step_len: usize,
    /// Steps of a block of `k`, in each of the `k_block_leaves` leaves that it covers. It is a part of one leaf, or
    /// several whole leaves.
    pub k_block_steps: usize,
    pub k_block_leaves: usize,
    /// Whether the first tile of a chunk stores the weights of a block widened to float32, and how many values that
    /// takes.
    pub widened: bool,
    pub copy_len: usize,
    /// Into how many parts each panel of the next block is cut for prefetching, where several tiles prefetch one part
    /// each.
    pub prefetch_parts: usize,
    pub leaves: usize,
    pub threads: usize,
}

impl LinearPlan {
    /// Cuts the product of `rows >= 1` rows of activations and `w` for the threads of `cpu`.
    pub fn new<F: LinearFormat>(cpu: &Cpu, rows: usize, w: Panels, gated: bool) -> LinearPlan {
        let halves = if gated { 2 } else { 1 };
        let accumulators = cpu.isa().accumulators();
        let tiles = rows.div_ceil(if accumulators >= 2 * TALLEST { TALLEST } else { accumulators / halves });
        let tile_rows = rows.div_ceil(tiles);
        let width = tile_width(tile_rows, accumulators);
        let steps = w.padded_k.div_ceil(F::PER_STEP);
        let step_len = F::PER_STEP * LANES;
        let leaf_steps = steps / w.leaves;
        let widened = F::COPIES && tiles >= WIDENED_FROM;
        let (k_block_bytes, size) =
            if widened { (WIDENED_K_BLOCK_BYTES, 4) } else { (K_BLOCK_BYTES, size_of::<F::W>()) };
        let (leaves, fitting) = (w.leaves, (k_block_bytes / (width * step_len * size)).max(1));
        let (k_block_steps, k_block_leaves) = match tiles {
            1 => (leaf_steps, leaves), // one tile reads the weights once
            // All blocks have the same length, since each prefetches the next; the number of leaves is a power of two.
            _ => {
                let k_block_leaves = (fitting / leaf_steps).clamp(1, leaves);
                (leaf_steps.div_ceil(leaf_steps.div_ceil(fitting)), 1 << k_block_leaves.ilog2())
            }
        };
        let copy_len = if widened { width * k_block_leaves * k_block_steps * step_len } else { 0 };
        let most_tiles = CHUNK_BYTES / (tile_rows * k_block_leaves * k_block_steps * size_of::<F::X>());
        let chunks = tiles.div_ceil(most_tiles.clamp(1, MOST_TILES));
        let (panels, threads) = (w.count / halves, cpu.pool().threads());
        let groups = panels.div_ceil(width / halves).next_multiple_of(threads).min(panels);
        LinearPlan {
            rows: EvenSplit::new(rows, tiles),
            tiles,
            tiles_by_chunk: EvenSplit::new(tiles, chunks),
            chunks,
            panels: EvenSplit::new(panels, groups),
            groups,
            first_panel: w.first,
            next_panel: w.next,
            width,
            gated: gated.then_some(panels),
            steps,
            step_len,
            k_block_steps,
            k_block_leaves,
            widened,
            copy_len,
            prefetch_parts: (tiles / chunks / width).max(1),
            leaves,
            threads,
        }
    }

    /// Index of a panel's first weight of a step.
    pub fn weight(&self, panel: usize, step: usize) -> usize {
        ((self.first_panel + panel) * self.steps + step) * self.step_len
    }

    /// As [`LinearPlan::weight`], of the product that comes next.
    pub fn next_weight(&self, panel: usize) -> usize {
        (self.next_panel + panel) * self.steps * self.step_len
    }

    /// The first row of a tile.
    pub fn row(&self, tile: usize) -> usize {
        self.rows.start(tile)
    }

    /// The first tile of a chunk.
    pub fn tile(&self, chunk: usize) -> usize {
        self.tiles_by_chunk.start(chunk)
    }

    /// The first panel of a group.
    pub fn panel(&self, group: usize) -> usize {
        self.panels.start(group)
    }

    /// The panel at place `v` of a group's register tile. A group that has one panel less than the tile repeats its
    /// last panel, and the repeated columns are dropped.
    pub fn tile_panel(&self, group: usize, v: usize) -> usize {
        let last = self.panel(group + 1) - 1;
        match self.gated {
            None => last.min(self.panel(group) + v),
            Some(first) if v >= self.width / 2 => first + last.min(self.panel(group) + v - self.width / 2),
            Some(_) => last.min(self.panel(group) + v),
        }
    }

    /// Vectors of output columns that a register tile gives.
    pub fn outputs(&self) -> usize {
        if self.gated.is_some() { self.width / 2 } else { self.width }
    }

    /// A task computes one chunk of rows times one group of panels.
    pub fn tasks(&self) -> usize {
        self.chunks * self.groups
    }

    /// Float32 values of scratch that a task needs.
    pub fn scratch_len(&self) -> usize {
        self.copy_len + self.sum_sets() * self.sum_set_len()
    }

    /// How many sets of partial sums a task keeps: those that wait for their sibling in the tree of leaves, and those
    /// of the current leaf.
    fn sum_sets(&self) -> usize {
        self.leaves.ilog2() as usize + 1
    }

    /// Float32 values of one set of partial sums: the rows of a chunk times the columns of a register tile.
    pub fn sum_set_len(&self) -> usize {
        self.tiles_by_chunk.longest() * self.rows.longest() * self.width * LANES
    }
}

/// A split of items into runs whose lengths differ by one item at most. `start` needs no division, since tiles call it
/// often.
struct EvenSplit {
    each: usize,
    /// How many of the first runs have one item more.
    longer: usize,
}

impl EvenSplit {
    fn new(items: usize, runs: usize) -> EvenSplit {
        EvenSplit { each: items / runs, longer: items % runs }
    }

    fn start(&self, run: usize) -> usize {
        run * self.each + run.min(self.longer)
    }

    fn longest(&self) -> usize {
        self.each + usize::from(self.longer > 0)
    }
}
