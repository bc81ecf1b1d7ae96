//! Merges in the host's memory, for tests.

use rollout_kernels::{Backend, DeviceOptions, MatrixShape, Merge, MergeBase, StorageDtype};

use super::Adapter;
use crate::weights::Slice;

impl Adapter {
    /// Merges the adapter into `values`, as the instruction set `kernel` of the CPU does it. They are row-major
    /// float32: the base's values of `slice` in the serving precision, and then the merged ones, not yet rounded to it.
    /// A parameter that the adapter does not touch stays as it is.
    pub fn merge(&self, kernel: &str, parameter: &str, slice: &Slice, values: &mut [f32]) {
        let Some(change) = self.change(parameter).filter(|_| !slice.is_empty()) else { return };
        if slice.cols == (0..1) && change.low_rank().is_none() {
            return change.apply_to_vector(slice.rows.clone(), values);
        }
        let device = Backend::Cpu.open(&DeviceOptions { kernel, ..DeviceOptions::default() }).unwrap();
        let (n, k) = (slice.rows.len(), slice.cols.len());
        let mut merged = device.zeros(MatrixShape { dtype: StorageDtype::F32, n, k, leaves: 1 }).unwrap();
        let base = values.to_vec();
        let read = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>, out: &mut [f32]| {
            assert_eq!(columns, slice.cols, "a test merges all columns of its slice");
            out.copy_from_slice(&base[(rows.start - slice.rows.start) * k..(rows.end - slice.rows.start) * k]);
        };
        let base = MergeBase::Read(&read);
        let merge =
            Merge { change, base, rows: slice.rows.clone(), columns: slice.cols.clone(), width: slice.cols.end };
        device.ops().merge_rows(&mut merged, 0, &merge).unwrap();
        merged.read_f32(0, values);
    }
}
