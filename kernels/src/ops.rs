//! The operators that a model is written in. Activations are float32 tensors made once and written in place, so that a
//! step allocates nothing and addresses stay stable.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Error, Result, Tensor};
use tracing::{Span, trace_span};

use crate::adapter::AdapterRows;
use crate::backend::operators::OpsImpl;
use crate::buffer::DeviceBuffer;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::group::HostCollective;
use crate::kv_cache::KvCache;
use crate::kv_layout::BlockCopy;
use crate::matrix::Matrix;
use crate::merge::Merge;
use crate::patches::Patches;
use crate::rotary::RotaryTables;
use crate::sampling::SampledTokens;
use crate::step::{AttentionSequence, AttentionShape, Padding, Step, StepInput};
use crate::weights::{ReadRows, WriteElements};

mod experts;

/// The operators of one rank. Each operator of a step is a trace-level span, which costs one comparison while spans are
/// off.
pub struct Ops(Box<dyn OpsImpl>);

impl Ops {
    pub(crate) fn new(ops: Box<dyn OpsImpl>) -> Self {
        Self(ops)
    }

    /// Prepares a step, from which the operators take their indices.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the positions do not have the shape `[rows, axes]`, if `axes` is not 1 to 3, or if a sequence sees no tokens.
    pub fn prepare<'a>(&self, input: StepInput<'a>) -> Result<Step<'a>> {
        input.check();
        let prepared = self.0.prepare(&input)?;
        Ok(Step::new(input, input.tokens.len(), prepared))
    }

    /// As [`Ops::prepare`], for a step with one row per sequence, as most decode steps are. A device that replays
    /// graphs ([`Ops::capture_or_replay`]) may pad it with rows behind those of its input, so that steps have fewer
    /// shapes. The outputs of these rows are never read, and their keys and values are never written to a cache. The
    /// step lasts until the next padded step is prepared.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// As [`Ops::prepare`]. If a sequence has several rows or is not causal ([`AttentionSequence::visible`]), or if
    /// there are more than [`Padding::most_rows`].
    pub fn prepare_padded<'a>(&self, input: StepInput<'a>, padding: Padding) -> Result<Step<'a>> {
        input.check();
        assert!(input.sequences.iter().all(|s| s.visible.is_none()), "the sequences of a padded step are causal");
        let (rows, prepared) = self.0.prepare_padded(&input, padding)?;
        Ok(Step::new(input, rows, prepared))
    }

    /// Runs `launches`, which calls operators of a prepared step and nothing else. For a padded step the device may
    /// capture them as a graph, and replay the graph for later padded steps of the same shape: until
    /// [`Ops::drop_graphs`], these must use the same operators, matrices, buffers and caches.
    ///
    /// In a [`RankGroup`](crate::RankGroup), whose collectives `launches` may call too, all ranks run the same steps,
    /// and agree by `ranks` whether each is captured or replayed.
    ///
    /// # Errors
    /// Those of `launches`, or if the device fails. The other ranks of a group may then wait for this one, as in a
    /// collective.
    pub fn capture_or_replay<E: From<Error>>(
        &self,
        step: &Step<'_>,
        ranks: &dyn HostCollective,
        mut launches: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut done = Ok(());
        let result = self.0.capture_or_replay(step, ranks, &mut || {
            done = launches();
            done.is_ok()
        });
        done?;
        Ok(result?)
    }

    /// Whether the graph of a padded step also answers its tasks: by [`Ops::sample_in_graph`] for all of its rows, to
    /// be read by [`Ops::sampled`]. Otherwise [`Ops::sample`] answers them after the graph.
    pub fn samples_in_graph(&self, step: &Step<'_>) -> bool {
        self.0.samples_in_graph(step)
    }

    /// Answers the tasks of these rows of the step from their logits `[rows, vocabulary]`, as a part of its graph.
    ///
    /// # Panics
    /// If the step's graph does not answer tasks ([`Ops::samples_in_graph`]).
    pub fn sample_in_graph(&self, logits: &Tensor, step: &Step<'_>, rows: Range<usize>) -> Result<()> {
        let _span = trace_span!("sampling").entered();
        self.0.sample_in_graph(logits, step, rows)
    }

    /// The answers to a step's tasks, after [`Ops::sample_in_graph`] for all of its rows.
    ///
    /// # Panics
    /// As [`Ops::sample_in_graph`].
    pub fn sampled<'a>(&'a self, step: &'a Step<'_>) -> Result<Deferred<'a, SampledTokens>> {
        self.0.sampled(step)
    }

    /// Drops all graphs, because the memory that they use is about to change.
    pub fn drop_graphs(&self) {
        self.0.drop_graphs();
    }

    /// Cuts square patches out of a picture's pixels, one for each row of `out` (`[patches.corners.len(), 3 * frames *
    /// side * side]`), in the order `[channel][frame][y][x]`. A value is `(pixel - mean) / std` of its channel: one
    /// float32 subtraction and one float32 division, so that the bits are those of transformers on every device.
    ///
    /// # Panics
    /// If the pixels do not make whole rows of the picture's width, a patch is empty or not within the picture, or
    /// `out` has another shape.
    pub fn patches(&self, patches: &Patches<'_>, out: &Tensor) -> Result<()> {
        let _span = trace_span!("patches").entered();
        patches.check();
        assert_eq!(out.dims2()?, (patches.corners.len(), patches.row_width()), "rows and width of patches");
        self.0.patches(patches, out)
    }

    /// `out[i]` = row `token of row i - first_token` of `table`, or zeros if the table has no such row.
    pub fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()> {
        let _span = trace_span!("embed").entered();
        self.0.embed(table, first_token, step, out)
    }

    /// `out = x wᵀ + bias`.
    pub fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>, out: &Tensor) -> Result<()> {
        let _span = linear_span(x, w).entered();
        self.0.linear(x, w, bias, out)
    }

    /// `out = silu(left half) * right half` of `x wᵀ + bias`, which may be written to `gate_up` on the way.
    pub fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&DeviceBuffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let _span = linear_span(x, w).entered();
        self.0.linear_silu_mul(x, w, bias, gate_up, out)
    }

    /// `out = silu(left half of gate_up) * right half`.
    pub fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        let _span = trace_span!("silu_mul").entered();
        self.0.silu_mul(gate_up, out)
    }

    /// `x = 0.5 * x * (1 + erf(x / sqrt(2)))`, the exact form of GELU: 0 for `-inf`.
    pub fn gelu(&self, x: &Tensor) -> Result<()> {
        let _span = trace_span!("gelu").entered();
        self.0.gelu(x)
    }

    /// `out = x / rms(x) * weight` by row.
    pub fn rms_norm(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        let _span = trace_span!("rms_norm").entered();
        self.0.rms_norm(x, weight, eps, out)
    }

    /// `residual += x (+ bias)`, then `out = rms_norm(residual)`.
    pub fn add_rms_norm(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&DeviceBuffer>,
        weight: &DeviceBuffer,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        let _span = trace_span!("add_rms_norm").entered();
        self.0.add_rms_norm(residual, x, bias, weight, eps, out)
    }

    /// Normalises each head of `x` (`[rows, heads * weight.len()]`) in place.
    pub fn rms_norm_heads(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32) -> Result<()> {
        let _span = trace_span!("rms_norm_heads").entered();
        self.0.rms_norm_heads(x, weight, eps)
    }

    /// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` by row, with the variance of all values of the
    /// row, not of a sample.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn layer_norm(
        &self,
        x: &Tensor,
        weight: &DeviceBuffer,
        bias: &DeviceBuffer,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        let _span = trace_span!("layer_norm").entered();
        self.0.layer_norm(x, weight, bias, eps, out)
    }

    /// Rotates each head of `x` (`[rows, heads * head_dim]`) in place by the positions of its row.
    ///
    /// # Panics
    /// If shapes do not agree, more dimensions are rotated than a head has, or the positions of the step lack the axis
    /// of a frequency.
    pub fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, tables: &RotaryTables<'_>) -> Result<()> {
        let _span = trace_span!("rope").entered();
        let RotaryTables { rotary_dim, axis_of, .. } = *tables;
        assert!(rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim, "{rotary_dim} dimensions of {head_dim}");
        let (given, half, axes) = (axis_of.len(), rotary_dim / 2, step.input().axes);
        assert!(given == 0 || given == half, "an axis for each of {half} frequencies, not for {given}");
        let is_axis = |axis: &u8| usize::from(*axis) < axes;
        assert!(axis_of.iter().all(is_axis), "{axis_of:?}: positions have {axes} axes");
        self.0.rope(x, head_dim, step, tables)
    }

    /// Puts the key and the value of each row (`[rows, kv_heads * head_dim]`) into its slot of the cache.
    pub fn write_kv(&self, k: &Tensor, v: &Tensor, step: &Step<'_>, cache: &mut KvCache) -> Result<()> {
        let _span = trace_span!("write_kv").entered();
        self.0.write_kv(k, v, step, cache)
    }

    /// Does the copies in order, keys and values.
    ///
    /// # Panics
    /// If a block is outside the cache, or `tokens` exceeds the block size.
    pub fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) -> Result<()> {
        let _span = trace_span!("copy_blocks").entered();
        self.0.copy_blocks(cache, copies)
    }

    /// `out[row] = softmax(scale * q[row] · K) V` per head: attention of each row over its sequence's cached keys and
    /// values, causal unless [`AttentionSequence::visible`] is given. `q` and `out` are `[rows, heads * head_dim]`;
    /// rows of no sequence are not touched.
    ///
    /// # Panics
    /// If shapes do not agree, a block table is too short or names a block outside the cache, sequences share rows, or
    /// a sequence that is not causal meets a sliding window.
    pub fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        step: &Step<'_>,
        cache: &KvCache,
        out: &Tensor,
    ) -> Result<()> {
        let sequences = step.input().sequences;
        let _span = attention_span(q, sequences).entered();
        let is_causal = sequences.iter().all(|s| s.visible.is_none());
        assert!(is_causal || shape.sliding_window.is_none(), "a sliding window is of causal attention");
        self.0.paged_attention(q, shape, step, cache, out)
    }

    /// Copies the rows of `x` that these rows of [`StepInput::logits`] name to `out`.
    pub fn select_logits_rows(&self, x: &Tensor, step: &Step<'_>, rows: Range<usize>, out: &Tensor) -> Result<()> {
        let _span = trace_span!("select_rows").entered();
        self.0.select_logits_rows(x, step, rows, out)
    }

    /// Answers the tasks of these rows of [`StepInput::logits`] from their logits `[rows, vocabulary]`, which are read
    /// before any later operator writes to them.
    pub fn sample<'a>(
        &'a self,
        logits: &Tensor,
        step: &'a Step<'_>,
        rows: Range<usize>,
    ) -> Result<Deferred<'a, SampledTokens>> {
        let _span = trace_span!("sampling").entered();
        self.0.sample(logits, step, rows)
    }

    /// The divergences of pairs of rows of `logits` (`[rows, vocabulary]`), which are read before any later operator
    /// writes to them.
    ///
    /// # Panics
    /// If a row is not there, or a temperature is not above 0.
    pub fn divergences<'a>(&'a self, logits: &Tensor, pairs: &[LogitsPair]) -> Result<Deferred<'a, Vec<Divergences>>> {
        let _span = trace_span!("divergences").entered();
        let rows = logits.dim(0)?;
        for pair in pairs {
            let has_rows = pair.policy < rows && pair.reference < rows;
            assert!(has_rows && pair.temperature > 0.0, "{pair:?} of {rows} rows");
        }
        self.0.divergences(logits, pairs)
    }

    /// Rows of `x`, one after the other, on the host. Waits for the device.
    ///
    /// # Panics
    /// If `x` has no such row.
    pub fn read_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Vec<f32>> {
        let _span = trace_span!("read_rows").entered();
        let count = x.dim(0)?;
        assert!(rows.iter().all(|row| (*row as usize) < count), "rows {rows:?} of {count}");
        self.0.read_rows(x, rows)
    }

    /// Writes values of the host, row by row, to all of `out`.
    ///
    /// # Panics
    /// If there are more or fewer values than `out` has.
    pub fn write_rows(&self, values: &[f32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("write_rows").entered();
        assert_eq!(values.len(), out.elem_count(), "values of {:?}", out.shape());
        self.0.write_rows(values, out)
    }

    /// `out[i] = x[rows[i]]`.
    pub fn select_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("select_rows").entered();
        self.0.select_rows(x, rows, out)
    }

    /// `out[rows[i]] = x[i]`; other rows are not touched.
    ///
    /// # Panics
    /// If `out` has no such row, a row is named twice, or `x` has fewer rows.
    pub fn put_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("put_rows").entered();
        check_distinct(rows, out.dim(0)?);
        self.0.put_rows(x, rows, out)
    }

    /// `out[rows[i]] += x[i]`.
    ///
    /// # Panics
    /// If the rows are not ascending: each is added to once.
    pub fn add_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("add_rows").entered();
        assert!(rows.is_sorted_by(|row, next| row < next), "rows {rows:?} are ascending");
        self.0.add_rows(x, rows, out)
    }

    /// `out += x`.
    pub fn add(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        let _span = trace_span!("add").entered();
        self.0.add(x, out)
    }

    /// `out += scale * x`, with one factor for each column.
    ///
    /// # Panics
    /// If shapes do not agree.
    pub fn add_scaled(&self, x: &Tensor, scale: &DeviceBuffer, out: &Tensor) -> Result<()> {
        let _span = trace_span!("add_scaled").entered();
        self.0.add_scaled(x, scale, out)
    }

    /// `out[rows] += b (a x[rows])` of several adapters at once, if the device has a job for them: returns whether it
    /// was done. The bits are those of [`Ops::linear`] and [`Ops::add_rows`] for each adapter alone. `scratch` has flat
    /// buffers for the selected rows, for `a x` and for `b (a x)`.
    ///
    /// # Panics
    /// If shapes do not agree, or two adapters have a row in common.
    pub fn add_adapters(
        &self,
        x: &Tensor,
        groups: &[AdapterRows<'_>],
        scratch: [&Tensor; 3],
        out: &Tensor,
    ) -> Result<bool> {
        let _span = trace_span!("add_adapters", adapters = groups.len()).entered();
        let rows: Vec<u32> = groups.iter().flat_map(|group| group.rows).copied().collect();
        check_distinct(&rows, out.dim(0)?);
        self.0.add_adapters(x, groups, scratch, out)
    }

    /// Stores rows of `w` as `read` gives them, some at a time; rounds to nearest even where the matrix is bfloat16.
    ///
    /// # Panics
    /// If `rows` pass the end, or other rows are given than were asked for.
    pub fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()> {
        self.0.store_rows(w, rows, read)
    }

    /// Copies `rows` of `from` to the first rows of `to`, of the same width.
    pub fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()> {
        let _span = trace_span!("copy_rows", n = rows.len(), k = to.k()).entered();
        self.0.copy_rows(from, rows, to)
    }

    /// Writes merged rows to `w` from row `first_row` on.
    ///
    /// # Panics
    /// If they pass the end, or have other columns than `w`.
    pub fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()> {
        let _span = trace_span!("merge_rows", n = merge.rows.len(), k = w.k()).entered();
        self.0.merge_rows(w, first_row, merge)
    }

    /// Stores single elements of `rows`, which `write` names; rounds to nearest even where the matrix is bfloat16.
    ///
    /// # Panics
    /// If `rows` pass the end, or an element is outside the rows it was asked for.
    pub fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()> {
        let _span = trace_span!("write_elements", n = w.n(), k = w.k()).entered();
        self.0.write_elements(w, rows, write)
    }

    /// Writes all of `w` to `out`, `[n, k]` float32: exact.
    pub fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()> {
        self.0.unpack(w, out)
    }

    /// Calls `f` with each item, on all threads of the host that the rank has.
    pub fn for_each<T: Send>(&self, items: &mut [T], f: impl Fn(&mut T) + Sync) {
        let items: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
        self.0.run_on_host(items.len(), &|i| {
            let mut item = items[i].lock().expect("each item is taken once");
            f(&mut item);
        });
    }

    /// Drops the memory that the operators reuse; the next ones take it again.
    pub fn release(&self) {
        self.0.release();
    }
}

/// Panics if a row is named twice, or is not below `count`.
fn check_distinct(rows: &[u32], count: usize) {
    let mut is_named = vec![false; count];
    for row in rows {
        let is_named = is_named.get_mut(*row as usize).unwrap_or_else(|| panic!("row {row} of {count}"));
        assert!(!std::mem::replace(is_named, true), "row {row} is named twice");
    }
}

/// A span that tells the layer by its matrix, and what it must compute and read.
fn linear_span(x: &Tensor, w: &Matrix) -> Span {
    let flop = || 2 * x.dims().first().map_or(0, |rows| rows * w.n() * w.k());
    trace_span!("linear", n = w.n(), k = w.k(), flop = flop(), bytes = w.bytes())
}

/// A span with what rows compute that see all tokens before them: a window makes it less.
fn attention_span(q: &Tensor, sequences: &[AttentionSequence<'_>]) -> Span {
    let causal = |s: &AttentionSequence<'_>| s.rows * s.start_position + s.rows * (s.rows + 1) / 2;
    let seen = |s: &AttentionSequence<'_>| s.visible.map_or_else(|| causal(s), |visible| s.rows * visible);
    let flop = || 4 * q.dims().last().map_or(0, |width| width * sequences.iter().map(seen).sum::<usize>());
    trace_span!("paged_attention", flop = flop())
}
