//! What a device's room implements where other processes send to its ranks.

use crate::error::DeviceError;
use crate::group::GroupId;
use crate::weights::Dtype;

/// The place of a rank in a group whose rank 0 is another process.
#[derive(Clone, Copy)]
pub struct Place {
    pub id: GroupId,
    pub rank: usize,
    /// Number of ranks, those of other processes among them.
    pub world: usize,
}

/// What rank 0 sends to all at once. All ranks must expect the same: nothing tells them apart from other values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broadcast {
    /// Number of values.
    pub count: usize,
    /// Their type; `None` for bytes.
    pub dtype: Option<Dtype>,
}

impl Broadcast {
    /// Bytes of all values.
    pub fn bytes(self) -> usize {
        self.count * self.dtype.map_or(1, Dtype::size)
    }
}

/// Says, whenever it is asked during a wait, whether to wait no longer.
pub type GiveUp<'a> = &'a dyn Fn() -> bool;

/// Takes what has come, in pieces and in its order.
pub type Take<'a> = &'a mut dyn FnMut(&[u8]);

/// The end of one rank. [`Feed`](crate::Feed) documents what each method does.
pub(crate) trait FeedImpl: Send {
    fn receive(&mut self, broadcast: Broadcast, take: Option<Take<'_>>, give_up: GiveUp<'_>)
    -> Result<(), DeviceError>;
    fn release(&mut self);
}
