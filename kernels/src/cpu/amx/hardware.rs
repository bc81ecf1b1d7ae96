//! Intel's tile unit through inline assembly.
//!
//! The compiler does not know tile registers as values, so each product is one `asm!` block, from clearing the sums to
//! storing them.

use std::arch::asm;

use half::bf16;

use super::super::amx_detection::is_available;
use super::{TILE_PAIRS, TILE_PANELS, TILE_ROWS, TILE_SUMS, TileOperands, TileShape};

/// The operand of `ldtilecfg`: bytes of a row and rows of each tile.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tiles of this thread are configured until this is dropped: 0 to 3 for sums, 4 and 5 for activations, 6 and 7 for
/// weights.
pub(crate) struct ConfiguredTiles(TileShape);

impl ConfiguredTiles {
    /// # Panics
    /// If the processor has no tiles, or the shape is none of theirs.
    pub fn new(shape: TileShape) -> ConfiguredTiles {
        const LINE: u16 = 64;
        assert!(is_available(), "this processor has no tiles");
        assert!((1..=TILE_ROWS).contains(&shape.rows) && (1..=TILE_PAIRS).contains(&shape.pairs), "{shape:?}");
        let (rows, pairs) = (shape.rows as u8, shape.pairs as u8);
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            (config.row_bytes[tile], config.rows[tile]) = match tile {
                0..4 => (LINE, rows),
                4..6 => (4 * u16::from(pairs), rows),
                _ => (LINE, pairs),
            };
        }
        // SAFETY: the processor has the instruction by the first assertion, the operand has its 64 bytes, and the tiles
        // have such a shape by the second.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack)) };
        ConfiguredTiles(shape)
    }

    /// Stores the products as [`TileUnit::multiply`](super::TileUnit::multiply) does.
    ///
    /// # Safety
    /// The operands are readable for all their steps, and there are as many sums as those of `R` tiles.
    pub unsafe fn multiply<const R: usize>(&self, operands: &TileOperands<R>, sums: &mut [f32]) {
        debug_assert_eq!(sums.len(), R * TILE_PANELS * TILE_SUMS);
        let TileOperands { x, x_step, w, steps } = operands;
        let step = Step { x: 4 * x_step, w: 2 * self.0.weights() };
        // SAFETY: the caller's promise.
        unsafe {
            match R {
                1 => multiply_one(x[0], *w, *steps, step, sums.as_mut_ptr()),
                2 => multiply_two([x[0], x[1]], *w, *steps, step, sums.as_mut_ptr()),
                _ => unreachable!("{R} tiles of activations"),
            }
        }
    }
}

impl Drop for ConfiguredTiles {
    /// Releases the tiles: those in use are 8 KiB more to save at each context switch.
    fn drop(&mut self) {
        // SAFETY: the processor has the instruction, since the value exists.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// Bytes from one tile of activations to the next, and from one tile of weights to the next.
#[derive(Clone, Copy)]
struct Step {
    x: usize,
    w: usize,
}

/// The products of two tiles of activations and two panels.
///
/// # Safety
/// The tiles of this thread are configured, activations and panels are readable for `steps` steps, and `sums` is
/// writable for four tiles.
unsafe fn multiply_two(x: [*const f32; 2], w: [*const bf16; 2], steps: usize, step: Step, sums: *mut f32) {
    // SAFETY: the caller's promise; a tile of sums is at most 16 rows of 64 bytes.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tileloadd tmm4, [{x0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{x1} + {line}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {x0}, {x_step}",
            "add {x1}, {x_step}",
            "add {w0}, {w_step}",
            "add {w1}, {w_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm1",
            "tilestored [{sums} + {line}*1 + 2048], tmm2",
            "tilestored [{sums} + {line}*1 + 3072], tmm3",
            x0 = inout(reg) x[0] => _,
            x1 = inout(reg) x[1] => _,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            steps = inout(reg) steps => _,
            x_step = in(reg) step.x,
            w_step = in(reg) step.w,
            sums = in(reg) sums,
            line = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The products of one tile of activations and two panels.
///
/// # Safety
/// The tiles of this thread are configured, activations and panels are readable for `steps` steps, and `sums` is
/// writable for two tiles.
unsafe fn multiply_one(x: *const f32, w: [*const bf16; 2], steps: usize, step: Step, sums: *mut f32) {
    // SAFETY: the caller's promise; a tile of sums is at most 16 rows of 64 bytes.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "2:",
            "tileloadd tmm4, [{x} + {line}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {x}, {x_step}",
            "add {w0}, {w_step}",
            "add {w1}, {w_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm1",
            x = inout(reg) x => _,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            steps = inout(reg) steps => _,
            x_step = in(reg) step.x,
            w_step = in(reg) step.w,
            sums = in(reg) sums,
            line = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
