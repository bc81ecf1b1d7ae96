//! Writing parameters from their base, with an adapter merged or without.

use candle_core::Tensor;
use rollout_kernels::{Activations, Matrix, MatrixShape, Merge, MergeBase, Ops, ReadValues, TensorView, WeightChange};

use crate::comm::Communicator;
use crate::error::Result;
use crate::model::{Build, ParamSlot};
use crate::weights::{Adapter, ParamSpec, Slice, Tensors};

/// Reads the base: called with a part of a parameter, it passes the stored values of that part to the function. It is
/// called from several threads at once, each time for some whole rows.
pub(super) type ReadBaseRows<'a> = dyn Fn(&Slice, &mut dyn FnMut(TensorView<'_>)) + Sync + 'a;

/// The change of a parameter that the adapter does not touch.
const UNCHANGED: WeightChange = WeightChange { replacement: None, delta: None };

/// A parameter's part on this rank, and where it is stored.
pub(super) struct LocalParameter<'a> {
    pub spec: &'a ParamSpec,
    pub slice: Slice,
    pub slot: ParamSlot<'a>,
    pub build: &'a Build,
}

/// Reads a parameter that a push has brought; the push must have it.
pub(super) fn tensor_rows<'a>(
    tensors: &'a Tensors,
    name: &'a str,
) -> impl Fn(&Slice, &mut dyn FnMut(TensorView<'_>)) + Sync + 'a {
    move |slice, store| store(tensors.read(name, slice).expect("the push has this parameter").view())
}

/// Memory in which ranks gather whole rows of a parameter of which each has some of the columns. It is allocated before
/// the ranks begin an order, so that no rank runs out of memory while the others wait for its part.
pub(super) struct RowGather {
    local: Activations,
    whole: Activations,
}

impl RowGather {
    /// For at most `elements` elements of whole rows.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    pub fn new(build: &Build, elements: usize) -> Result<Self> {
        let of = |elements| build.device.activations(1, elements);
        Ok(Self { local: of(build.partition.share(elements))?, whole: of(elements)? })
    }

    /// Most elements of whole rows that it has room for.
    pub fn elements(&self) -> usize {
        self.whole.elem_count()
    }
}

/// The first `rows * width` elements of a tensor, as rows.
fn first_rows(t: &Tensor, rows: usize, width: usize) -> Result<Tensor> {
    Ok(t.narrow(1, 0, rows * width)?.reshape((rows, width))?)
}

impl<'a> LocalParameter<'a> {
    /// # Errors
    /// `Config` if the parameter cannot be divided among the ranks.
    pub fn new(build: &'a Build, spec: &'a ParamSpec, slot: ParamSlot<'a>) -> Result<Self> {
        Ok(Self { spec, slice: build.partition.slice(spec)?, slot, build })
    }

    /// A copy of the stored values, as a matrix of its own. A vector becomes one column.
    pub fn copy(&self, ops: &Ops) -> Result<Matrix> {
        let (n, k) = (self.slice.rows.len(), self.slice.cols.len());
        let mut copy =
            self.build.device.zeros(MatrixShape { dtype: self.spec.dtype(self.build.weights), n, k, leaves: 1 })?;
        match &self.slot {
            ParamSlot::Matrix { matrix, first_row } => ops.copy_rows(matrix, *first_row..first_row + n, &mut copy)?,
            ParamSlot::Vector { vector, offset } => {
                copy.write_rows(0, TensorView::F32(&vector.read(*offset..offset + n)?));
            }
        }
        Ok(copy)
    }

    /// Stores the base.
    pub fn store(self, ops: &Ops, base: &ReadBaseRows<'_>) -> Result<()> {
        let Self { spec, slice, slot, build } = self;
        match slot {
            ParamSlot::Matrix { matrix, first_row } => {
                let rows = first_row..first_row + slice.rows.len();
                ops.store_rows(matrix, rows, &|rows, store| {
                    let start = slice.rows.start + rows.start - first_row;
                    base(&Slice { rows: start..start + rows.len(), cols: slice.cols.clone() }, store);
                })?;
            }
            ParamSlot::Vector { vector, offset } => {
                let mut written = Ok(());
                base(&slice, &mut |rows| written = vector.write_rounded(offset, rows, spec.dtype(build.weights)));
                written?;
            }
        }
        Ok(())
    }

    /// Stores the base, which `base` reads, with `adapter` merged.
    pub fn merge(self, ops: &Ops, adapter: &Adapter, base: &ReadValues<'_>) -> Result<()> {
        self.merge_from(ops, adapter, MergeBase::Read(base))
    }

    /// Elements of whole rows that the ranks gather for a merge from a copy; 0 where each merges what it has.
    pub fn gathered_elements(&self, adapter: &Adapter) -> usize {
        let whole = Slice::whole(&self.spec.shape);
        let needs_whole_rows = adapter.change(&self.spec.name).is_some_and(|change| change.needs_whole_rows());
        if needs_whole_rows && self.slice.cols != whole.cols { self.slice.rows.len() * whole.cols.len() } else { 0 }
    }

    /// As [`LocalParameter::merge`], with the base in `copy`, which has this rank's part of it. All ranks must call it
    /// together: where the adapter needs whole rows and each rank has some of the columns, they gather them in
    /// `gathering`.
    ///
    /// # Panics
    /// If they gather and there is no `gathering`, or it is too small.
    pub fn merge_from_copy(
        self,
        ops: &Ops,
        comm: &dyn Communicator,
        adapter: &Adapter,
        copy: &Matrix,
        gathering: Option<&RowGather>,
    ) -> Result<()> {
        if self.gathered_elements(adapter) == 0 {
            return self.merge_from(ops, adapter, MergeBase::Matrix(copy));
        }
        let gathering = gathering.expect("the order was prepared");
        let local = first_rows(&gathering.local, copy.n(), copy.k())?;
        let whole = first_rows(&gathering.whole, copy.n(), copy.k() * comm.world())?;
        ops.unpack(copy, &local)?;
        comm.all_gather_columns(&local, &whole)?;
        self.merge_from(ops, adapter, MergeBase::WholeRows(&whole))
    }

    fn merge_from(self, ops: &Ops, adapter: &Adapter, base: MergeBase<'_>) -> Result<()> {
        let Self { spec, slice, slot, build } = self;
        let change = adapter.change(&spec.name).unwrap_or(&UNCHANGED);
        match slot {
            ParamSlot::Matrix { matrix, first_row } => {
                let width = Slice::whole(&spec.shape).cols.end;
                let merge = Merge { change, base, rows: slice.rows, columns: slice.cols, width };
                ops.merge_rows(matrix, first_row, &merge)?;
            }
            ParamSlot::Vector { vector, offset } => {
                let mut values = vec![0.0; slice.len()];
                match base {
                    MergeBase::Read(read) => read(slice.rows.clone(), slice.cols.clone(), &mut values),
                    MergeBase::Matrix(copy) => copy.read_f32(0, &mut values),
                    MergeBase::WholeRows(_) => unreachable!("a vector is whole on every rank that has it"),
                }
                change.apply_to_vector(slice.rows, &mut values);
                vector.write_rounded(offset, TensorView::F32(&values), spec.dtype(build.weights))?;
            }
        }
        Ok(())
    }
}
