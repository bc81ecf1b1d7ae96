//! Receives one push.

mod packing;

use std::sync::Arc;

use twox_hash::xxhash3_128::Hasher;

use super::delta::{self, Decoded, Delta};
use super::directory;
use super::files::SourceFile;
use super::manifest::{Declared, Manifest};
use super::names;
use super::receipt::{MOST_THREADS, Slot, in_parallel};
use super::shadow::ShadowWeights;
use super::tensors::{Staged, Tensors};
use super::{Received, Source, Sources, TensorEntry, UpdateKind, UpdateSpec, WeightUpdate};
use crate::error::{Error, Result};
use crate::memory::human_bytes;
use crate::weights::lora::{Adapter, AdapterSpec, AdapterTensor};
use crate::weights::{Parameters, Slice, TensorData, matrix_shape};

/// An adapter is float32 once it is read, so no more than this many times its tensors as transported.
const ADAPTER_GROWTH: u64 = 2;
/// Most bytes that a FULL push may announce for buffers that the model does not need.
const BUFFER_BYTES: u64 = 64 << 20;
/// Most bytes of a FULL push in the stream that wait for those before them. A sender that goes through each tensor in
/// order needs none.
const EARLY_BYTES: u64 = 64 << 20;

/// Receives one push. After an error the push is over: it can only be dropped.
pub struct Receiver {
    manifest: Manifest,
    /// One for each tensor of the manifest.
    slots: Vec<Slot>,
    origin: Origin,
    adapter_config: String,
    unmerged: bool,
    /// LORA, once all tensors are declared.
    plan: Option<AdapterSpec>,
    /// FULL: what the tensors are packed into; else they are kept.
    stage: Option<ShadowWeights>,
    /// Bytes of the parameters as they serve, on all ranks.
    serving_bytes: u64,
    /// Most bytes that wait for those before them, with a stage.
    early_bytes: u64,
    /// Most bytes that it holds at a time in place.
    in_place_bytes: u64,
    /// Once [`Receiver::take_complete`] was called.
    in_place: bool,
    /// Bytes of the slots that hold memory; with a stage, bytes that wait for those before them.
    held: u64,
    /// Tensors that have become whole and were not taken.
    complete: Vec<usize>,
    /// First tensor that has not been read from the source in place, or packed from it.
    next: usize,
    /// What each thread that packs files reads into.
    pieces: [Vec<u8>; MOST_THREADS],
}

/// Where the bytes are read from.
struct Origin {
    /// None: the stream.
    files: Vec<SourceFile>,
    /// Index of each tensor's file, where there are several.
    places: Vec<usize>,
    /// Whether the tensors' digests are the sender's; a directory has none.
    has_digests: bool,
}

impl Origin {
    fn file(&self, tensor: usize) -> Option<&SourceFile> {
        self.files.get(self.places.get(tensor).copied().unwrap_or(0))
    }
}

impl Receiver {
    /// Checks what is declared and opens the source; takes no memory for tensors yet.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or field; `NotFound` for a segment or directory that is not there.
    pub fn open(spec: UpdateSpec, parameters: Arc<Parameters>, sources: &Sources) -> Result<Self> {
        let UpdateSpec { kind, mut adapter_config, unmerged, mut tensors, total_bytes, source } = spec;
        if kind != UpdateKind::Lora && !adapter_config.is_empty() {
            return Err(Error::invalid("adapter_config", "only a LORA push has an adapter"));
        }
        let mut origin = Origin { files: Vec::new(), places: Vec::new(), has_digests: true };
        match source {
            Source::Inline => {}
            Source::SharedMemory(name) => {
                origin.files.push(SourceFile::mapped(&name, sources.segments.open(&name)?));
            }
            Source::Directory(path) => {
                if !tensors.is_empty() || !adapter_config.is_empty() {
                    return Err(Error::invalid(
                        "source.directory",
                        "the directory declares the tensors and the adapter's configuration; leave both out",
                    ));
                }
                let directory = directory::open(kind, &path, sources.weights_dir.as_deref())?;
                origin = Origin { files: directory.files, places: directory.places, has_digests: false };
                (tensors, adapter_config) = (directory.tensors, directory.adapter_config);
            }
        }
        let serving_bytes = parameters.iter().map(|spec| parameters.bytes_on_ranks(spec)).sum::<Result<u64>>()?;
        let mut receiver = Self {
            manifest: Manifest::new(kind, parameters, total_bytes),
            slots: Vec::new(),
            origin,
            adapter_config,
            unmerged,
            plan: None,
            stage: None,
            serving_bytes,
            early_bytes: 0,
            in_place_bytes: 0,
            in_place: false,
            held: 0,
            complete: Vec::new(),
            next: 0,
            pieces: Default::default(),
        };
        receiver.add(tensors)?;
        if kind == UpdateKind::Delta && !receiver.manifest.is_final() {
            // What the rest decompresses to could not be set aside.
            return Err(Error::invalid("total_bytes", "a DELTA declares all its tensors in the header"));
        }
        let (largest, total) = (receiver.largest(), receiver.manifest.total());
        receiver.check_total(total)?;
        // The largest tensor, and as much again so that senders may begin the next before one is whole.
        receiver.in_place_bytes = largest.saturating_mul(2).min(total);
        if receiver.origin.files.is_empty() {
            receiver.early_bytes = EARLY_BYTES.min(largest).min(total);
        }
        Ok(receiver)
    }

    /// FULL: whether there can be as much. The stage does not grow with what is announced, so that nothing else would
    /// refuse nonsense.
    fn check_total(&self, total: u64) -> Result<()> {
        let elements = self.manifest.parameters().iter().map(|spec| spec.shape.iter().product::<usize>() as u64);
        let float32 = elements.sum::<u64>().saturating_mul(size_of::<f32>() as u64);
        // Twice, for a head that is the embedding can come beside it.
        if self.manifest.kind() != UpdateKind::Full || total <= float32.saturating_mul(2).saturating_add(BUFFER_BYTES) {
            return Ok(());
        }
        let what = format!("{total} bytes are announced, but all parameters have {float32} in float32");
        Err(Error::invalid("total_bytes", what))
    }

    /// Most memory that it and its [`Received`] will hold at any time, of FULL with its stage. `in_place`: with
    /// [`Receiver::take_complete`] after each write, if what it gives is dropped before the next.
    pub fn staging_bytes(&self, in_place: bool) -> u64 {
        let total = self.manifest.total();
        let beside = match self.manifest.kind() {
            UpdateKind::Full if in_place => return self.in_place_bytes,
            UpdateKind::Full => return self.serving_bytes.saturating_add(self.early_bytes),
            UpdateKind::Lora => match &self.plan {
                Some(plan) => plan.bytes(),
                None => total.saturating_mul(ADAPTER_GROWTH),
            },
            UpdateKind::Delta => self.changes().fold(0, u64::saturating_add),
        };
        total.saturating_add(beside)
    }

    /// Bytes that each tensor of a DELTA decodes to.
    fn changes(&self) -> impl Iterator<Item = u64> {
        self.manifest.tensors().iter().map(|tensor| {
            let (changed, _) = tensor.entry.payload.unwrap_or_default();
            delta::decoded_bytes(changed, tensor.entry.dtype).unwrap_or(u64::MAX)
        })
    }

    /// Bytes of the largest tensor that is or may be declared.
    fn largest(&self) -> u64 {
        let declared = self.slots.iter().map(|slot| slot.bytes() as u64).max().unwrap_or(0);
        // What is declared later can be any tensor of the model, in float32.
        let later = (names::largest(self.manifest.parameters()) as u64).saturating_mul(size_of::<f32>() as u64);
        if self.manifest.is_final() { declared } else { declared.max(later) }
    }

    /// Declares further tensors.
    ///
    /// # Errors
    /// As for [`Receiver::open`]; also if they pass the announced total.
    pub fn declare(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        if !self.origin.has_digests {
            return Err(Error::invalid("tensors", "the directory declares the tensors"));
        }
        if tensors.is_empty() {
            return Ok(());
        }
        self.add(tensors)?;
        self.check_set_aside(self.manifest.total())
    }

    /// LORA: whether the adapter fits into what was set aside when `total` bytes were announced and it was not known.
    fn check_set_aside(&self, total: u64) -> Result<()> {
        let set_aside = total.saturating_mul(ADAPTER_GROWTH);
        match &self.plan {
            Some(plan) if plan.bytes() > set_aside => Err(Error::ResourceExhausted(format!(
                "the adapter takes {} beside its {} of tensors, and only {} were set aside; declare all its tensors in \
                 the header",
                human_bytes(plan.bytes()),
                human_bytes(total),
                human_bytes(set_aside)
            ))),
            _ => Ok(()),
        }
    }

    fn add(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        self.manifest.add(tensors)?;
        let kind = self.manifest.kind();
        for (index, tensor) in self.manifest.tensors().iter().enumerate().skip(self.slots.len()) {
            let entry = &tensor.entry;
            if let Some(file) = self.origin.file(index) {
                file.check(&entry.name, entry.offset, tensor.bytes)?;
            }
            let values = (kind != UpdateKind::Delta).then_some(entry.dtype);
            let digest = self.origin.has_digests.then_some(entry.digest);
            self.slots.push(Slot::new(tensor.bytes, values, digest));
        }
        if self.origin.has_digests {
            self.manifest.check_head(|i| self.manifest.tensors()[i].entry.digest)?;
        }
        if self.manifest.is_final() {
            self.manifest.check_complete()?;
            self.plan_adapter()?;
        }
        Ok(())
    }

    /// LORA: checks the adapter now that all its tensors are declared. No tensors and no configuration: the base.
    fn plan_adapter(&mut self) -> Result<()> {
        let tensors = self.manifest.tensors();
        if self.manifest.kind() != UpdateKind::Lora || tensors.is_empty() && self.adapter_config.is_empty() {
            return Ok(());
        }
        let tensors: Vec<_> = tensors.iter().map(|tensor| AdapterTensor::from(&tensor.entry)).collect();
        self.plan = Some(AdapterSpec::new(&self.adapter_config, &tensors, self.manifest.parameters())?);
        Ok(())
    }

    /// Takes bytes of a declared tensor. They may come in any order; each byte once.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such tensor, or the bytes are outside it or were sent before; `DataLoss` if
    /// they complete a tensor whose digest is another, `InvalidArgument` if one with a value that is not finite.
    /// `ResourceExhausted` in place, if more tensors are begun at a time than there is memory set aside for.
    pub fn write(&mut self, tensor: u32, offset: u64, data: &[u8]) -> Result<()> {
        if !self.origin.files.is_empty() {
            return Err(Error::invalid("chunk", "the tensors of this push come from its source, not from the stream"));
        }
        let index = tensor as usize;
        if index >= self.slots.len() {
            let declared = self.slots.len();
            return Err(Error::invalid("chunk", format!("there is no tensor {tensor}; {declared} are declared")));
        }
        if self.stage.is_some() {
            return self.pack(index, offset, data);
        }
        self.hold(index)?;
        if self.slots[index].write(&self.manifest.tensors()[index].entry.name, offset, data)? {
            self.complete.push(index);
        }
        Ok(())
    }

    /// Notes the memory that tensor `index` takes with its first byte.
    fn hold(&mut self, index: usize) -> Result<()> {
        let slot = &self.slots[index];
        if !slot.is_untouched() {
            return Ok(());
        }
        let held = self.held + slot.bytes() as u64;
        if self.in_place && held > self.in_place_bytes {
            return Err(Error::ResourceExhausted(format!(
                "tensor {:?} is begun while others are not whole; in place, {} are set aside for them: send one after \
                 the other",
                self.manifest.tensors()[index].entry.name,
                human_bytes(self.in_place_bytes)
            )));
        }
        self.held = held;
        Ok(())
    }

    /// Where the source is no stream: reads the next tensor; false if all have been read. For pushes in place, with
    /// [`Receiver::take_complete`] after each; [`Receiver::finish`] reads the rest itself, and faster.
    ///
    /// # Errors
    /// As for [`Receiver::finish`].
    pub fn read_next(&mut self) -> Result<bool> {
        let index = self.next;
        let (Some(file), Some(tensor)) = (self.origin.file(index), self.manifest.tensors().get(index)) else {
            return Ok(false);
        };
        self.slots[index].fill(&tensor.entry.name, file, tensor.entry.offset)?;
        self.held += tensor.bytes as u64;
        self.complete.push(index);
        self.next += 1;
        Ok(true)
    }

    /// FULL in place: the verified tensors that have become complete since the last call, if any; their memory goes
    /// when they are dropped.
    pub fn take_complete(&mut self) -> Option<Tensors> {
        if self.manifest.kind() != UpdateKind::Full {
            return None;
        }
        self.in_place = true;
        let complete = std::mem::take(&mut self.complete);
        self.held -= complete.iter().map(|&i| self.slots[i].bytes() as u64).sum::<u64>();
        let tensors = self.tensors(complete.into_iter());
        (!tensors.is_empty()).then_some(tensors)
    }

    /// The parameters of these verified tensors.
    fn tensors(&mut self, indices: impl Iterator<Item = usize>) -> Tensors {
        let mut tensors = Tensors::default();
        for index in indices {
            let Some(bytes) = self.slots[index].take() else { continue };
            if self.manifest.is_second_name(index) {
                continue;
            }
            let declared = &self.manifest.tensors()[index];
            let (_, columns) = matrix_shape(&declared.entry.shape);
            let staged = Arc::new(Staged { dtype: declared.entry.dtype, columns, bytes });
            for part in &declared.target.parts {
                tensors.insert(part.parameter.clone(), staged.clone(), part.first_row);
            }
        }
        tensors
    }

    /// Verifies all that has not been: that every tensor is there whole, its digest and that its values are finite.
    /// Reads the tensors first where the source is no stream. After [`Receiver::take_complete`] what was taken is not in
    /// the result.
    ///
    /// # Errors
    /// `DataLoss` naming the tensor of another digest; `InvalidArgument` naming one that is missing, incomplete or not
    /// finite.
    pub fn finish(mut self) -> Result<Received> {
        self.close()?;
        self.manifest.check_complete()?;
        self.read_rest()?;
        let digests = self.digests()?;
        self.manifest.check_head(|i| digests[i])?;
        let mut hasher = Hasher::new();
        self.manifest.by_name().into_iter().for_each(|i| hasher.write(&digests[i]));
        let (bytes, kind) = (self.manifest.declared(), self.manifest.kind());
        let (update, parameters) = match kind {
            UpdateKind::Lora => {
                let adapter = self.adapter()?;
                let parameters = adapter.parameters().count();
                (WeightUpdate::Lora(Arc::new(adapter)), parameters)
            }
            UpdateKind::Full if let Some(stage) = self.stage.take() => {
                (WeightUpdate::Packed(stage), self.manifest.covered())
            }
            UpdateKind::Full => {
                let tensors = self.tensors(0..self.slots.len());
                (WeightUpdate::Full(Arc::new(tensors)), self.manifest.covered())
            }
            UpdateKind::Delta => (WeightUpdate::Delta(Arc::new(self.delta()?)), self.manifest.covered()),
        };
        Ok(Received { update, digest: hasher.finish_128().to_be_bytes(), bytes, parameters })
    }

    /// What was announced is the most that may come; what has been declared is all that has.
    fn close(&mut self) -> Result<()> {
        if self.manifest.is_final() {
            return Ok(());
        }
        let announced = self.manifest.total();
        self.manifest.close();
        self.plan_adapter()?;
        self.check_set_aside(announced)
    }

    /// Reads what has not been read where the source is no stream.
    fn read_rest(&mut self) -> Result<()> {
        if self.stage.is_some() {
            return self.read_declared();
        }
        let Self { manifest, slots, origin, .. } = self;
        let mut rest = Vec::new();
        for ((index, slot), tensor) in slots.iter_mut().enumerate().zip(manifest.tensors()) {
            if let Some(file) = origin.file(index).filter(|_| slot.is_untouched()) {
                rest.push((tensor.bytes, (slot, file, &tensor.entry)));
            }
        }
        in_parallel(rest, |(slot, file, entry)| slot.fill(&entry.name, file, entry.offset))
    }

    /// The verified digest of every tensor.
    fn digests(&self) -> Result<Vec<[u8; 16]>> {
        let digest = |(slot, tensor): (&Slot, &Declared)| {
            slot.digest().ok_or_else(|| {
                let (name, received, bytes) = (&tensor.entry.name, slot.received(), slot.bytes());
                Error::invalid("tensors", format!("tensor {name:?} is not whole: {received} of its {bytes} bytes came"))
            })
        };
        self.slots.iter().zip(self.manifest.tensors()).map(digest).collect()
    }

    fn adapter(&mut self) -> Result<Adapter> {
        let Some(plan) = self.plan.take() else { return Ok(Adapter::none()) };
        let (tensors, slots) = (self.manifest.tensors(), &self.slots);
        let adapter = plan.build(&|i| {
            let entry = &tensors[i].entry;
            let bytes = slots[i].buffer().expect("LORA tensors are not taken");
            let whole = Slice::whole(&entry.shape);
            TensorData::of_bytes(entry.dtype, bytes, whole.cols.end, &whole)
        });
        if self.unmerged {
            adapter.check_unmerged()?;
        }
        Ok(adapter)
    }

    fn delta(&mut self) -> Result<Delta> {
        let mut decoded: Vec<Option<Decoded>> = self.slots.iter().map(|_| None).collect();
        let mut work = Vec::new();
        for ((slot, tensor), out) in self.slots.iter_mut().zip(self.manifest.tensors()).zip(&mut decoded) {
            let (changed, _) = tensor.entry.payload.unwrap_or_default();
            work.push((changed as usize, (slot, &tensor.entry, changed as usize, out)));
        }
        in_parallel(work, |(slot, entry, changed, out)| {
            // The compressed bytes go as soon as they have been read.
            let payload = slot.take().expect("DELTA tensors are not taken before");
            let elements = entry.shape.iter().product();
            *out = Some(delta::decode(&entry.name, &payload, entry.dtype, changed, elements)?);
            Ok(())
        })?;
        let mut delta = Delta::default();
        for (index, (decoded, tensor)) in decoded.into_iter().zip(self.manifest.tensors()).enumerate() {
            if let (Some(decoded), false) = (decoded, self.manifest.is_second_name(index)) {
                let parameter = &tensor.target.parts[0].parameter;
                delta.insert(parameter.clone(), decoded);
            }
        }
        Ok(delta)
    }
}
