//! Tensor-parallel ranks on devices that exchange activations among themselves.

use candle_core::Tensor;
use rollout_kernels::Group;

use super::Communicator;
use super::accord::Accord;
use crate::error::Result;

/// The communicator of one rank whose device reaches those of the others.
pub struct DeviceGroup {
    group: Group,
    accord: Accord,
}

impl DeviceGroup {
    /// `accord` is the end of the same rank.
    pub fn new(group: Group, accord: Accord) -> Self {
        Self { group, accord }
    }
}

impl Communicator for DeviceGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world(&self) -> usize {
        self.group.world()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<()> {
        Ok(self.group.all_reduce_sum(x)?)
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        Ok(self.group.all_gather_columns(local, out)?)
    }

    fn least(&self, mine: u32) -> u32 {
        self.accord.least(mine)
    }

    fn restore(&self) -> Result<()> {
        Ok(self.group.restore()?)
    }

    fn release(&self) {
        self.group.release();
    }
}
