//! The hot operators of rollout-server: one function per coarse operator.
//!
//! Every reduction order depends on nothing but the row's own inputs, so a row's result is the same bits alone or in
//! any batch, on any number of threads.
//!
//! [`cpu`] has the operators over slices.

pub mod cpu;
mod tensor;

pub use tensor::{KvMut, row_stride, with_f32, with_f32_mut, with_kv_mut};
