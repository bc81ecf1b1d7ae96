//! Broadcasts from another process to a rank, by NCCL. That process may vanish at any time, and NCCL has no timeout:
//! every wait here can be cancelled, and a rank that cancels a wait leaves the group.

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, result, sys};

use super::context::Context;
use super::nccl::{NcclId, NonblockingCommunicator};
use super::pinned::PinnedBuffer;
use crate::backend::broadcast::{Broadcast, BroadcastReceiverImpl, IsCancelled, OnBytes};
use crate::error::DeviceError;
use crate::group::Membership;

/// Bytes that are copied to the host at a time, while those before are taken.
const PIECE_BYTES: usize = 2 << 20;
/// How often to check whether others have joined or sent, and whether the wait is cancelled.
const POLL: Duration = Duration::from_micros(200);

/// One rank's receiving end of a broadcast.
pub(super) struct CudaBroadcastReceiver {
    /// `None` once the rank has left the group.
    communicator: Option<NonblockingCommunicator>,
    context: Arc<Context>,
    /// For pieces on their way to the host, in turn.
    pieces: [Option<PinnedBuffer>; 2],
}

impl CudaBroadcastReceiver {
    /// Joins, and adds up one value with all ranks, as vLLM's do when they have joined.
    ///
    /// # Errors
    /// Those of NCCL and of the driver; if the wait was cancelled.
    pub fn join(
        context: &Arc<Context>,
        membership: &Membership,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Self, DeviceError> {
        context.stream.context().bind_to_thread().map_err(failed)?;
        let value = context.broadcasts.allocate(size_of::<f32>())?;
        context.copies.zero(value.pointer, size_of::<f32>()).map_err(|e| DeviceError::Unsupported(e.to_string()))?;
        let Membership { id, rank, world } = *membership;
        let communicator = NonblockingCommunicator::join(NcclId(id.0), rank, world);
        let communicator = Some(communicator.map_err(DeviceError::Unsupported)?);
        let mut receiver = Self { communicator, context: context.clone(), pieces: [None, None] };
        receiver.carry_out(is_cancelled, |_, _| Ok(()))?;
        // SAFETY: the memory has one value, and outlives what is carried out.
        receiver.carry_out(is_cancelled, |communicator, stream| unsafe {
            communicator.add_one_value(value.pointer, stream)
        })?;
        drop(value);
        receiver.release();
        Ok(receiver)
    }

    /// Begins an operation, and waits until the device has finished it. After an error the rank has left the group, and
    /// the operation no longer uses the device's memory.
    fn carry_out(
        &mut self,
        is_cancelled: IsCancelled<'_>,
        begin: impl FnOnce(&NonblockingCommunicator, &CudaStream) -> Result<(), String>,
    ) -> Result<(), DeviceError> {
        let Some(communicator) = &self.communicator else {
            return Err(DeviceError::Unsupported("the rank has left the group".into()));
        };
        let stream = self.context.broadcasts.stream();
        let done = carry_out(communicator, stream, is_cancelled, begin);
        if done.is_err() {
            self.communicator = None;
            if let Err(error) = stream.synchronize() {
                tracing::error!("the device did not end what it received: {error}");
            }
        }
        done.map_err(DeviceError::Unsupported)
    }

    /// Copies device memory to the host, and passes it to `take` in order.
    fn hand_over(&mut self, from: sys::CUdeviceptr, bytes: usize, take: OnBytes<'_>) -> Result<(), DriverError> {
        let stream = self.context.broadcasts.stream();
        let length = |piece: usize| PIECE_BYTES.min(bytes - piece * PIECE_BYTES);
        let begin = |pieces: &mut [Option<PinnedBuffer>; 2], piece: usize| {
            let place = &mut pieces[piece % 2];
            let buffer = match place {
                Some(buffer) => buffer,
                None => place.insert(PinnedBuffer::new(stream.context(), PIECE_BYTES)?),
            };
            buffer.download(stream, length(piece), from + (piece * PIECE_BYTES) as u64)
        };
        let count = bytes.div_ceil(PIECE_BYTES);
        for piece in 0..=count {
            if piece < count {
                begin(&mut self.pieces, piece)?;
            }
            if let Some(last) = piece.checked_sub(1) {
                let buffer = self.pieces[last % 2].as_mut().expect("its copy has begun");
                take(buffer.values(length(last))?);
            }
        }
        Ok(())
    }
}

impl BroadcastReceiverImpl for CudaBroadcastReceiver {
    fn receive(
        &mut self,
        broadcast: Broadcast,
        take: Option<OnBytes<'_>>,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<(), DeviceError> {
        self.context.stream.context().bind_to_thread().map_err(failed)?;
        let bytes = broadcast.bytes();
        let memory = self.context.broadcasts.allocate(bytes).inspect_err(|_| self.communicator = None)?;
        let Broadcast { count, dtype } = broadcast;
        self.carry_out(is_cancelled, |communicator, stream| {
            // SAFETY: the memory has as many bytes, and outlives what is carried out.
            unsafe { communicator.receive(memory.pointer, count, dtype, stream) }
        })?;
        take.map_or(Ok(()), |take| self.hand_over(memory.pointer, bytes, take)).map_err(failed)
    }

    fn release(&mut self) {
        self.pieces = [None, None];
        self.context.broadcasts.trim();
    }
}

fn carry_out(
    communicator: &NonblockingCommunicator,
    stream: &CudaStream,
    is_cancelled: IsCancelled<'_>,
    begin: impl FnOnce(&NonblockingCommunicator, &CudaStream) -> Result<(), String>,
) -> Result<(), String> {
    begin(communicator, stream)?;
    wait(is_cancelled, || communicator.is_ready())?;
    let behind = stream.record_event(None).map_err(|e| e.to_string())?;
    wait(is_cancelled, || {
        // SAFETY: the event is of this context and was recorded.
        match unsafe { result::event::query(behind.cu_event()) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => communicator.is_ready().map(|_| false),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// Waits until something is done.
fn wait(is_cancelled: IsCancelled<'_>, is_done: impl Fn() -> Result<bool, String>) -> Result<(), String> {
    while !is_done()? {
        if is_cancelled() {
            return Err("the wait was cancelled".into());
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

fn failed(error: DriverError) -> DeviceError {
    DeviceError::Unsupported(format!("the device has failed: {error}"))
}
