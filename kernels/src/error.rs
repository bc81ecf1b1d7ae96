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
