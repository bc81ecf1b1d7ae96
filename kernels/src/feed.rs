//! Groups of ranks with another process, which sends to them from its device to theirs.

use crate::backend::feed::{Broadcast, FeedImpl, GiveUp, Take};
use crate::error::DeviceError;

/// The end of one rank in a group whose rank 0 is another process, which may vanish. Works beside the rank's operators,
/// on any thread. Dropping it leaves the group.
pub struct Feed(Box<dyn FeedImpl>);

impl Feed {
    pub(crate) fn new(inner: Box<dyn FeedImpl>) -> Self {
        Self(inner)
    }

    /// Receives what rank 0 broadcasts next into memory of the device, as large, and hands it over from the host's
    /// memory; without `take` it stays unread. After an error the group has been left.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has not as much memory; [`DeviceError::Unsupported`] if the group or
    /// the device has failed, or the wait was given up.
    pub fn receive(
        &mut self,
        broadcast: Broadcast,
        take: Option<Take<'_>>,
        give_up: GiveUp<'_>,
    ) -> Result<(), DeviceError> {
        self.0.receive(broadcast, take, give_up)
    }

    /// Gives the memory back that was used to receive; the next call takes it again.
    pub fn release(&mut self) {
        self.0.release();
    }
}
