//! The tiles of a picture as rows of InternViT, and as sequences of its attention, which no other tile sees.

use std::ops::Range;

use rollout_kernels::{AttentionSequence, Ops, Step, StepInput};

use crate::error::Result;
use crate::model::config::VisionConfig;
use crate::model::tower::workspace::KV_BLOCK;

/// The rows of some tiles, one behind the other: the class token of a tile, then its patches row by row. All tiles are
/// alike, so those of a chunk are the first of these.
pub(super) struct TileRows {
    /// Patches of a tile.
    patches: usize,
    /// Index of each row in its tile.
    indices: Vec<u32>,
    slots: Vec<u32>,
    /// The KV blocks of each tile.
    blocks: Vec<Vec<u32>>,
    /// The rows of patches, ascending.
    patch_rows: Vec<u32>,
    /// The rows of patches in the order of tokens: those of a token behind each other, row by row.
    token_rows: Vec<u32>,
}

impl TileRows {
    /// The rows of `tiles` tiles.
    pub fn new(config: &VisionConfig, tile_side: usize, tiles: usize) -> Self {
        let (merge, columns) = (config.merge_size(), tile_side / config.token_side());
        let patches = columns * columns * config.unit();
        let rows = patches + 1;
        let tile_blocks = rows.div_ceil(KV_BLOCK);
        let in_order_of_tokens = |patch: usize| {
            let (token, part) = (patch / config.unit(), patch % config.unit());
            let row = token / columns * merge + part / merge;
            let column = token % columns * merge + part % merge;
            row * columns * merge + column
        };
        let of_tiles = |row: &dyn Fn(usize, usize) -> usize, count: usize| -> Vec<u32> {
            (0..tiles).flat_map(|tile| (0..count).map(move |i| row(tile, i) as u32)).collect()
        };
        Self {
            patches,
            indices: of_tiles(&|_, row| row, rows),
            slots: of_tiles(&|tile, row| tile * tile_blocks * KV_BLOCK + row, rows),
            blocks: (0..tiles)
                .map(|tile| (tile * tile_blocks..(tile + 1) * tile_blocks).map(|block| block as u32).collect())
                .collect(),
            patch_rows: of_tiles(&|tile, patch| tile * rows + 1 + patch, patches),
            token_rows: of_tiles(&|tile, patch| tile * rows + 1 + in_order_of_tokens(patch), patches),
        }
    }

    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        self.patches + 1
    }

    /// Patches of a tile.
    pub fn patches(&self) -> usize {
        self.patches
    }

    /// The rows of the patches of so many tiles.
    pub fn patch_rows(&self, tiles: usize) -> &[u32] {
        &self.patch_rows[..tiles * self.patches]
    }

    /// The same in the order of tokens.
    pub fn token_rows(&self, tiles: usize) -> &[u32] {
        &self.token_rows[..tiles * self.patches]
    }

    /// The attention of each tile to itself.
    pub fn sequences(&self) -> Vec<AttentionSequence<'_>> {
        let rows = self.rows();
        let first_rows = (0..).step_by(rows);
        let sequence = |(first_row, blocks)| AttentionSequence {
            first_row,
            rows,
            start_position: 0,
            visible: Some(rows),
            block_table: blocks,
        };
        first_rows.zip(self.blocks.iter().map(Vec::as_slice)).map(sequence).collect()
    }

    /// Prepares a step of the first `tiles` of `sequences`.
    pub fn prepare<'a>(&'a self, ops: &Ops, tiles: usize, sequences: &'a [AttentionSequence<'a>]) -> Result<Step<'a>> {
        let rows = 0..tiles * self.rows();
        Ok(ops.prepare(StepInput {
            tokens: &self.indices[rows.clone()],
            positions: &self.indices[rows.clone()],
            axes: 1,
            slots: &self.slots[rows],
            sequences: &sequences[..tiles],
            logits: &[],
            tasks: &[],
        })?)
    }
}

/// Pixel row and column of the upper left corner of each patch of these tiles, in a picture that has its tiles one
/// below the other.
pub(super) fn corners(config: &VisionConfig, tile_side: usize, tiles: Range<usize>) -> Vec<[u32; 2]> {
    let patch = config.preprocessor.patch_size as usize;
    let columns = tile_side / patch;
    let of_tile = |tile: usize| {
        let corner = move |i: usize| [tile * tile_side + i / columns * patch, i % columns * patch];
        (0..columns * columns).map(move |i| corner(i).map(|pixel| pixel as u32))
    };
    tiles.flat_map(of_tile).collect()
}

/// Chunks of at most `most` tiles.
pub(super) fn chunks(tiles: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..tiles).step_by(most).map(move |first| first..tiles.min(first + most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;
    use crate::weights::ModelSource;

    #[test]
    fn a_token_has_its_four_patches_and_a_tile_its_own_blocks() {
        let path = format!("{}/tests/fixtures/internvl3", env!("CARGO_MANIFEST_DIR"));
        let files = ModelSource::parse(&path).unwrap().open().unwrap();
        let config = ModelConfig::from_files(&files).unwrap().vision.unwrap();
        let rows = TileRows::new(&config, 56, 2);
        assert_eq!((rows.rows(), rows.patches()), (17, 16));
        // Row 0 is the class token; rows 1 to 4 are the first row of patches.
        let of_tile = [1, 2, 5, 6, 3, 4, 7, 8, 9, 10, 13, 14, 11, 12, 15, 16];
        assert_eq!(rows.token_rows(1), of_tile);
        assert_eq!(rows.token_rows(2)[16..], of_tile.map(|row| row + 17));
        assert_eq!(rows.patch_rows(1), (1..17).collect::<Vec<u32>>());
        assert_eq!((rows.slots[16], rows.slots[17]), (16, 32));
        assert_eq!(rows.blocks, [[0, 1], [2, 3]]);
        let corners = corners(&config, 56, 1..3);
        assert_eq!((corners[0], corners[5], corners[16], corners.len()), ([56, 0], [70, 14], [112, 0], 32));
        assert_eq!(chunks(5, 2).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
    }
}
