//! FULL pushes packed as they come, into the stage that the commit exchanges for what serves.

use std::collections::BTreeMap;

use super::Receiver;
use crate::error::Result;
use crate::weights::matrix_shape;
use crate::weights::push::TensorEntry;
use crate::weights::push::manifest::Declared;
use crate::weights::push::ordered::Layout;
use crate::weights::push::receipt::{Slot, in_parallel_with};
use crate::weights::push::shadow::{Cell, ShadowWeights, TensorRows};

impl Receiver {
    /// FULL: from now on packs the tensors into `stage` as they come.
    ///
    /// # Panics
    /// If some have come already.
    pub fn pack_into(&mut self, stage: ShadowWeights) {
        assert!(self.slots.iter().all(Slot::is_untouched), "tensors have come before the stage");
        self.stage = Some(stage);
    }

    /// Packs bytes of tensor `index`, or keeps them until those before them have come.
    pub(super) fn pack(&mut self, index: usize, offset: u64, data: &[u8]) -> Result<()> {
        let Self { manifest, slots, stage: Some(stage), held, early_bytes, .. } = self else { return Ok(()) };
        let (tensor, slot) = (&manifest.tensors()[index], &mut slots[index]);
        let place = if manifest.is_second_name(index) { None } else { stage.place(&tensor.target)? };
        let mut cell = place.map(|place| &mut stage.cells()[place]);
        let layout = layout(tensor);
        let (room, before) = (early_bytes.saturating_sub(*held), slot.early_bytes());
        let mut write = |row: usize, bytes: &[u8]| write_rows(cell.as_deref_mut(), tensor, layout, row, bytes);
        slot.pass(&tensor.entry.name, offset, data, layout, room, &mut write)?;
        *held = *held - before + slot.early_bytes();
        Ok(())
    }

    /// FULL with a stage, where the source is no stream: reads and packs what has been declared since the last call.
    ///
    /// # Errors
    /// As for [`Receiver::finish`].
    pub fn read_declared(&mut self) -> Result<()> {
        if self.stage.is_some() && !self.origin.files.is_empty() { self.pack_files() } else { Ok(()) }
    }

    /// Tensors of one cell are packed by one thread.
    fn pack_files(&mut self) -> Result<()> {
        let Self { manifest, slots, origin, stage: Some(stage), next, pieces, .. } = self else { return Ok(()) };
        let mut shares: BTreeMap<Option<usize>, (usize, Vec<_>)> = BTreeMap::new();
        for ((index, slot), tensor) in slots.iter_mut().enumerate().zip(manifest.tensors()).skip(*next) {
            let Some(file) = origin.file(index) else { continue };
            let place = if manifest.is_second_name(index) { None } else { stage.place(&tensor.target)? };
            let (bytes, share) = shares.entry(place).or_default();
            *bytes += tensor.bytes;
            share.push((slot, file, tensor));
        }
        *next = manifest.tensors().len();
        let (mut cells, mut passed) = (stage.cells().iter_mut(), 0);
        let mut work = Vec::new();
        for (place, (bytes, share)) in shares {
            let cell = place.and_then(|place| cells.nth(place - passed));
            passed = place.map_or(0, |place| place + 1);
            work.push((bytes, (share, cell)));
        }
        in_parallel_with(work, pieces, |piece, (share, mut cell)| {
            share.into_iter().try_for_each(|(slot, file, tensor)| {
                let layout = layout(tensor);
                let mut write = |row: usize, bytes: &[u8]| write_rows(cell.as_deref_mut(), tensor, layout, row, bytes);
                let TensorEntry { name, offset, .. } = &tensor.entry;
                slot.pass_file(name, (file, *offset), layout, piece, &mut write)
            })
        })
    }
}

fn layout(tensor: &Declared) -> Layout {
    let (_, columns) = matrix_shape(&tensor.entry.shape);
    Layout { dtype: tensor.entry.dtype, columns }
}

/// Packs some whole rows; without a cell they are of no parameter.
fn write_rows(cell: Option<&mut Cell>, tensor: &Declared, layout: Layout, first_row: usize, bytes: &[u8]) {
    if let Some(cell) = cell {
        cell.write(&tensor.target, &TensorRows { layout, first_row, bytes });
    }
}
