//! The group of a trainer, which broadcasts its weights from its devices to ours. The trainer is rank 0 and may vanish
//! at any time, so every wait for it has a timeout, after which we leave the group.

mod group;
mod id;
mod store;
mod timeout;

use rollout_kernels::{Devices, GroupId};

use crate::error::{Error, Result};
use store::Store;

pub use group::{ByteSink, TrainerGroup};
pub use timeout::TrainerTimeout;

/// The name of vLLM's first broadcast from rank 0: the id of the group.
const ID_KEY: &str = "/broadcast_from/0/0";
/// Where torch counts the ranks that have joined; rank 0 waits for all.
const JOINED_KEY: &str = "init/";
/// Most bytes of the value of [`ID_KEY`].
const MAX_ID_BYTES: usize = 4096;

/// How the ranks of a group find one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// torch's TCPStore, which the trainer serves.
    Store { host: String, port: u16 },
    /// The id of the group.
    Id([u8; 128]),
}

/// Our ranks in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRange {
    /// The rank of our first one; the others follow.
    pub first: usize,
    /// Number of ranks of all processes.
    pub world: usize,
}

/// Joins groups of trainers, with the devices of all ranks.
#[derive(Clone, Default)]
pub struct Trainers(Option<Devices>);

impl Trainers {
    /// Joins with these devices, if they can receive broadcasts.
    pub fn new(devices: &Devices) -> Self {
        let can = devices.iter().all(|device| device.broadcast_library().is_some());
        Self(can.then(|| devices.clone()))
    }

    /// Name of the library by which trainers broadcast; `None` if the devices cannot receive broadcasts.
    pub fn library(&self) -> Option<&'static str> {
        self.0.as_ref().and_then(|devices| devices.of_rank(0).broadcast_library())
    }

    /// How many ranks join a group.
    pub fn ranks(&self) -> usize {
        self.0.as_ref().map_or(0, |devices| devices.iter().count())
    }

    /// Checks that our ranks are inside a group and leave rank 0 to the trainer.
    ///
    /// # Errors
    /// `InvalidArgument` if they do not, or the group is larger than NCCL can count.
    pub fn check(&self, RankRange { first, world }: RankRange) -> Result<()> {
        if i32::try_from(world).is_err() {
            return Err(Error::invalid(
                "world_size",
                format!("{world} ranks are more than a group can have, {}", i32::MAX),
            ));
        }
        let ranks = self.ranks();
        if first == 0 || first.checked_add(ranks).is_none_or(|end| end > world) {
            return Err(Error::invalid(
                "rank_offset",
                format!("ranks {first} to {first} + {ranks} - 1 are not within 1 to {world} - 1, as world_size has it"),
            ));
        }
        Ok(())
    }

    /// Joins a group with all ranks, and waits until all other ranks of the group have joined. Blocks.
    ///
    /// # Errors
    /// The errors of [`Trainers::check`]; `DeadlineExceeded` or `Aborted` if a rank does not join.
    pub fn join(&self, rendezvous: &Rendezvous, ranks: RankRange, timeout: &TrainerTimeout) -> Result<TrainerGroup> {
        let Some(devices) = &self.0 else {
            return Err(Error::FailedPrecondition("no trainer can send to this device".into()));
        };
        self.check(ranks)?;
        let id = match rendezvous {
            Rendezvous::Id(id) => *id,
            Rendezvous::Store { host, port } => {
                let mut store = Store::connect(host, *port, timeout)?;
                store.add(JOINED_KEY, self.ranks() as i64)?;
                let broadcast = store.get(ID_KEY, MAX_ID_BYTES)?;
                id::from_pickle(&broadcast).ok_or_else(|| {
                    let bytes = broadcast.len();
                    Error::invalid(
                        "master_port",
                        format!("{ID_KEY} has {bytes} bytes, which are no id as vLLM writes it"),
                    )
                })?
            }
        };
        TrainerGroup::join(devices, GroupId(id), ranks, timeout)
    }
}
