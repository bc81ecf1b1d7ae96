//! Linear layers by products of tiles.
//!
//! A block is up to two tiles of 16 rows times two panels, over one leaf of the reduction. The leaves of a block are
//! added as the tree that [`linear`](super) documents; within a leaf the order is that of [`amx`](super::super::amx).

use super::super::activation::silu_times;
use super::super::amx::{TILE_PANELS, TILE_ROWS, TILE_SUMS, TileOperands, TileShape, TileUnit, pack_row};
use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::rows::{Rows, RowsMut, SelectedRows, SharedRows};
use super::super::tile::RoundedPairs;
use super::format::LinearFormat as _;
use super::plan::Panels;
use half::bf16;
use std::ops::Range;

/// Tiles of activations in a block.
const BLOCK_TILES: usize = 2;

/// Bytes of the activations of a chunk, which stay in the second-level cache (2 MiB on processors with tiles) while the
/// panels of a task pass.
const CHUNK_BYTES: usize = 768 << 10;

/// Bytes of the weights of a task: enough that starting a task, which configures the tiles, is a small part of it.
const TASK_BYTES: usize = 96 << 10;

/// `out = x · Wᵀ + bias`, or `silu(gate) * up` if the layer is gated; shapes are checked.
pub(super) fn run(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>, gated: bool) {
    let plan = TilePlan::new(cpu.pool().threads(), x.rows(), Panels::all(w), gated);
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<f32>(plan.tiles * plan.tile_len());
    pack_activations(cpu, SelectedRows::all(x), &plan, packed);
    let call =
        TileCall { isa: cpu.isa(), plan: &plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    cpu.pool().run_with_scratch(plan.tasks(), plan.scratch_len(), |task, sums| call.task(task, sums));
}

/// The cut of a linear layer into tiles, blocks and tasks. A task computes a chunk of tiles times a group of blocks'
/// panels.
pub(super) struct TilePlan {
    shape: TileShape,
    rows: usize,
    /// Tiles of 16 rows, of which the last may have fewer.
    pub tiles: usize,
    /// Tiles of a chunk, a whole number of blocks.
    pub chunk: usize,
    pub chunks: usize,
    /// Blocks side by side.
    blocks: usize,
    groups: usize,
    /// The first panel of the weights.
    first_panel: usize,
    panels: usize,
    /// Whether the first half of the panels gives the gates of the values that the second half gives.
    gated: bool,
    /// Tiles of the reduction in a leaf.
    steps: usize,
    leaves: usize,
}

impl TilePlan {
    pub fn new(threads: usize, rows: usize, w: Panels, gated: bool) -> TilePlan {
        let (leaves, panels) = (w.leaves, w.count);
        let pairs = w.padded_k / 2 / leaves;
        let shape = TileShape::new(rows, pairs);
        let steps = pairs / shape.pairs;
        let tiles = rows.div_ceil(TILE_ROWS);
        let row_bytes = size_of::<f32>() * LANES * steps * leaves;
        let chunks = tiles.div_ceil((CHUNK_BYTES / (TILE_ROWS * row_bytes)).max(BLOCK_TILES));
        let chunk = tiles.div_ceil(chunks).next_multiple_of(BLOCK_TILES);
        let blocks = panels.div_ceil(TILE_PANELS);
        let bytes = blocks * TILE_PANELS * LANES * w.padded_k * size_of::<bf16>();
        let groups = bytes.div_ceil(TASK_BYTES).next_multiple_of(threads).min(blocks);
        TilePlan {
            shape,
            rows,
            tiles,
            chunk,
            chunks: tiles.div_ceil(chunk),
            blocks,
            groups,
            first_panel: w.first,
            panels,
            gated,
            steps,
            leaves,
        }
    }

    /// A task computes one chunk of tiles times one group of blocks.
    pub fn tasks(&self) -> usize {
        self.chunks * self.groups
    }

    /// Sums that a task needs scratch for.
    pub fn scratch_len(&self) -> usize {
        self.sum_sets() * BLOCK_TILES * TILE_PANELS * TILE_SUMS
    }

    /// Packed values of a tile over the whole reduction.
    pub fn tile_len(&self) -> usize {
        self.leaves * self.steps * self.shape.activations()
    }

    /// How many sets of sums a block keeps: those of leaves that wait for their sibling, and those of the current leaf.
    fn sum_sets(&self) -> usize {
        self.leaves.ilog2() as usize + 1
    }

    /// The panels of a block: two neighbours, or one of gates and the one that these gate. If the number of panels is
    /// odd, the last block has the last panel twice.
    fn panels_of(&self, block: usize) -> [usize; TILE_PANELS] {
        match self.gated {
            true => [block, self.blocks + block],
            false => [TILE_PANELS * block, (TILE_PANELS * block + 1).min(self.panels - 1)],
        }
    }
}

/// Packs the rounded activations as `[tile][step][row][16 pairs]`. Rows that the last of several tiles lacks are zeros.
fn pack_activations(cpu: &Cpu, x: SelectedRows<'_>, plan: &TilePlan, packed: &mut [f32]) {
    let parts = if packed.len() < RoundedPairs::WORTH_WAKING { 1 } else { plan.tiles.min(4 * cpu.pool().threads()) };
    let first = |part: usize| plan.tiles * part / parts;
    let start = |part: usize| first(part) * plan.tile_len();
    cpu.pool().run_parts(packed, parts, start, |part, packed| {
        cpu.isa().dispatch(PackTiles { x, plan, tiles: first(part)..first(part + 1), packed });
    });
}

pub(super) struct PackTiles<'a> {
    pub x: SelectedRows<'a>,
    pub plan: &'a TilePlan,
    pub tiles: Range<usize>,
    pub packed: &'a mut [f32],
}

impl Kernel for PackTiles<'_> {
    type Output = ();
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { x, plan, tiles, packed } = self;
        let TileShape { rows, pairs } = plan.shape;
        for (tile, packed) in tiles.zip(packed.chunks_exact_mut(plan.tile_len())) {
            let (lines, _) = packed.as_chunks_mut::<LANES>();
            for row in 0..rows {
                let of_row = lines[row..].iter_mut().step_by(rows);
                match TILE_ROWS * tile + row {
                    at if at < plan.rows => pack_row::<L>(x.row(at), pairs, of_row),
                    _ => of_row.for_each(|line| *line = [0.0; LANES]),
                }
            }
        }
    }
}

/// The operands and the output of one call, which all its tasks share.
pub(super) struct TileCall<'a> {
    pub isa: Isa,
    pub plan: &'a TilePlan,
    pub packed: &'a [f32],
    pub weights: &'a [bf16],
    pub bias: Option<&'a [f32]>,
    pub out: SharedRows<'a>,
}

impl TileCall<'_> {
    pub fn task(&self, task: usize, sums: &mut [f32]) {
        let plan = self.plan;
        let (chunk, group) = (task / plan.groups, task % plan.groups);
        let tiles = chunk * plan.chunk..plan.tiles.min((chunk + 1) * plan.chunk);
        let first = |group: usize| plan.blocks * group / plan.groups;
        let unit = TileUnit::new(self.isa, plan.shape);
        for block in first(group)..first(group + 1) {
            for tile in tiles.clone().step_by(BLOCK_TILES) {
                match tiles.end - tile {
                    1 => self.block::<1>(&unit, tile, block, sums),
                    _ => self.block::<BLOCK_TILES>(&unit, tile, block, sums),
                }
            }
        }
    }

    /// Computes `R` tiles of rows from `tile` on times the two panels of a block.
    fn block<const R: usize>(&self, unit: &TileUnit, tile: usize, block: usize, sums: &mut [f32]) {
        let plan = self.plan;
        let len = R * TILE_PANELS * TILE_SUMS;
        let panel_len = plan.leaves * plan.steps * plan.shape.weights();
        let x: [&[f32]; R] = std::array::from_fn(|r| &self.packed[(tile + r) * plan.tile_len()..][..plan.tile_len()]);
        let w = plan.panels_of(block).map(|panel| &self.weights[(plan.first_panel + panel) * panel_len..][..panel_len]);
        let rows = TILE_ROWS * tile..plan.rows.min(TILE_ROWS * (tile + R));
        for leaf in 0..plan.leaves {
            if leaf + 1 == plan.leaves {
                self.isa.dispatch(PrefetchRows { call: self, rows: rows.clone(), block });
            }
            let at = leaf * plan.steps;
            let operands = TileOperands {
                x_step: plan.shape.activations(),
                x: x.map(|x| x[at * plan.shape.activations()..].as_ptr()),
                w: w.map(|w| w[at * plan.shape.weights()..].as_ptr()),
                steps: plan.steps,
            };
            let waiting = leaf.count_ones() as usize;
            // SAFETY: both have `steps` tiles from here on, since a leaf has as many and this is one of the leaves.
            unsafe { unit.multiply(&operands, &mut sums[waiting * len..][..len]) };
            for sibling in 0..leaf.trailing_ones() as usize {
                let (left, right) = sums[(waiting - sibling - 1) * len..][..2 * len].split_at_mut(len);
                self.isa.dispatch(AddSums { left, right });
            }
        }
        self.isa.dispatch(WriteBlock { call: self, rows, block, sums: &sums[..len] });
    }

    /// The output columns of each panel of a block, without padding; none for values that are gated, and for a panel
    /// that the block has twice.
    fn columns_of(&self, block: usize) -> [Range<usize>; TILE_PANELS] {
        let end = |panel: usize| self.out.width().min(panel * LANES);
        let [first, second] = self.plan.panels_of(block);
        let is_own = !self.plan.gated && second != first;
        [end(first)..end(first + 1), if is_own { end(second)..end(second + 1) } else { 0..0 }]
    }
}

/// Adds the sums of a leaf, or of a run of leaves, to those of its sibling on the left.
struct AddSums<'a> {
    left: &'a mut [f32],
    right: &'a [f32],
}

impl Kernel for AddSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (left, right) in self.left.as_chunks_mut::<LANES>().0.iter_mut().zip(self.right.as_chunks::<LANES>().0) {
            *left = L::from_array(left).add(L::from_array(right)).to_array();
        }
    }
}

/// Prefetches the outputs of a block: stores to cache lines that are not in the cache would delay the next block.
struct PrefetchRows<'a> {
    call: &'a TileCall<'a>,
    rows: Range<usize>,
    block: usize,
}

impl Kernel for PrefetchRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for columns in self.call.columns_of(self.block).into_iter().filter(|columns| !columns.is_empty()) {
            for row in self.rows.clone() {
                L::prefetch_near(self.call.out.as_ptr(row, columns.start).cast());
            }
        }
    }
}

/// Adds the bias to the sums of a block, applies the gates, and writes the outputs.
struct WriteBlock<'a> {
    call: &'a TileCall<'a>,
    rows: Range<usize>,
    block: usize,
    sums: &'a [f32],
}

impl Kernel for WriteBlock<'_> {
    type Output = ();

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // indices, as in `tile`
    fn run<L: Lanes>(self) {
        let Self { call, rows, block, sums } = self;
        let mut bias = None;
        if let Some(values) = call.bias {
            let [first, second] = call.plan.panels_of(block);
            bias = Some([first_lanes::<L>(&values[first * LANES..]), first_lanes::<L>(&values[second * LANES..])]);
        }
        let columns = call.columns_of(block);
        for (tile, sums) in sums.chunks_exact(TILE_PANELS * TILE_SUMS).enumerate() {
            let (first, second) = sums.as_chunks::<LANES>().0.split_at(TILE_ROWS);
            for (m, row) in rows.clone().skip(tile * TILE_ROWS).take(TILE_ROWS).enumerate() {
                let mut values = [L::from_array(&first[m]), L::from_array(&second[m])];
                if let Some(bias) = bias {
                    values = [values[0].add(bias[0]), values[1].add(bias[1])];
                }
                if call.plan.gated {
                    values[0] = silu_times(values[0], values[1]);
                }
                for panel in 0..TILE_PANELS {
                    // SAFETY: no other task has these rows and columns.
                    let to = unsafe { call.out.part(row, columns[panel].start, columns[panel].len()) };
                    match to.first_chunk_mut::<LANES>() {
                        Some(to) => *to = values[panel].to_array(),
                        None => to.copy_from_slice(&values[panel].to_array()[..to.len()]),
                    }
                }
            }
        }
    }
}

/// The first 16 values, with zeros in place of those that are missing.
#[inline(always)]
fn first_lanes<L: Lanes>(values: &[f32]) -> L {
    match values.first_chunk::<LANES>() {
        Some(values) => L::from_array(values),
        None => {
            let mut padded = [0.0; LANES];
            padded[..values.len()].copy_from_slice(values);
            L::from_array(&padded)
        }
    }
}
