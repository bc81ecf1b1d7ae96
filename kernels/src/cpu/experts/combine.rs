//! The weighted sum over a row's experts, and the shared expert that is added to it.

use std::ops::Range;

use super::super::isa::Kernel;
use super::super::lanes::{LANES, Lanes};
use super::super::pool::Cpu;
use super::super::rows::{Rows, RowsMut};
use super::route::sigmoid;
use crate::host::{ELSEWHERE, HostRouting};
use crate::routing_shape::RoutingShape;
use crate::weights::MAX_LEAVES;

/// Writes to each of the grouped `rows` of `out` the weighted sum of its rows of `expert_out`, in the order of
/// [`Ops::combine`](crate::Ops::combine).
///
/// # Panics
/// If shapes do not agree.
pub fn combine(
    cpu: &Cpu,
    expert_out: Rows<'_>,
    routing: &HostRouting,
    shape: &RoutingShape,
    rows: Range<usize>,
    out: RowsMut<'_>,
) {
    assert_eq!(expert_out.width(), out.width(), "width of the output");
    let (top_k, width, first) = (shape.top_k, out.width(), rows.start);
    let groups = shape.local.len() / shape.group_len();
    let out = out.share();
    cpu.for_ranges(rows.len(), (top_k + 1) * width, |from, to| {
        let mut terms = Vec::with_capacity(top_k);
        for i in from..to {
            let row = first + i;
            let (chosen, places) = (row * top_k..(row + 1) * top_k, &routing.places[i * top_k..(i + 1) * top_k]);
            let pairs = places.iter().zip(&routing.experts[chosen.clone()]).zip(&routing.weights[chosen]);
            terms.clear();
            terms.extend(pairs.filter(|((place, _), _)| **place != ELSEWHERE).map(|((place, expert), weight)| Term {
                expert: usize::from(*expert) - shape.local.start,
                weight: *weight,
                row: expert_out.row(*place as usize),
            }));
            terms.sort_unstable_by_key(|term| term.expert);
            terms.iter_mut().for_each(|term| term.expert /= shape.group_len());
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(row) };
            cpu.isa().dispatch(WeightedSum { terms: &terms, groups, out });
        }
    });
}

/// The output of one of a row's experts, by ascending number.
struct Term<'a> {
    /// The expert, or its group once the experts are sorted.
    expert: usize,
    weight: f32,
    row: &'a [f32],
}

struct WeightedSum<'a> {
    terms: &'a [Term<'a>],
    groups: usize,
    out: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { terms, groups, out } = self;
        for (block, out) in out.chunks_mut(LANES).enumerate() {
            let mut sums = [L::zero(); MAX_LEAVES];
            for term in terms {
                let product = L::splat(term.weight).mul(lanes_at(term.row, block));
                sums[term.expert] = sums[term.expert].add(product);
            }
            let mut count = groups;
            while count > 1 {
                count /= 2;
                for i in 0..count {
                    sums[i] = sums[2 * i].add(sums[2 * i + 1]);
                }
            }
            out.copy_from_slice(&sums[0].to_array()[..out.len()]);
        }
    }
}

/// Block `block` of 16 values, padded with zeros.
#[inline(always)]
fn lanes_at<L: Lanes>(values: &[f32], block: usize) -> L {
    let values = &values[block * LANES..];
    match values.first_chunk::<LANES>() {
        Some(values) => L::from_array(values),
        None => {
            let mut padded = [0.0; LANES];
            padded[..values.len()].copy_from_slice(values);
            L::from_array(&padded)
        }
    }
}

/// `out += sigmoid(gates) * shared`, row by row, with one gate for each.
///
/// # Panics
/// If shapes do not agree.
pub fn add_gated(cpu: &Cpu, gates: Rows<'_>, shared: Rows<'_>, out: RowsMut<'_>) {
    assert_eq!((gates.rows(), gates.width()), (out.rows(), 1), "rows and width of the gates");
    assert_eq!((shared.rows(), shared.width()), (out.rows(), out.width()), "rows and width of the shared expert");
    let out = out.share();
    cpu.for_ranges(shared.rows(), 2 * shared.width(), |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(i) };
            cpu.isa().dispatch(AddGated { gate: gates.row(i)[0], shared: shared.row(i), out });
        }
    });
}

struct AddGated<'a> {
    gate: f32,
    shared: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for AddGated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let weight = sigmoid(L::splat(self.gate)).to_array()[0];
        for (out, shared) in self.out.iter_mut().zip(self.shared) {
            *out += weight * shared;
        }
    }
}
