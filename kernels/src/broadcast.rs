//! Groups of ranks whose rank 0 is another process, which broadcasts from its device to theirs.

use crate::backend::broadcast::{Broadcast, BroadcastReceiverImpl, IsCancelled, OnBytes};
use crate::error::DeviceError;

/// The end of one rank in a group whose rank 0 is another process, which may vanish. Works beside the rank's operators,
/// on any thread. Dropping it leaves the group.
pub struct BroadcastReceiver(Box<dyn BroadcastReceiverImpl>);

impl BroadcastReceiver {
    pub(crate) fn new(inner: Box<dyn BroadcastReceiverImpl>) -> Self {
        Self(inner)
    }

    /// Receives the next broadcast of rank 0 into device memory of the same size, and passes its bytes to `take` from
    /// host memory; without `take` they stay unread. After an error the rank has left the group.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; [`DeviceError::Unsupported`] if the group or
    /// the device has failed, or the wait was cancelled.
    pub fn receive(
        &mut self,
        broadcast: Broadcast,
        take: Option<OnBytes<'_>>,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<(), DeviceError> {
        self.0.receive(broadcast, take, is_cancelled)
    }

    /// Frees the memory that was used to receive; the next call allocates it again.
    pub fn release(&mut self) {
        self.0.release();
    }
}
