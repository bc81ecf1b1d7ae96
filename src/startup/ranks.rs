//! Builds the ranks, each on its own thread: operators, weights and communicator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rollout_kernels::{AllReduce, Device, Devices, GroupId, Membership};

use super::Layout;
use crate::comm::{Communicator, DeviceGroup, HostGroup, LocalGroup, SingleRank};
use crate::error::{Error, Result};
use crate::executor::{ModelRunner, RankWeights, Ranks};
use crate::memory::human_bytes;
use crate::model::config::ModelConfig;
use crate::model::{Model, kv_caches};
use crate::weights::{Checkpoint, Parameters};

/// How a rank gets its communicator, on its own thread.
pub(super) enum CommunicatorPlan {
    SingleRank,
    /// Ranks that share activations in the host's memory.
    Local(LocalGroup),
    /// Ranks whose devices exchange activations.
    Devices(GroupId, AllReduce, HostGroup),
}

impl CommunicatorPlan {
    /// One for each rank.
    ///
    /// # Errors
    /// `Config` if the devices cannot reach one another, or do not support `all_reduce`.
    pub fn of_ranks(devices: &Devices, world: usize, all_reduce: AllReduce) -> Result<Vec<Self>> {
        if world == 1 {
            return Ok(vec![Self::SingleRank]);
        }
        match devices.of_rank(0).group_id()? {
            Some(id) => {
                let hosts = HostGroup::create(world).into_iter();
                Ok(hosts.map(|host| Self::Devices(id, all_reduce, host)).collect())
            }
            None if all_reduce == AllReduce::Tree => {
                Ok(LocalGroup::create(world).into_iter().map(Self::Local).collect())
            }
            None => Err(Error::Config("--all-reduce nccl: ranks on the CPU support only --all-reduce tree".into())),
        }
    }

    /// Returns the communicator; if devices exchange activations, waits until all ranks have joined.
    fn join(self, device: &Device, rank: usize, world: usize) -> Result<Box<dyn Communicator>> {
        Ok(match self {
            Self::SingleRank => Box::new(SingleRank),
            Self::Local(group) => Box::new(group),
            Self::Devices(id, all_reduce, host) => {
                Box::new(DeviceGroup::new(device.join(&Membership { id, rank, world }, all_reduce)?, host))
            }
        })
    }
}

/// The parts that every rank is built from, shared by their threads.
pub(super) struct Ingredients {
    pub model: ModelConfig,
    pub layout: Layout,
    pub checkpoint: Arc<Checkpoint>,
    pub blocks: usize,
    pub progress: LoadProgress,
}

impl Ingredients {
    /// Builds one rank and loads its weights; runs on the rank's own thread.
    fn make(&self, rank: usize, weights: Model, communicator: CommunicatorPlan) -> Result<ModelRunner> {
        let Self { model, layout, checkpoint, blocks, progress } = self;
        let build = layout.build(rank);
        let ops = build.device.ops();
        let loaded = |bytes| progress.add(bytes);
        let weights = RankWeights::load(&ops, weights, build.clone(), checkpoint.clone(), &loaded)?;
        let weights = if layout.keeps_base { weights.keep_base() } else { weights };
        let kv = kv_caches(model, &build, layout.kv, *blocks, layout.block_size);
        let join = || communicator.join(layout.devices.of_rank(rank), rank, layout.world);
        let tower = layout.tower(model, rank);
        let shapes = (layout.workspace(model, rank), tower);
        ModelRunner::new(ops, join, weights, kv, shapes, layout.block_size, layout.uses_graphs)
    }
}

/// Starts the ranks.
///
/// # Errors
/// The first error of a rank.
pub(super) fn start_ranks(
    models: Vec<Model>,
    communicators: Vec<CommunicatorPlan>,
    ingredients: Ingredients,
) -> Result<Ranks> {
    let ingredients = Arc::new(ingredients);
    let makers = models.into_iter().zip(communicators).enumerate().map(|(rank, (model, communicator))| {
        let ingredients = ingredients.clone();
        move || ingredients.make(rank, model, communicator)
    });
    let ranks = Ranks::start(ingredients.layout.devices.clone(), makers)?;
    ingredients.progress.done();
    Ok(ranks)
}

/// Logs the progress of loading at each tenth.
pub(super) struct LoadProgress {
    total: u64,
    loaded: AtomicU64,
    started: Instant,
}

impl LoadProgress {
    pub fn new(checkpoint: &Checkpoint, parameters: &Parameters) -> Self {
        let bytes = parameters.iter().filter_map(|spec| checkpoint.stored_bytes(&spec.name).ok());
        let total: u64 = bytes.map(|bytes| bytes as u64).sum();
        Self { total: total * parameters.world() as u64, loaded: AtomicU64::new(0), started: Instant::now() }
    }

    fn add(&self, bytes: u64) {
        let before = self.loaded.fetch_add(bytes, Ordering::Relaxed);
        let tenth = |b: u64| 10 * b / self.total.max(1);
        if tenth(before) != tenth(before + bytes) {
            tracing::info!("loading: {} %", 10 * tenth(before + bytes));
        }
    }

    fn done(&self) {
        let (bytes, seconds) = (self.loaded.load(Ordering::Relaxed), self.started.elapsed().as_secs_f64());
        tracing::info!("loaded {} in {seconds:.2} s", human_bytes(bytes));
    }
}
