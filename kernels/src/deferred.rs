//! Values that come back from a device.

use candle_core::Result;

/// Values that the device may still be computing.
pub struct Deferred<'a, T>(Box<dyn FnOnce() -> Result<T> + 'a>);

impl<'a, T> Deferred<'a, T> {
    /// `read` waits for the device and copies what it has written.
    pub(crate) fn new(read: impl FnOnce() -> Result<T> + 'a) -> Self {
        Self(Box::new(read))
    }

    /// Values that are there.
    pub(crate) fn ready(values: T) -> Self
    where
        T: 'a,
    {
        Self::new(|| Ok(values))
    }

    /// Waits for the values.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(self) -> Result<T> {
        (self.0)()
    }
}
