//! Weights on their way into and out of matrices.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, sys};
use half::bf16;

use super::arena::ArenaAllocation;
use super::context::Context;
use super::host::HostSide;
use super::launch::{Launch, grid};
use super::layout::{DeviceRows, PackedRowLayout, Weight};
use super::matrix::CudaMatrix;
use super::module::{Module, fat_binary};
use crate::cpu::math::round_bf16;
use crate::error::out_of_memory;
use crate::values::{StorageDtype, TensorView};
use crate::weights::{FillRows, MatrixShape, ROW_GROUP, ReadRows, WriteElements};

/// Threads of a block.
const THREADS: usize = 128;
/// Values of the rows whose changed elements are collected at once.
const SCANNED_VALUES: usize = 1 << 20;
/// Words of an element: its row, its place there, and its value.
const ELEMENT_WORDS: usize = 3;

/// Moves weights between the host and matrices, and between matrices.
pub(super) struct Packer {
    context: Arc<Context>,
    write_elements: [CudaFunction; 2],
}

/// The index of a type among functions.
fn index(dtype: StorageDtype) -> usize {
    match dtype {
        StorageDtype::Bf16 => 0,
        StorageDtype::F32 => 1,
    }
}

impl Packer {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("pack"))?;
        let load = |name| module.function(name);
        Ok(Self {
            context: context.clone(),
            write_elements: [load("write_elements_bf16")?, load("write_elements_f32")?],
        })
    }

    /// Stores `rows` as `read` gives them, rounded to nearest even.
    ///
    /// # Panics
    /// If they pass the end, or another number of values is given.
    pub fn store_rows(
        &self,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        read: &ReadRows<'_>,
    ) -> Result<()> {
        self.store_columns(host, w, rows, w.shape.k, 0, read)
    }

    /// As [`Packer::store_rows`], from rows of `width` values, of which it takes the columns from `first_column` on.
    ///
    /// # Panics
    /// As [`Packer::store_rows`], and if they have too few columns.
    pub fn store_columns(
        &self,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        width: usize,
        first_column: usize,
        read: &ReadRows<'_>,
    ) -> Result<()> {
        match w.shape.dtype {
            StorageDtype::Bf16 => self.store_as::<bf16>(host, w, rows, width, first_column, read),
            StorageDtype::F32 => self.store_as::<f32>(host, w, rows, width, first_column, read),
        }
    }

    fn store_as<T: Weight>(
        &self,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        width: usize,
        first_column: usize,
        read: &ReadRows<'_>,
    ) -> Result<()> {
        check(w, &rows);
        let layout = w.layout();
        assert!(first_column + w.shape.k <= width, "{} columns from {first_column} on of {width}", w.shape.k);
        host.send(w.row(rows.start), rows, layout.stride(), 0, &|rows, packed: &mut [T], _| {
            read(rows.clone(), &mut |values| {
                assert_eq!(values.len(), rows.len() * width, "values of rows {rows:?}");
                T::pack(layout, values, width, first_column, packed);
            });
        })
    }

    /// Stores `rows` as `fill` computes them, rounded to nearest even.
    ///
    /// # Panics
    /// If they pass the end.
    pub fn fill_rows(&self, host: HostSide<'_>, w: &CudaMatrix, rows: Range<usize>, fill: &FillRows<'_>) -> Result<()> {
        match w.shape.dtype {
            StorageDtype::Bf16 => self.fill_as::<bf16>(host, w, rows, fill),
            StorageDtype::F32 => self.fill_as::<f32>(host, w, rows, fill),
        }
    }

    fn fill_as<T: Weight>(
        &self,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        fill: &FillRows<'_>,
    ) -> Result<()> {
        check(w, &rows);
        let (layout, k) = (w.layout(), w.shape.k);
        host.send(w.row(rows.start), rows, layout.stride(), k, &|rows, packed: &mut [T], values| {
            fill(rows, values);
            T::pack(layout, TensorView::F32(values), k, 0, packed);
        })
    }

    /// Copies `rows` of a matrix to another's rows from `first_row` on.
    ///
    /// # Panics
    /// If they pass the end of one, or these have other widths.
    pub fn copy_rows(&self, from: &CudaMatrix, rows: Range<usize>, to: &CudaMatrix, first_row: usize) -> Result<()> {
        check(from, &rows);
        check(to, &(first_row..first_row + rows.len()));
        self.copy(from.rows(rows.start), to.rows(first_row), rows.len())
    }

    /// Writes all of `w`, without padding, as float32 to the address `out`.
    pub fn unpack(&self, w: &CudaMatrix, out: sys::CUdeviceptr) -> Result<()> {
        let MatrixShape { n, k, .. } = w.shape;
        let layout = PackedRowLayout::dense(k);
        self.copy(w.rows(0), DeviceRows { pointer: out, dtype: StorageDtype::F32, stride: k, layout }, n)
    }

    /// Copies `count` rows, rounded to nearest even where that is needed.
    ///
    /// # Panics
    /// If they have different widths.
    pub fn copy(&self, from: DeviceRows, to: DeviceRows, count: usize) -> Result<()> {
        self.context.weight_row_copies.start(&self.context.stream, from.into(), to, count)
    }

    /// Stores the single elements of `rows` that `write` names, rounded to nearest even. If one is named twice, the
    /// later value stays.
    ///
    /// # Panics
    /// If `rows` pass the end, or an element is outside the rows it was asked for.
    pub fn write_elements(
        &self,
        host: HostSide<'_>,
        w: &CudaMatrix,
        rows: Range<usize>,
        write: &WriteElements<'_>,
    ) -> Result<()> {
        check(w, &rows);
        let scanned = (SCANNED_VALUES / w.shape.k).max(1).next_multiple_of(ROW_GROUP);
        for first in rows.clone().step_by(scanned) {
            let mine = first..rows.end.min(first + scanned);
            let mut groups: Vec<Mutex<Vec<[u32; ELEMENT_WORDS]>>> = Vec::new();
            groups.resize_with(mine.len().div_ceil(ROW_GROUP), Mutex::default);
            host.pool.run(groups.len(), |group| {
                let start = first + group * ROW_GROUP;
                let rows = start..mine.end.min(start + ROW_GROUP);
                *groups[group].lock().expect("each group is taken once") = elements(w, rows, write);
            });
            let groups = groups.into_iter().map(|group| group.into_inner().expect("no task has failed"));
            let elements: Vec<[u32; ELEMENT_WORDS]> = groups.flatten().collect();
            self.scatter(host, w, &elements)?;
        }
        Ok(())
    }

    /// Writes elements at different places.
    fn scatter(&self, host: HostSide<'_>, w: &CudaMatrix, elements: &[[u32; ELEMENT_WORDS]]) -> Result<()> {
        if elements.is_empty() {
            return Ok(());
        }
        let upload = || -> Result<ArenaAllocation> {
            let memory = self.context.scratch.allocate(size_of_val(elements))?;
            host.staging.copy(elements.as_flattened(), memory.pointer).w()?;
            Ok(memory)
        };
        let memory = match upload() {
            // A push that has begun cannot go back.
            Err(error) if out_of_memory(&error).is_some() => return self.write_one_by_one(w, elements),
            memory => memory?,
        };
        let mut launch = Launch::of(&self.context.stream, &self.write_elements[index(w.shape.dtype)]);
        launch.pointer(w.row(0)).long(w.layout().stride()).pointer(memory.pointer).int(elements.len());
        let blocks = elements.len().div_ceil(THREADS) as u32;
        // SAFETY: the elements are of the matrix, and no two of one place.
        unsafe { launch.start(grid((blocks, 1, 1), THREADS as u32, 0)) }
    }

    /// Writes elements at different places without any memory of the device.
    fn write_one_by_one(&self, w: &CudaMatrix, elements: &[[u32; ELEMENT_WORDS]]) -> Result<()> {
        elements.iter().try_for_each(|[row, place, bits]| {
            let at = w.row(*row as usize) + (*place as usize * w.shape.dtype.size()) as u64;
            let value = f32::from_bits(*bits);
            match w.shape.dtype {
                StorageDtype::Bf16 => self.context.copies.write(at, &[round_bf16(value)]),
                StorageDtype::F32 => self.context.copies.write(at, &[value]),
            }
        })
    }
}

/// The elements of some rows that `write` names, in the order of their places, each place once.
fn elements(w: &CudaMatrix, rows: Range<usize>, write: &WriteElements<'_>) -> Vec<[u32; ELEMENT_WORDS]> {
    let (layout, k) = (w.layout(), w.shape.k);
    let mut elements = Vec::new();
    write(rows.clone(), &mut |row, column, value| {
        assert!(rows.contains(&row) && column < k, "row {row}, column {column} of rows {rows:?} of {k}");
        elements.push([row as u32, layout.place(column) as u32, value.to_bits()]);
    });
    let place = |element: &[u32; ELEMENT_WORDS]| (element[0], element[1]);
    if !elements.is_sorted_by(|a, b| place(a) < place(b)) {
        // The sort is stable: of each place the last that was named comes first, and stays.
        elements.reverse();
        elements.sort_by_key(place);
        elements.dedup_by_key(|element| place(element));
    }
    elements
}

/// # Panics
/// If the rows pass the end.
fn check(w: &CudaMatrix, rows: &Range<usize>) {
    let n = w.shape.n;
    assert!(rows.start <= rows.end && rows.end <= n, "rows {rows:?} of a matrix of {n} rows");
}
