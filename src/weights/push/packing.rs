//! A FULL push that is packed into shadow weights as it comes.

use std::collections::BTreeMap;

use super::manifest::Manifest;
use super::tensor::PushedTensor;
use super::threads::in_parallel;
use super::transport::device::{copy_on_device, rows_on_device};
use crate::error::Result;
use crate::weights::parameters::ParameterMapping;
use crate::weights::update::{PushedRows, ShadowTensor, ShadowWeights};

/// The shadow weights that a push is packed into, row by row.
pub(super) struct PackedPush {
    pub shadow: ShadowWeights,
    /// Bytes of all tensors that are kept until those in front of them have come, and the most of them.
    early: u64,
    most_early: u64,
    /// Index of the first tensor that has not been read, where tensors come from files.
    next: usize,
}

impl PackedPush {
    pub fn new(shadow: ShadowWeights, most_early: u64) -> Self {
        Self { shadow, early: 0, most_early, next: 0 }
    }

    /// Packs bytes of tensor `index`. Bytes that come before those in front of them are kept.
    ///
    /// # Errors
    /// As for [`PushedTensor::stream`].
    pub fn write(&mut self, manifest: &mut Manifest, index: usize, offset: u64, data: &[u8]) -> Result<()> {
        let mut shadow = self.destination(manifest, index)?.map(|i| &mut self.shadow.tensors_mut()[i]);
        let tensor = &mut manifest.tensors[index];
        let (left, before) = (self.most_early.saturating_sub(self.early), tensor.early_bytes());
        tensor.stream(offset, data, left, &mut write_to(&mut shadow))?;
        self.early = self.early - before + tensor.early_bytes();
        Ok(())
    }

    /// Reads and packs the tensors that come from files and have been declared since the last call. Those that go into
    /// the same shadow tensor are packed by one thread.
    ///
    /// # Errors
    /// As for [`PushedTensor::stream_file`] and [`copy_on_device`].
    pub fn read_files(&mut self, manifest: &mut Manifest) -> Result<()> {
        let first = std::mem::replace(&mut self.next, manifest.tensors.len());
        let destinations = (first..self.next).map(|index| self.destination(manifest, index));
        let destinations = destinations.collect::<Result<Vec<_>>>()?;
        self.copy_on_devices(manifest, first, &destinations)?;
        let mut shares: BTreeMap<Option<usize>, (usize, Vec<&mut PushedTensor>)> = BTreeMap::new();
        for (tensor, destination) in manifest.tensors[first..].iter_mut().zip(destinations) {
            if tensor.file().is_some() && tensor.is_untouched() {
                let (bytes, share) = shares.entry(destination).or_default();
                *bytes += tensor.bytes;
                share.push(tensor);
            }
        }
        let mut shadows: Vec<_> = self.shadow.tensors_mut().iter_mut().map(Some).collect();
        let work = shares.into_iter().map(|(destination, (bytes, share))| {
            let shadow = destination.and_then(|i| shadows[i].take());
            (bytes, (share, shadow))
        });
        in_parallel(work.collect(), |(share, mut shadow)| {
            let mut scratch = Vec::new();
            share.into_iter().try_for_each(|tensor| tensor.stream_file(&mut scratch, &mut write_to(&mut shadow)))
        })
    }

    /// Copies the tensors from number `first` on that devices can copy and verify without the host.
    fn copy_on_devices(&mut self, manifest: &mut Manifest, first: usize, destinations: &[Option<usize>]) -> Result<()> {
        let (mut copies, mut rows) = (Vec::new(), Vec::new());
        for (index, &destination) in (first..).zip(destinations) {
            let tensor = &manifest.tensors[index];
            let shadow = destination.map(|i| self.shadow.tensor(i));
            let found = tensor.file().and_then(|file| rows_on_device(file, &tensor.entry, tensor.layout()));
            if let Some(found) = found.filter(|rows| shadow.is_none_or(|shadow| shadow.can_copy(rows))) {
                copies.push((index, destination));
                rows.push(found);
            }
        }
        let tensor = |copy: usize| &manifest.tensors[copies[copy].0];
        let digests = copy_on_device(
            &rows,
            |copy| tensor(copy).name(),
            |copy| match copies[copy].1 {
                Some(shadow) => self.shadow.tensors_mut()[shadow].copy_rows(&tensor(copy).mapping, &rows[copy]),
                None => Ok(()),
            },
        )?;
        drop(rows);
        let mut digested = copies.into_iter().zip(&digests);
        digested.try_for_each(|((index, _), digested)| manifest.tensors[index].take_digested(digested))
    }

    /// The index of the shadow tensor that tensor `index` goes into; `None` for one that brings no parameter.
    fn destination(&self, manifest: &Manifest, index: usize) -> Result<Option<usize>> {
        if manifest.is_second_name(index) {
            return Ok(None);
        }
        self.shadow.index_of(&manifest.tensors[index].mapping)
    }
}

/// Writes rows to a shadow tensor, or nowhere.
fn write_to(shadow: &mut Option<&mut ShadowTensor>) -> impl FnMut(&ParameterMapping, PushedRows<'_>) {
    move |mapping, rows| {
        if let Some(shadow) = shadow {
            shadow.write_rows(mapping, rows);
        }
    }
}
