//! How linear layers store activations, and what tiles that share weights read.

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::math::round_bf16;
use super::super::tile::{Element, Format, Pairs, RoundedPairs, Single};
use super::register::Panels;
use half::bf16;

/// The format of a matrix as it is stored.
pub(super) trait LinearFormat: Format {
    /// The elements of the reduction in one step.
    type Step: Copy + Sync;
    const PER_STEP: usize;

    /// What several tiles that share weights read: the same, or a copy that was widened once for all of them.
    type Wide: Format<X = Self::X>;
    const COPIES: bool = false;

    /// A row's whole steps, and what is left.
    fn steps(row: &[f32]) -> (&[Self::Step], &[f32]);

    fn pack(step: Self::Step) -> Self::X;

    /// The step of an element that has no second.
    fn pack_last(x: f32) -> Self::X;

    /// `weights` as [`Wide`](Self::Wide), of as many panels as fit into `copy` if it [copies](Self::COPIES).
    fn wide<'a>(isa: Isa, weights: Panels<'a, Self::W>, copy: &'a mut [f32]) -> Panels<'a, <Self::Wide as Format>::W>;
}

impl LinearFormat for Single<f32> {
    type Step = f32;
    const PER_STEP: usize = 1;
    type Wide = Self;

    fn steps(row: &[f32]) -> (&[f32], &[f32]) {
        (row, &[])
    }

    #[inline(always)]
    fn pack(x: f32) -> f32 {
        x
    }

    fn pack_last(x: f32) -> f32 {
        x
    }

    fn wide<'a>(_: Isa, weights: Panels<'a, Self::W>, _: &'a mut [f32]) -> Panels<'a, Self::W> {
        weights
    }
}

impl LinearFormat for Pairs<bf16> {
    type Step = [f32; 2];
    const PER_STEP: usize = 2;
    type Wide = Pairs<f32>;
    const COPIES: bool = true;

    fn steps(row: &[f32]) -> (&[[f32; 2]], &[f32]) {
        row.as_chunks()
    }

    #[inline(always)]
    fn pack(pair: [f32; 2]) -> [f32; 2] {
        pair
    }

    fn pack_last(x: f32) -> [f32; 2] {
        [x, 0.0]
    }

    fn wide<'a>(isa: Isa, weights: Panels<'a, bf16>, copy: &'a mut [f32]) -> Panels<'a, f32> {
        let len = weights[0].len();
        copy.chunks_exact_mut(len).zip(weights).for_each(|(copy, panel)| isa.dispatch(Widen { panel, copy }));
        std::array::from_fn(|v| copy.chunks_exact(len).nth(v).unwrap_or(&[]))
    }
}

impl LinearFormat for RoundedPairs {
    type Step = [f32; 2];
    const PER_STEP: usize = 2;
    type Wide = Self;

    fn steps(row: &[f32]) -> (&[[f32; 2]], &[f32]) {
        row.as_chunks()
    }

    #[inline(always)]
    fn pack(pair: [f32; 2]) -> u32 {
        let [first, second] = pair.map(|x| u32::from(round_bf16(x).to_bits()));
        first | second << 16
    }

    fn pack_last(x: f32) -> u32 {
        Self::pack([x, 0.0])
    }

    fn wide<'a>(_: Isa, weights: Panels<'a, Self::W>, _: &'a mut [f32]) -> Panels<'a, Self::W> {
        weights
    }
}

/// Pairs of bfloat16 as float32: first 16 even elements, then 16 odd ones.
struct Widen<'a> {
    panel: &'a [bf16],
    copy: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let steps = self.panel.as_chunks::<{ 2 * LANES }>().0.iter();
        for (pairs, copy) in steps.zip(self.copy.as_chunks_mut::<{ 2 * LANES }>().0) {
            // SAFETY: both hold 32 elements.
            unsafe {
                let (even, odd) = bf16::load_pairs::<L>(pairs.as_ptr());
                even.store(copy.as_mut_ptr());
                odd.store(copy.as_mut_ptr().add(LANES));
            }
        }
    }
}
