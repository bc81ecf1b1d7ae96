//! A device as everything above this crate sees it.

use std::fmt;
use std::sync::Arc;

use crate::Backend;
use crate::activations::Activations;
use crate::backend::broadcast::IsCancelled;
use crate::backend::device::{DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::storage::MemoryImpl;
use crate::borrowed::{BorrowedMemory, MemoryHandle};
use crate::broadcast::BroadcastReceiver;
use crate::buffer::DeviceBuffer;
use crate::error::DeviceError;
use crate::group::{AllReduce, GroupId, Membership, RankGroup};
use crate::kv_cache::KvCache;
use crate::kv_layout::KvLayout;
use crate::matrix::Matrix;
use crate::ops::Ops;
use crate::routing::Routing;
use crate::routing_shape::RoutingShape;
use crate::weights::MatrixShape;

/// The device of one rank: its limits, its memory and its operators. Clones are handles of the same device.
#[derive(Clone)]
pub struct Device(Arc<dyn DeviceImpl>);

impl Device {
    pub(crate) fn new(device: impl DeviceImpl) -> Self {
        Self(Arc::new(device))
    }

    /// Name of the variant of its operators, such as the instruction set.
    pub fn kernel(&self) -> &'static str {
        self.0.kernel()
    }

    /// Whether it can run a model of this shape.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] naming the value that it does not support.
    pub fn check(&self, model: &ModelShape) -> Result<(), DeviceError> {
        self.0.check(model)
    }

    /// Free device memory in bytes, as the driver reports it. Returns `None` if the device has no driver or the driver
    /// fails.
    pub fn free_bytes(&self) -> Option<u64> {
        self.0.free_bytes()
    }

    /// Whether its memory is not the host's.
    pub fn has_own_memory(&self) -> bool {
        self.0.has_own_memory()
    }

    /// Moves the contents of its matrices and buffers to host memory, except for released ones, and frees their device
    /// memory. They must not be used until [`Device::bring_back`]. Does nothing on a device whose memory is the host's.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the host would then keep more than `most` bytes, or has too little memory;
    /// nothing has changed then.
    pub fn offload(&self, most: u64) -> Result<(), DeviceError> {
        self.0.offload(most)
    }

    /// Bytes of host memory that hold offloaded contents.
    pub fn offloaded_bytes(&self) -> u64 {
        self.0.offloaded_bytes()
    }

    /// Copies offloaded contents back, to the same addresses.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing has changed then.
    pub fn bring_back(&self) -> Result<(), DeviceError> {
        self.0.bring_back()
    }

    /// Its UUID as text, which identifies it in all processes. `None` where memory of other processes cannot be
    /// borrowed.
    pub fn uuid(&self) -> Option<String> {
        self.0.uuid()
    }

    /// Opens an allocation that another process has in this device's memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if there is no such allocation, or none of other processes can be opened;
    /// [`DeviceError::OutOfMemory`].
    pub fn borrow_memory(&self, handle: &MemoryHandle) -> Result<BorrowedMemory, DeviceError> {
        self.0.borrow_memory(handle)
    }

    /// Bytes of its memory that [`Matrix::copy_columns`] uses as a buffer for rows of another device.
    pub fn arriving_bytes(&self) -> usize {
        self.0.arriving_bytes()
    }

    /// Starts the operators of the rank.
    pub fn ops(&self) -> Ops {
        Ops::new(self.0.ops())
    }

    /// A matrix that has no memory until [`Matrix::restore`].
    pub fn matrix(&self, shape: MatrixShape) -> Matrix {
        Matrix::new(self.memory(), shape)
    }

    /// A matrix of zeros.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros(&self, shape: MatrixShape) -> Result<Matrix, DeviceError> {
        let mut matrix = self.matrix(shape);
        matrix.restore()?;
        Ok(matrix)
    }

    /// A paged cache for the keys and values of one layer, which has no memory until [`KvCache::restore`].
    pub fn kv_cache(&self, layout: KvLayout) -> KvCache {
        KvCache::new(self.memory(), layout)
    }

    /// A buffer of zeros.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn buffer(&self, len: usize) -> candle_core::Result<DeviceBuffer> {
        Ok(DeviceBuffer::new(self.memory(), self.0.zeros(len)?))
    }

    /// A buffer with these values.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn upload(&self, values: &[f32]) -> candle_core::Result<DeviceBuffer> {
        let buffer = self.buffer(values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Zeros for activations, `[rows, width]` float32, aligned as the operators read them fastest.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn activations(&self, rows: usize, width: usize) -> candle_core::Result<Activations> {
        self.0.activations(rows, width)
    }

    /// A routing of a layer's rows, with memory for all of them ([`RoutingShape::bytes`]).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    ///
    /// # Panics
    /// If the shape has no such experts, or the rank's experts are not an aligned run of
    /// [`expert_groups`](crate::expert_groups).
    pub fn routing(&self, shape: RoutingShape) -> Result<Routing, DeviceError> {
        shape.check();
        let storage = self.0.routing(&shape)?;
        Ok(Routing::new(shape, storage))
    }

    /// Rows of a step whose experts are to be computed at once. More read the experts' weights fewer times, and each
    /// takes buffers of several experts; no bit depends on it.
    pub fn expert_rows(&self) -> usize {
        self.0.expert_rows()
    }

    /// The id of a new group of ranks on devices of this kind, or `None` where ranks access one another's activations
    /// in host memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if ranks cannot reach one another on this machine.
    pub fn group_id(&self) -> Result<Option<GroupId>, DeviceError> {
        self.0.group_id()
    }

    /// Joins a group; waits until all its ranks have, each on a thread and a device of its own.
    ///
    /// # Errors
    /// If the ranks cannot reach one another, or are too many.
    ///
    /// # Panics
    /// If the id is not of such devices.
    pub fn join(&self, membership: &Membership, all_reduce: AllReduce) -> candle_core::Result<RankGroup> {
        Ok(RankGroup::new(self.0.join(membership, all_reduce)?, membership.rank, membership.world))
    }

    /// Most bytes of its memory that operators take while they run, beside their inputs and outputs and
    /// [`Device::exchange_bytes`].
    pub fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    /// Bytes of its memory that a rank in a group exchanges values through.
    pub fn exchange_bytes(&self) -> usize {
        self.0.exchange_bytes()
    }

    /// Name of the library by which other processes can broadcast to the device; `None` if they cannot.
    pub fn broadcast_library(&self) -> Option<&'static str> {
        self.0.broadcast_library()
    }

    /// Joins a group whose rank 0 is another process; waits until all its ranks have joined, or `is_cancelled`.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the ranks cannot reach one another, or the wait was cancelled.
    pub fn join_broadcast(
        &self,
        membership: &Membership,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<BroadcastReceiver, DeviceError> {
        self.0.join_broadcast(membership, is_cancelled).map(BroadcastReceiver::new)
    }

    fn memory(&self) -> Arc<dyn MemoryImpl> {
        self.0.clone()
    }
}

/// The devices of all ranks, and the memory that they have together. The default has none.
#[derive(Clone, Default)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Opens a device for each of `ranks`, with what `options` asks for beside the rank.
    ///
    /// # Errors
    /// As for [`Backend::open`].
    pub fn open(backend: Backend, ranks: usize, options: &DeviceOptions<'_>) -> Result<Self, DeviceError> {
        (0..ranks).map(|rank| backend.open(&DeviceOptions { rank, ..*options })).collect::<Result<_, _>>().map(Self)
    }

    /// The device of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn of_rank(&self, rank: usize) -> &Device {
        &self.0[rank]
    }

    /// The devices in the order of the ranks.
    pub fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter()
    }

    /// Bytes of memory that the process may use of them at most, before any share is applied. Each counts as much as
    /// the smallest, as ranks take the same of each.
    pub fn total_bytes(&self) -> u64 {
        let smallest = self.memories().map(|device| device.0.total_bytes()).min();
        smallest.map_or(0, |bytes| bytes * self.memories().count() as u64)
    }

    /// Whether their memory is not the host's.
    pub fn have_own_memory(&self) -> bool {
        self.0.iter().any(Device::has_own_memory)
    }

    /// Bytes of their memory that the process takes before anything is stored there, with what `ranks` ranks need to
    /// reach one another; as measured where that can be. 0 where the memory is the host's.
    pub fn context_bytes(&self, ranks: usize) -> u64 {
        self.largest(|device| device.context_bytes(ranks))
    }

    /// Bytes of their memory to reserve because they allocate whole pages. 0 where the memory is the host's.
    pub fn rounding_bytes(&self) -> u64 {
        self.largest(|device| device.rounding_bytes())
    }

    /// Bytes of page-locked memory of the host through which values go to them and come back, at most, where rank 0
    /// samples from `logits_bytes` bytes of logits at once, and reads `kept_bytes` bytes of the experts of a step. 0
    /// where the memory is the host's.
    pub fn host_bytes(&self, logits_bytes: usize, kept_bytes: usize) -> u64 {
        let of_rank = |rank: usize| if rank == 0 { (logits_bytes, kept_bytes) } else { (0, 0) };
        let bytes = |(rank, device): (usize, &Device)| {
            let (logits, kept) = of_rank(rank);
            device.0.host_bytes(logits, kept)
        };
        self.memories().enumerate().map(bytes).sum()
    }

    /// Limits the memory that the process may take on them to `bytes` in all, the same on each: larger allocations fail
    /// with [`DeviceError::OutOfMemory`]. Does nothing where the memory is the host's.
    pub fn limit(&self, bytes: u64) {
        let each = bytes / self.memories().count().max(1) as u64;
        self.memories().for_each(|device| device.0.limit(each));
    }

    /// The bytes of all devices if each takes as much as the largest.
    fn largest(&self, bytes: impl Fn(&dyn DeviceImpl) -> u64) -> u64 {
        let most = self.memories().map(|device| bytes(&*device.0)).max();
        most.map_or(0, |bytes| bytes * self.memories().count() as u64)
    }

    /// Bytes of their memory that the process takes now.
    pub fn used_bytes(&self) -> u64 {
        self.memories().map(|device| device.0.used_bytes()).sum()
    }

    /// Returns the freed memory that allocators cache to the system.
    pub fn trim(&self) {
        self.memories().for_each(|device| device.0.trim());
    }

    /// One device for each memory: some share one.
    fn memories(&self) -> impl Iterator<Item = &Device> {
        let is_first = |i: usize| self.0[..i].iter().all(|other| other.0.memory() != self.0[i].0.memory());
        self.0.iter().enumerate().filter(move |(i, _)| is_first(*i)).map(|(_, device)| device)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Devices({})", self.0.len())
    }
}
