//! The sizes of a routing, and how experts are divided among ranks.

use std::ops::Range;

use crate::weights::MAX_LEAVES;

/// In place of each expert of a row that is not forced.
pub const NOT_FORCED: u16 = u16::MAX;

/// The sizes of a [`Routing`](crate::Routing).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// The most rows that are routed at once.
    pub rows: usize,
    /// Experts of the layer, those of other ranks included.
    pub experts: usize,
    /// Experts that each row takes.
    pub top_k: usize,
    /// The experts whose matrices this rank has: those of all ranks, or an aligned run of [`expert_groups`].
    pub local: Range<usize>,
    /// Number of layers whose experts are kept until the next step, for
    /// [`Ops::kept_experts`](crate::Ops::kept_experts); 0 keeps none.
    pub kept_layers: usize,
}

impl RoutingShape {
    /// Memory that a routing takes.
    pub fn bytes(&self) -> usize {
        let pair = size_of::<u16>() + size_of::<f32>() + 2 * size_of::<u32>();
        self.rows * self.top_k * pair + 2 * (self.local.len() + 1) * size_of::<u32>() + self.kept_bytes()
    }

    /// Bytes of the experts that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.rows * self.kept_row() * size_of::<u16>()
    }

    /// Where the experts of layer `layer` are kept among those of a row; `None` if those of no layer are.
    ///
    /// # Panics
    /// If the layer is not one of those.
    pub(crate) fn kept_places(&self, layer: usize) -> Option<Range<usize>> {
        let Self { top_k, kept_layers, .. } = *self;
        assert!(kept_layers == 0 || layer < kept_layers, "layer {layer} of {kept_layers} whose experts are kept");
        (kept_layers > 0).then(|| layer * top_k..(layer + 1) * top_k)
    }

    /// Experts that are kept of a row.
    pub(crate) fn kept_row(&self) -> usize {
        self.kept_layers * self.top_k
    }

    /// The most pairs of a row and an expert of this rank that `rows` rows make: rows of the buffers between
    /// [`Ops::expert_linear_silu_mul`](crate::Ops::expert_linear_silu_mul) and [`Ops::combine`](crate::Ops::combine).
    pub fn most_pairs(&self, rows: usize) -> usize {
        rows * self.top_k.min(self.local.len())
    }

    /// Experts of one of the [`expert_groups`].
    pub(crate) fn group_len(&self) -> usize {
        self.experts / expert_groups(self.experts)
    }

    /// # Panics
    /// If rows take no experts, or more than there are; if there are more than have a number; if the rank's experts
    /// are not an aligned run of whole groups.
    pub(crate) fn check(&self) {
        let Self { experts, top_k, ref local, .. } = *self;
        assert!((1..=experts).contains(&top_k), "rows take {top_k} of {experts} experts");
        assert!(experts <= usize::from(NOT_FORCED), "{experts} experts: their numbers have 16 bits");
        let (len, each) = (local.len(), self.group_len());
        let is_run = len > 0 && len.is_multiple_of(each) && (len / each).is_power_of_two();
        let is_aligned = is_run && local.start.is_multiple_of(len) && local.end <= experts;
        assert!(is_aligned, "experts {local:?} of {experts} are not an aligned run of groups of {each}");
    }
}

/// Into how many groups of neighbours the experts of a layer are divided for the sum over a row's experts: the largest
/// power of two up to [`MAX_LEAVES`] that divides their number. Ranks that each have whole groups give the bits of one
/// rank.
pub fn expert_groups(experts: usize) -> usize {
    [8, 4, 2].into_iter().find(|groups| experts.is_multiple_of(*groups)).unwrap_or(1)
}
const _: () = assert!(MAX_LEAVES == 8, "as many groups as the leaves of other reductions");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_the_largest_power_of_two_up_to_eight() {
        let cases = [(1, 1), (2, 2), (6, 2), (8, 8), (60, 4), (64, 8), (128, 8), (7, 1)];
        assert_eq!(cases.map(|(experts, _)| expert_groups(experts)), cases.map(|(_, groups)| groups));
    }

    #[test]
    fn a_rank_has_an_aligned_run_of_whole_groups() {
        let shape = |experts, local| RoutingShape { rows: 4, experts, top_k: 2, local, kept_layers: 0 };
        for (experts, local) in [(8, 0..8), (8, 7..8), (60, 15..30), (60, 30..60), (7, 0..7), (128, 96..128)] {
            shape(experts, local).check();
        }
        for (experts, local) in [(8, 1..3), (8, 0..3), (60, 0..10), (60, 15..45), (7, 0..1), (8, 8..16), (8, 4..4)] {
            let checked = std::panic::catch_unwind(|| shape(experts, local.clone()).check());
            let refused = checked.expect_err("no such run").downcast::<String>().expect("a text");
            let each = experts / expert_groups(experts);
            assert_eq!(*refused, format!("experts {local:?} of {experts} are not an aligned run of groups of {each}"));
        }
        assert_eq!((shape(8, 7..8).most_pairs(5), shape(8, 0..8).most_pairs(5)), (5, 10));
    }
}
