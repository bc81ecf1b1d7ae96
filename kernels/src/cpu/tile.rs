//! The register tile that products are made of: `MR` rows of activations times `NV` vectors of 16 columns.
//!
//! No closures here: a closure has not the target features of the kernel it is part of, and one that the compiler does
//! not inline calls every intrinsic as a function.

#![allow(clippy::needless_range_loop)] // indices, for the reason above

use super::lanes::{LANES, Lanes};
use half::bf16;
use std::marker::PhantomData;

/// How one step of a reduction reads activations and weights.
pub(crate) trait Format: Send + Sync + 'static {
    /// One row's activations of one step.
    type X: super::storage::Plain;
    /// An element of the weights.
    type W: super::storage::Plain;
    /// See [`Kernel::DOT_PAIRS`](super::isa::Kernel::DOT_PAIRS).
    const DOT_PAIRS: bool = false;
    /// Elements of the reduction in one step.
    const PER_STEP: usize;
    /// Whether a step leaves its weights widened to float32.
    const WIDENS: bool = false;

    /// `acc[m][v] += x[m] · w[v]`, elements of the reduction in ascending order. A format that
    /// [widens](Self::WIDENS) leaves them at `copy`.
    ///
    /// # Safety
    /// `x + m * x_row` for every `m < MR`, and every `w[v]` for the weights of one step, are readable; `copy` is
    /// writable for as many float32 if the format widens.
    unsafe fn step<L: Lanes, const MR: usize, const NV: usize>(
        acc: &mut [[L; NV]; MR],
        x: *const Self::X,
        x_row: usize,
        w: [*const Self::W; NV],
        copy: *mut f32,
    );
}

/// An element type of which 16 neighbours are widened to float32 lanes.
pub(crate) trait Element: super::storage::Plain {
    /// # Safety
    /// `p` is readable for 16 elements.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
    /// Two vectors of the reduction's neighbours.
    ///
    /// # Safety
    /// `p` is readable for 32 elements.
    unsafe fn load_pairs<L: Lanes>(p: *const Self) -> (L, L);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }

    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(p: *const f32) -> (L, L) {
        // SAFETY: the caller's promise.
        unsafe { (L::load(p), L::load(p.add(LANES))) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const bf16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(p: *const bf16) -> (L, L) {
        // SAFETY: the caller's promise.
        unsafe { L::load_pairs(p) }
    }
}

/// One element of the reduction a step: 16 neighbouring elements of `E` against one float32.
pub(crate) struct Single<E>(PhantomData<E>);

/// Two elements a step against two float32: 16 pairs of bfloat16, widened as they are read, or of float32 that were
/// widened before, first all even and then all odd ones.
pub(crate) struct Pairs<E>(PhantomData<E>);

/// As [`Pairs`] of bfloat16, which it also leaves widened, panel by panel: other tiles read that as `Pairs<f32>`.
pub(crate) struct Widening;

/// Two elements a step: 16 pairs of bfloat16 against a pair of bfloat16, the bits of a float32; one instruction where
/// there is one.
pub(crate) struct RoundedPairs;

impl<E: Element> Format for Single<E> {
    type X = f32;
    type W = E;
    const PER_STEP: usize = 1;

    #[inline(always)]
    unsafe fn step<L: Lanes, const MR: usize, const NV: usize>(
        acc: &mut [[L; NV]; MR],
        x: *const f32,
        x_row: usize,
        w: [*const E; NV],
        _: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut lanes = [L::zero(); NV];
            for v in 0..NV {
                lanes[v] = E::load::<L>(w[v]);
            }
            for m in 0..MR {
                let x = L::splat(*x.add(m * x_row));
                for v in 0..NV {
                    acc[m][v] = x.mul_add(lanes[v], acc[m][v]);
                }
            }
        }
    }
}

impl<E: Element> Format for Pairs<E> {
    type X = [f32; 2];
    type W = E;
    const PER_STEP: usize = 2;

    #[inline(always)]
    unsafe fn step<L: Lanes, const MR: usize, const NV: usize>(
        acc: &mut [[L; NV]; MR],
        x: *const [f32; 2],
        x_row: usize,
        w: [*const E; NV],
        _: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut lanes = [(L::zero(), L::zero()); NV];
            for v in 0..NV {
                lanes[v] = E::load_pairs::<L>(w[v]);
            }
            for m in 0..MR {
                let x = L::splat((*x.add(m * x_row))[0]);
                for v in 0..NV {
                    acc[m][v] = x.mul_add(lanes[v].0, acc[m][v]);
                }
            }
            for m in 0..MR {
                let x = L::splat((*x.add(m * x_row))[1]);
                for v in 0..NV {
                    acc[m][v] = x.mul_add(lanes[v].1, acc[m][v]);
                }
            }
        }
    }
}

impl Format for Widening {
    type X = [f32; 2];
    type W = bf16;
    const PER_STEP: usize = 2;
    const WIDENS: bool = true;

    #[inline(always)]
    unsafe fn step<L: Lanes, const MR: usize, const NV: usize>(
        acc: &mut [[L; NV]; MR],
        x: *const [f32; 2],
        x_row: usize,
        w: [*const bf16; NV],
        copy: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut wide = [copy.cast_const(); NV];
            for v in 0..NV {
                let to = copy.add(2 * LANES * v);
                let (even, odd) = L::load_pairs(w[v]);
                even.store(to);
                odd.store(to.add(LANES));
                wide[v] = to;
            }
            Pairs::<f32>::step(acc, x, x_row, wide, copy);
        }
    }
}

impl Format for RoundedPairs {
    type X = f32;
    type W = bf16;
    const PER_STEP: usize = 2;
    const DOT_PAIRS: bool = true;

    #[inline(always)]
    unsafe fn step<L: Lanes, const MR: usize, const NV: usize>(
        acc: &mut [[L; NV]; MR],
        x: *const f32,
        x_row: usize,
        w: [*const bf16; NV],
        _: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut pairs = [L::zero(); NV];
            for v in 0..NV {
                pairs[v] = L::load(w[v].cast());
            }
            for m in 0..MR {
                let x = L::splat(*x.add(m * x_row));
                for v in 0..NV {
                    acc[m][v] = acc[m][v].dot_pairs(x, pairs[v]);
                }
            }
        }
    }
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// The most rows of a register tile on any instruction set.
pub(crate) const MOST_ROWS: usize = 12;

/// The most rows of a register tile on an instruction set with this many accumulators: two vectors of columns a row are
/// enough for wide ones to hide what loading and widening weights costs.
pub(crate) const fn most_rows(accumulators: usize) -> usize {
    if accumulators >= 2 * MOST_ROWS { MOST_ROWS } else { accumulators }
}

/// How many vectors of columns, side by side, the tile of so many rows has.
pub(crate) const fn tile_width(rows: usize, accumulators: usize) -> usize {
    match accumulators / rows {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Where a tile reads from: step `s` takes row `m` from `x + s * x_step + m * x_row` and its weights from
/// `w[v] + s * w_step`.
pub(crate) struct Operands<F: Format, const NV: usize> {
    pub x: *const F::X,
    pub x_row: usize,
    pub x_step: usize,
    pub w: [*const F::W; NV],
    pub w_step: usize,
    /// Where a format that widens leaves the weights of all steps.
    pub copy: *mut f32,
    pub ahead: Ahead<NV>,
}

/// What the steps fetch for later; none of it need be readable.
#[derive(Clone, Copy)]
pub(crate) enum Ahead<const NV: usize> {
    /// Streams, of each of which every step fetches a cache line into the first-level cache.
    Near([*const u8; NV]),
    /// A stream into the second-level cache, further on by so many bytes with each step.
    Far(*const u8, usize),
}

/// Adds `steps` steps to the accumulators, in order.
///
/// # Safety
/// Everything that `operands` describe for `steps` steps and `MR` rows is readable, or writable where it is a copy.
#[inline(always)]
pub(crate) unsafe fn accumulate<L: Lanes, F: Format, const MR: usize, const NV: usize>(
    acc: &mut [[L; NV]; MR],
    steps: usize,
    operands: &Operands<F, NV>,
) {
    // SAFETY: the caller's promise. Two loops, as one that asks in each step what to fetch takes longer.
    unsafe {
        match operands.ahead {
            Ahead::Near(streams) => steps_of::<L, F, MR, NV, NV>(acc, steps, operands, streams, LINE),
            Ahead::Far(stream, stride) => steps_of::<L, F, MR, NV, 0>(acc, steps, operands, [stream; NV], stride),
        }
    }
}

/// Fetches `NEAR` streams into the first-level cache, or one into the second.
///
/// # Safety
/// As [`accumulate`].
#[inline(always)]
unsafe fn steps_of<L: Lanes, F: Format, const MR: usize, const NV: usize, const NEAR: usize>(
    acc: &mut [[L; NV]; MR],
    steps: usize,
    operands: &Operands<F, NV>,
    mut streams: [*const u8; NV],
    stride: usize,
) {
    let (mut x, mut w, mut copy) = (operands.x, operands.w, operands.copy);
    for _ in 0..steps {
        if NEAR == 0 {
            L::prefetch(streams[0]);
            streams[0] = streams[0].wrapping_add(stride);
        }
        for v in 0..NEAR {
            L::prefetch_near(streams[v]);
            streams[v] = streams[v].wrapping_add(stride);
        }
        if MR > 6 {
            // Activations of so many rows come from the second-level cache, a line and a half each step.
            let ahead = x.wrapping_add(8 * operands.x_step).cast::<u8>();
            L::prefetch_near(ahead);
            L::prefetch_near(ahead.wrapping_add(LINE));
        }
        // SAFETY: the caller's promise; the pointers end where their data does, and are not used there.
        unsafe { F::step(acc, x, operands.x_row, w, copy) };
        x = x.wrapping_add(operands.x_step);
        copy = copy.wrapping_add(NV * F::PER_STEP * LANES);
        for v in 0..NV {
            w[v] = w[v].wrapping_add(operands.w_step);
        }
    }
}
