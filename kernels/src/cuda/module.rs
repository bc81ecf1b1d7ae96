//! The compiled kernels: one module for each file of `cu/`.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;

/// The fat binary that the build script has made of `cu/NAME.cu`.
macro_rules! fat_binary {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))
    };
}
pub(super) use fat_binary;

/// One loaded file of kernels.
pub(super) struct Module(Arc<CudaModule>);

impl Module {
    /// # Errors
    /// If the driver does not take it: it is older than the toolkit, or the card older than the kernels.
    pub fn load(context: &Arc<CudaContext>, binary: &[u8]) -> Result<Self> {
        context.load_module(Ptx::from_binary(binary.to_vec())).map(Self).w()
    }

    /// A kernel by its name, which is that of an `extern "C"` function.
    ///
    /// # Errors
    /// If there is none.
    pub fn function(&self, name: &str) -> Result<CudaFunction> {
        self.0.load_function(name).w()
    }
}
