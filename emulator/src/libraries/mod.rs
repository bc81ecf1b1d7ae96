//! The libraries beside the driver, as far as candle and the server call them.

pub mod cublas;
pub mod cudart;
pub mod curand;
pub mod nccl;
mod number;
pub mod nvml;
