//! Receives one push. The way of a pushed tensor, from its first byte to where it is used, goes through this file from
//! top to bottom; the picture of it is in [`super`].

use std::collections::BTreeMap;
use std::sync::Arc;

use twox_hash::xxhash3_128::Hasher;

use super::adapter::PushedAdapter;
use super::delta::{Delta, Payload};
use super::manifest::{Declared, Manifest};
use super::on_device::{OnDevice, rows_on_device, take_on_device};
use super::receipt::Receipt;
use super::reservation::Reservation;
use super::row_stream::{RowLayout, Rows};
use super::shadow::ShadowWeights;
use super::source::{Allocations, Directory, OpenedSource, Source, SourceFile, SourceRoom, Sources, open_directory};
use super::tensors::{KeptTensor, Tensors};
use super::threads::{MAX_THREADS, in_parallel, in_parallel_with};
use super::verify::Digest;
use super::{Received, TensorEntry, UpdateKind, UpdateSpec, WeightUpdate};
use crate::error::{Error, Result};
use crate::memory::human_bytes;
use crate::weights::{Parameters, matrix_shape};

/// Receives one push. After an error the push is over, and the receiver can only be dropped.
pub struct Receiver {
    manifest: Manifest,
    /// The receipt of each tensor of the manifest.
    receipts: Vec<Receipt>,
    source: OpenedSource,
    adapter: PushedAdapter,
    reservation: Reservation,
    mode: Mode,
}

/// What becomes of the tensors of a push as they come.
enum Mode {
    /// Every tensor is kept until [`Receiver::finish`].
    Kept,
    /// FULL: every tensor is packed into shadow weights, row by row.
    Packed(Packing),
    /// FULL in place: every tensor is kept until [`Receiver::take_complete`].
    InPlace(InPlace),
}

/// The state of a FULL push that is packed as it comes.
struct Packing {
    shadow: ShadowWeights,
    /// Bytes of all tensors that are kept until those in front of them have come.
    early: u64,
    /// Index of the first tensor that has not been read, where tensors come from files.
    next: usize,
    /// Memory for what each thread reads from files that are not mapped.
    rooms: [Vec<u8>; MAX_THREADS],
}

/// The state of a FULL push whose tensors are written over the weights as soon as they are whole.
struct InPlace {
    /// Bytes of the tensors that are kept, whole or in part.
    kept: u64,
    /// Indices of the tensors that are whole and were not taken.
    complete: Vec<usize>,
    /// Index of the first tensor that has not been read, where tensors come from files.
    next: usize,
}

/// The declaration of the tensors, before any of their bytes comes.
impl Receiver {
    /// Checks what the header declares, and opens the source. Takes no memory for tensors yet.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or field; `NotFound` for a segment, directory or allocation that is not
    /// there; `FailedPrecondition` for device memory that is of no device of this server.
    pub fn open(spec: UpdateSpec, parameters: Arc<Parameters>, sources: &Sources) -> Result<Self> {
        let UpdateSpec { kind, adapter_config: mut config, unmerged, mut tensors, total_bytes, source } = spec;
        if kind != UpdateKind::Lora && !config.is_empty() {
            return Err(Error::invalid("adapter_config", "only a LORA push has an adapter"));
        }
        let source = match source {
            Source::Inline => OpenedSource::Stream,
            Source::Broadcast(room) => OpenedSource::Broadcast(room),
            Source::SharedMemory(name) => {
                OpenedSource::Segment(SourceFile::mapped(&name, sources.segments.open(&name)?))
            }
            Source::Directory(path) => {
                if !tensors.is_empty() || !config.is_empty() {
                    return Err(Error::invalid(
                        "source.directory",
                        "the directory declares the tensors and the adapter's configuration; leave both out",
                    ));
                }
                let directory = open_directory(kind, &path, sources, parameters.len())?;
                let Directory { files, places, charge, .. } = directory;
                (tensors, config) = (directory.tensors, directory.adapter_config);
                OpenedSource::Directory { files, places, _charge: charge }
            }
            Source::DeviceMemory => OpenedSource::DeviceMemory(Allocations::new(&sources.devices)?),
        };
        let mut receiver = Self {
            manifest: Manifest::new(kind, parameters, total_bytes),
            receipts: Vec::new(),
            source,
            adapter: PushedAdapter::new(config, unmerged, sources.traffic.clone()),
            reservation: Reservation::default(),
            mode: Mode::Kept,
        };
        receiver.add(tensors)?;
        if kind == UpdateKind::Delta && !receiver.manifest.is_final() {
            // What later tensors decompress to could not be reserved.
            return Err(Error::invalid("total_bytes", "a DELTA declares all its tensors in the header"));
        }
        receiver.reservation = Reservation::new(&receiver.manifest, receiver.source.is_unordered())?;
        Ok(receiver)
    }

    /// Most bytes that the push takes at any time until it is applied, its shadow weights among them. `in_place`: if
    /// each [`Receiver::write`] is followed by [`Receiver::take_complete`], and what that gives is dropped before the
    /// next.
    pub fn staging_bytes(&self, in_place: bool) -> u64 {
        match self.manifest.kind() {
            UpdateKind::Full if in_place => self.reservation.in_place,
            _ => {
                let staging = self.reservation.staging_bytes(&self.manifest, self.adapter.spec());
                let SourceRoom { of_devices, of_host } = self.room();
                staging.saturating_add(of_devices).saturating_add(of_host)
            }
        }
    }

    /// Of [`Receiver::staging_bytes`] of a push that is not in place, those of its shadow weights, and of what is
    /// on its way to them where these are.
    pub fn shadow_bytes(&self) -> u64 {
        self.reservation.shadow_bytes(self.manifest.kind()).saturating_add(self.room().of_devices)
    }

    /// What the tensors take on their way into shadow weights.
    fn room(&self) -> SourceRoom {
        if self.manifest.kind() == UpdateKind::Full { self.source.room() } else { SourceRoom::default() }
    }

    /// Whether the tensors are broadcast.
    pub fn is_broadcast(&self) -> bool {
        self.source.is_broadcast()
    }

    /// Packs the tensors of a FULL push into `shadow` from now on, as they come.
    ///
    /// # Panics
    /// If some have come already.
    pub fn pack_into(&mut self, shadow: ShadowWeights) {
        assert!(self.receipts.iter().all(Receipt::is_untouched), "tensors have come before the shadow weights");
        self.mode = Mode::Packed(Packing { shadow, early: 0, next: 0, rooms: Default::default() });
    }

    /// Declares further tensors.
    ///
    /// # Errors
    /// As for [`Receiver::open`]; also if the tensors pass the announced total.
    pub fn declare(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        if !self.source.is_declared() {
            return Err(Error::invalid("tensors", "the directory declares the tensors"));
        }
        if tensors.is_empty() {
            return Ok(());
        }
        self.add(tensors)?;
        self.adapter.check_reserved(self.manifest.total())
    }

    fn add(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        self.manifest.add(tensors)?;
        let kind = self.manifest.kind();
        for (index, tensor) in self.manifest.tensors().iter().enumerate().skip(self.receipts.len()) {
            let entry = &tensor.entry;
            self.source.add(index, entry)?;
            if let Some(file) = self.source.file(index) {
                file.check(&entry.name, entry.offset, tensor.bytes)?;
            }
            let dtype = (kind != UpdateKind::Delta).then_some(entry.dtype);
            self.receipts.push(Receipt::new(tensor.bytes, dtype, entry.digest));
        }
        self.manifest.check_head(|i| self.manifest.tensors()[i].entry.digest)?;
        if self.manifest.is_final() {
            self.manifest.check_complete()?;
            self.adapter.check(&self.manifest)?;
        }
        Ok(())
    }
}

/// The transfer of the tensors' bytes.
impl Receiver {
    /// Takes bytes of a declared tensor. They may come in any order; each byte once.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such tensor, or the bytes are outside it or were sent before; `DataLoss` if
    /// they complete a tensor whose digest is another, `InvalidArgument` if one with a value that is not finite.
    /// `ResourceExhausted` if more is begun at a time, or comes too early, than memory is reserved for.
    pub fn write(&mut self, tensor: u32, offset: u64, data: &[u8]) -> Result<()> {
        if !self.source.is_stream() {
            return Err(Error::invalid("chunk", "the tensors of this push come from its source, not from the stream"));
        }
        let index = tensor as usize;
        let Some(declared) = self.manifest.tensors().get(index) else {
            let declared = self.receipts.len();
            return Err(Error::invalid("chunk", format!("there is no tensor {tensor}; {declared} are declared")));
        };
        let (name, receipt) = (&declared.entry.name, &mut self.receipts[index]);
        match &mut self.mode {
            Mode::Kept => _ = receipt.gather(name, offset, data)?,
            Mode::Packed(packing) => {
                packing.write(&self.manifest, index, receipt, (offset, data), self.reservation.early)?;
            }
            Mode::InPlace(in_place) => {
                if receipt.is_untouched() && !data.is_empty() {
                    in_place.keep(name, receipt.bytes() as u64, self.reservation.in_place)?;
                }
                if receipt.gather(name, offset, data)? {
                    in_place.complete.push(index);
                }
            }
        }
        Ok(())
    }

    /// Reads and packs the tensors that have been declared since the last call, if they come from files and are packed.
    ///
    /// # Errors
    /// As for [`Receiver::finish`].
    pub fn read_declared(&mut self) -> Result<()> {
        match &mut self.mode {
            Mode::Packed(packing) => packing.read_files(&self.manifest, &mut self.receipts, &self.source),
            _ => Ok(()),
        }
    }

    /// Reads the next tensor of a push in place that comes from files; false if all have been read. For use with
    /// [`Receiver::take_complete`] after each tensor. [`Receiver::finish`] reads the rest by itself, and faster.
    ///
    /// # Errors
    /// As for [`Receiver::finish`].
    pub fn read_next(&mut self) -> Result<bool> {
        self.enter_in_place();
        let Mode::InPlace(in_place) = &mut self.mode else { return Ok(false) };
        let index = in_place.next;
        let (Some(file), Some(tensor)) = (self.source.file(index), self.manifest.tensors().get(index)) else {
            return Ok(false);
        };
        self.receipts[index].read(&tensor.entry.name, file, tensor.entry.offset)?;
        in_place.kept += tensor.bytes as u64;
        in_place.complete.push(index);
        in_place.next += 1;
        Ok(true)
    }

    /// The verified tensors of a FULL push that have become whole since the last call, if any. Their memory goes when
    /// they are dropped. The first call makes it a push in place, which keeps only few tensors at a time.
    pub fn take_complete(&mut self) -> Option<Tensors> {
        if self.manifest.kind() != UpdateKind::Full {
            return None;
        }
        self.enter_in_place();
        let Mode::InPlace(in_place) = &mut self.mode else { return None };
        let complete = std::mem::take(&mut in_place.complete);
        in_place.kept -= complete.iter().map(|&i| self.receipts[i].bytes() as u64).sum::<u64>();
        let tensors = self.take_tensors(complete.into_iter());
        (!tensors.is_empty()).then_some(tensors)
    }

    fn enter_in_place(&mut self) {
        if let Mode::Kept = self.mode {
            self.mode = Mode::InPlace(InPlace::new(&self.receipts));
        }
    }

    /// Takes those of these tensors that are verified and were not taken before, as parameters.
    fn take_tensors(&mut self, indices: impl Iterator<Item = usize>) -> Tensors {
        let mut tensors = Tensors::default();
        for index in indices {
            let Some(bytes) = self.receipts[index].take() else { continue };
            if self.manifest.is_second_name(index) {
                continue;
            }
            let declared = &self.manifest.tensors()[index];
            let RowLayout { dtype, columns } = row_layout(&declared.entry);
            let tensor = Arc::new(KeptTensor { dtype, columns, bytes });
            for part in &declared.mapping.parts {
                tensors.insert(part.parameter.clone(), tensor.clone(), part.first_row);
            }
        }
        tensors
    }
}

impl Packing {
    /// Packs bytes of tensor `index`. Bytes that come before those in front of them are kept, at most `limit` of all
    /// tensors together.
    fn write(
        &mut self,
        manifest: &Manifest,
        index: usize,
        receipt: &mut Receipt,
        chunk: (u64, &[u8]),
        limit: u64,
    ) -> Result<()> {
        let mut destination = self.destination(manifest, index)?.map(|i| &mut self.shadow.tensors_mut()[i]);
        let Declared { entry, mapping, .. } = &manifest.tensors()[index];
        let (room, before) = (limit.saturating_sub(self.early), receipt.early_bytes());
        receipt.stream(&entry.name, chunk, row_layout(entry), room, &mut |rows: Rows<'_>| {
            if let Some(shadow) = &mut destination {
                shadow.write_rows(mapping, rows);
            }
        })?;
        self.early = self.early - before + receipt.early_bytes();
        Ok(())
    }

    /// Reads and packs the tensors that have been declared since the last call. Those that go into the same shadow
    /// tensor are packed by one thread.
    fn read_files(&mut self, manifest: &Manifest, receipts: &mut [Receipt], source: &OpenedSource) -> Result<()> {
        let mut shares: BTreeMap<Option<usize>, (usize, Vec<_>)> = BTreeMap::new();
        let mut on_device = Vec::new();
        for ((index, receipt), tensor) in receipts.iter_mut().enumerate().zip(manifest.tensors()).skip(self.next) {
            let Some(file) = source.file(index) else { continue };
            let destination = self.destination(manifest, index)?;
            let shadow = destination.map(|i| self.shadow.tensor(i));
            if let Some(rows) = rows_on_device(file, tensor, shadow) {
                on_device.push(OnDevice { receipt, tensor, rows, destination });
                continue;
            }
            let (bytes, share) = shares.entry(destination).or_default();
            *bytes += tensor.bytes;
            share.push((receipt, file, tensor));
        }
        self.next = manifest.tensors().len();
        take_on_device(on_device, &mut self.shadow)?;
        let (mut tensors, mut passed) = (self.shadow.tensors_mut().iter_mut(), 0);
        let mut work = Vec::new();
        for (destination, (bytes, share)) in shares {
            let shadow = destination.and_then(|i| tensors.nth(i - passed));
            passed = destination.map_or(0, |i| i + 1);
            work.push((bytes, (share, shadow)));
        }
        in_parallel_with(work, &mut self.rooms, |room, (share, mut shadow)| {
            share.into_iter().try_for_each(|(receipt, file, Declared { entry, mapping, .. })| {
                receipt.stream_file(
                    &entry.name,
                    (file, entry.offset),
                    row_layout(entry),
                    room,
                    &mut |rows: Rows<'_>| {
                        if let Some(shadow) = &mut shadow {
                            shadow.write_rows(mapping, rows);
                        }
                    },
                )
            })
        })
    }

    /// The index of the shadow tensor that tensor `index` goes into; `None` for one that brings no parameter.
    fn destination(&self, manifest: &Manifest, index: usize) -> Result<Option<usize>> {
        if manifest.is_second_name(index) {
            return Ok(None);
        }
        self.shadow.index_of(&manifest.tensors()[index].mapping)
    }
}

/// How the bytes of a tensor are rows of the parameters that it brings.
fn row_layout(entry: &TensorEntry) -> RowLayout {
    let (_, columns) = matrix_shape(&entry.shape);
    RowLayout { dtype: entry.dtype, columns }
}

impl InPlace {
    /// The state after what has come so far.
    fn new(receipts: &[Receipt]) -> Self {
        let kept = receipts.iter().filter(|receipt| receipt.is_kept()).map(|receipt| receipt.bytes() as u64).sum();
        let complete = (0..receipts.len()).filter(|&i| receipts[i].verified().is_some()).collect();
        Self { kept, complete, next: 0 }
    }

    /// Notes the memory of `bytes` that the tensor `name` takes with its first byte.
    fn keep(&mut self, name: &str, bytes: u64, limit: u64) -> Result<()> {
        let kept = self.kept + bytes;
        if kept > limit {
            return Err(Error::ResourceExhausted(format!(
                "tensor {name:?} is begun while others are not whole; in place, {} are set aside for them: send one \
                 after the other",
                human_bytes(limit)
            )));
        }
        self.kept = kept;
        Ok(())
    }
}

/// The end of the push, after the last byte.
impl Receiver {
    /// Reads the tensors that come from files and have not been read, checks that every tensor is whole and verified,
    /// and makes the update of them. Tensors that [`Receiver::take_complete`] gave are not in it.
    ///
    /// # Errors
    /// `DataLoss` naming the tensor of another digest; `InvalidArgument` naming one that is missing, incomplete or not
    /// finite.
    pub fn finish(mut self) -> Result<Received> {
        self.close()?;
        self.manifest.check_complete()?;
        self.read_rest()?;
        let digests = self.digests()?;
        self.manifest.check_head(|i| Some(digests[i]))?;
        let mut hasher = Hasher::new();
        self.manifest.by_name().into_iter().for_each(|i| hasher.write(&digests[i]));
        let (digest, bytes) = (hasher.finish_128().to_be_bytes(), self.manifest.declared());
        let (update, parameters) = self.into_update()?;
        Ok(Received { update, digest, bytes, parameters })
    }

    /// Takes the tensors that have been declared for all, although more may have been announced.
    fn close(&mut self) -> Result<()> {
        if self.manifest.is_final() {
            return Ok(());
        }
        let announced = self.manifest.total();
        self.manifest.close();
        self.adapter.check(&self.manifest)?;
        self.adapter.check_reserved(announced)
    }

    /// Reads the tensors that come from files and have not been read.
    fn read_rest(&mut self) -> Result<()> {
        if let Mode::Packed(_) = self.mode {
            return self.read_declared();
        }
        let mut rest = Vec::new();
        for ((index, receipt), tensor) in self.receipts.iter_mut().enumerate().zip(self.manifest.tensors()) {
            if let Some(file) = self.source.file(index).filter(|_| receipt.is_untouched()) {
                rest.push((tensor.bytes, (receipt, file, &tensor.entry)));
            }
        }
        in_parallel(rest, |(receipt, file, entry)| receipt.read(&entry.name, file, entry.offset))
    }

    /// The verified digest of every tensor.
    fn digests(&self) -> Result<Vec<Digest>> {
        let digest = |(receipt, tensor): (&Receipt, &Declared)| {
            receipt.digest().ok_or_else(|| {
                let (name, received, bytes) = (&tensor.entry.name, receipt.received(), receipt.bytes());
                Error::invalid("tensors", format!("tensor {name:?} is not whole: {received} of its {bytes} bytes came"))
            })
        };
        self.receipts.iter().zip(self.manifest.tensors()).map(digest).collect()
    }

    /// The update, all of whose tensors are verified, and how many parameters it brings.
    fn into_update(mut self) -> Result<(WeightUpdate, usize)> {
        let parameters = self.manifest.covered();
        Ok(match (self.manifest.kind(), std::mem::replace(&mut self.mode, Mode::Kept)) {
            (UpdateKind::Lora, _) => {
                let adapter = self.adapter.build(self.manifest.tensors(), &self.receipts)?;
                let parameters = adapter.parameters().count();
                (WeightUpdate::Lora(Arc::new(adapter)), parameters)
            }
            (UpdateKind::Full, Mode::Packed(packing)) => (WeightUpdate::Packed(packing.shadow), parameters),
            (UpdateKind::Full, _) => {
                let tensors = self.take_tensors(0..self.receipts.len());
                (WeightUpdate::Full(Arc::new(tensors)), parameters)
            }
            (UpdateKind::Delta, _) => (WeightUpdate::Delta(Arc::new(self.decode_delta()?)), parameters),
        })
    }

    /// The changes of the tensors of a DELTA.
    fn decode_delta(&mut self) -> Result<Delta> {
        let payload = |(index, receipt): (usize, &mut Receipt)| {
            let Declared { entry, mapping, .. } = &self.manifest.tensors()[index];
            let parameter = (!self.manifest.is_second_name(index)).then(|| mapping.parts[0].parameter.as_str());
            Payload { parameter, entry, bytes: receipt.take().expect("DELTA tensors are not taken before") }
        };
        Delta::decode(self.receipts.iter_mut().enumerate().map(payload).collect())
    }
}
