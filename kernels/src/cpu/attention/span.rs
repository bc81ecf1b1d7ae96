//! Spans of 512 absolute positions. A query's softmax starts again with each span, and the results of its spans are
//! folded in order. That order is part of the definition of the result, so one thread may compute all spans of a query,
//! or several threads one span each.

use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::{LANES, Lanes};

/// Folds the softmax states of later positions into those of earlier ones, with one largest score per query. A state
/// whose largest score is `-inf` has seen nothing and adds nothing.
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

/// Divides the weighted sums of values by the sum of the exponentials and writes the output. The addition of 0 turns -0
/// into 0: positions that only other queries of the tile see add products with 0 to a query's sums, and spans of which
/// the query sees nothing add none, so that without it the sign of a zero would depend on the tile.
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
