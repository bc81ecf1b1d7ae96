//! Copies from the memory of one device to that of another.

use std::ptr::{null, null_mut};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

use super::context::Context;

/// Rows in the memory of a device, as far apart as `stride_bytes`.
pub(super) struct RowsOf<'a> {
    pub device: &'a Context,
    pub pointer: sys::CUdeviceptr,
    pub stride_bytes: usize,
}

/// Starts to copy `count` rows of `row_bytes` on `stream`, which is of the device that they go to. No kernel reads what
/// is another device's: the driver copies, over the link between the two where there is one.
///
/// # Errors
/// If the driver refuses.
pub(super) fn start(
    stream: &CudaStream,
    from: &RowsOf<'_>,
    to: &RowsOf<'_>,
    count: usize,
    row_bytes: usize,
) -> Result<()> {
    let kind = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let context = |rows: &RowsOf<'_>| rows.device.stream.context().cu_ctx();
    let copy = sys::CUDA_MEMCPY3D_PEER {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: kind,
        srcHost: null(),
        srcDevice: from.pointer,
        srcArray: null_mut(),
        srcContext: context(from),
        srcPitch: from.stride_bytes,
        srcHeight: count,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: kind,
        dstHost: null_mut(),
        dstDevice: to.pointer,
        dstArray: null_mut(),
        dstContext: context(to),
        dstPitch: to.stride_bytes,
        dstHeight: count,
        WidthInBytes: row_bytes,
        Height: count,
        Depth: 1,
    };
    // SAFETY: callers name rows that they have borrowed and memory of their own; the description is read in the call.
    unsafe { sys::cuMemcpy3DPeerAsync(&raw const copy, stream.cu_stream()) }.result().w()
}
