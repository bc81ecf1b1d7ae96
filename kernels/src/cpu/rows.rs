//! Views of float32 rows with a stride, so that an operator can work on some columns of a wider buffer.

use std::marker::PhantomData;
use std::ops::Range;

/// A view of `rows × width` float32 values; row `i` starts at `i * stride` of the slice.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    rows: usize,
    width: usize,
    stride: usize,
}

/// A writable view of `rows × width` float32 values; row `i` starts at `i * stride` of the slice.
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    width: usize,
    stride: usize,
}

fn check(len: usize, rows: usize, width: usize, stride: usize) {
    assert!(width <= stride || rows <= 1, "rows of width {width} overlap at stride {stride}");
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + width };
    assert!(len >= needed, "{rows} rows of width {width} at stride {stride} need {needed} values, not {len}");
}

impl<'a> Rows<'a> {
    /// # Panics
    /// If the slice is too short, or rows overlap (`width > stride`).
    pub fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Rows<'a> {
        check(data.len(), rows, width, stride);
        Rows { data, rows, width, stride }
    }

    /// A view of adjacent rows: the stride is `width`.
    pub fn dense(data: &'a [f32], width: usize) -> Rows<'a> {
        assert!(width > 0 && data.len().is_multiple_of(width), "{} values are no rows of width {width}", data.len());
        Rows { data, rows: data.len() / width, width, stride: width }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    #[inline]
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Row `i` and everything after it: a pointer into this slice may be moved to later rows, one into `row(i)` may
    /// not.
    #[inline]
    pub(crate) fn rows_from(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..]
    }
}

/// Rows of a view in the order in which an operator takes them.
#[derive(Clone, Copy)]
pub(crate) struct SelectedRows<'a> {
    rows: Rows<'a>,
    /// Numbers of rows; `None` for all rows of the view.
    selected: Option<&'a [u32]>,
}

impl<'a> SelectedRows<'a> {
    pub fn all(rows: Rows<'a>) -> SelectedRows<'a> {
        SelectedRows { rows, selected: None }
    }

    pub fn of(rows: Rows<'a>, selected: &'a [u32]) -> SelectedRows<'a> {
        SelectedRows { rows, selected: Some(selected) }
    }

    pub fn len(&self) -> usize {
        self.selected.map_or(self.rows.rows, <[u32]>::len)
    }

    pub fn width(&self) -> usize {
        self.rows.width
    }

    #[inline]
    pub fn row(&self, i: usize) -> &'a [f32] {
        self.rows.row(self.selected.map_or(i, |selected| selected[i] as usize))
    }

    /// The address of row `i`, which need not be there.
    #[inline]
    pub fn as_ptr(&self, i: usize) -> *const f32 {
        let row = self.selected.map_or(i, |selected| selected.get(i).map_or(0, |row| *row as usize));
        self.rows.data.as_ptr().wrapping_add(row * self.rows.stride)
    }

    /// The rows of a range.
    pub fn part(&self, range: Range<usize>) -> SelectedRows<'a> {
        let Rows { data, width, stride, .. } = self.rows;
        match self.selected {
            Some(selected) => SelectedRows { selected: Some(&selected[range]), ..*self },
            None => SelectedRows::all(Rows::new(&data[range.start * stride..], range.len(), width, stride)),
        }
    }
}

impl<'a> RowsMut<'a> {
    /// # Panics
    /// If the slice is too short, or rows overlap (`width > stride`).
    pub fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> RowsMut<'a> {
        check(data.len(), rows, width, stride);
        RowsMut { data, rows, width, stride }
    }

    /// A view of adjacent rows: the stride is `width`.
    pub fn dense(data: &'a mut [f32], width: usize) -> RowsMut<'a> {
        let Rows { rows, .. } = Rows::dense(data, width);
        RowsMut { data, rows, width, stride: width }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row `i`, `width` elements.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &mut self.data[i * self.stride..][..self.width]
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// The same rows, for an operator that must not keep them.
    pub(crate) fn reborrow(&mut self) -> RowsMut<'_> {
        let RowsMut { ref mut data, rows, width, stride } = *self;
        RowsMut { data, rows, width, stride }
    }

    /// Shares the rows with the threads of a job.
    pub(crate) fn share(self) -> SharedRows<'a> {
        let RowsMut { data, width, stride, .. } = self;
        SharedRows { data: SharedSlice::new(data), width, stride }
    }
}

/// A slice that several threads write, each its own part.
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: `part` is the only access, and its callers keep the parts disjoint.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub fn new(data: &'a mut [T]) -> SharedSlice<'a, T> {
        SharedSlice { start: data.as_mut_ptr(), len: data.len(), data: PhantomData }
    }

    /// Elements `from..from + len`.
    ///
    /// # Safety
    /// No two parts that are alive at once may overlap.
    #[inline]
    #[allow(clippy::mut_from_ref)] // parts are disjoint by contract
    pub unsafe fn part(&self, from: usize, len: usize) -> &mut [T] {
        assert!(from <= self.len && len <= self.len - from, "part {from}+{len} of a slice of {}", self.len);
        // SAFETY: inside the slice by the assertion, disjoint by contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

/// Rows that several threads write, each its own part.
pub(crate) struct SharedRows<'a> {
    data: SharedSlice<'a, f32>,
    width: usize,
    stride: usize,
}

impl SharedRows<'_> {
    pub fn width(&self) -> usize {
        self.width
    }

    /// The rows from `first` on. They are the same ones, so that the promise of [`part`](Self::part) is one about both.
    pub fn rows_from(&self, first: usize) -> SharedRows<'_> {
        let skipped = (first * self.stride).min(self.data.len);
        let data =
            SharedSlice { start: self.data.start.wrapping_add(skipped), len: self.data.len - skipped, ..self.data };
        SharedRows { data, ..*self }
    }

    /// The address of column `from` of row `i`.
    #[inline]
    pub fn as_ptr(&self, i: usize, from: usize) -> *const f32 {
        self.data.start.wrapping_add(i * self.stride + from)
    }

    /// Columns `from..from + len` of row `i`.
    ///
    /// # Safety
    /// No two parts that are alive at once may overlap.
    #[inline]
    #[allow(clippy::mut_from_ref)] // parts are disjoint by contract
    pub unsafe fn part(&self, i: usize, from: usize, len: usize) -> &mut [f32] {
        assert!(from + len <= self.width, "columns {from}+{len} of a row of {}", self.width);
        // SAFETY: the caller's promise.
        unsafe { self.data.part(i * self.stride + from, len) }
    }

    /// All columns of row `i`.
    ///
    /// # Safety
    /// As for [`part`](Self::part).
    #[inline]
    #[allow(clippy::mut_from_ref)] // rows are disjoint by contract
    pub unsafe fn row(&self, i: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.part(i, 0, self.width) }
    }
}
