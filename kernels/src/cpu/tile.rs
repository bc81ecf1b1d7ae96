//! The register tile of matrix products: accumulators for `MR` rows of activations times `NV` vectors of 16 columns.
//!
//! No closures here: a closure is compiled without the target features of the kernel that contains it, and if the
//! compiler does not inline it, every intrinsic in it becomes a function call.

#![allow(clippy::needless_range_loop)] // indices, for the reason above

use super::lanes::{LANES, Lanes};
use half::bf16;
use std::marker::PhantomData;

/// How one step of a reduction reads activations and weights.
pub(crate) trait Format: Send + Sync + 'static {
    /// The activations of one row in one step.
    type X: super::storage::Plain;
    /// An element of the stored weights.
    type W: super::storage::Plain;
    /// Whether steps use the dot product of bfloat16 pairs, see [`Kernel::DOT_PAIRS`](super::isa::Kernel::DOT_PAIRS).
    const DOT_PAIRS: bool = false;
    /// Elements of the reduction in one step.
    const PER_STEP: usize;
    /// Whether a step also stores its weights widened to float32.
    const WIDENS: bool = false;

    /// Adds one step to the accumulators: `acc[m][v] += x[m] · w[v]`, elements of the reduction in ascending order. A
    /// format that [widens](Self::WIDENS) stores the widened weights at `copy`.
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

/// An element type that is loaded as float32 lanes, 16 neighbours at a time.
pub(crate) trait TileElement: super::storage::Plain {
    /// # Safety
    /// `p` is readable for 16 elements.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
    /// Loads 16 pairs of elements as two vectors: the first elements of all pairs, and the second ones.
    ///
    /// # Safety
    /// `p` is readable for 32 elements.
    unsafe fn load_pairs<L: Lanes>(p: *const Self) -> (L, L);
}

impl TileElement for f32 {
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

impl TileElement for bf16 {
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

/// The format that takes one element of the reduction per step: 16 neighbouring elements of `E` times one float32.
pub(crate) struct Single<E>(PhantomData<E>);

/// The format that takes two elements of the reduction per step, times two float32. `Pairs<bf16>` has 16 pairs of
/// bfloat16, widened as they are read; `Pairs<f32>` has 32 elements widened before, all even ones and then all odd
/// ones.
pub(crate) struct Pairs<E>(PhantomData<E>);

/// The format of `Pairs<bf16>` that also stores the widened weights, panel by panel, which other tiles read as
/// `Pairs<f32>`.
pub(crate) struct Widening;

/// The format that takes two elements of the reduction per step as one bfloat16 pair: 16 pairs of weights times a pair
/// of activations, which is stored as the bits of a float32. It is one instruction where the processor has it.
pub(crate) struct RoundedPairs;

impl<E: TileElement> Format for Single<E> {
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

impl<E: TileElement> Format for Pairs<E> {
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

/// The most rows of a register tile on an instruction set with this many accumulators. Two vectors of columns per row
/// are enough for wide instruction sets to hide the cost of loading and widening weights.
pub(crate) const fn most_rows(accumulators: usize) -> usize {
    if accumulators >= 2 * MOST_ROWS { MOST_ROWS } else { accumulators }
}

/// How many vectors of columns a register tile of `rows` rows has side by side.
pub(crate) const fn tile_width(rows: usize, accumulators: usize) -> usize {
    match accumulators / rows {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Where a register tile reads: step `s` takes row `m` from `x + s * x_step + m * x_row` and its weights from
/// `w[v] + s * w_step`.
pub(crate) struct Operands<F: Format, const NV: usize> {
    pub x: *const F::X,
    pub x_row: usize,
    pub x_step: usize,
    pub w: [*const F::W; NV],
    pub w_step: usize,
    /// Where a format that widens stores the weights of all steps.
    pub copy: *mut f32,
    pub ahead: Prefetch<NV>,
}

/// Addresses that the steps prefetch for later. They need not be readable.
#[derive(Clone, Copy)]
pub(crate) enum Prefetch<const NV: usize> {
    /// Streams of cache lines; every step prefetches one line of each into the first-level cache.
    Near([*const u8; NV]),
    /// One stream into the second-level cache, and the bytes by which it advances with each step.
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
    // SAFETY: the caller's promise. There are two loops because one that decides in each step what to prefetch is
    // slower.
    unsafe {
        match operands.ahead {
            Prefetch::Near(streams) => steps_of::<L, F, MR, NV, NV>(acc, steps, operands, streams, LINE),
            Prefetch::Far(stream, stride) => steps_of::<L, F, MR, NV, 0>(acc, steps, operands, [stream; NV], stride),
        }
    }
}

/// The loop of [`accumulate`], which prefetches `NEAR` streams into the first-level cache, or one into the second-level
/// cache if `NEAR` is 0.
///
/// # Safety
/// As for [`accumulate`].
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
            // Activations of more than six rows come from the second-level cache, about a line and a half per step.
            let ahead = x.wrapping_add(8 * operands.x_step).cast::<u8>();
            L::prefetch_near(ahead);
            L::prefetch_near(ahead.wrapping_add(LINE));
        }
        // SAFETY: the caller's promise; after the last step the pointers are at the end of their data and are not used.
        unsafe { F::step(acc, x, operands.x_row, w, copy) };
        x = x.wrapping_add(operands.x_step);
        copy = copy.wrapping_add(NV * F::PER_STEP * LANES);
        for v in 0..NV {
            w[v] = w[v].wrapping_add(operands.w_step);
        }
    }
}
