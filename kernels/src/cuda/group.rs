//! The ranks of a model on several GPUs of one machine, by NCCL.
//!
//! Gathered values pass through a buffer of fixed size, one part after the other, so that memory does not grow in a
//! step. The terms of a sum are gathered too and then added by a kernel, in the same tree for each element on every
//! rank.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, sys};
use candle_core::{Error, Result, Tensor, bail};

use super::context::Context;
use super::launch::{Launch, grid};
use super::module::{Module, fat_binary};
use super::nccl::{NcclCommunicator, NcclId};
use super::scratch::DeviceScratch;
use super::tensor::pointer;
use crate::backend::group::GroupImpl;
use crate::error::DeviceError;
use crate::group::{AllReduce, GroupId, Membership};

/// Ranks that `cu/exchange.cu` has a tree for.
const MAX_RANKS: usize = 8;
/// Bytes that the values of all ranks pass through: the activations of 256 rows of a 7B model on 8 ranks. Rows that are
/// gathered are no longer.
pub(super) const EXCHANGE_BYTES: usize = 32 << 20;
const EXCHANGE_VALUES: usize = EXCHANGE_BYTES / size_of::<f32>();
/// Values of a part are a multiple of this where there are several, so that each has the best alignment for copies.
const PART_STEP: usize = 128;
const THREADS: u32 = 256;
/// Blocks of a sum for each multiprocessor, all of which run at once.
const BLOCKS_PER_PROCESSOR: usize = 8;

/// The end of one rank.
pub(super) struct CudaGroup {
    // Dropped first: it waits for the other ranks, and the stream's work with them.
    communicator: NcclCommunicator,
    context: Arc<Context>,
    world: usize,
    all_reduce: AllReduce,
    sum: CudaFunction,
    join: CudaFunction,
    gathered: DeviceScratch,
}

/// A new group's id.
///
/// # Errors
/// [`DeviceError::Unsupported`] if there is no NCCL.
pub(super) fn new_id() -> std::result::Result<GroupId, DeviceError> {
    let id = NcclId::new().map_err(|e| DeviceError::Unsupported(format!("--tp above 1 needs NCCL: {e}")))?;
    Ok(GroupId(id.0))
}

impl CudaGroup {
    /// Joins on the rank's own thread, when all others do.
    ///
    /// # Errors
    /// If there are more ranks than a group can have, or NCCL or the driver refuses.
    pub fn join(context: &Arc<Context>, membership: &Membership, all_reduce: AllReduce) -> Result<Self> {
        let Membership { id, rank, world } = *membership;
        if !(2..=MAX_RANKS).contains(&world) {
            bail!("--tp {world}: the kernels add the terms of 2 to {MAX_RANKS} ranks");
        }
        let module = Module::load(context.stream.context(), fat_binary!("exchange"))?;
        let (sum, join) = (module.function(&format!("sum_parts_{world}"))?, module.function("join_columns")?);
        context.stream.context().bind_to_thread().w()?;
        let communicator = NcclCommunicator::join(NcclId(id.0), rank, world).map_err(failed)?;
        let gathered = DeviceScratch::new(context);
        Ok(Self { communicator, context: context.clone(), world, all_reduce, sum, join, gathered })
    }

    /// Gathers `count` values of each rank and returns their address. Values gathered before are overwritten.
    fn gather(&self, from: sys::CUdeviceptr, count: usize) -> Result<sys::CUdeviceptr> {
        assert!(count * self.world <= EXCHANGE_VALUES, "{count} values of each rank are gathered at once");
        let to = self.gathered.take(EXCHANGE_BYTES)?;
        self.context.stream.context().bind_to_thread().w()?;
        // SAFETY: the values are of a tensor, and what is gathered fits; all ranks have tensors of the same shape.
        unsafe { self.communicator.all_gather(from, to, count, &self.context.stream) }.map_err(failed)?;
        Ok(to)
    }

    /// Replaces `count` values by the trees of all ranks.
    fn add_as_tree(&self, at: sys::CUdeviceptr, count: usize) -> Result<()> {
        let gathered = self.gather(at, count)?;
        let blocks = count.div_ceil(THREADS as usize).min(BLOCKS_PER_PROCESSOR * self.context.processors as usize);
        let mut launch = Launch::of(&self.context.stream, &self.sum);
        launch.pointer(gathered).long(count).pointer(at);
        // SAFETY: `count` values of each rank were gathered, and a tensor has as many at `at`.
        unsafe { launch.start(grid((blocks as u32, 1, 1), THREADS, 0)) }
    }
}

impl GroupImpl for CudaGroup {
    fn all_reduce_sum(&self, x: &Tensor) -> Result<()> {
        let (first, count) = (contiguous(x)?, x.elem_count());
        if self.all_reduce == AllReduce::Library {
            self.context.stream.context().bind_to_thread().w()?;
            // SAFETY: the values are of a tensor; all ranks have one of the same shape.
            return unsafe { self.communicator.all_reduce(first, count, &self.context.stream) }.map_err(failed);
        }
        let part = EXCHANGE_VALUES / self.world / PART_STEP * PART_STEP;
        (0..count).step_by(part).try_for_each(|start| self.add_as_tree(at(first, start), part.min(count - start)))
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        let (rows, width) = local.dims2()?;
        let (out_rows, columns) = out.dims2()?;
        let most = width * self.world;
        assert!(out_rows == rows && columns > most - width && columns <= most, "{columns} columns of {width} each");
        let (from, to) = (contiguous(local)?, contiguous(out)?);
        let part = (EXCHANGE_VALUES / self.world / width.max(1)).max(1);
        for first in (0..rows).step_by(part) {
            let count = part.min(rows - first);
            let gathered = self.gather(at(from, first * width), count * width)?;
            let mut launch = Launch::of(&self.context.stream, &self.join);
            launch.pointer(gathered).int(width).pointer(at(to, first * columns)).int(columns);
            // SAFETY: `count` rows of each rank were gathered, and `out` has as many from its row `first` on.
            unsafe { launch.start(grid((count as u32, self.world as u32, 1), THREADS, 0)) }?;
        }
        Ok(())
    }

    fn restore(&self) -> Result<()> {
        self.gathered.take(EXCHANGE_BYTES).map(drop)
    }

    fn release(&self) {
        self.gathered.release();
    }
}

/// The address of a contiguous tensor's first value.
fn contiguous(x: &Tensor) -> Result<sys::CUdeviceptr> {
    assert!(x.is_contiguous(), "what ranks exchange is contiguous, the strides are {:?}", x.stride());
    pointer(x)
}

/// The address of the value `index` places behind that at `first`.
fn at(first: sys::CUdeviceptr, index: usize) -> sys::CUdeviceptr {
    first + (index * size_of::<f32>()) as u64
}

fn failed(message: String) -> Error {
    Error::Msg(message)
}
