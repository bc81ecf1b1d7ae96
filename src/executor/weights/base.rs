//! Values of a base on their way to where they serve.

use candle_core::{Device, Tensor};
use rollout_kernels::{Ops, PackedMatrix, RowBits, WeightDtype, WeightRows, with_f32, with_f32_mut};

use crate::comm::Communicator;
use crate::error::Result;
use crate::model::ParamSlot;
use crate::weights::{Adapter, ParamSpec, Slice, Tensors};

/// Writes the base's values of a part of a parameter to a row-major buffer, in float32 of serving precision. Called
/// from several threads at once, each time for some whole rows of what is filled.
pub(super) type Values<'a> = dyn Fn(&Slice, &mut [f32]) + Sync + 'a;

/// Gives the base's values of a part of a parameter, as they are stored, to the function it is called with. Called from
/// several threads at once, as [`Values`].
pub(super) type Rows<'a> = dyn Fn(&Slice, &mut dyn FnMut(WeightRows<'_>)) + Sync + 'a;

/// A parameter's part on this rank.
pub(super) struct Target<'a> {
    pub spec: &'a ParamSpec,
    pub slice: Slice,
    pub slot: ParamSlot<'a>,
    pub dtype: WeightDtype,
}

/// A push's values of a parameter, which it has.
pub(super) fn tensor_rows<'a>(
    tensors: &'a Tensors,
    name: &'a str,
) -> impl Fn(&Slice, &mut dyn FnMut(WeightRows<'_>)) + Sync + 'a {
    move |slice, store| store(tensors.read(name, slice).expect("the push has this parameter").as_rows())
}

/// What is stored, as a matrix of its own.
pub(super) fn copy_of(ops: &Ops, target: &Target<'_>) -> Result<PackedMatrix> {
    let (rows, columns) = (target.slice.rows.len(), target.slice.cols.len());
    let mut copy = PackedMatrix::zeros(target.dtype, rows, columns, 1);
    match &target.slot {
        ParamSlot::Matrix { matrix, first_row } => ops.fill_rows(&mut copy, 0..rows, &|rows, values| {
            matrix.read_rows(first_row + rows.start, RowBits::F32(values));
        }),
        ParamSlot::Vector { vector, offset } => {
            with_f32(vector, |values| copy.write_rows(0, WeightRows::F32(&values[*offset..offset + rows])))?;
        }
    }
    Ok(copy)
}

impl Target<'_> {
    /// Stores the base.
    pub fn store(self, ops: &Ops, base: &Rows<'_>) -> Result<()> {
        let Self { slice, slot, dtype, .. } = self;
        match slot {
            ParamSlot::Matrix { matrix, first_row } => {
                let rows = first_row..first_row + slice.rows.len();
                ops.store_rows(matrix, rows, &|rows, store| {
                    let start = slice.rows.start + rows.start - first_row;
                    base(&Slice { rows: start..start + rows.len(), cols: slice.cols.clone() }, store);
                });
            }
            ParamSlot::Vector { vector, offset } => with_f32_mut(vector, |stored| {
                base(&slice, &mut |rows| rows.to_f32(dtype, &mut stored[offset..offset + slice.len()]));
            })?,
        }
        Ok(())
    }

    /// Stores the base with `adapter` merged.
    pub fn fill(self, ops: &Ops, adapter: &Adapter, base: &Values<'_>) -> Result<()> {
        let Self { spec, slice, slot, dtype } = self;
        let merged = |part: &Slice, values: &mut [f32]| {
            base(part, values);
            adapter.merge(ops.isa(), &spec.name, part, values);
        };
        let whole = Slice::whole(&spec.shape);
        let by_whole_rows = slice.cols != whole.cols && adapter.needs_whole_rows(&spec.name);
        let make = |part: &Slice, values: &mut [f32]| {
            if !by_whole_rows {
                return merged(part, values);
            }
            let mut rows = vec![0.0; part.rows.len() * whole.cols.len()];
            merged(&Slice { rows: part.rows.clone(), cols: whole.cols.clone() }, &mut rows);
            for (to, from) in values.chunks_exact_mut(part.cols.len()).zip(rows.chunks_exact(whole.cols.len())) {
                to.copy_from_slice(&from[part.cols.clone()]);
            }
        };
        match slot {
            ParamSlot::Matrix { matrix, first_row } => {
                let rows = first_row..first_row + slice.rows.len();
                ops.fill_rows(matrix, rows, &|rows, values| {
                    let start = slice.rows.start + rows.start - first_row;
                    make(&Slice { rows: start..start + rows.len(), cols: slice.cols.clone() }, values);
                });
            }
            ParamSlot::Vector { vector, offset } => {
                let mut values = vec![0.0; slice.len()];
                make(&slice, &mut values);
                // In bfloat16 every weight has bfloat16's precision, vectors too, as in the trainer.
                let rows = WeightRows::F32(&values);
                with_f32_mut(vector, |stored| rows.to_f32(dtype, &mut stored[offset..offset + values.len()]))?;
            }
        }
        Ok(())
    }

    /// As [`Target::fill`], from a copy of this rank's part of the base.
    pub fn fill_from_copy(
        self,
        ops: &Ops,
        comm: &dyn Communicator,
        adapter: &Adapter,
        copy: &PackedMatrix,
    ) -> Result<()> {
        let slice = self.slice.clone();
        if slice.cols != Slice::whole(&self.spec.shape).cols && adapter.needs_whole_rows(&self.spec.name) {
            let rows = gather_columns(comm, copy)?;
            return with_f32(&rows, |rows| {
                let columns = rows.len() / copy.n();
                let base = |part: &Slice, values: &mut [f32]| {
                    values.copy_from_slice(&rows[part.rows.start * columns..part.rows.end * columns]);
                };
                self.fill(ops, adapter, &base)
            })?;
        }
        let base = |part: &Slice, values: &mut [f32]| {
            copy.read_rows(part.rows.start - slice.rows.start, RowBits::F32(values));
        };
        self.fill(ops, adapter, &base)
    }
}

/// Whole rows, of which each rank has a run of columns.
fn gather_columns(comm: &dyn Communicator, columns: &PackedMatrix) -> Result<Tensor> {
    let mut local = vec![0.0; columns.n() * columns.k()];
    columns.read_rows(0, RowBits::F32(&mut local));
    let local = Tensor::from_vec(local, (columns.n(), columns.k()), &Device::Cpu)?;
    let shape = (columns.n(), columns.k() * comm.world());
    let whole = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu)?;
    comm.all_gather_columns(&local, &whole)?;
    Ok(whole)
}
