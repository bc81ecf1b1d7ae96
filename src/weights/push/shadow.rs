//! Storage of the shape of the weights that serve, beside them: a FULL push fills it as it comes, and its commit
//! exchanges the two.

use std::collections::HashMap;
use std::fmt;

use rollout_kernels::{Matrix, WeightDtype, host};

use super::names::Target;
use super::ordered::Layout;
use crate::error::{Error, Result};
use crate::weights::{Slice, TensorData};

/// What a FULL push is packed into, on every rank.
#[derive(Default)]
pub struct ShadowWeights {
    cells: Vec<Cell>,
    /// The cell of each parameter.
    places: HashMap<String, usize>,
}

/// A matrix as all ranks hold it, or all vectors. Different threads can write different ones.
pub(super) struct Cell(Vec<ShadowShard>);

/// One rank's part of a cell.
pub struct ShadowShard {
    parts: HashMap<String, Part>,
    storage: Storage,
}

/// A parameter in a shard.
struct Part {
    /// What of it this rank holds.
    slice: Slice,
    /// Where that starts: row of the matrix, element of the vectors.
    start: usize,
}

enum Storage {
    Matrix(Matrix),
    /// In float32 of serving precision.
    Vectors {
        values: Vec<f32>,
        dtype: WeightDtype,
    },
}

/// Some whole rows of a tensor.
pub(super) struct TensorRows<'a> {
    pub layout: Layout,
    pub first_row: usize,
    pub bytes: &'a [u8],
}

impl ShadowShard {
    /// For the parameters that share `matrix`, one below the other in this order.
    pub fn matrix(matrix: Matrix, parameters: impl Iterator<Item = (String, Slice)>) -> Self {
        Self { parts: parts(parameters).0, storage: Storage::Matrix(matrix) }
    }

    /// For vectors of `dtype`'s precision.
    pub fn vectors(dtype: WeightDtype, parameters: impl Iterator<Item = (String, Slice)>) -> Self {
        let (parts, len) = parts(parameters);
        Self { parts, storage: Storage::Vectors { values: vec![0.0; len], dtype } }
    }

    /// The matrix, if it is one.
    pub fn as_matrix_mut(&mut self) -> Option<&mut Matrix> {
        match &mut self.storage {
            Storage::Matrix(matrix) => Some(matrix),
            Storage::Vectors { .. } => None,
        }
    }

    /// This rank's part of a vector, if it is among these.
    pub fn vector(&self, parameter: &str) -> Option<&[f32]> {
        let Storage::Vectors { values, .. } = &self.storage else { return None };
        let Part { slice, start } = self.parts.get(parameter)?;
        Some(&values[*start..start + slice.rows.len()])
    }

    /// Stores what this rank holds of some rows of a parameter, of which the first is its row `first_row`.
    fn write(&mut self, parameter: &str, first_row: usize, rows: &TensorData<'_>, columns: usize) {
        let Part { slice, start } = &self.parts[parameter];
        let count = rows.len() / columns;
        let mine = slice.rows.start.max(first_row)..slice.rows.end.min(first_row + count);
        if mine.is_empty() {
            return;
        }
        let rows = rows.as_rows().part((mine.start - first_row) * columns..(mine.end - first_row) * columns);
        let place = start + mine.start - slice.rows.start;
        match &mut self.storage {
            Storage::Matrix(matrix) => matrix.write_columns(place, rows, columns, slice.cols.start),
            Storage::Vectors { values, dtype } => host::to_f32(rows, *dtype, &mut values[place..place + mine.len()]),
        }
    }
}

/// One below the other; and how many rows they are together.
fn parts(parameters: impl Iterator<Item = (String, Slice)>) -> (HashMap<String, Part>, usize) {
    let mut end = 0;
    let place = |(name, slice): (String, Slice)| {
        let start = end;
        end += slice.rows.len();
        (name, Part { slice, start })
    };
    (parameters.map(place).collect(), end)
}

impl Cell {
    /// Stores some rows of a tensor that is `target` to the model.
    pub fn write(&mut self, target: &Target, rows: &TensorRows<'_>) {
        let TensorRows { layout: Layout { dtype, columns }, first_row, bytes } = *rows;
        let end = first_row + bytes.len() / rows.layout.row_bytes();
        let starts = target.parts.iter().skip(1).map(|part| part.first_row).chain([usize::MAX]);
        for (part, part_end) in target.parts.iter().zip(starts) {
            let mine = first_row.max(part.first_row)..end.min(part_end);
            if mine.is_empty() {
                continue;
            }
            let slice = Slice { rows: mine.start - first_row..mine.end - first_row, cols: 0..columns };
            let values = TensorData::of_bytes(dtype, bytes, columns, &slice);
            for shard in &mut self.0 {
                shard.write(&part.parameter, mine.start - part.first_row, &values, columns);
            }
        }
    }
}

impl ShadowWeights {
    /// A stage of the ranks' shards, which hold parts of the same parameters in the same order.
    pub fn new(ranks: Vec<Vec<ShadowShard>>) -> Self {
        let places = ranks.first().into_iter().flatten().enumerate();
        let places =
            places.flat_map(|(cell, shard)| shard.parts.keys().map(move |name| (name.clone(), cell))).collect();
        let mut cells: Vec<Cell> = Vec::new();
        for shards in ranks {
            cells.resize_with(shards.len(), || Cell(Vec::new()));
            cells.iter_mut().zip(shards).for_each(|(cell, shard)| cell.0.push(shard));
        }
        Self { cells, places }
    }

    /// The shards of each rank.
    pub fn into_ranks(self) -> Vec<Vec<ShadowShard>> {
        let mut ranks: Vec<Vec<ShadowShard>> = Vec::new();
        for Cell(shards) in self.cells {
            ranks.resize_with(shards.len(), Vec::new);
            ranks.iter_mut().zip(shards).for_each(|(rank, shard)| rank.push(shard));
        }
        ranks
    }

    pub(super) fn cells(&mut self) -> &mut [Cell] {
        &mut self.cells
    }

    /// Where a tensor goes; None for one that brings no parameter.
    ///
    /// # Errors
    /// `Internal` if that is not one cell.
    pub(super) fn place(&self, target: &Target) -> Result<Option<usize>> {
        let mut places = target.parts.iter().map(|part| self.places.get(&part.parameter).copied());
        let Some(first) = places.next() else { return Ok(None) };
        if first.is_none() || !places.all(|place| place == first) {
            let names: Vec<&str> = target.parts.iter().map(|part| part.parameter.as_str()).collect();
            return Err(Error::Internal(format!("{names:?} are stored apart, and cannot come as one tensor")));
        }
        Ok(first)
    }
}

impl fmt::Debug for ShadowWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShadowWeights({} parameters)", self.places.len())
    }
}
