//! Weight matrices stored in the order in which the kernel of linear layers reads them.

use super::isa::{Isa, Kernel};
use super::lanes::Lanes;
use super::math::round_bf16;
use super::pool::Cpu;
use super::rows::RowsMut;
use super::storage::{Mapping, Plain};
use crate::values::{StorageDtype, TensorData, TensorView};
use crate::weights::{MAX_LEAVES, MatrixShape, ROW_GROUP};
use half::{bf16, f16};

mod fill;

/// Rows of the matrix (columns of the product) in a panel.
pub const PANEL: usize = super::lanes::LANES;
const _: () = assert!(ROW_GROUP == PANEL, "rows are written fastest by panels");

/// Stored values of a row, including the padding of its last pair.
fn padded_k(dtype: StorageDtype, k: usize) -> usize {
    match dtype {
        StorageDtype::Bf16 => k.next_multiple_of(2),
        StorageDtype::F32 => k,
    }
}

/// Converts values to those that a matrix of `dtype` would hold, as float32.
///
/// # Panics
/// If `out` has another length than `values`.
pub fn to_f32(values: TensorView<'_>, dtype: StorageDtype, out: &mut [f32]) {
    assert_eq!(values.len(), out.len(), "values of the rows");
    match (values, dtype) {
        (TensorView::Bf16(rows), StorageDtype::Bf16) => widen::<bf16, _>(rows, out),
        (TensorView::F16(rows), StorageDtype::Bf16) => widen::<bf16, _>(rows, out),
        (TensorView::F32(rows), StorageDtype::Bf16) => widen::<bf16, _>(rows, out),
        (TensorView::Bf16(rows), StorageDtype::F32) => widen::<f32, _>(rows, out),
        (TensorView::F16(rows), StorageDtype::F32) => widen::<f32, _>(rows, out),
        (TensorView::F32(rows), StorageDtype::F32) => widen::<f32, _>(rows, out),
    }
}

/// Rounds values to `P` and widens them to float32.
fn widen<P: WeightElement<S>, S: Copy>(from: &[S], to: &mut [f32])
where
    f32: WeightElement<P>,
{
    Isa::detect().dispatch(Widen { from, to, precision: std::marker::PhantomData::<P> });
}

/// Weights `[n, k]` (output features, input features) of a linear layer, stored in panels of 16 rows:
/// `[n/16][k/2][16][2]` for bfloat16 and `[n/16][k][16]` for float32, padded with zeros to whole panels (and pairs).
pub struct PackedMatrix {
    dtype: StorageDtype,
    n: usize,
    k: usize,
    leaves: usize,
    storage: Mapping,
}

impl PackedMatrix {
    /// A matrix of zeros. Its memory is reserved at once, but pages are taken only as rows are written.
    ///
    /// # Panics
    /// As for [`PackedMatrix::try_zeros`], and if the system cannot map the memory.
    pub fn zeros(dtype: StorageDtype, n: usize, k: usize, leaves: usize) -> PackedMatrix {
        PackedMatrix::try_zeros(MatrixShape { dtype, n, k, leaves })
            .unwrap_or_else(|e| panic!("cannot map memory: {e}"))
    }

    /// A matrix of zeros. Its memory is reserved at once, but pages are taken only as rows are written.
    ///
    /// # Errors
    /// If the system cannot map the memory.
    ///
    /// # Panics
    /// If a dimension is 0, or `leaves` is not a power of two up to [`MAX_LEAVES`] that cuts `k` into runs of whole
    /// pairs.
    pub fn try_zeros(shape: MatrixShape) -> std::io::Result<PackedMatrix> {
        let MatrixShape { dtype, n, k, leaves } = shape;
        assert!(n >= 1 && k >= 1, "a weight matrix of {n} x {k} is empty");
        let fits = leaves == 1 || k.is_multiple_of(2 * leaves);
        assert!(leaves.is_power_of_two() && leaves <= MAX_LEAVES && fits, "k = {k} does not make {leaves} leaves");
        let storage = Mapping::try_zeroed(PackedMatrix::bytes_for(dtype, n, k))?;
        Ok(PackedMatrix { dtype, n, k, leaves, storage })
    }

    /// The memory in bytes of a matrix of this shape, padding included.
    pub fn bytes_for(dtype: StorageDtype, n: usize, k: usize) -> usize {
        n.next_multiple_of(PANEL) * padded_k(dtype, k) * dtype.size()
    }

    pub fn dtype(&self) -> StorageDtype {
        self.dtype
    }

    /// Output features: rows of the matrix.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features: columns of the matrix.
    pub fn k(&self) -> usize {
        self.k
    }

    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// The memory in bytes that the matrix takes once all its rows are written, padding included.
    pub fn bytes(&self) -> usize {
        self.storage.bytes()
    }

    pub(crate) fn padded_k(&self) -> usize {
        padded_k(self.dtype, self.k)
    }

    pub(crate) fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    pub(crate) fn storage(&self) -> &Mapping {
        &self.storage
    }

    /// Writes rows from `row0` on, rounded to nearest even if the matrix is bfloat16.
    ///
    /// # Panics
    /// If the values are not whole rows, or pass the end of the matrix.
    pub fn write_rows(&mut self, row0: usize, rows: TensorView<'_>) {
        self.write_columns(row0, rows, self.k, 0);
    }

    /// Writes rows from `row0` on, as [`PackedMatrix::write_rows`] does, from rows of `width` values: the matrix takes
    /// the columns from `first_column` on.
    ///
    /// # Panics
    /// If the values are not whole rows, pass the end of the matrix, or have too few columns.
    pub fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) {
        let end = row0 + whole_rows(rows.len(), width);
        assert!(end <= self.n, "rows {row0}..{end} pass the end of a matrix of {} rows", self.n);
        if row0 == end {
            return;
        }
        let (k, from) = (self.k, Source { rows, width, first_column });
        let panels = row0 / PANEL..end.div_ceil(PANEL);
        match self.dtype {
            StorageDtype::Bf16 => fill::pack::<2, bf16>(self.panels_mut(&panels), &(row0..end), k, from),
            StorageDtype::F32 => fill::pack::<1, f32>(self.panels_mut(&panels), &(row0..end), k, from),
        }
    }

    fn panels_mut<D: Plain>(&mut self, panels: &std::ops::Range<usize>) -> &mut [D] {
        let panel_len = PANEL * self.padded_k();
        &mut self.storage.as_mut_slice()[panels.start * panel_len..panels.end * panel_len]
    }

    /// The row after `values` values of whole rows from `row0` on.
    fn end(&self, row0: usize, values: usize) -> usize {
        let end = row0 + whole_rows(values, self.k);
        assert!(end <= self.n, "rows {row0}..{end} pass the end of a matrix of {} rows", self.n);
        end
    }

    /// The stored values of whole rows.
    ///
    /// # Panics
    /// If the rows pass the end of the matrix.
    pub fn read_rows(&self, rows: std::ops::Range<usize>) -> TensorData<'static> {
        let len = rows.len() * self.k;
        match self.dtype {
            StorageDtype::Bf16 => {
                let mut values = vec![bf16::ZERO; len];
                self.read_as::<2, bf16, _>(rows.start, &mut values, |w| w);
                TensorData::Bf16(values.into())
            }
            StorageDtype::F32 => {
                let mut values = vec![0.0; len];
                self.read_as::<1, f32, _>(rows.start, &mut values, |w| w);
                TensorData::F32(values.into())
            }
        }
    }

    /// Copies whole rows from `row0` on as float32, which is exact.
    ///
    /// # Panics
    /// If `out` does not have whole rows, or passes the end of the matrix.
    pub fn read_f32(&self, row0: usize, out: &mut [f32]) {
        match self.dtype {
            StorageDtype::Bf16 => self.read_as::<2, bf16, _>(row0, out, bf16::to_f32),
            StorageDtype::F32 => self.read_as::<1, f32, _>(row0, out, |w| w),
        }
    }

    fn read_as<const GROUP: usize, S: Plain, D>(&self, row0: usize, out: &mut [D], convert: impl Fn(S) -> D) {
        let (k, end) = (self.k, self.end(row0, out.len()));
        let panel_len = PANEL * self.padded_k();
        for (row, out) in (row0..end).zip(out.chunks_mut(k)) {
            let panel = &self.storage.as_slice::<S>()[row / PANEL * panel_len..][..panel_len];
            let lane = &panel.as_chunks::<GROUP>().0[row % PANEL..];
            let (whole, rest) = out.as_chunks_mut::<GROUP>();
            for (i, out) in whole.iter_mut().enumerate() {
                for (out, value) in out.iter_mut().zip(lane[i * PANEL]) {
                    *out = convert(value);
                }
            }
            let groups = whole.len();
            rest.iter_mut().zip(0..).for_each(|(out, i): (&mut D, usize)| *out = convert(lane[groups * PANEL][i]));
        }
    }
}

/// How many rows of `width` the values are.
fn whole_rows(values: usize, width: usize) -> usize {
    assert!(values.is_multiple_of(width), "{values} values are no whole rows of {width}");
    values / width
}

/// Rows of `width` values, of which a matrix takes the columns from `first_column` on.
#[derive(Clone, Copy)]
struct Source<'a> {
    rows: TensorView<'a>,
    width: usize,
    first_column: usize,
}

/// An element type of a matrix, made from `S` by rounding to nearest even.
trait WeightElement<S>: Plain + Default {
    fn rounded(x: S) -> Self;
}

impl WeightElement<bf16> for bf16 {
    #[inline(always)]
    fn rounded(x: bf16) -> bf16 {
        x
    }
}

impl WeightElement<f16> for bf16 {
    #[inline(always)]
    fn rounded(x: f16) -> bf16 {
        round_bf16(x.to_f32())
    }
}

impl WeightElement<f32> for bf16 {
    #[inline(always)]
    fn rounded(x: f32) -> bf16 {
        round_bf16(x)
    }
}

impl WeightElement<bf16> for f32 {
    #[inline(always)]
    fn rounded(x: bf16) -> f32 {
        f32::from_bits(u32::from(x.to_bits()) << 16)
    }
}

impl WeightElement<f16> for f32 {
    #[inline(always)]
    fn rounded(x: f16) -> f32 {
        x.to_f32()
    }
}

impl WeightElement<f32> for f32 {
    #[inline(always)]
    fn rounded(x: f32) -> f32 {
        x
    }
}

/// Writes rows of length `k`, which start `stride` values apart, to the lanes of a panel from `first_lane` on. `GROUP`
/// neighbours of a row lie together: 2 for bfloat16, 1 for float32.
struct PackLanes<'a, const GROUP: usize, D, S> {
    panel: &'a mut [D],
    first_lane: usize,
    k: usize,
    rows: &'a [S],
    stride: usize,
}

impl<const GROUP: usize, D: WeightElement<S>, S: Copy> Kernel for PackLanes<'_, GROUP, D, S> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        const BLOCK: usize = 64; // elements of a row that are converted together, as vectors
        let (groups, _) = self.panel.as_chunks_mut::<GROUP>();
        for (block, groups) in groups.chunks_mut(PANEL * BLOCK / GROUP).enumerate() {
            for (lane, row) in self.rows.chunks(self.stride).enumerate() {
                let source = &row[block * BLOCK..self.k];
                let mut values = [D::default(); BLOCK];
                for (value, source) in values.iter_mut().zip(source) {
                    *value = D::rounded(*source);
                }
                let lane = &mut groups[self.first_lane + lane..];
                for (i, group) in values.as_chunks().0[..source.len().min(BLOCK).div_ceil(GROUP)].iter().enumerate() {
                    lane[i * PANEL] = *group;
                }
            }
        }
    }
}

/// Rounds values to `P` and widens them to float32, one by one.
struct Widen<'a, P, S> {
    from: &'a [S],
    to: &'a mut [f32],
    precision: std::marker::PhantomData<P>,
}

impl<P: WeightElement<S>, S: Copy> Kernel for Widen<'_, P, S>
where
    f32: WeightElement<P>,
{
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = f32::rounded(P::rounded(*from));
        }
    }
}

/// Embedding lookup: `out[i]` is row `tokens[i] - row_offset` of `weights`, or zeros if this shard of the vocabulary
/// does not have that row.
pub fn gather_rows(cpu: &Cpu, weights: &PackedMatrix, tokens: &[u32], row_offset: usize, out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (tokens.len(), weights.k()), "rows and width of the output");
    let out = out.share();
    cpu.for_ranges(tokens.len(), 4 * weights.k(), |from, to| {
        for (i, token) in (from..to).zip(&tokens[from..to]) {
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(i) };
            match (*token as usize).checked_sub(row_offset) {
                Some(row) if row < weights.n() => weights.read_f32(row, out),
                _ => out.fill(0.0),
            }
        }
    });
}

#[cfg(test)]
mod tests;
