//! Fills a rank's weights from a checkpoint.

use half::bf16;
use rollout_kernels::{Ops, WeightDtype, WeightRows, with_f32_mut};

use crate::error::Result;
use crate::model::{Build, Decoder, Slot};
use crate::weights::{Checkpoint, Slice, TensorData};

/// Elements read at once: de-quantised rows of a large embedding would otherwise be hundreds of megabytes.
const ELEMENTS_AT_ONCE: usize = 4 << 20;

/// Reads every parameter of `model` from `checkpoint`, this rank's part only. `progress` gets the bytes of each
/// parameter as it is done.
///
/// # Errors
/// `Config` naming the parameter that is missing or has another shape.
pub fn load(
    ops: &Ops,
    model: &mut Decoder,
    build: Build,
    checkpoint: &Checkpoint,
    progress: &dyn Fn(u64),
) -> Result<()> {
    model.visit(&mut |spec, slot| {
        let slice = checkpoint.slice(spec, build.partition)?;
        match slot {
            Slot::Matrix { matrix, first_row } => {
                let rows_at_once = (ELEMENTS_AT_ONCE / slice.cols.len()).max(1);
                for start in slice.rows.clone().step_by(rows_at_once) {
                    let rows = start..(start + rows_at_once).min(slice.rows.end);
                    let to = first_row + start - slice.rows.start;
                    match &checkpoint.read(&spec.name, &Slice { rows, cols: slice.cols.clone() })? {
                        TensorData::Bf16(v) => ops.write_rows(matrix, to, WeightRows::Bf16(v)),
                        TensorData::F16(v) => ops.write_rows(matrix, to, WeightRows::F16(v)),
                        TensorData::F32(v) => ops.write_rows(matrix, to, WeightRows::F32(v)),
                    }
                }
            }
            Slot::Vector { vector, offset } => {
                let values = checkpoint.read(&spec.name, &slice)?.into_f32();
                // In bfloat16 every weight has bfloat16's precision, vectors too, as in the trainer.
                let round = |x: f32| if build.weights == WeightDtype::Bf16 { bf16::from_f32(x).to_f32() } else { x };
                with_f32_mut(vector, |v| {
                    for (to, from) in v[offset..offset + values.len()].iter_mut().zip(values.iter()) {
                        *to = round(*from);
                    }
                })?;
            }
        }
        checkpoint.release(&spec.name);
        progress(checkpoint.stored_bytes(&spec.name)? as u64);
        Ok(())
    })
}
