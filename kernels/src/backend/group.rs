//! The trait of a device whose ranks exchange activations between their devices.

use candle_core::{Result, Tensor};

/// The end of one rank. [`RankGroup`](crate::RankGroup) documents what each method does.
pub(crate) trait GroupImpl: Send {
    fn all_reduce_sum(&self, x: &Tensor) -> Result<()>;
    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()>;
    fn restore(&self) -> Result<()>;
    fn release(&self);
}
