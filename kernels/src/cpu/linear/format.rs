//! How linear layers store activations, and what tiles that share weights read.

use super::super::math::round_bf16;
use super::super::tile::{Format, Pairs, RoundedPairs, Single, Widening};
use half::bf16;

/// The format of a matrix as it is stored.
pub(super) trait LinearFormat: Format {
    /// The elements of the reduction in one step.
    type Step: Copy + Sync;

    /// Whether of several tiles that share weights the first leaves a copy, as [`First`](Self::First), which the others
    /// read, as [`Wide`](Self::Wide).
    const COPIES: bool = false;
    type First: Format<X = Self::X, W = Self::W>;
    type Wide: Format<X = Self::X>;

    /// What the first tile left.
    fn copied(_: &[f32]) -> &[<Self::Wide as Format>::W] {
        unreachable!("a format that does not copy")
    }

    /// A row's whole steps, and what is left.
    fn steps(row: &[f32]) -> (&[Self::Step], &[f32]);

    fn pack(step: Self::Step) -> Self::X;

    /// The step of an element that has no second.
    fn pack_last(x: f32) -> Self::X;
}

impl LinearFormat for Single<f32> {
    type Step = f32;
    type First = Self;
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
}

impl LinearFormat for Pairs<bf16> {
    type Step = [f32; 2];
    const COPIES: bool = true;
    type First = Widening;
    type Wide = Pairs<f32>;

    fn copied(copy: &[f32]) -> &[f32] {
        copy
    }

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
}

impl LinearFormat for RoundedPairs {
    type Step = [f32; 2];
    type First = Self;
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
}
