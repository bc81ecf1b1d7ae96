//! How a product is cut into blocks: by sizes, for speed. No choice changes a bit of the result.

use crate::values::StorageDtype;
/// How blocks combine the sums of leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GemmKind {
    /// Each block sums one leaf.
    Leaf,
    /// Each block adds the sums of several leaves as a tree, or writes that of one.
    Leaves,
    /// Each block sums one leaf, and writes the SiLU of the left half of the columns times the right half.
    Gated,
}

/// The outputs of a block, and what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemmTile {
    pub kernel: &'static str,
    pub dtype: StorageDtype,
    pub kind: GemmKind,
    pub rows: usize,
    pub columns: usize,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

const fn bf16(kernel: &'static str, kind: GemmKind, [rows, columns]: [usize; 2], warps: u32, stages: u32) -> GemmTile {
    /// Values of `k` in a stage of the kernels' pipeline.
    const DEPTH: usize = 64;
    let halves = if matches!(kind, GemmKind::Gated) { 2 } else { 1 };
    let shared = stages * ((rows + halves * columns) * DEPTH * size_of::<half::bf16>()) as u32;
    GemmTile { kernel, dtype: StorageDtype::Bf16, kind, rows, columns, threads: 32 * warps, shared }
}

/// A tile of which the sums of two levels of the tree wait in shared memory.
const fn waiting_in_shared(tile: GemmTile) -> GemmTile {
    let sums = (tile.rows * tile.columns * size_of::<f32>()) as u32;
    GemmTile { shared: tile.shared + 2 * sums, ..tile }
}

const fn f32(kernel: &'static str, [rows, columns]: [usize; 2], threads: u32) -> GemmTile {
    GemmTile { kernel, dtype: StorageDtype::F32, kind: GemmKind::Leaves, rows, columns, threads, shared: 0 }
}

/// The tiles of `cu/linear_bf16.cu` and `cu/linear_f32.cu`; those of one type and kind from small to large.
pub(super) const TILES: [GemmTile; 17] = [
    bf16("bf16_16x32_leaf", GemmKind::Leaf, [16, 32], 2, 8),
    bf16("bf16_32x64_leaf", GemmKind::Leaf, [32, 64], 4, 5),
    bf16("bf16_64x64_leaf", GemmKind::Leaf, [64, 64], 4, 4),
    bf16("bf16_128x128_leaf", GemmKind::Leaf, [128, 128], 8, 3),
    bf16("bf16_128x256_leaf", GemmKind::Leaf, [128, 256], 8, 3),
    bf16("bf16_16x32_leaves", GemmKind::Leaves, [16, 32], 2, 8),
    bf16("bf16_32x64_leaves", GemmKind::Leaves, [32, 64], 4, 5),
    bf16("bf16_64x64_leaves", GemmKind::Leaves, [64, 64], 4, 4),
    bf16("bf16_64x128_leaves", GemmKind::Leaves, [64, 128], 8, 3),
    waiting_in_shared(bf16("bf16_128x128_leaves", GemmKind::Leaves, [128, 128], 8, 3)),
    bf16("bf16_16x16_gated", GemmKind::Gated, [16, 16], 2, 8),
    bf16("bf16_32x32_gated", GemmKind::Gated, [32, 32], 4, 5),
    bf16("bf16_64x32_gated", GemmKind::Gated, [64, 32], 4, 4),
    bf16("bf16_128x64_gated", GemmKind::Gated, [128, 64], 8, 3),
    bf16("bf16_128x128_gated", GemmKind::Gated, [128, 128], 8, 3),
    f32("f32_16x32", [16, 32], 128),
    f32("f32_64x64", [64, 64], 256),
];

/// Most bytes of the sums of leaves that blocks share: a product is divided while there are fewer than two blocks for
/// each multiprocessor, so into fewer than four, each with the sums of one tile.
pub(in crate::cuda) fn most_part_bytes(processors: usize) -> usize {
    let outputs = TILES.iter().map(|tile| tile.rows * tile.columns).max().expect("there are tiles");
    4 * processors * outputs * size_of::<f32>()
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemmPlan {
    /// Which of [`TILES`].
    pub tile: usize,
    /// Between how many blocks the leaves of an output are divided; their sums are added by another kernel.
    pub splits: usize,
}

/// The size of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemmSize {
    pub dtype: StorageDtype,
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    pub leaves: usize,
    pub is_gated: bool,
}

/// The limits of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemmLimits {
    /// Multiprocessors.
    pub processors: usize,
    /// Bytes of shared memory that a block can have.
    pub shared: u32,
}

impl GemmSize {
    /// The kind of blocks that sum this many leaves.
    fn kind(self, leaves: usize) -> GemmKind {
        match leaves {
            _ if self.is_gated => GemmKind::Gated,
            1 => GemmKind::Leaf,
            _ => GemmKind::Leaves,
        }
    }

    fn blocks(self, tile: &GemmTile) -> usize {
        self.m.div_ceil(tile.rows) * self.n.div_ceil(tile.columns)
    }
}

impl GemmPlan {
    /// The fastest way for a device.
    pub fn of(size: GemmSize, limits: GemmLimits) -> Self {
        let tile = largest_tile(size, size.leaves, limits);
        let mut splits = 1;
        while splits < size.leaves && splits * size.blocks(&TILES[tile]) < 2 * limits.processors {
            splits *= 2;
        }
        Self { tile: largest_tile(size, size.leaves / splits, limits), splits }
    }

    /// All ways there are on a device.
    #[cfg(test)]
    pub fn all(size: GemmSize, limits: GemmLimits) -> Vec<Self> {
        let divided = |tile| (0..=size.leaves.ilog2()).map(move |power| Self { tile, splits: 1 << power });
        let fits = |plan: &Self| {
            let (tile, kind) = (&TILES[plan.tile], size.kind(size.leaves / plan.splits));
            limits.fit(tile)
                && tile.dtype == size.dtype
                && (tile.kind == kind || (tile.kind, kind) == (GemmKind::Leaves, GemmKind::Leaf))
        };
        (0..TILES.len()).flat_map(divided).filter(fits).collect()
    }
}

/// The size of the products of a rank's experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertsSize {
    pub dtype: StorageDtype,
    /// Experts of the rank.
    pub experts: usize,
    /// The most pairs of a row and one of them.
    pub pairs: usize,
    /// Rows of an expert if all are chosen equally often.
    pub rows: usize,
    /// Columns of the output.
    pub n: usize,
    pub is_gated: bool,
}

impl ExpertsSize {
    /// The most tiles that the pairs fill along the rows, each of them of one expert.
    pub fn tiles(self, tile: &GemmTile) -> usize {
        (self.pairs + self.experts.min(self.pairs) * (tile.rows - 1)) / tile.rows
    }

    /// The fastest of [`TILES`] for a device.
    pub fn tile(self, limits: GemmLimits) -> usize {
        let blocks = |tile: &GemmTile| self.tiles(tile) * self.n.div_ceil(tile.columns);
        largest_of_kind(self.dtype, self.kind(), self.rows, limits, blocks)
    }

    fn kind(self) -> GemmKind {
        if self.is_gated { GemmKind::Gated } else { GemmKind::Leaf }
    }

    /// All of [`TILES`] that a device can take.
    #[cfg(test)]
    pub fn all(self, limits: GemmLimits) -> Vec<usize> {
        let fits = |tile: &GemmTile| limits.fit(tile) && tile.is_of(self.dtype, self.kind());
        (0..TILES.len()).filter(|i| fits(&TILES[*i])).collect()
    }
}

impl GemmTile {
    /// Whether its blocks compute this kind of outputs: those of float32 compute any that is not gated.
    fn is_of(&self, dtype: StorageDtype, kind: GemmKind) -> bool {
        self.dtype == dtype && (dtype == StorageDtype::F32 || self.kind == kind)
    }

    /// Whether experts have it too: a rank has the whole of each of their sums, which is of one leaf.
    pub fn is_of_experts(&self) -> bool {
        self.dtype == StorageDtype::F32 || self.kind != GemmKind::Leaves
    }
}

impl GemmLimits {
    pub fn fit(self, tile: &GemmTile) -> bool {
        tile.shared <= self.shared
    }
}

/// The largest tile for blocks that sum this many leaves.
fn largest_tile(size: GemmSize, leaves: usize, limits: GemmLimits) -> usize {
    largest_of_kind(size.dtype, size.kind(leaves), size.m, limits, |tile| size.blocks(tile) * size.leaves)
}

/// The largest tile of which no more than half is outside the `rows` of a product and that keeps all multiprocessors
/// busy, or else the smallest: a large one reads less, a small one makes more blocks.
fn largest_of_kind(
    dtype: StorageDtype,
    kind: GemmKind,
    rows: usize,
    limits: GemmLimits,
    blocks: impl Fn(&GemmTile) -> usize,
) -> usize {
    let is_busy = |i: &usize| {
        let tile = &TILES[*i];
        limits.fit(tile) && tile.rows < 2 * rows && blocks(tile) >= limits.processors
    };
    let mut tiles = (0..TILES.len()).filter(|i| TILES[*i].is_of(dtype, kind));
    let smallest = tiles.next().expect("each type and kind has a tile");
    tiles.rfind(is_busy).unwrap_or(smallest)
}
