//! The operators on the CPU, over slices. Activations are float32; weights and the KV cache are bfloat16 or float32.
//!
//! The first argument of each operator is a [`Cpu`], which says where it runs. Kernels are written once over
//! [`lanes::Lanes`], 16 float32 lanes with the same operations on every instruction set, so all instruction sets give
//! the same bits. The exceptions are [`linear()`] with bfloat16 weights and [`paged_attention`] over a bfloat16 cache
//! on `avx512_bf16` and `amx`: their instructions take both factors in bfloat16, so activations, queries and softmax
//! weights are rounded first. All other instruction sets can emulate them. The router of [`experts`] sums products of
//! float32 on all of them.

mod activation;
mod adapters;
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_detection;
mod attention;
mod dequantise;
mod device;
mod experts;
mod finite;
mod isa;
mod kv;
mod lanes;
mod linear;
pub mod logits;
mod low_rank;
pub mod math;
mod merge;
mod norm;
mod ops;
mod packed;
mod patches;
mod pool;
mod rope;
mod rows;
mod sampling;
mod storage;
#[cfg(test)]
pub(crate) mod testing;
mod tile;

pub use activation::{gelu, silu_mul};
pub use attention::paged_attention;
pub use dequantise::dequantise;
pub(crate) use device::CpuDevice;
pub use finite::{StoredBits, first_saturated};
pub use isa::{Isa, Products};
pub use kv::KvBlocks;
pub use linear::{linear, linear_silu_mul};
pub use low_rank::add_low_rank;
pub use merge::round;
pub use norm::{add_rms_norm, add_scaled, head_rms_norm, layer_norm, rms_norm};
pub use packed::{PANEL, PackedMatrix, gather_rows, to_f32};
pub use patches::patches;
pub use pool::{Cpu, ThreadPool};
pub use rope::rope;
#[cfg(feature = "cuda")]
pub(crate) use rows::SharedSlice;
pub use rows::{Rows, RowsMut};
#[cfg(feature = "cuda")]
pub(crate) use sampling::{LogitsTasks, Samplers, certain_logprob, logprob};
#[cfg(feature = "cuda")]
pub(crate) use storage::Plain;
