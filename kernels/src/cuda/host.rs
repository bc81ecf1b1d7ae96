//! Values on their way from the host's threads to the device.

use std::ops::Range;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys;

use super::staging::Staging;
use crate::cpu::{Plain, SharedSlice, ThreadPool};

/// Bytes that are copied at once: the host packs the next while they are on their way.
const COPIED_BYTES: usize = 8 << 20;
/// Bytes that a thread packs at once.
const PACKED_BYTES: usize = 128 << 10;

/// The host's side of a copy to the device: the threads that pack, and the memory that the device copies from.
#[derive(Clone, Copy)]
pub(super) struct HostSide<'a> {
    pub pool: &'a ThreadPool,
    pub staging: &'a Staging,
}

/// Called with some rows, the place of their packed values, and scratch for each of them. Called from several threads.
pub(super) type PackRows<'a, T> = dyn Fn(Range<usize>, &mut [T], &mut [f32]) + Sync + 'a;

impl HostSide<'_> {
    /// Copies `rows` of `row_values` packed values each to `to`, as `pack` gives them, on the rank's stream. `pack` has
    /// `scratch` float32 values for each row.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn send<T: Plain>(
        &self,
        to: sys::CUdeviceptr,
        rows: Range<usize>,
        row_values: usize,
        scratch: usize,
        pack: &PackRows<'_, T>,
    ) -> Result<()> {
        let row_bytes = row_values * size_of::<T>();
        let fitting = |bytes: usize| (bytes / row_bytes.max(1)).max(1);
        let (copied, packed) = (fitting(COPIED_BYTES), fitting(PACKED_BYTES));
        for first in rows.clone().step_by(copied) {
            let mine = first..rows.end.min(first + copied);
            let to = to + ((first - rows.start) * row_bytes) as u64;
            let fill = |values: &mut [T]| {
                let values = SharedSlice::new(values);
                let tasks = mine.len().div_ceil(packed);
                self.pool.run_with_scratch(tasks, packed.min(mine.len()) * scratch, |task, floats| {
                    let (start, end) = (task * packed, mine.len().min((task + 1) * packed));
                    // SAFETY: each row is in one task.
                    let values = unsafe { values.part(start * row_values, (end - start) * row_values) };
                    pack(first + start..first + end, values, &mut floats[..(end - start) * scratch]);
                });
            };
            self.staging.fill(mine.len() * row_values, to, fill).w()?;
        }
        Ok(())
    }
}
