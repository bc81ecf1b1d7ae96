//! Products of tiles, as Intel's AMX computes them: on the processor's tile unit, or emulated with the same bits.
//!
//! A tile has up to 16 rows of up to 16 bfloat16 pairs, and a product of tiles adds to 16 × 16 sums. For each sum it
//! adds up the products of the first elements of all pairs of the tile, and apart from these the products of the second
//! elements, pair by pair; then it adds both, and the result to the sum. So the bits depend on how many pairs a tile
//! has, and not on how many rows. Denormal inputs count as zeros, and denormal results become zeros.

mod emulation;
#[cfg(target_arch = "x86_64")]
mod hardware;
#[cfg(test)]
mod tests;

use half::bf16;

use super::isa::Isa;
use super::lanes::{LANES, Lanes, rounded_pairs};

/// The most rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// The most bfloat16 pairs in a row of a tile.
pub(crate) const TILE_PAIRS: usize = 16;
/// Panels that one product multiplies by.
pub(crate) const TILE_PANELS: usize = 2;
/// Sums of a tile.
pub(crate) const TILE_SUMS: usize = TILE_ROWS * LANES;

/// The shape of the tiles of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    pub rows: usize,
    pub pairs: usize,
}

impl TileShape {
    /// The shape for `rows` rows and a reduction of `pairs` pairs. All tiles of a reduction have the same number of
    /// pairs, the most that divides it.
    pub fn new(rows: usize, pairs: usize) -> TileShape {
        let divides = |most: &usize| pairs.is_multiple_of(*most);
        let pairs = (1..=TILE_PAIRS).rev().find(divides).expect("1 divides all");
        TileShape { rows: rows.min(TILE_ROWS), pairs }
    }

    /// Float32 values that the activations of a tile take: a line of 16 for each row, of which the first are its pairs.
    pub fn activations(self) -> usize {
        self.rows * LANES
    }

    /// Bfloat16 values of a panel that a tile of weights is.
    pub fn weights(self) -> usize {
        2 * LANES * self.pairs
    }
}

/// Where a product reads: `R` tiles of activations and two panels of weights, in `steps` steps, from one tile of each
/// to the next. A tile of activations is `[row][16 pairs]`, and the next one starts `x_step` float32 values further on.
pub(crate) struct TileOperands<const R: usize> {
    pub x: [*const f32; R],
    pub x_step: usize,
    pub w: [*const bf16; TILE_PANELS],
    pub steps: usize,
}

/// Rounds a row of activations to bfloat16 pairs, `pairs` in each line. Values behind them in a line are not read.
#[inline(always)]
pub(crate) fn pack_row<'a, L: Lanes>(row: &[f32], pairs: usize, lines: impl Iterator<Item = &'a mut [f32; LANES]>) {
    for (line, elements) in lines.zip(row.chunks(2 * pairs)) {
        *line = rounded_pairs::<L>(elements).to_array();
    }
}

/// The tile unit of a thread, or its emulation, for tiles of one shape. The unit is configured until this is dropped.
pub(crate) enum TileUnit {
    #[cfg(target_arch = "x86_64")]
    Hardware(hardware::ConfiguredTiles),
    Emulated(Isa, TileShape),
}

impl TileUnit {
    /// The unit of an instruction set whose products are those of tiles.
    pub fn new(isa: Isa, shape: TileShape) -> TileUnit {
        #[cfg(target_arch = "x86_64")]
        if !isa.is_emulated() {
            return TileUnit::Hardware(hardware::ConfiguredTiles::new(shape));
        }
        TileUnit::Emulated(isa, shape)
    }

    /// Stores the products `[tile of activations][panel][row][column]` in `sums`.
    ///
    /// # Safety
    /// The operands are readable for all their steps.
    ///
    /// # Panics
    /// If `sums` has another length.
    pub unsafe fn multiply<const R: usize>(&self, operands: &TileOperands<R>, sums: &mut [f32]) {
        assert_eq!(sums.len(), R * TILE_PANELS * TILE_SUMS, "sums of {R} tiles of activations");
        match self {
            // SAFETY: the caller's promise, and the length above.
            #[cfg(target_arch = "x86_64")]
            TileUnit::Hardware(tiles) => unsafe { tiles.multiply(operands, sums) },
            // SAFETY: the caller's promise.
            TileUnit::Emulated(isa, shape) => unsafe { emulation::multiply(*isa, *shape, operands, sums) },
        }
    }
}
