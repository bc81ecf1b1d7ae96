//! Shadow weights: storage of the shapes of the weights that serve, beside them. A FULL push fills it as it comes, and
//! its commit swaps the two.
//!
//! ```text
//! ShadowWeights ── a ShadowTensor for each matrix, and one for all vectors ── a ShadowShard for each rank
//! ```

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rollout_kernels::{BorrowedRows, Matrix, StorageDtype, host};

use crate::error::{Error, Result};
use crate::weights::parameters::{Dtype, ParameterMapping, Slice, tensor_of_bytes};

/// How the bytes of a tensor are rows of values.
#[derive(Clone, Copy, Debug)]
pub(in crate::weights) struct RowLayout {
    pub dtype: Dtype,
    pub columns: usize,
}

impl RowLayout {
    pub fn row_bytes(self) -> usize {
        self.columns * self.dtype.size()
    }
}

/// Some whole rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(in crate::weights) struct PushedRows<'a> {
    pub layout: RowLayout,
    /// The tensor's row that `bytes` begin with.
    pub first: usize,
    pub bytes: &'a [u8],
}

impl PushedRows<'_> {
    /// The indices of these rows in the tensor.
    fn range(&self) -> Range<usize> {
        self.first..self.first + self.bytes.len() / self.layout.row_bytes()
    }
}

/// Storage for a complete set of weights on all ranks, which a FULL push is packed into.
#[derive(Default)]
pub struct ShadowWeights {
    tensors: Vec<ShadowTensor>,
    /// The index of the tensor that holds a parameter, by the parameter's name.
    index: HashMap<String, usize>,
    /// Parameters that have no value here, because the push brings none: they keep their base.
    kept: Arc<HashSet<String>>,
}

/// A matrix as all ranks hold it, or all vectors. Different threads can write different ones.
pub(in crate::weights) struct ShadowTensor {
    /// One for each rank.
    shards: Vec<ShadowShard>,
}

/// One rank's part of a matrix, which several parameters may share, or of all vectors.
pub struct ShadowShard {
    /// Where the parameters are, by their name.
    placements: HashMap<String, Placement>,
    storage: Storage,
}

/// Where a parameter is in a shard.
struct Placement {
    /// The part of the parameter that the rank holds.
    slice: Slice,
    /// The row of the matrix, or element of the vectors, that this part begins at.
    start: usize,
}

/// The place in a shard that some rows of a pushed tensor go to.
struct Destination {
    /// The index of the shard.
    shard: usize,
    /// The tensor's rows.
    rows: Range<usize>,
    /// The row of the matrix, or element of the vectors, that the first of them becomes.
    start: usize,
    /// The first of the columns that the rank holds.
    first_column: usize,
}

enum Storage {
    Matrix(Matrix),
    /// All vectors, in float32 that is not rounded.
    Vectors(Vec<f32>),
}

impl ShadowWeights {
    /// Shadow weights of the shards of each rank. All ranks have shards of the same parameters in the same order.
    pub fn new(ranks: Vec<Vec<ShadowShard>>) -> Self {
        let shards = ranks.first().into_iter().flatten().enumerate();
        let index = shards.flat_map(|(i, shard)| shard.placements.keys().map(move |name| (name.clone(), i))).collect();
        Self { tensors: by_tensor(ranks), index, kept: Arc::default() }
    }

    /// The same with other storage: `change` gets the shards of each rank, and returns as many for the same parameters.
    ///
    /// # Errors
    /// That of `change`.
    pub fn with_storage(
        self,
        change: impl FnOnce(Vec<Vec<ShadowShard>>) -> Result<Vec<Vec<ShadowShard>>>,
    ) -> Result<Self> {
        let ranks = change(by_rank(self.tensors))?;
        Ok(Self { tensors: by_tensor(ranks), index: self.index, kept: Arc::default() })
    }

    /// Names the parameters that the push brings no value for.
    pub fn keep(&mut self, parameters: HashSet<String>) {
        self.kept = Arc::new(parameters);
    }

    /// The parameters that have no value here, and keep their base.
    pub fn kept(&self) -> &Arc<HashSet<String>> {
        &self.kept
    }

    /// The shards of each rank, in the order in which they were given.
    pub fn into_ranks(self) -> Vec<Vec<ShadowShard>> {
        by_rank(self.tensors)
    }

    pub(in crate::weights) fn tensor(&self, index: usize) -> &ShadowTensor {
        &self.tensors[index]
    }

    pub(in crate::weights) fn tensors_mut(&mut self) -> &mut [ShadowTensor] {
        &mut self.tensors
    }

    /// The index of the tensor that holds the parameters of `mapping`; `None` if those are none.
    ///
    /// # Errors
    /// `Internal` if the parameters are not in one tensor.
    pub(in crate::weights) fn index_of(&self, mapping: &ParameterMapping) -> Result<Option<usize>> {
        let mut indices = mapping.parts.iter().map(|part| self.index.get(&part.parameter).copied());
        let Some(first) = indices.next() else { return Ok(None) };
        if first.is_none() || !indices.all(|index| index == first) {
            let names: Vec<&str> = mapping.parts.iter().map(|part| part.parameter.as_str()).collect();
            return Err(Error::Internal(format!("{names:?} are stored apart, and cannot come as one tensor")));
        }
        Ok(first)
    }
}

/// The tensors of shards that each rank has in the same order.
fn by_tensor(ranks: Vec<Vec<ShadowShard>>) -> Vec<ShadowTensor> {
    let mut tensors: Vec<ShadowTensor> = Vec::new();
    for shards in ranks {
        tensors.resize_with(shards.len(), || ShadowTensor { shards: Vec::new() });
        tensors.iter_mut().zip(shards).for_each(|(tensor, shard)| tensor.shards.push(shard));
    }
    tensors
}

/// The shards of each rank, in the order of the tensors.
fn by_rank(tensors: Vec<ShadowTensor>) -> Vec<Vec<ShadowShard>> {
    let mut ranks: Vec<Vec<ShadowShard>> = Vec::new();
    for ShadowTensor { shards } in tensors {
        ranks.resize_with(shards.len(), Vec::new);
        ranks.iter_mut().zip(shards).for_each(|(rank, shard)| rank.push(shard));
    }
    ranks
}

impl fmt::Debug for ShadowWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShadowWeights({} parameters)", self.index.len())
    }
}

impl ShadowTensor {
    /// Packs some rows of a pushed tensor, on every rank. `mapping` says which parameters the tensor brings.
    pub fn write_rows(&mut self, mapping: &ParameterMapping, rows: PushedRows<'_>) {
        let RowLayout { dtype, columns } = rows.layout;
        for Destination { shard, rows: mine, start, first_column } in self.destinations(mapping, rows.range()) {
            let slice = Slice { rows: mine.start - rows.first..mine.end - rows.first, cols: 0..columns };
            let values = tensor_of_bytes(dtype, rows.bytes, columns, &slice);
            match &mut self.shards[shard].storage {
                Storage::Matrix(matrix) => matrix.write_columns(start, values.view(), columns, first_column),
                Storage::Vectors(all) => {
                    host::to_f32(values.view(), StorageDtype::F32, &mut all[start..start + mine.len()]);
                }
            }
        }
    }

    /// Whether every rank's device takes the rows of a pushed tensor by itself. Vectors are the host's.
    pub fn can_copy(&self, rows: &BorrowedRows<'_>) -> bool {
        self.shards.iter().all(|shard| match &shard.storage {
            Storage::Matrix(matrix) => matrix.can_copy(rows),
            Storage::Vectors(_) => false,
        })
    }

    /// As [`ShadowTensor::write_rows`], of all rows of a pushed tensor; only if [`ShadowTensor::can_copy`].
    ///
    /// # Errors
    /// If a device cannot copy them.
    pub fn copy_rows(&mut self, mapping: &ParameterMapping, rows: &BorrowedRows<'_>) -> candle_core::Result<()> {
        self.destinations(mapping, 0..rows.rows()).into_iter().try_for_each(|destination| {
            let Destination { shard, rows: mine, start, first_column } = destination;
            let matrix = self.shards[shard].as_matrix_mut().expect("vectors are not copied");
            matrix.copy_columns(start, &rows.part(mine), first_column)
        })
    }

    /// Where the rows `range` of a pushed tensor go.
    fn destinations(&self, mapping: &ParameterMapping, range: Range<usize>) -> Vec<Destination> {
        let ends = mapping.parts.iter().skip(1).map(|part| part.first_row).chain([usize::MAX]);
        let mut destinations = Vec::new();
        for (part, end) in mapping.parts.iter().zip(ends) {
            for (shard, ShadowShard { placements, .. }) in self.shards.iter().enumerate() {
                let Placement { slice, start } = &placements[&part.parameter];
                let held = part.first_row + slice.rows.start..end.min(part.first_row + slice.rows.end);
                let rows = range.start.max(held.start)..range.end.min(held.end);
                if !rows.is_empty() {
                    let start = start + rows.start - held.start;
                    destinations.push(Destination { shard, rows, start, first_column: slice.cols.start });
                }
            }
        }
        destinations
    }
}

impl ShadowShard {
    /// A shard of the parameters that share `matrix`, one below the other in this order. Each comes with the part of it
    /// that the rank holds.
    pub fn matrix(matrix: Matrix, parameters: impl Iterator<Item = (String, Slice)>) -> Self {
        Self { placements: place(parameters).0, storage: Storage::Matrix(matrix) }
    }

    /// A shard of vectors. Each comes with the part of it that the rank holds.
    pub fn vectors(parameters: impl Iterator<Item = (String, Slice)>) -> Self {
        let (placements, len) = place(parameters);
        Self { placements, storage: Storage::Vectors(vec![0.0; len]) }
    }

    /// The matrix; `None` in a shard of vectors.
    pub fn as_matrix_mut(&mut self) -> Option<&mut Matrix> {
        match &mut self.storage {
            Storage::Matrix(matrix) => Some(matrix),
            Storage::Vectors(_) => None,
        }
    }

    /// Names of the parameters that the shard has.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.placements.keys().map(String::as_str)
    }

    /// The part of a vector that the rank holds, as it was pushed; `None` if the shard has no such vector.
    pub fn vector(&self, parameter: &str) -> Option<&[f32]> {
        let Storage::Vectors(values) = &self.storage else { return None };
        let Placement { slice, start } = self.placements.get(parameter)?;
        Some(&values[*start..start + slice.rows.len()])
    }
}

/// Places parameters one below the other. Also gives the rows that they have together.
fn place(parameters: impl Iterator<Item = (String, Slice)>) -> (HashMap<String, Placement>, usize) {
    let mut end = 0;
    let place = |(name, slice): (String, Slice)| {
        let start = end;
        end += slice.rows.len();
        (name, Placement { slice, start })
    };
    (parameters.map(place).collect(), end)
}
