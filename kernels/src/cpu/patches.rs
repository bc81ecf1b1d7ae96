//! Patches of pictures.

use super::pool::Cpu;
use super::rows::RowsMut;
use crate::patches::Patches;

/// Cuts the patches out of their picture and normalises their values: see [`Ops::patches`](crate::Ops::patches). A
/// channel has 256 values, which are normalised once and then looked up.
///
/// # Panics
/// If a patch is not within the picture, or there are other rows.
pub fn patches(cpu: &Cpu, patches: &Patches<'_>, out: RowsMut<'_>) {
    let Patches { side, frames, corners, .. } = *patches;
    assert_eq!((out.rows(), out.width()), (corners.len(), patches.row_width()), "rows and width of patches");
    let width = out.width();
    let out = out.share();
    let normalised = normalised(patches);
    cpu.for_ranges(corners.len(), width, |from, to| {
        for (i, corner) in (from..to).zip(&corners[from..to]) {
            // SAFETY: each row is in one range.
            let row = unsafe { out.row(i) };
            for (channel, planes) in row.chunks_exact_mut(frames * side * side).enumerate() {
                let (first, others) = planes.split_at_mut(side * side);
                for (y, values) in first.chunks_exact_mut(side).enumerate() {
                    let pixels = patches.pixels(*corner, y).as_chunks::<3>().0;
                    let of_pixel = |pixel: &[u8; 3]| normalised[channel][usize::from(pixel[channel])];
                    values.iter_mut().zip(pixels).for_each(|(value, pixel)| *value = of_pixel(pixel));
                }
                others.chunks_exact_mut(side * side).for_each(|plane| plane.copy_from_slice(first));
            }
        }
    });
}

/// The normalised form of each of the 256 values of a channel.
fn normalised(patches: &Patches<'_>) -> [[f32; 256]; 3] {
    let Patches { mean, std, .. } = patches;
    std::array::from_fn(|channel| std::array::from_fn(|value| (value as f32 - mean[channel]) / std[channel]))
}
