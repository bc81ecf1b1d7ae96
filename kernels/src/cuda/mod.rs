//! NVIDIA GPUs. Activations are float32 rows in device memory; weights and keys and values are bfloat16 or float32.
//!
//! Every operator is one of the project's own kernels (`cu/`), started on the one stream of its rank; candle-core gives
//! the device and the tensors. A row's bits depend on nothing but the row's own inputs: no kernel chooses an order of
//! sums by the number of rows.

mod activation;
mod arena;
mod attention;
mod borrowed;
mod broadcast;
mod capture;
mod context;
mod copy;
mod device;
mod digest;
mod download;
mod experts;
mod footprint;
mod graphs;
mod group;
mod host;
mod kv;
mod launch;
mod layout;
mod library;
mod linear;
mod matrix;
mod merge;
mod module;
mod nccl;
mod norm;
mod nvml;
mod offloaded;
mod ops;
mod pack;
mod patches;
mod peer;
mod pinned;
mod rope;
mod rows;
mod sampling;
mod scratch;
mod staging;
mod step;
mod tensor;
mod weight_row_copy;

pub(crate) use device::CudaDevice;

/// Whether an error of candle's is the driver's word that there is not as much memory, of the device or page-locked.
pub(crate) fn is_out_of_memory(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    use candle_core::cuda_backend::CudaError;
    use candle_core::cuda_backend::cudarc::driver::{DriverError, sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY};
    let is_it = |error: &DriverError| error.0 == CUDA_ERROR_OUT_OF_MEMORY;
    match error.downcast_ref::<CudaError>() {
        Some(CudaError::Cuda(error)) => is_it(error),
        Some(_) => false,
        None => error.downcast_ref::<DriverError>().is_some_and(is_it),
    }
}
