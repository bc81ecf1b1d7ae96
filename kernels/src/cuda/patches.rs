//! Patches of pictures.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::context::Context;
use super::host::HostSide;
use super::launch::{Launch, rows_grid};
use super::module::{Module, fat_binary};
use super::tensor::TensorRows;
use crate::patches::Patches;

/// Bytes of pixels that are on the device at once, unless a single patch has more.
pub(super) const PIXEL_BYTES: usize = 1 << 20;

/// The kernel of [`Ops::patches`](crate::Ops::patches).
pub(super) struct PatchCutter {
    context: Arc<Context>,
    patches: CudaFunction,
}

impl PatchCutter {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("patches"))?;
        Ok(Self { context: context.clone(), patches: module.function("patches")? })
    }

    /// The host's threads cut the pixels of each patch out of the picture, and the device makes its row of them.
    pub fn cut(&self, host: HostSide<'_>, patches: &Patches<'_>, out: TensorRows) -> Result<()> {
        let Patches { side, frames, mean, std, corners, .. } = *patches;
        assert_eq!((out.rows, out.width), (corners.len(), patches.row_width()), "rows and width of patches");
        let patch_bytes = 3 * side * side;
        let count = (PIXEL_BYTES / patch_bytes.max(1)).clamp(1, corners.len().max(1));
        let memory = self.context.scratch.allocate_for_step(count * patch_bytes)?;
        for first in (0..corners.len()).step_by(count) {
            let rows = first..corners.len().min(first + count);
            host.send(memory.pointer, rows.clone(), patch_bytes, 0, &|rows, pixels: &mut [u8], _| {
                let lines = corners[rows].iter().flat_map(|corner| (0..side).map(|y| patches.pixels(*corner, y)));
                pixels.chunks_exact_mut(3 * side).zip(lines).for_each(|(to, line)| to.copy_from_slice(line));
            })?;
            let mut launch = Launch::of(&self.context.stream, &self.patches);
            launch.pointer(memory.pointer).int(side * side).int(frames);
            for value in mean.into_iter().chain(std) {
                launch.float(value);
            }
            launch.rows(out.rows_from(first));
            // SAFETY: the pixels of these rows are in the memory, and the rows are of a tensor.
            unsafe { launch.start(rows_grid(rows.len())) }?;
        }
        Ok(())
    }
}
