//! Adapters merged into weights.
//!
//! The base is put into the matrix, where it is exact, and the low-rank delta is added to it there. Other changes go
//! through the host, by the functions of the CPU's merge.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::arena::ArenaAllocation;
use super::context::Context;
use super::host::HostSide;
use super::launch::{Launch, grid};
use super::layout::{DeviceRows, PackedRowLayout};
use super::matrix::CudaMatrix;
use super::module::{Module, fat_binary};
use super::pack::Packer;
use super::tensor;
use crate::cpu::Isa;
use crate::error::out_of_memory;
use crate::merge::{LoraDelta, LowRank, Merge, MergeBase, ReadValues, Replacement};
use crate::values::{Dtype, StorageDtype};

/// The tile of a block of `cu/merge.cu`, and its threads.
const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 64;
const THREADS: u32 = 256;

/// Merges with the arithmetic of PEFT's `merge_adapter()` on the CPU, bit by bit.
pub(super) struct Merger {
    context: Arc<Context>,
    isa: Isa,
    add_low_rank_bf16: CudaFunction,
    add_low_rank_f32: CudaFunction,
}

impl Merger {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("merge"))?;
        Ok(Self {
            context: context.clone(),
            isa: Isa::detect(),
            add_low_rank_bf16: module.function("add_low_rank_bf16")?,
            add_low_rank_f32: module.function("add_low_rank_f32")?,
        })
    }

    /// Writes merged rows to `w`, from row `first_row` on.
    ///
    /// # Panics
    /// If they pass the end, or have other columns than `w`.
    pub fn merge_rows(
        &self,
        packer: &Packer,
        host: HostSide<'_>,
        w: &CudaMatrix,
        first_row: usize,
        merge: &Merge<'_>,
    ) -> Result<()> {
        assert_eq!(merge.columns.len(), w.shape.k, "columns of a merge");
        let rows = first_row..first_row + merge.rows.len();
        match (&merge.change.replacement, &merge.change.delta) {
            (Some(replacement), None) => replace(packer, host, w, rows, merge, replacement),
            (None, None) => self.put_base(packer, host, w, rows, merge),
            (None, Some(LoraDelta::LowRank(low_rank))) if low_rank.magnitude.is_none() => {
                match self.upload_factors(host, merge, low_rank) {
                    Ok(factors) => {
                        self.put_base(packer, host, w, rows, merge)?;
                        self.add_low_rank(factors, w, first_row, merge, low_rank)
                    }
                    // A push that has begun cannot go back. The host's bits are the same.
                    Err(error) if out_of_memory(&error).is_some() => self.merge_on_host(packer, host, w, rows, merge),
                    Err(error) => Err(error),
                }
            }
            _ => self.merge_on_host(packer, host, w, rows, merge),
        }
    }

    /// Stores the rows of the base.
    fn put_base(
        &self,
        packer: &Packer,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        merge: &Merge<'_>,
    ) -> Result<()> {
        match &merge.base {
            MergeBase::Read(read) => packer.fill_rows(host, w, rows.clone(), &|some, values| {
                read(of_weight(merge, &rows, some), merge.columns.clone(), values);
            }),
            MergeBase::Matrix(base) => packer.copy_rows(base.storage(), 0..rows.len(), w, rows.start),
            MergeBase::WholeRows(base) => {
                let base = tensor::rows(base)?;
                assert!(rows.len() <= base.rows && merge.width == base.width, "{rows:?} of {base:?}");
                let first = (merge.columns.start * size_of::<f32>()) as u64;
                let layout = PackedRowLayout::dense(merge.columns.len());
                let from =
                    DeviceRows { pointer: base.pointer + first, dtype: StorageDtype::F32, stride: base.stride, layout };
                packer.copy(from, w.rows(rows.start), rows.len())
            }
        }
    }

    /// The parts of `a` and `b` that a merge needs, in the device's memory.
    fn upload_factors(
        &self,
        host: HostSide<'_>,
        merge: &Merge<'_>,
        low_rank: &LowRank,
    ) -> Result<[ArenaAllocation; 2]> {
        let (rank, rows, columns) = (low_rank.rank, merge.rows.clone(), merge.columns.clone());
        let a = self.upload(host, 0..rank, columns.len(), &|i, row| {
            low_rank.a.read_f32(i * low_rank.cols + columns.start, row);
        })?;
        let b = self.upload(host, rows, rank, &|i, row| low_rank.b.read_f32(i * rank, row))?;
        Ok([a, b])
    }

    /// Adds `scaling * b a` to rows from `first_row` on.
    fn add_low_rank(
        &self,
        [a, b]: [ArenaAllocation; 2],
        w: &CudaMatrix,
        first_row: usize,
        merge: &Merge<'_>,
        low_rank: &LowRank,
    ) -> Result<()> {
        let (rank, rows, columns) = (low_rank.rank, &merge.rows, &merge.columns);
        let function = match w.shape.dtype {
            StorageDtype::Bf16 => &self.add_low_rank_bf16,
            StorageDtype::F32 => &self.add_low_rank_f32,
        };
        let to = w.rows(first_row);
        let mut launch = Launch::of(&self.context.stream, function);
        launch.pointer(to.pointer).long(to.stride).int(to.layout.run).int(to.layout.padded_run);
        launch.pointer(a.pointer).pointer(b.pointer).int(rows.len()).int(columns.len()).int(rank);
        launch.float(low_rank.scaling).int(steps_code(low_rank));
        let blocks = [rows.len().div_ceil(TILE_ROWS), columns.len().div_ceil(TILE_COLUMNS)];
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("tiles of a matrix"));
        // SAFETY: `a` is `[rank, columns]` and `b` `[rows, rank]`, and the matrix has these rows and columns.
        unsafe { launch.start(grid((x, y, 1), THREADS, 0)) }
    }

    /// Copies rows of float32 values, which `read` gives by their index, to new memory. The memory may be dropped once
    /// the kernel that uses it has been launched.
    fn upload(
        &self,
        host: HostSide<'_>,
        rows: Range<usize>,
        width: usize,
        read: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<ArenaAllocation> {
        let bytes = rows.len() * width * size_of::<f32>();
        let memory = self.context.scratch.allocate(bytes)?;
        host.send(memory.pointer, rows, width, 0, &|rows, packed: &mut [f32], _| {
            rows.zip(packed.chunks_exact_mut(width.max(1))).for_each(|(i, packed)| read(i, packed));
        })?;
        Ok(memory)
    }

    /// Merges on the host's threads, and stores the result.
    fn merge_on_host(
        &self,
        packer: &Packer,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        merge: &Merge<'_>,
    ) -> Result<()> {
        let fill = |read: &ReadValues<'_>| {
            packer.fill_rows(host, w, rows.clone(), &|some, values| {
                merge.values(self.isa, of_weight(merge, &rows, some), read, values);
            })
        };
        match &merge.base {
            MergeBase::Read(read) => fill(read),
            MergeBase::Matrix(base) => {
                assert!(!merge.goes_by_whole_rows(), "a merge that needs whole rows has a part of them");
                fill(&|rows, _, values| base.read_f32(rows.start - merge.rows.start, values))
            }
            MergeBase::WholeRows(base) => {
                let base = tensor::rows(base)?;
                assert!(rows.len() <= base.rows && merge.width == base.width, "{rows:?} of {base:?}");
                fill(&|rows, columns, values| {
                    for (row, values) in rows.zip(values.chunks_exact_mut(columns.len())) {
                        let first = (row - merge.rows.start) * base.stride + columns.start;
                        let at = base.pointer + (first * size_of::<f32>()) as u64;
                        let read = self.context.copies.read(at, values);
                        read.unwrap_or_else(|e| panic!("the base of a merge was not read: {e}"));
                    }
                })
            }
        }
    }
}

/// Stores the values that replace the base's.
fn replace(
    packer: &Packer,
    host: HostSide<'_>,
    w: &CudaMatrix,
    rows: Range<usize>,
    merge: &Merge<'_>,
    replacement: &Replacement,
) -> Result<()> {
    let columns = replacement.cols;
    let values = replacement.values.view();
    packer.store_columns(host, w, rows.clone(), columns, merge.columns.start, &|some, store| {
        let rows = of_weight(merge, &rows, some);
        store(values.part(rows.start * columns..rows.end * columns));
    })
}

/// Rows of the whole weight by those of the matrix.
fn of_weight(merge: &Merge<'_>, all: &Range<usize>, some: Range<usize>) -> Range<usize> {
    let start = merge.rows.start + some.start - all.start;
    start..start + some.len()
}

/// Bits of a step that scales.
const SCALE: u64 = 3;

/// The steps between the product and its addition, as the kernel takes them: two bits for each, the first lowest.
///
/// # Panics
/// If there are more steps than fit.
fn steps_code(low_rank: &LowRank) -> usize {
    let rounding = |dtype: &Dtype| match dtype {
        Dtype::F32 => None,
        Dtype::F16 => Some(1),
        Dtype::Bf16 => Some(2),
    };
    let before = rounding(&low_rank.product).into_iter().chain([SCALE]);
    let steps: Vec<u64> = before.chain(low_rank.roundings.iter().filter_map(rounding)).collect();
    assert!(steps.len() <= 16, "{} steps between a product and its addition", steps.len());
    steps.into_iter().rev().fold(0, |code, step| code << 2 | step) as usize
}
