//! How a product is cut into blocks: by sizes, for speed. No choice changes a bit of the result.

use crate::weights::WeightDtype;

/// The outputs of a block, and what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub kernel: &'static str,
    pub dtype: WeightDtype,
    pub rows: usize,
    pub columns: usize,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Whether a block may sum several leaves: their sums wait in registers.
    pub sums_leaves: bool,
}

const fn bf16(kernel: &'static str, [rows, columns]: [usize; 2], warps: u32, stages: u32, sums_leaves: bool) -> Tile {
    /// Values of `k` in a stage of the kernels' pipeline.
    const DEPTH: usize = 64;
    let shared = stages * ((rows + columns) * DEPTH * size_of::<half::bf16>()) as u32;
    Tile { kernel, dtype: WeightDtype::Bf16, rows, columns, threads: 32 * warps, shared, sums_leaves }
}

const fn f32(kernel: &'static str, [rows, columns]: [usize; 2], threads: u32) -> Tile {
    Tile { kernel, dtype: WeightDtype::F32, rows, columns, threads, shared: 0, sums_leaves: true }
}

/// The tiles of `cu/linear_bf16.cu` and `cu/linear_f32.cu`.
pub(super) const TILES: [Tile; 10] = [
    bf16("bf16_16x32_leaf", [16, 32], 2, 8, false),
    bf16("bf16_32x64_leaf", [32, 64], 4, 5, false),
    bf16("bf16_64x64_leaf", [64, 64], 4, 4, false),
    bf16("bf16_128x128_leaf", [128, 128], 8, 3, false),
    bf16("bf16_16x32_leaves", [16, 32], 2, 8, true),
    bf16("bf16_32x64_leaves", [32, 64], 4, 5, true),
    bf16("bf16_64x64_leaves", [64, 64], 4, 4, true),
    bf16("bf16_64x128_leaves", [64, 128], 8, 3, true),
    f32("f32_16x32", [16, 32], 128),
    f32("f32_64x64", [64, 64], 256),
];

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Which of [`TILES`].
    pub tile: usize,
    /// Between how many blocks the leaves of an output are divided; their sums are added by another kernel.
    pub splits: usize,
}

/// What there is to multiply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub dtype: WeightDtype,
    pub m: usize,
    pub n: usize,
    pub leaves: usize,
}

impl Plan {
    /// The fastest way for a device with this many multiprocessors.
    pub fn of(size: Size, processors: usize) -> Self {
        let tile = largest_tile(size, size.leaves > 1, processors);
        let mut splits = 1;
        while splits < size.leaves && splits * blocks(&TILES[tile], size) < 2 * processors {
            splits *= 2;
        }
        Self { tile: largest_tile(size, size.leaves > splits, processors), splits }
    }

    /// All ways there are.
    #[cfg(test)]
    pub fn all(size: Size) -> Vec<Self> {
        let divided = |tile| (0..=size.leaves.ilog2()).map(move |power| Self { tile, splits: 1 << power });
        let fits = |plan: &Self| fits(&TILES[plan.tile], size.dtype, size.leaves > plan.splits);
        (0..TILES.len()).flat_map(divided).filter(fits).collect()
    }
}

fn blocks(tile: &Tile, size: Size) -> usize {
    size.m.div_ceil(tile.rows) * size.n.div_ceil(tile.columns)
}

fn fits(tile: &Tile, dtype: WeightDtype, sums_leaves: bool) -> bool {
    tile.dtype == dtype && (tile.sums_leaves || !sums_leaves)
}

/// The largest tile of which no more than half is outside the product and that keeps all multiprocessors busy, or else
/// the smallest. A large one reads less, a small one makes more blocks.
fn largest_tile(size: Size, sums_leaves: bool, processors: usize) -> usize {
    let of_kind = |i: &usize| {
        let tile = &TILES[*i];
        fits(tile, size.dtype, sums_leaves) && (tile.sums_leaves == sums_leaves || size.dtype == WeightDtype::F32)
    };
    let is_busy = |i: &usize| {
        let tile = &TILES[*i];
        tile.rows < 2 * size.m && blocks(tile, size) * size.leaves >= processors
    };
    let mut tiles = (0..TILES.len()).filter(of_kind);
    let smallest = tiles.next().expect("each type has a tile");
    tiles.filter(is_busy).next_back().unwrap_or(smallest)
}
