//! The operators of mixture-of-experts layers.

use std::ops::Range;

use candle_core::{Result, Tensor};
use tracing::{Span, trace_span};

use super::Ops;
use crate::deferred::Deferred;
use crate::matrix::Matrix;
use crate::routing::{Router, Routing};
use crate::routing_shape::NOT_FORCED;

impl Ops {
    /// Chooses the experts of each row of `x` (`[rows, hidden]`) and weighs them, all in float32. A row of `forced`
    /// (`[rows, top_k]`) has the experts that are taken instead of those with the highest scores, with the router's own
    /// weights, or [`NOT_FORCED`] in all places; a step that is captured as a graph has no forced rows. Experts are in
    /// the order of their weights, of equal weights the lower number first, forced or not.
    ///
    /// `logits` (`[rows, experts]`) is written on the way. All weights of a row are NaN if one of its logits is not
    /// finite, and its experts then the first ones, if they are not forced: the row's sum over experts is NaN.
    ///
    /// # Panics
    /// If shapes do not agree, or a row is forced to an expert twice or to one that is not there.
    pub fn route(
        &self,
        x: &Tensor,
        router: &Router<'_>,
        forced: Option<&[u16]>,
        logits: &Tensor,
        routing: &mut Routing,
    ) -> Result<()> {
        let (shape, rows, gate) = (routing.shape(), x.dim(0)?, router.gate.shape());
        assert!(rows <= shape.rows, "{rows} rows of a routing of {}", shape.rows);
        assert_eq!((gate.n, gate.k), (shape.experts, x.dim(1)?), "experts and width of the gate");
        assert_eq!(logits.dims2()?, (rows, shape.experts), "rows and width of the logits");
        if let Some(forced) = forced {
            assert_eq!(forced.len(), rows * shape.top_k, "forced experts of {rows} rows");
            forced.chunks_exact(shape.top_k).for_each(|row| check_forced(row, shape.experts));
        }
        let flop = || 2 * rows * gate.n * gate.k;
        let _span = trace_span!("route", n = gate.n, k = gate.k, flop = flop(), bytes = router.gate.bytes()).entered();
        routing.set_routed(rows);
        self.0.route(x, router, forced, logits, routing)
    }

    /// Starts to bring the experts that all layers have kept of the first `rows` rows of a step to the host, those that
    /// a graph has routed too. [`Ops::route`] must not be called before they are read.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the routing has not as many rows, or keeps no layers.
    pub fn kept_experts<'a>(&'a self, routing: &'a Routing, rows: usize) -> Result<Deferred<'a, Vec<u16>>> {
        let shape = routing.shape();
        assert!(rows <= shape.rows && shape.kept_layers > 0, "{rows} rows of a routing of {}", shape.rows);
        let _span = trace_span!("kept_experts").entered();
        self.0.kept_experts(routing, rows)
    }

    /// Sorts the pairs of these rows with this rank's experts by expert, for the next operators: they compute these
    /// rows alone. No bit depends on how the rows of a step are divided into runs.
    ///
    /// # Panics
    /// If not all of them are routed.
    pub fn group_by_expert(&self, routing: &mut Routing, rows: Range<usize>) -> Result<()> {
        let routed = routing.rows();
        assert!(rows.start <= rows.end && rows.end <= routed, "rows {rows:?} of {routed} that are routed");
        let _span = trace_span!("group_by_expert").entered();
        routing.set_grouped(rows);
        self.0.group_by_expert(routing)
    }

    /// For each pair of a grouped row and an expert of this rank, in sorted order: `out[pair] = silu(left half) * right
    /// half` of the row of `x` (`[rows, hidden]`, all rows that are routed) times the expert's part of `w`. `w` is
    /// `[experts * 2 * width, hidden]`: for each of the rank's experts its gate above its up projection. The product
    /// may be written to `gate_up` (`[pairs, 2 * width]`) on the way.
    ///
    /// `out` (`[pairs, width]`) has at least [`RoutingShape::most_pairs`](crate::RoutingShape::most_pairs) rows; those
    /// behind the last pair are unspecified. A row of it has the bits that [`Ops::linear_silu_mul`] gives for a matrix
    /// of the expert alone.
    ///
    /// # Errors
    /// If the device fails, or does not support the width.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn expert_linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        routing: &Routing,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let width = out.dim(1)?;
        assert_eq!(x.dims2()?, (routing.rows(), w.k()), "rows and width of the input");
        check_experts(w, routing, 2 * width);
        check_pairs(gate_up, routing, 2 * width)?;
        check_pairs(out, routing, width)?;
        let _span = experts_span(w, routing).entered();
        self.0.expert_linear_silu_mul(x, w, routing, gate_up, out)
    }

    /// For each pair of a grouped row and an expert of this rank, in sorted order: `out[pair]` (`[pairs, n]`) = row
    /// `pair` of `x` (`[pairs, k]`) times the expert's part of `w`, which is `[experts * n, k]`. Both have as many rows
    /// as the output of [`Ops::expert_linear_silu_mul`], and a row the bits that [`Ops::linear`] gives for a matrix of
    /// the expert alone.
    ///
    /// # Errors
    /// If the device fails, or does not support the width.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn expert_linear(&self, x: &Tensor, w: &Matrix, routing: &Routing, out: &Tensor) -> Result<()> {
        check_experts(w, routing, out.dim(1)?);
        check_pairs(x, routing, w.k())?;
        check_pairs(out, routing, w.n() / routing.shape().local.len())?;
        let _span = experts_span(w, routing).entered();
        self.0.expert_linear(x, w, routing, out)
    }

    /// Writes to each grouped row of `out` (`[rows, hidden]`, all rows that are routed) the sum over its experts of
    /// this rank of weight times the pair's row of `expert_out` (`[pairs, hidden]`). The order is part of the
    /// definition: each product is rounded, the products of a group ([`expert_groups`](crate::expert_groups)) are added
    /// to 0 by ascending expert, and the groups as a balanced binary tree. So the outputs of all ranks, added as that
    /// tree ([`RankGroup::all_reduce_sum`](crate::RankGroup::all_reduce_sum)), have the bits of one rank with all
    /// experts.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn combine(&self, expert_out: &Tensor, routing: &Routing, out: &Tensor) -> Result<()> {
        let hidden = out.dim(1)?;
        assert_eq!(out.dim(0)?, routing.rows(), "rows of the output");
        check_pairs(expert_out, routing, hidden)?;
        let _span = trace_span!("combine").entered();
        self.0.combine(expert_out, routing, out)
    }

    /// `out += sigmoid(gates) * shared`, with one gate for each row: the shared expert of Qwen2-MoE. `gates` is
    /// `[rows, 1]`, `shared` and `out` are `[rows, width]`.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn add_gated(&self, gates: &Tensor, shared: &Tensor, out: &Tensor) -> Result<()> {
        assert_eq!(gates.dims2()?, (out.dim(0)?, 1), "rows and width of the gates");
        assert_eq!(shared.dims2()?, out.dims2()?, "rows and width of the shared expert");
        let _span = trace_span!("add_gated").entered();
        self.0.add_gated(gates, shared, out)
    }
}

/// Panics if a row of forced experts is neither free nor of different experts that are there.
fn check_forced(row: &[u16], experts: usize) {
    if row.iter().all(|expert| *expert == NOT_FORCED) {
        return;
    }
    for (i, expert) in row.iter().enumerate() {
        assert!(usize::from(*expert) < experts, "a row is forced to expert {expert} of {experts}");
        assert!(!row[..i].contains(expert), "a row is forced to expert {expert} twice");
    }
}

fn check_experts(w: &Matrix, routing: &Routing, rows: usize) {
    let experts = routing.shape().local.len();
    assert_eq!(w.n(), experts * rows, "rows of the matrix of {experts} experts");
}

fn check_pairs(pairs: &Tensor, routing: &Routing, width: usize) -> Result<()> {
    let (rows, found) = pairs.dims2()?;
    let needed = routing.shape().most_pairs(routing.grouped().len());
    assert!(rows >= needed && found == width, "{rows} rows of {found}, needed are {needed} of {width}");
    Ok(())
}

/// A span that tells the layer by its matrix, and what the grouped rows compute if all experts are chosen equally
/// often.
fn experts_span(w: &Matrix, routing: &Routing) -> Span {
    let (shape, rows) = (routing.shape(), routing.grouped().len());
    let flop = || 2 * rows * shape.top_k * w.n() / shape.experts * w.k();
    trace_span!("expert_linear", n = w.n() / shape.local.len(), k = w.k(), flop = flop())
}
