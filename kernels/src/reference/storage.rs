//! Weights and KV as float32 values, row by row.

use std::ops::Range;

use half::bf16;

use crate::backend::storage::{KvCacheImpl, MatrixImpl};
use crate::cpu::Rows;
use crate::kv_layout::{BlockCopy, KvLayout};
use crate::values::{StorageDtype, TensorData, TensorView};
use crate::weights::MatrixShape;

/// A value as bfloat16 or float32 holds it.
fn stored(x: f32, is_bf16: bool) -> f32 {
    if is_bf16 { bf16::from_f32(x).to_f32() } else { x }
}

/// A weight matrix `[n, k]`.
pub(crate) struct RowMajor {
    shape: MatrixShape,
    values: Vec<f32>,
}

impl RowMajor {
    pub fn zeros(shape: MatrixShape) -> Self {
        Self { shape, values: vec![0.0; shape.n * shape.k] }
    }

    pub fn rows(&self) -> usize {
        self.shape.n
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.shape.k..][..self.shape.k]
    }

    /// Rounds `value` to the matrix's type.
    pub fn set(&mut self, row: usize, column: usize, value: f32) {
        assert!(column < self.shape.k, "column {column} of {}", self.shape.k);
        self.values[row * self.shape.k + column] = stored(value, self.shape.dtype == StorageDtype::Bf16);
    }
}

impl MatrixImpl for RowMajor {
    fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) {
        let value = |i: usize| match rows {
            TensorView::Bf16(values) => values[i].to_f32(),
            TensorView::F16(values) => values[i].to_f32(),
            TensorView::F32(values) => values[i],
        };
        assert!(rows.len().is_multiple_of(width), "{} values are no whole rows of {width}", rows.len());
        for row in 0..rows.len() / width {
            for column in 0..self.shape.k {
                self.set(row0 + row, column, value(row * width + first_column + column));
            }
        }
    }

    fn read_rows(&self, rows: Range<usize>) -> TensorData<'static> {
        let values = &self.values[rows.start * self.shape.k..rows.end * self.shape.k];
        match self.shape.dtype {
            StorageDtype::Bf16 => TensorData::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
            StorageDtype::F32 => TensorData::F32(values.to_vec().into()),
        }
    }

    fn read_f32(&self, row0: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.values[row0 * self.shape.k..][..out.len()]);
    }
}

/// Keys and values of one layer, `[slot][kv_heads * head_dim]` each.
pub(crate) struct Slots {
    layout: KvLayout,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Slots {
    pub fn new(layout: KvLayout) -> Self {
        let len = layout.blocks * layout.block_size * layout.kv_heads * layout.head_dim;
        Self { layout, keys: vec![0.0; len], values: vec![0.0; len] }
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    /// Stores the rows of `k` and `v` in `slots`, rounded to the cache's type.
    pub fn write(&mut self, k: Rows<'_>, v: Rows<'_>, slots: &[u32]) {
        let (width, is_bf16) = (self.width(), self.layout.dtype == StorageDtype::Bf16);
        for (row, slot) in slots.iter().enumerate() {
            let at = *slot as usize * width;
            for (i, (k, v)) in k.row(row).iter().zip(v.row(row)).enumerate() {
                (self.keys[at + i], self.values[at + i]) = (stored(*k, is_bf16), stored(*v, is_bf16));
            }
        }
    }

    pub fn copy(&mut self, copy: BlockCopy) {
        let (width, block_size) = (self.width(), self.layout.block_size);
        assert!(copy.tokens <= block_size, "{copy:?} of blocks of {block_size}");
        let at = |block: u32| block as usize * block_size * width;
        let from = at(copy.src)..at(copy.src) + copy.tokens * width;
        self.keys.copy_within(from.clone(), at(copy.dst));
        self.values.copy_within(from, at(copy.dst));
    }

    /// Key and value of a head in a slot.
    pub fn head(&self, slot: usize, head: usize) -> (&[f32], &[f32]) {
        let (at, head_dim) = (slot * self.width() + head * self.layout.head_dim, self.layout.head_dim);
        (&self.keys[at..at + head_dim], &self.values[at..at + head_dim])
    }
}

impl KvCacheImpl for Slots {}
