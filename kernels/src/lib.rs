//! The hot operators of rollout-server: one function per coarse operator.
//!
//! Every reduction order depends on nothing but the row's own inputs, so a row's result is the same bits alone or in
//! any batch, on any number of threads.
//!
//! [`cpu`] has the operators over slices, [`Ops`] the same over candle tensors, which is what the model is written in.

pub mod cpu;
mod ops;
mod tensor;

pub use cpu::{
    AttentionSequence, AttentionShape, BlockCopy, KvCache, KvDtype, KvLayout, PANEL, PackedMatrix, RowBits,
    WeightDtype, WeightRows, reduction_leaves,
};
pub use ops::Ops;
pub use tensor::{with_f32, with_f32_mut};
