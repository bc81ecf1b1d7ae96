//! Tensor-parallel ranks on devices that exchange activations among themselves.

use candle_core::Tensor;
use rollout_kernels::{HostCollective, RankGroup};

use super::Communicator;
use super::host::HostGroup;
use crate::error::Result;

/// The communicator of one rank whose device reaches those of the others.
pub struct DeviceGroup {
    group: RankGroup,
    host: HostGroup,
}

impl DeviceGroup {
    /// `group` and `host` are ends of the same rank.
    pub fn new(group: RankGroup, host: HostGroup) -> Self {
        Self { group, host }
    }
}

impl HostCollective for DeviceGroup {
    fn world(&self) -> usize {
        self.group.world()
    }

    fn all_reduce_min(&self, mine: u32) -> u32 {
        self.host.all_reduce_min(mine)
    }
}

impl Communicator for DeviceGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<()> {
        Ok(self.group.all_reduce_sum(x)?)
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        Ok(self.group.all_gather_columns(local, out)?)
    }

    fn restore(&self) -> Result<()> {
        Ok(self.group.restore()?)
    }

    fn release(&self) {
        self.group.release();
    }
}
