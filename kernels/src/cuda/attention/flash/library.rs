//! The function of C++ behind candle-flash-attn 0.11.1. Its public functions allocate what they give from the driver;
//! our memory is set aside before a step.

use std::ffi::c_void;
#[cfg(feature = "flash-attn")]
use std::{ffi::c_int, ptr::null};

// Linked for its one function.
#[cfg(feature = "flash-attn")]
use candle_flash_attn as _;

/// A call of candle-flash-attn. Strides are in values.
#[cfg_attr(not(feature = "flash-attn"), expect(dead_code, reason = "it is made for the library alone"))]
pub(super) struct FlashCall {
    /// `[rows, heads, head_dim]`, [`FlashCall::row_stride`] from row to row, as are those of the results.
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub out: u64,
    /// `[heads, rows]`
    pub sums: u64,
    /// Where the rows of each part end, behind a 0.
    pub row_ends: *const i32,
    /// The same of positions.
    pub position_ends: *const i32,
    /// `[parts, table]`
    pub tables: *const i32,
    pub table: u32,
    pub row_stride: u32,
    pub block_stride: u32,
    pub parts: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub block_size: u32,
    pub rows: u32,
    pub most_rows: u32,
    pub most_positions: u32,
    pub scale: f32,
    pub window: Option<i32>,
}

impl FlashCall {
    /// # Safety
    /// All addresses are those of a device's memory of these shapes, and `stream` is one of that device's, which is
    /// current.
    #[cfg(feature = "flash-attn")]
    pub unsafe fn start(&self, stream: *mut c_void) {
        let head_stride = self.block_size * self.head_dim;
        let (left, right, is_causal) = match self.window {
            Some(window) => (window - 1, 0, 0),
            None => (self.most_positions as c_int, 0, 1),
        };
        // SAFETY: the caller's promise.
        unsafe {
            run_mha(
                self.q as *const c_void,
                self.k as *const c_void,
                self.v as *const c_void,
                self.out as *const c_void,
                self.sums as *const c_void,
                null(),
                self.row_ends,
                self.position_ends,
                0,
                self.block_stride,
                self.block_stride,
                0,
                0,
                self.row_stride,
                self.head_dim,
                self.head_dim,
                self.row_stride,
                self.head_dim,
                head_stride,
                head_stride,
                self.head_dim,
                self.parts,
                self.heads,
                self.kv_heads,
                self.head_dim,
                self.head_dim.next_multiple_of(32),
                self.scale,
                self.most_rows,
                self.most_positions,
                self.most_rows.next_multiple_of(128),
                self.most_positions.next_multiple_of(128),
                self.rows,
                1,
                is_causal,
                1,
                left,
                right,
                0.0,
                self.tables,
                self.table,
                self.block_size as c_int,
                null(),
                0,
                0,
                stream,
            );
        }
    }

    #[cfg(not(feature = "flash-attn"))]
    pub unsafe fn start(&self, _: *mut c_void) {
        unreachable!("a device without candle-flash-attn is not opened for it")
    }
}

#[cfg(feature = "flash-attn")]
unsafe extern "C" {
    fn run_mha(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        out: *const c_void,
        sums: *const c_void,
        alibi_slopes: *const c_void,
        row_ends: *const i32,
        position_ends: *const i32,
        q_batch_stride: u32,
        k_batch_stride: u32,
        v_batch_stride: u32,
        out_batch_stride: u32,
        alibi_batch_stride: u32,
        q_row_stride: u32,
        k_row_stride: u32,
        v_row_stride: u32,
        out_row_stride: u32,
        q_head_stride: u32,
        k_head_stride: u32,
        v_head_stride: u32,
        out_head_stride: u32,
        batch: u32,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        head_dim_rounded: u32,
        scale: f32,
        most_rows: u32,
        most_positions: u32,
        most_rows_rounded: u32,
        most_positions_rounded: u32,
        rows: u32,
        is_bf16: c_int,
        is_causal: c_int,
        sums_by_row: c_int,
        window_left: c_int,
        window_right: c_int,
        softcap: f32,
        tables: *const i32,
        table: u32,
        block_size: c_int,
        prefix_ranges: *const i32,
        prefix_range_stride: u32,
        prefix_range_count: c_int,
        stream: *mut c_void,
    );
}
