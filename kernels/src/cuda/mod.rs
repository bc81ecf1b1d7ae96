//! NVIDIA GPUs. Activations are float32 rows in device memory; weights and keys and values are bfloat16 or float32.
//!
//! Every operator is one of the project's own kernels (`cu/`), started on the one stream of its rank; candle-core gives
//! the device and the tensors. A row's bits depend on nothing but the row's own inputs: no kernel chooses an order of
//! sums by the number of rows.

mod activation;
mod arena;
mod attention;
mod context;
mod copy;
mod device;
mod host;
mod kv;
mod launch;
mod layout;
mod linear;
mod matrix;
mod merge;
mod module;
mod norm;
mod ops;
mod pack;
mod pinned;
mod rope;
mod rows;
mod sampling;
mod scratch;
mod staging;
mod step;
mod tensor;

pub(crate) use device::CudaDevice;
