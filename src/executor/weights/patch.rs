//! Writing single elements, for a DELTA push.

use std::ops::Range;

use rollout_kernels::{Ops, TensorView};

use super::merge::LocalParameter;
use crate::error::Result;
use crate::model::ParamSlot;
use crate::weights::{Changes, matrix_shape};

impl LocalParameter<'_> {
    /// Stores the changes of elements that are in this rank's part.
    pub fn patch(self, ops: &Ops, changes: Changes<'_>) -> Result<()> {
        let Self { spec, slice, slot, build } = self;
        let (_, columns) = matrix_shape(&spec.shape);
        let new = changes.values.into_f32();
        let elements = |rows: Range<usize>| {
            let index = |row: usize| changes.indices.partition_point(|&i| i < (row * columns) as u64);
            let range = index(rows.start)..index(rows.end);
            let places = changes.indices[range.clone()].iter().map(|&i| (i as usize / columns, i as usize % columns));
            places.zip(&new[range])
        };
        match slot {
            ParamSlot::Matrix { matrix, first_row } => {
                let rows = first_row..first_row + slice.rows.len();
                ops.write_elements(matrix, rows, &|rows, write| {
                    let start = slice.rows.start + rows.start - first_row;
                    for ((row, column), value) in elements(start..start + rows.len()) {
                        if slice.cols.contains(&column) {
                            write(rows.start + row - start, column - slice.cols.start, *value);
                        }
                    }
                })?;
            }
            ParamSlot::Vector { vector, offset } => {
                for ((row, _), value) in elements(slice.rows.clone()) {
                    let place = offset + row - slice.rows.start;
                    vector.write_rounded(place, TensorView::F32(&[*value]), spec.dtype(build.weights))?;
                }
            }
        }
        Ok(())
    }
}
