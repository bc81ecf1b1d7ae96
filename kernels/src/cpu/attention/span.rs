//! Spans of 512 absolute positions. A query row's softmax begins anew with each, and what the spans give is folded in
//! their order: that order is part of the result, so one thread may take all spans of a row or many threads one each.

use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::{LANES, Lanes};

/// Adds what later positions gave to the states of some pairs, one largest score each, whatever a state holds while
/// nothing was seen (a largest score of `-inf`).
pub(super) fn fold(isa: Isa, largest: &mut [f32], states: &mut [f32], later_largest: &[f32], later: &[f32]) {
    isa.dispatch(Fold { largest, states, later_largest, later });
}

struct Fold<'a> {
    largest: &'a mut [f32],
    states: &'a mut [f32],
    later_largest: &'a [f32],
    later: &'a [f32],
}

impl Kernel for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let vectors = self.later.len() / LANES / self.largest.len();
        let (states, later) = (self.states.as_chunks_mut::<LANES>().0, self.later.as_chunks::<LANES>().0);
        for (m, later_largest) in self.later_largest.iter().enumerate() {
            let (largest, at) = (&mut self.largest[m], m * vectors..(m + 1) * vectors);
            let (state, later) = (&mut states[at.clone()], &later[at]);
            let before = *largest;
            if before == f32::NEG_INFINITY {
                *largest = *later_largest;
                state.copy_from_slice(later);
                continue;
            }
            *largest = if *later_largest > before { *later_largest } else { before };
            let (old, new) = (L::splat(before - *largest).exp2(), L::splat(*later_largest - *largest).exp2());
            for i in 0..vectors {
                let added = L::from_array(&later[i]).mul(new);
                state[i] = L::from_array(&state[i]).mul_add(old, added).to_array();
            }
        }
    }
}

/// `out` = weighted sums of values / sum of exponentials. Positions that only other pairs of a tile see added products
/// with 0, and spans without any of a pair's positions nothing, which can only turn -0 into 0: + 0 makes that so
/// always.
pub(super) fn divide(isa: Isa, state: &[f32], out: &mut [f32]) {
    isa.dispatch(Divide { state, out });
}

struct Divide<'a> {
    state: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Divide<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (state, out) = (self.state.as_chunks::<LANES>().0, self.out.as_chunks_mut::<LANES>().0);
        let total = L::splat(L::from_array(&state[0]).sum());
        for i in 0..out.len() {
            out[i] = L::from_array(&state[i + 1]).div(total).add(L::zero()).to_array();
        }
    }
}
