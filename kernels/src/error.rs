//! Errors of devices.

use std::fmt;

/// Why a device refuses; the text names what was asked for and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceError {
    /// The machine or the device cannot do what was asked for.
    Unsupported(String),
    /// The device has not as much memory.
    OutOfMemory(String),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported(what) | Self::OutOfMemory(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for DeviceError {}

/// A device that refuses inside an operator.
impl From<DeviceError> for candle_core::Error {
    fn from(error: DeviceError) -> Self {
        Self::Cuda(Box::new(error))
    }
}

/// The text of an error of an operator that has failed because the device, or the host, has not as much memory.
pub fn out_of_memory(error: &candle_core::Error) -> Option<String> {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => out_of_memory(inner),
        candle_core::Error::Cuda(cause) => match cause.downcast_ref::<DeviceError>() {
            Some(DeviceError::OutOfMemory(why)) => Some(why.clone()),
            Some(DeviceError::Unsupported(_)) => None,
            #[cfg(feature = "cuda")]
            None if crate::cuda::is_out_of_memory(&**cause) => Some(cause.to_string()),
            None => None,
        },
        _ => None,
    }
}
