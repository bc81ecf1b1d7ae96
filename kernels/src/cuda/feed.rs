//! What another process broadcasts to a rank, by NCCL. That process may vanish at any time, and NCCL has no timeout:
//! nothing here waits without asking whether to go on, and a rank that gives up leaves the group.

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, result, sys};

use super::context::Context;
use super::nccl::{Endpoint, UniqueId};
use super::pinned::Pinned;
use crate::backend::feed::{Broadcast, FeedImpl, GiveUp, Place, Take};
use crate::error::DeviceError;

/// Bytes that are copied to the host at a time, while those before are taken.
const PIECE_BYTES: usize = 2 << 20;
/// How often to look whether others have come, and whether to give up.
const LOOK: Duration = Duration::from_micros(200);

/// The end of one rank.
pub(super) struct CudaFeed {
    /// None once the group was left.
    endpoint: Option<Endpoint>,
    context: Arc<Context>,
    /// For pieces on their way to the host, in turn.
    pieces: [Option<Pinned>; 2],
}

impl CudaFeed {
    /// Joins, and adds up one value with all ranks, as vLLM's do when they have joined.
    ///
    /// # Errors
    /// What NCCL or the driver says; if the wait was given up.
    pub fn join(context: &Arc<Context>, place: &Place, give_up: GiveUp<'_>) -> Result<Self, DeviceError> {
        context.stream.context().bind_to_thread().map_err(failed)?;
        let value = context.feeds.allocate(size_of::<f32>())?;
        context.copies.zero(value.pointer, size_of::<f32>()).map_err(|e| DeviceError::Unsupported(e.to_string()))?;
        let endpoint = Endpoint::join(UniqueId(place.id.0), place.rank, place.world);
        let endpoint = Some(endpoint.map_err(DeviceError::Unsupported)?);
        let mut feed = Self { endpoint, context: context.clone(), pieces: [None, None] };
        feed.carry_out(give_up, |_, _| Ok(()))?;
        // SAFETY: the memory has one value, and outlives what is carried out.
        feed.carry_out(give_up, |endpoint, stream| unsafe { endpoint.add_one_value(value.pointer, stream) })?;
        drop(value);
        feed.release();
        Ok(feed)
    }

    /// Begins something, and waits until it is done on the device. After an error the group is left, and nothing that
    /// was begun uses the device's memory any more.
    fn carry_out(
        &mut self,
        give_up: GiveUp<'_>,
        begin: impl FnOnce(&Endpoint, &CudaStream) -> Result<(), String>,
    ) -> Result<(), DeviceError> {
        let Some(endpoint) = &self.endpoint else {
            return Err(DeviceError::Unsupported("the group was left".into()));
        };
        let stream = self.context.feeds.stream();
        let done = carry_out(endpoint, stream, give_up, begin);
        if done.is_err() {
            self.endpoint = None;
            if let Err(error) = stream.synchronize() {
                tracing::error!("the device did not end what it received: {error}");
            }
        }
        done.map_err(DeviceError::Unsupported)
    }

    /// Copies device memory to the host, and hands it over in its order.
    fn hand_over(&mut self, from: sys::CUdeviceptr, bytes: usize, take: Take<'_>) -> Result<(), DriverError> {
        let stream = self.context.feeds.stream();
        let length = |piece: usize| PIECE_BYTES.min(bytes - piece * PIECE_BYTES);
        let begin = |pieces: &mut [Option<Pinned>; 2], piece: usize| {
            let place = &mut pieces[piece % 2];
            let buffer = match place {
                Some(buffer) => buffer,
                None => place.insert(Pinned::new(stream.context(), PIECE_BYTES)?),
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

impl FeedImpl for CudaFeed {
    fn receive(
        &mut self,
        broadcast: Broadcast,
        take: Option<Take<'_>>,
        give_up: GiveUp<'_>,
    ) -> Result<(), DeviceError> {
        self.context.stream.context().bind_to_thread().map_err(failed)?;
        let bytes = broadcast.bytes();
        let memory = self.context.feeds.allocate(bytes).inspect_err(|_| self.endpoint = None)?;
        let Broadcast { count, dtype } = broadcast;
        self.carry_out(give_up, |endpoint, stream| {
            // SAFETY: the memory has as many bytes, and outlives what is carried out.
            unsafe { endpoint.receive(memory.pointer, count, dtype, stream) }
        })?;
        take.map_or(Ok(()), |take| self.hand_over(memory.pointer, bytes, take)).map_err(failed)
    }

    fn release(&mut self) {
        self.pieces = [None, None];
        self.context.feeds.trim();
    }
}

fn carry_out(
    endpoint: &Endpoint,
    stream: &CudaStream,
    give_up: GiveUp<'_>,
    begin: impl FnOnce(&Endpoint, &CudaStream) -> Result<(), String>,
) -> Result<(), String> {
    begin(endpoint, stream)?;
    wait(give_up, || endpoint.is_ready())?;
    let behind = stream.record_event(None).map_err(|e| e.to_string())?;
    wait(give_up, || {
        // SAFETY: the event is of this context and was recorded.
        match unsafe { result::event::query(behind.cu_event()) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => endpoint.is_ready().map(|_| false),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// Waits until something is done.
fn wait(give_up: GiveUp<'_>, is_done: impl Fn() -> Result<bool, String>) -> Result<(), String> {
    while !is_done()? {
        if give_up() {
            return Err("the wait was given up".into());
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn failed(error: DriverError) -> DeviceError {
    DeviceError::Unsupported(format!("the device has failed: {error}"))
}
