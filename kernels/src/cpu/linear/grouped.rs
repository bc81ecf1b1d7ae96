//! Several products in one job, each of some rows and an equal part of one matrix: the experts of a layer. A row's bits
//! are those that [`linear`](super::linear()) gives for its part of the matrix alone, as both run the same tiles.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::super::isa::{Isa, Products};
use super::super::lanes::LANES;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::rows::{RowsMut, SelectedRows, SharedRows};
use super::super::storage::Plain;
use super::super::tile::{Pairs, RoundedPairs, Single};
use super::format::LinearFormat;
use super::plan::{LinearPlan, Panels};
use super::tiles::{PackTiles, TileCall, TilePlan};
use super::{LinearCall, PackActivations};
use crate::values::StorageDtype;

/// `out[i] = x[i] · w_pᵀ` for each product `p` of rows `starts[p]..starts[p + 1]`. `w` has the equal parts `w_p` below
/// each other.
///
/// # Panics
/// If shapes do not agree, or a part is not of whole panels.
pub(crate) fn grouped_linear(cpu: &Cpu, x: SelectedRows<'_>, w: &PackedMatrix, starts: &[u32], out: RowsMut<'_>) {
    by_format(cpu, x, w, starts, out, false);
}

/// `out[i] = silu(gate) * up` for each product, the part of which has the rows of its gates above those of the values
/// that they gate.
///
/// # Panics
/// If [`grouped_linear`] would panic, or the gates of a part do not fill whole panels.
pub(crate) fn grouped_linear_silu_mul(
    cpu: &Cpu,
    x: SelectedRows<'_>,
    w: &PackedMatrix,
    starts: &[u32],
    out: RowsMut<'_>,
) {
    by_format(cpu, x, w, starts, out, true);
}

fn by_format(cpu: &Cpu, x: SelectedRows<'_>, w: &PackedMatrix, starts: &[u32], out: RowsMut<'_>, gated: bool) {
    let (count, halves) = (starts.len() - 1, if gated { 2 } else { 1 });
    assert_eq!(x.width(), w.k(), "input features");
    assert_eq!(count * halves * out.width(), w.n(), "output features of {count} products");
    assert!(out.width().is_multiple_of(LANES), "{} outputs are no whole panels", out.width());
    assert!(x.len() >= starts[count] as usize && out.rows() >= starts[count] as usize, "rows of the products");
    let parts = parts(w, starts);
    match (w.dtype(), cpu.isa().products()) {
        (StorageDtype::F32, _) => run::<PanelProduct<Single<f32>>>(cpu, x, w, parts, out, gated),
        (StorageDtype::Bf16, Products::Widened) => run::<PanelProduct<Pairs<bf16>>>(cpu, x, w, parts, out, gated),
        (StorageDtype::Bf16, Products::Pairs) => run::<PanelProduct<RoundedPairs>>(cpu, x, w, parts, out, gated),
        (StorageDtype::Bf16, Products::Tiles) => run::<TilePlan>(cpu, x, w, parts, out, gated),
    }
}

/// The rows and the panels of each product that has rows.
fn parts(w: &PackedMatrix, starts: &[u32]) -> Vec<(Range<usize>, Panels)> {
    let count = w.panels() / (starts.len() - 1);
    let products = starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]);
    let of_product = |(product, rows): (usize, &[u32])| {
        let panels = Panels { first: product * count, count, ..Panels::all(w) };
        (rows[0] as usize..rows[1] as usize, panels)
    };
    let mut parts: Vec<_> = products.map(of_product).collect();
    for i in 1..parts.len() {
        parts[i - 1].1.next = parts[i].1.first;
    }
    parts
}

/// The plan of one of several products.
trait Product: Sync {
    /// An element of the packed activations, and one of the weights.
    type X: Plain;
    type W: Plain;
    /// How many packed values one thread packs in about the time that it takes to wake other threads.
    const WORTH_WAKING: usize;

    /// The product of `rows >= 1` rows of activations and these panels.
    fn new(cpu: &Cpu, rows: usize, panels: Panels, gated: bool) -> Self;
    /// Into how many chunks the rows are cut.
    fn chunks(&self) -> usize;
    /// How many packed values the chunks before this one have.
    fn packed_before(&self, chunk: usize) -> usize;
    fn pack(&self, isa: Isa, x: SelectedRows<'_>, chunk: usize, packed: &mut [Self::X]);
    fn tasks(&self) -> usize;
    /// Float32 values of scratch that a task needs.
    fn scratch_len(&self) -> usize;
    fn run(&self, task: Task<'_, Self::X, Self::W>, scratch: &mut [f32]);
}

/// A task of a product, and what it reads and writes.
struct Task<'a, X, W> {
    isa: Isa,
    number: usize,
    /// The product's own.
    packed: &'a [X],
    /// The whole matrix.
    weights: &'a [W],
    out: SharedRows<'a>,
}

/// A product by register tiles in the format `F`.
struct PanelProduct<F>(LinearPlan, PhantomData<F>);

impl<F: LinearFormat> Product for PanelProduct<F> {
    type X = F::X;
    type W = F::W;
    const WORTH_WAKING: usize = F::WORTH_WAKING;

    fn new(cpu: &Cpu, rows: usize, panels: Panels, gated: bool) -> Self {
        Self(LinearPlan::new::<F>(cpu, rows, panels, gated), PhantomData)
    }

    fn chunks(&self) -> usize {
        self.0.chunks
    }

    fn packed_before(&self, chunk: usize) -> usize {
        self.0.row(self.0.tile(chunk)) * self.0.steps
    }

    fn pack(&self, isa: Isa, x: SelectedRows<'_>, chunk: usize, packed: &mut [F::X]) {
        let tiles = self.0.tile(chunk)..self.0.tile(chunk + 1);
        isa.dispatch(PackActivations::<F> { x, plan: &self.0, tiles, packed });
    }

    fn tasks(&self) -> usize {
        self.0.tasks()
    }

    fn scratch_len(&self) -> usize {
        self.0.scratch_len()
    }

    fn run(&self, task: Task<'_, F::X, F::W>, scratch: &mut [f32]) {
        let Task { isa, number, packed, weights, out } = task;
        LinearCall::<F> { isa, plan: &self.0, packed, weights, bias: None, out }.task(number, scratch);
    }
}

impl Product for TilePlan {
    type X = f32;
    type W = bf16;
    const WORTH_WAKING: usize = RoundedPairs::WORTH_WAKING;

    fn new(cpu: &Cpu, rows: usize, panels: Panels, gated: bool) -> Self {
        TilePlan::new(cpu.pool().threads(), rows, panels, gated)
    }

    fn chunks(&self) -> usize {
        self.chunks
    }

    fn packed_before(&self, chunk: usize) -> usize {
        self.tiles.min(chunk * self.chunk) * self.tile_len()
    }

    fn pack(&self, isa: Isa, x: SelectedRows<'_>, chunk: usize, packed: &mut [f32]) {
        let tiles = chunk * self.chunk..self.tiles.min((chunk + 1) * self.chunk);
        isa.dispatch(PackTiles { x, plan: self, tiles, packed });
    }

    fn tasks(&self) -> usize {
        TilePlan::tasks(self)
    }

    fn scratch_len(&self) -> usize {
        TilePlan::scratch_len(self)
    }

    fn run(&self, task: Task<'_, f32, bf16>, scratch: &mut [f32]) {
        let Task { isa, number, packed, weights, out } = task;
        TileCall { isa, plan: self, packed, weights, bias: None, out }.task(number, scratch);
    }
}

/// Runs of numbers, one behind the other.
struct Runs(Vec<usize>);

impl Runs {
    fn new(lengths: impl Iterator<Item = usize>) -> Runs {
        let mut end = 0;
        let ends = lengths.map(|length| {
            end += length;
            end
        });
        Runs(ends.collect())
    }

    fn len(&self) -> usize {
        self.0.last().copied().unwrap_or(0)
    }

    /// The first number of a run.
    fn start(&self, run: usize) -> usize {
        if run == 0 { 0 } else { self.0[run - 1] }
    }

    /// The run of a number, and its place there.
    fn find(&self, number: usize) -> (usize, usize) {
        let run = self.0.partition_point(|end| *end <= number);
        (run, number - self.start(run))
    }
}

fn run<P: Product>(
    cpu: &Cpu,
    x: SelectedRows<'_>,
    w: &PackedMatrix,
    parts: Vec<(Range<usize>, Panels)>,
    out: RowsMut<'_>,
    gated: bool,
) {
    let product = |(rows, panels): (Range<usize>, Panels)| (P::new(cpu, rows.len(), panels, gated), rows);
    let products: Vec<(P, Range<usize>)> = parts.into_iter().map(product).collect();
    let places = Runs::new(products.iter().map(|(product, _)| product.packed_before(product.chunks())));
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<P::X>(places.len());
    pack(cpu, x, &products, &places, packed);

    let (packed, weights, out) = (&*packed, w.storage().as_slice(), out.share());
    let tasks = Runs::new(products.iter().map(|(product, _)| product.tasks()));
    let scratch = products.iter().map(|(product, _)| product.scratch_len()).max().unwrap_or(0);
    cpu.pool().run_with_scratch(tasks.len(), scratch, |task, scratch| {
        let (i, number) = tasks.find(task);
        let (product, rows) = &products[i];
        let packed = &packed[places.start(i)..places.start(i + 1)];
        product.run(Task { isa: cpu.isa(), number, packed, weights, out: out.rows_from(rows.start) }, scratch);
    });
}

/// Packs the activations of all products, chunk by chunk, behind each other.
fn pack<P: Product>(
    cpu: &Cpu,
    x: SelectedRows<'_>,
    products: &[(P, Range<usize>)],
    places: &Runs,
    packed: &mut [P::X],
) {
    let chunks = Runs::new(products.iter().map(|(product, _)| product.chunks()));
    let jobs = if packed.len() < P::WORTH_WAKING { 1 } else { chunks.len().min(4 * cpu.pool().threads()) };
    let first = |job: usize| chunks.len() * job / jobs;
    let start = |number: usize| match chunks.find(number) {
        (i, _) if i == products.len() => places.len(),
        (i, chunk) => places.start(i) + products[i].0.packed_before(chunk),
    };
    let pack_job = |job: usize, mut packed: &mut [P::X]| {
        for number in first(job)..first(job + 1) {
            let (i, chunk) = chunks.find(number);
            let (product, rows) = &products[i];
            let (mine, rest) = packed.split_at_mut(start(number + 1) - start(number));
            product.pack(cpu.isa(), x.part(rows.clone()), chunk, mine);
            packed = rest;
        }
    };
    cpu.pool().run_parts(packed, jobs, |job| start(first(job)), pack_job);
}

#[cfg(test)]
mod tests;
