//! The trait of a device whose ranks receive broadcasts from other processes.

use crate::error::DeviceError;
use crate::values::Dtype;

/// Values that rank 0 sends to all ranks at once. All ranks must expect the same: the values do not say what they are.
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

/// Whether to stop waiting; called repeatedly during a wait.
pub type IsCancelled<'a> = &'a dyn Fn() -> bool;

/// Takes the bytes that have arrived, in pieces and in order.
pub type OnBytes<'a> = &'a mut dyn FnMut(&[u8]);

/// The end of one rank. [`BroadcastReceiver`](crate::BroadcastReceiver) documents what each method does.
pub(crate) trait BroadcastReceiverImpl: Send {
    fn receive(
        &mut self,
        broadcast: Broadcast,
        take: Option<OnBytes<'_>>,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<(), DeviceError>;
    fn release(&mut self);
}
