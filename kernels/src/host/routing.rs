//! Routings in the host's memory.

use std::ops::Range;

use candle_core::Result;

use crate::backend::storage::RoutingImpl;
use crate::deferred::Deferred;
use crate::routing::Routing;
use crate::routing_shape::RoutingShape;

/// How a router chooses and weighs, with values of the host; see [`Router`](crate::Router).
#[derive(Clone, Copy)]
pub(crate) struct HostRouter<'a> {
    pub top_k: usize,
    /// Added to the sigmoid of the logits before the choice; without it their softmax weighs.
    pub bias: Option<&'a [f32]>,
    pub normalise: bool,
    pub scale: f32,
}

/// The place of a pair whose expert another rank has.
pub(crate) const ELSEWHERE: u32 = u32::MAX;

/// Experts and weights `[rows, top_k]`, and the pairs of the grouped rows.
pub(crate) struct HostRouting {
    pub experts: Vec<u16>,
    pub weights: Vec<f32>,
    /// The row of each pair, sorted by expert and then by row.
    pub tokens: Vec<u32>,
    /// The first pair of each of the rank's experts, and the end of the last one's.
    pub starts: Vec<u32>,
    /// The place among the sorted pairs of each pair of the grouped rows, `[rows, top_k]`, or [`ELSEWHERE`].
    pub places: Vec<u32>,
    /// The experts of the layers that are kept, `[rows, layers, top_k]`.
    kept: Vec<u16>,
    /// Where the next pair of each expert goes while pairs are sorted.
    next: Vec<u32>,
}

impl HostRouting {
    pub fn new(shape: &RoutingShape) -> Self {
        let (entries, starts) = (shape.rows * shape.top_k, shape.local.len() + 1);
        Self {
            experts: vec![0; entries],
            weights: vec![0.0; entries],
            tokens: vec![0; entries],
            starts: vec![0; starts],
            places: vec![ELSEWHERE; entries],
            kept: vec![0; shape.rows * shape.kept_row()],
            next: vec![0; starts],
        }
    }

    /// Sorts the pairs of these rows by expert.
    pub fn group(&mut self, shape: &RoutingShape, rows: Range<usize>) {
        let (top_k, local) = (shape.top_k, &shape.local);
        let Self { experts, tokens, starts, places, next, .. } = self;
        let chosen = &experts[rows.start * top_k..rows.end * top_k];
        let index = |expert: u16| local.contains(&expert.into()).then(|| usize::from(expert) - local.start);
        starts.fill(0);
        chosen.iter().filter_map(|expert| index(*expert)).for_each(|expert| starts[expert + 1] += 1);
        for expert in 0..local.len() {
            starts[expert + 1] += starts[expert];
        }
        next.copy_from_slice(starts);
        for (i, expert) in chosen.iter().enumerate() {
            places[i] = index(*expert).map_or(ELSEWHERE, |expert| {
                let place = next[expert];
                next[expert] += 1;
                tokens[place as usize] = (rows.start + i / top_k) as u32;
                place
            });
        }
    }

    /// Keeps the experts of the first `rows` rows at these places.
    fn keep(&mut self, shape: &RoutingShape, rows: usize, places: Range<usize>) {
        let entries = self.experts.chunks_exact(shape.top_k).zip(self.kept.chunks_exact_mut(shape.kept_row()));
        entries.take(rows).for_each(|(experts, kept)| kept[places.clone()].copy_from_slice(experts));
    }

    /// The rows of the sorted pairs.
    pub fn pairs(&self) -> &[u32] {
        &self.tokens[..self.starts[self.starts.len() - 1] as usize]
    }
}

impl RoutingImpl for HostRouting {
    fn read_experts(&self, entries: Range<usize>) -> Result<Vec<u16>> {
        Ok(self.experts[entries].to_vec())
    }

    fn read_weights(&self, entries: Range<usize>) -> Result<Vec<f32>> {
        Ok(self.weights[entries].to_vec())
    }
}

/// Keeps the experts of the rows that are routed, if those of layers are kept; this is layer `layer`.
pub(crate) fn keep_experts(routing: &mut Routing, layer: usize) {
    let (shape, rows) = (routing.shape().clone(), routing.rows());
    if let Some(places) = shape.kept_places(layer) {
        routing.storage_mut::<HostRouting>().keep(&shape, rows, places);
    }
}

/// The experts that are kept of the first `rows` rows.
pub(crate) fn kept_experts(routing: &Routing, rows: usize) -> Deferred<'_, Vec<u16>> {
    let kept = &routing.storage::<HostRouting>().kept[..rows * routing.shape().kept_row()];
    Deferred::new(|| Ok(kept.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_sorted_by_expert_and_then_by_row() {
        let shape = RoutingShape { rows: 4, experts: 4, top_k: 2, local: 2..4, kept_layers: 0 };
        let mut routing = HostRouting::new(&shape);
        routing.experts = vec![3, 0, 2, 3, 1, 0, 3, 2];
        routing.group(&shape, 1..4);
        assert_eq!((routing.pairs(), &routing.starts[..]), (&[1, 3, 1, 3][..], &[0, 2, 4][..]));
        assert_eq!(routing.places[..6], [0, 2, ELSEWHERE, ELSEWHERE, 3, 1]);
        routing.group(&shape, 2..3);
        assert_eq!((routing.pairs(), &routing.starts[..]), (&[][..], &[0, 0, 0][..]));
    }
}
