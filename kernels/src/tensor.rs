//! The host's view of float32 tensors that lie in its memory, as slices and rows.

use std::cell::Cell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use crate::cpu::{Rows, RowsMut};

/// Runs `f` over the elements of a float32 CPU tensor from its first element to its last; rows may be
/// strided.
///
/// # Errors
/// If the tensor is not float32 on the CPU.
pub fn with_f32<R>(t: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => Ok(f(&v[span(layout)])),
        _ => bail!("a float32 CPU tensor is needed, not {:?} on {:?}", t.dtype(), t.device().location()),
    }
}

/// Like [`with_f32`], to be written. `f` must not touch another view of the same tensor: it is locked meanwhile.
pub fn with_f32_mut<R>(t: &Tensor, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    with_storage_mut(t, |storage, layout| match storage {
        CpuStorage::F32(v) => Ok(f(&mut v[span(layout)])),
        _ => bail!("a float32 CPU tensor is needed, not {:?}", t.dtype()),
    })
}

/// Runs `f` over the rows of a 2-dimensional float32 CPU tensor with contiguous rows.
pub(crate) fn rows<R>(t: &Tensor, f: impl FnOnce(Rows<'_>) -> R) -> Result<R> {
    let ((rows, width), stride) = (t.dims2()?, row_stride(t)?);
    with_f32(t, |data| f(Rows::new(data, rows, width, stride)))
}

/// Like [`rows`], to be written; see [`with_f32_mut`].
pub(crate) fn rows_mut<R>(t: &Tensor, f: impl FnOnce(RowsMut<'_>) -> R) -> Result<R> {
    let ((rows, width), stride) = (t.dims2()?, row_stride(t)?);
    with_f32_mut(t, |data| f(RowsMut::new(data, rows, width, stride)))
}

/// Elements between the starts of two rows of a 2-dimensional tensor with contiguous rows.
fn row_stride(t: &Tensor) -> Result<usize> {
    match t.stride() {
        [rows, 1] => Ok(*rows),
        stride => bail!("rows must be contiguous, the strides are {stride:?}"),
    }
}

/// From the first to past the last element that the layout reaches.
fn span(layout: &Layout) -> std::ops::Range<usize> {
    let start = layout.start_offset();
    if layout.shape().elem_count() == 0 {
        return start..start;
    }
    let last: usize = layout.dims().iter().zip(layout.stride()).map(|(d, s)| (d - 1) * s).sum();
    start..start + last + 1
}

fn with_storage_mut<R>(t: &Tensor, f: impl FnOnce(&mut CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    // candle hands out mutable storage only to in-place operators, which it calls by shared reference, once.
    struct Access<F, R> {
        f: Cell<Option<F>>,
        result: Cell<Option<R>>,
    }
    impl<R, F: FnOnce(&mut CpuStorage, &Layout) -> Result<R>> InplaceOp1 for Access<F, R> {
        fn name(&self) -> &'static str {
            "rollout-kernels"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let f = self.f.take().expect("candle runs an in-place operator once");
            self.result.set(Some(f(storage, layout)?));
            Ok(())
        }
    }
    let access = Access { f: Cell::new(Some(f)), result: Cell::new(None) };
    t.inplace_op1(&access)?;
    Ok(access.result.into_inner().expect("the operator ran"))
}

/// Copies of these rows of a 2-dimensional float32 CPU tensor, one after the other.
pub(crate) fn read_rows(x: &Tensor, indices: &[u32]) -> Result<Vec<f32>> {
    rows(x, |x| indices.iter().flat_map(|index| x.row(*index as usize)).copied().collect())
}

/// Writes values, row by row, to all of a 2-dimensional float32 CPU tensor.
pub(crate) fn write_rows(values: &[f32], out: &Tensor) -> Result<()> {
    let (count, width) = out.dims2()?;
    rows_mut(out, |mut out| (0..count).for_each(|i| out.row_mut(i).copy_from_slice(&values[i * width..][..width])))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn views_reach_their_own_elements_only() {
        let t = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let right = t.narrow(1, 2, 2).unwrap();
        assert_eq!(row_stride(&right).unwrap(), 4);
        assert_eq!(with_f32(&right, <[f32]>::to_vec).unwrap(), (2..12).map(|i| i as f32).collect::<Vec<_>>());
        with_f32_mut(&right, |v| v[4] = -1.0).unwrap();
        assert_eq!(t.to_vec2::<f32>().unwrap()[1], [4.0, 5.0, -1.0, 7.0]);
        assert!(row_stride(&t.t().unwrap()).is_err());
        assert!(with_f32(&t.to_dtype(candle_core::DType::BF16).unwrap(), |_| ()).is_err());
    }
}
