//! New weights from a trainer. A push passes through four states, each a type:
//!
//! ```text
//! header ─> DeclaredPush      names, dtypes and shapes fit the model; the source is open; no memory is taken
//!             │ receive(mode) the engine has reserved StagingBytes and chosen how the tensors are received
//!           ReceivingPush     declare: further tensors · write: chunks · files are read as they are declared or last
//!             │   Stage       PushedTensor::gather: each tensor is kept, and verified when whole
//!             │   InPlace     the same, and each verified tensor is returned at once, to be written over the weights
//!             │   Pack        PushedTensor::stream: rows in order ─> ShadowTensor::write_rows, verified on the way
//!             │ finish        every tensor is whole and verified
//!           VerifiedPush      the WeightUpdate and its digest
//!             │ CommitUpdate  the engine applies it between two steps, or not at all
//!           committed
//! ```
//!
//! Nothing here touches the weights that serve. `transport` has a file for each transport, and `verify` says what is
//! verified of a tensor.

mod adapter;
mod chain;
mod delta;
mod manifest;
mod packing;
mod staging;
mod tensor;
mod threads;
mod transport;
mod verify;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::lora::AdapterSpec;
use super::parameters::Parameters;
use super::update::{
    DeltaStore, ReceivedTensor, ShadowWeights, Source, StoredUpdate, StoredVersion, TensorEntry, Tensors, UpdateHeader,
    UpdateKind, WeightUpdate,
};
use crate::error::{Error, Result};
use crate::memory::{Traffic, human_bytes};
use chain::DeltaLink;
use manifest::Manifest;
use packing::PackedPush;
use staging::Limits;
use tensor::PushedTensor;
use transport::OpenSource;
use transport::delta_store::{self, Chain, StoredDelta, WholeVersion};
use transport::patched::{PatchedVersion, patched};

pub(crate) use manifest::most_announced;
pub use staging::StagingBytes;
pub(crate) use transport::broadcast::{BROADCAST_BUFFER_BYTES, largest_broadcast};
pub use transport::patched::ServingWeights;
pub use transport::{Segments, Sources};

/// A push whose header and declared tensors fit the model. It has no memory for tensors yet.
pub struct DeclaredPush {
    header: Arc<UpdateHeader>,
    manifest: Manifest,
    source: OpenSource,
    /// The checked adapter of a LORA push, once all its tensors are declared. `None` for a push of nothing, which means
    /// the base.
    adapter: Option<AdapterSpec>,
    limits: Limits,
    /// Counts the memory for reading the configuration.
    traffic: Traffic,
    /// Of a push from a delta store.
    stored: Option<StoredChain>,
}

/// The part of a push from a delta store that is not a whole version.
struct StoredChain {
    /// The changes of elements, the oldest first: of the whole version, or of the policy that serves.
    deltas: Vec<DeltaLink>,
    version: StoredVersion,
    /// Whether the version is a whole one, whose digest is that of its tensors.
    is_whole: bool,
    /// Most bytes that computing patched tensors takes.
    staging: u64,
}

/// How the tensors of a push are received, which is chosen when its memory has been reserved.
#[derive(Debug)]
pub enum ReceiveMode {
    /// Every tensor is kept until the push is verified.
    Stage,
    /// FULL: every tensor is packed into shadow weights, row by row.
    Pack(ShadowWeights),
    /// FULL: every tensor is written over the weights when it is whole and verified.
    InPlace,
}

/// A push whose tensors come. After an error the push is over, and this can only be dropped.
pub struct ReceivingPush {
    push: DeclaredPush,
    mode: Mode,
}

enum Mode {
    Stage,
    Pack(PackedPush),
    InPlace {
        /// Bytes of the tensors that have begun and are not whole.
        kept: u64,
        /// Index of the first tensor that has not been read, where tensors come from files.
        next: usize,
    },
}

/// A push that has come as a whole, ready to be committed.
#[derive(Debug)]
pub struct VerifiedPush {
    pub update: WeightUpdate,
    /// XXH3-128, big-endian, over the digests of all tensors in the order of their names.
    pub digest: [u8; 16],
    /// Digest of the values that a FULL push brings for the vision tower; `None` if it brings none.
    pub tower: Option<[u8; 16]>,
    /// Bytes of all tensors as transported.
    pub bytes: u64,
    /// How many parameters of the model the push brings.
    pub parameters: usize,
}

impl DeclaredPush {
    /// Checks the declarations of the header, and opens the source.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or field; `NotFound` for a segment, directory or allocation that is not
    /// there; `FailedPrecondition` for device memory that is on no device of this server.
    pub fn open(
        header: Arc<UpdateHeader>,
        tensors: Vec<TensorEntry>,
        parameters: Arc<Parameters>,
        sources: &Sources,
    ) -> Result<Self> {
        if header.kind != UpdateKind::Lora && !header.adapter_config.is_empty() {
            return Err(Error::invalid("adapter_config", "only a LORA push has an adapter"));
        }
        if let Source::DeltaStore(store) = &header.source {
            return Self::open_stored(&header, store, &tensors, parameters, sources);
        }
        let (source, declared) = OpenSource::open(&header, tensors, sources, parameters.len())?;
        Self::of_source(header, source, declared, parameters, sources)
    }

    /// A push of a version of a delta store: of changes only, if the policy that serves is a version that they lead
    /// from, else of every parameter.
    fn open_stored(
        header: &UpdateHeader,
        store: &DeltaStore,
        tensors: &[TensorEntry],
        parameters: Arc<Parameters>,
        sources: &Sources,
    ) -> Result<Self> {
        if !tensors.is_empty() {
            return Err(Error::invalid("source.directory", "the store declares the tensors; leave them out"));
        }
        let Chain { base, deltas, version } = delta_store::open(store, sources, &parameters)?;
        let mut header = header.clone();
        let serving = store.serving.filter(|_| base.is_none());
        header.source = Source::DeltaStore(DeltaStore { serving, ..store.clone() });
        let is_whole = base.is_some() && deltas.is_empty();
        let (base, deltas, staging) = if deltas.iter().any(StoredDelta::is_of_bytes) {
            let PatchedVersion { whole, staging } = patched(base, deltas, &parameters, sources)?;
            (Some(whole), Vec::new(), staging)
        } else {
            (base, deltas, 0)
        };
        let deltas = deltas.into_iter().map(|delta| DeltaLink::new(delta, parameters.clone()));
        let stored = StoredChain { deltas: deltas.collect::<Result<_>>()?, version, is_whole, staging };
        header.kind = if base.is_some() { UpdateKind::Full } else { UpdateKind::Delta };
        let (source, declared) = match base {
            Some(WholeVersion { tensors, files, charge }) => (OpenSource::of_files(files, charge), tensors),
            None => (OpenSource::of_files(Vec::new(), sources.traffic.charge(0)?), Vec::new()),
        };
        let push = Self::of_source(Arc::new(header), source, declared, parameters, sources)?;
        Ok(Self { stored: Some(stored), ..push })
    }

    fn of_source(
        header: Arc<UpdateHeader>,
        source: OpenSource,
        declared: Vec<TensorEntry>,
        parameters: Arc<Parameters>,
        sources: &Sources,
    ) -> Result<Self> {
        let mut push = Self {
            manifest: Manifest::new(&header, parameters),
            source,
            adapter: None,
            limits: Limits::default(),
            traffic: sources.traffic.clone(),
            stored: None,
            header,
        };
        push.add(declared)?;
        if push.header.kind == UpdateKind::Delta && !push.manifest.is_final() {
            // The bytes that later tensors decompress to could not be reserved.
            return Err(Error::invalid("total_bytes", "a DELTA declares all its tensors in the header"));
        }
        push.manifest.check_total()?;
        push.limits = Limits::new(&push.manifest, push.header.source == Source::Inline)?;
        Ok(push)
    }

    /// The header, which says what a push from a delta store changes.
    pub fn header(&self) -> &Arc<UpdateHeader> {
        &self.header
    }

    /// The memory to reserve for the push.
    pub fn staging(&self) -> StagingBytes {
        let staging = self.limits.staging(&self.manifest, self.adapter.as_ref(), self.source.transit(&self.header));
        let stored = self.stored.as_ref().map_or(0, StoredChain::staging);
        StagingBytes { staged: staging.staged.saturating_add(stored), ..staging }
    }

    /// Begins to receive the push. Tensors that are packed and come from files are read now.
    ///
    /// # Errors
    /// As for [`ReceivingPush::finish`].
    ///
    /// # Panics
    /// If the mode is for a FULL push and this is of another kind.
    pub fn receive(self, mode: ReceiveMode) -> Result<ReceivingPush> {
        let is_for_full = !matches!(mode, ReceiveMode::Stage);
        assert!(self.header.kind == UpdateKind::Full || !is_for_full, "only a FULL push is packed or written in place");
        let mode = match mode {
            ReceiveMode::Stage => Mode::Stage,
            ReceiveMode::Pack(shadow) => Mode::Pack(PackedPush::new(shadow, self.limits.early)),
            ReceiveMode::InPlace => Mode::InPlace { kept: 0, next: 0 },
        };
        let mut receiving = ReceivingPush { push: self, mode };
        receiving.pack_files()?;
        Ok(receiving)
    }

    fn add(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        self.manifest.add(tensors, &mut self.source)?;
        if self.manifest.is_final() { self.check_adapter() } else { Ok(()) }
    }

    fn check_adapter(&mut self) -> Result<()> {
        if self.header.kind == UpdateKind::Lora {
            let config = self.source.adapter_config(&self.header);
            self.adapter = adapter::check(config, &self.manifest, &self.traffic)?;
        }
        Ok(())
    }
}

impl ReceivingPush {
    /// Declares further tensors. Those that are packed and come from files are read now.
    ///
    /// # Errors
    /// As for [`DeclaredPush::open`]; also if the tensors pass the announced total.
    pub fn declare(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        if matches!(self.push.header.source, Source::Directory(_) | Source::DeltaStore(_)) {
            return Err(Error::invalid("tensors", "the directory declares the tensors"));
        }
        if tensors.is_empty() {
            return Ok(());
        }
        self.push.add(tensors)?;
        adapter::check_reserved(self.push.adapter.as_ref(), self.push.manifest.total())?;
        self.pack_files()
    }

    /// Takes bytes of a declared tensor. They may come in any order; each byte once. In place, returns the parameters
    /// of a tensor that is whole with them, which must be dropped before the next write.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such tensor, or the bytes are outside it or were sent before; `DataLoss` if
    /// they complete a tensor whose digest is another, `InvalidArgument` if one with a value that is not finite.
    /// `ResourceExhausted` if more is begun at a time, or comes too early, than memory is reserved for.
    pub fn write(&mut self, tensor: u32, offset: u64, data: &[u8]) -> Result<Option<Tensors>> {
        let DeclaredPush { manifest, source, limits, .. } = &mut self.push;
        if !source.is_chunks() {
            return Err(Error::invalid("chunk", "the tensors of this push come from its source, not from the stream"));
        }
        let (index, declared) = (tensor as usize, manifest.tensors.len());
        let Some(tensor) = manifest.tensors.get_mut(index) else {
            return Err(Error::invalid("chunk", format!("there is no tensor {tensor}; {declared} are declared")));
        };
        match &mut self.mode {
            Mode::Stage => _ = tensor.gather(offset, data)?,
            Mode::Pack(packing) => packing.write(manifest, index, offset, data)?,
            Mode::InPlace { kept, .. } => {
                if tensor.is_untouched() && !data.is_empty() {
                    *kept += tensor.bytes as u64;
                    check_kept(tensor, *kept, limits.in_place)?;
                }
                if tensor.gather(offset, data)? {
                    *kept -= tensor.bytes as u64;
                    return Ok(Some(take_tensors(manifest, index..index + 1)).filter(|tensors| !tensors.is_empty()));
                }
            }
        }
        Ok(None)
    }

    /// Reads the next tensor of a push in place that comes from files, and returns its parameters; `None` if all have
    /// been read. A tensor without parameters of its own is passed over.
    ///
    /// # Errors
    /// As for [`ReceivingPush::finish`].
    pub fn read_next(&mut self) -> Result<Option<Tensors>> {
        let (Mode::InPlace { next, .. }, manifest) = (&mut self.mode, &mut self.push.manifest) else { return Ok(None) };
        while let Some(tensor) = manifest.tensors.get_mut(*next).filter(|tensor| tensor.file().is_some()) {
            tensor.read()?;
            *next += 1;
            let tensors = take_tensors(manifest, *next - 1..*next);
            if !tensors.is_empty() {
                return Ok(Some(tensors));
            }
        }
        Ok(None)
    }

    /// Reads the tensors that come from files and have not been read, checks that every tensor is whole and verified,
    /// and makes the update of them. Tensors that were returned before are not in it.
    ///
    /// # Errors
    /// `DataLoss` naming the tensor of another digest; `InvalidArgument` naming one that is missing, incomplete or not
    /// finite.
    pub fn finish(mut self) -> Result<VerifiedPush> {
        self.close()?;
        self.push.manifest.check_complete()?;
        self.read_files()?;
        let DeclaredPush { header, mut manifest, adapter, stored, .. } = self.push;
        let (digest, bytes) = (manifest.digest()?, manifest.declared);
        let tower = if header.kind == UpdateKind::Full { manifest.tower_digest()? } else { None };
        manifest.check_head(PushedTensor::digest)?;
        let mut parameters = manifest.covered();
        let update = match (header.kind, self.mode) {
            (UpdateKind::Lora, _) => {
                let adapter = adapter::build(adapter, &manifest);
                if header.adapter.is_some() {
                    adapter.check_unmerged()?;
                }
                parameters = adapter.parameters().count();
                WeightUpdate::Lora(Arc::new(adapter))
            }
            (UpdateKind::Full, Mode::Pack(packing)) => {
                let mut shadow = packing.shadow;
                shadow.keep(manifest.missing().map(|spec| spec.name.clone()).collect());
                WeightUpdate::Packed(shadow)
            }
            (UpdateKind::Full, _) => {
                let all = 0..manifest.tensors.len();
                WeightUpdate::Full(Arc::new(take_tensors(&mut manifest, all)))
            }
            (UpdateKind::Delta, _) => WeightUpdate::Delta(Arc::new(delta::decode_all(&mut manifest)?)),
        };
        let push = VerifiedPush { update, digest, tower, bytes, parameters };
        if let Some(stored) = stored { stored.finish(push, &manifest) } else { Ok(push) }
    }

    /// Takes the tensors that have been declared for all, although more may have been announced.
    fn close(&mut self) -> Result<()> {
        if self.push.manifest.is_final() {
            return Ok(());
        }
        let announced = self.push.manifest.total();
        self.push.manifest.close();
        self.push.check_adapter()?;
        adapter::check_reserved(self.push.adapter.as_ref(), announced)
    }

    /// Packs the tensors that come from files and have been declared since the last call.
    fn pack_files(&mut self) -> Result<()> {
        match &mut self.mode {
            Mode::Pack(packing) if !self.push.source.is_chunks() => packing.read_files(&mut self.push.manifest),
            _ => Ok(()),
        }
    }

    /// Reads the tensors that come from files and have not been read.
    fn read_files(&mut self) -> Result<()> {
        let unread = self.push.manifest.tensors.iter_mut().filter(|t| t.file().is_some() && t.is_untouched());
        threads::in_parallel(unread.map(|tensor| (tensor.bytes, tensor)).collect(), PushedTensor::read)
    }
}

impl StoredChain {
    /// Most bytes that reading and decoding the changes takes.
    fn staging(&self) -> u64 {
        self.deltas.iter().map(DeltaLink::staging).fold(self.staging, u64::saturating_add)
    }

    /// Reads, verifies and decodes the changes, and adds them to the push of the whole version, if there is one.
    fn finish(self, push: VerifiedPush, manifest: &Manifest) -> Result<VerifiedPush> {
        let Self { deltas, mut version, is_whole, .. } = self;
        if is_whole {
            version.digest = push.digest;
        }
        let has_base = manifest.kind == UpdateKind::Full;
        let base = has_base.then(|| Box::new(push.update));
        let mut names = HashSet::new();
        deltas.iter().for_each(|delta| delta.add_names(&mut names));
        let parameters = if has_base { push.parameters } else { names.len() };
        let bytes = deltas.iter().map(DeltaLink::bytes).sum::<u64>() + push.bytes;
        let deltas = deltas.into_iter().map(|delta| Ok(Arc::new(delta.decode()?))).collect::<Result<_>>()?;
        let update = WeightUpdate::Stored(StoredUpdate { base, deltas, version });
        Ok(VerifiedPush { update, digest: version.digest, tower: push.tower, bytes, parameters })
    }
}

/// Checks that no more than `limit` bytes are `kept` with `tensor`, which begins.
fn check_kept(tensor: &PushedTensor, kept: u64, limit: u64) -> Result<()> {
    if kept <= limit {
        return Ok(());
    }
    let (name, limit) = (tensor.name(), human_bytes(limit));
    Err(Error::ResourceExhausted(format!(
        "tensor {name:?} is begun while others are not whole; in place, {limit} are set aside for them: send one after \
         the other"
    )))
}

/// Takes those of these tensors that are kept and verified, as parameters.
fn take_tensors(manifest: &mut Manifest, indices: Range<usize>) -> Tensors {
    let mut tensors = Tensors::default();
    for index in indices {
        let is_second_name = manifest.is_second_name(index);
        let pushed = &mut manifest.tensors[index];
        let Some(bytes) = pushed.take().filter(|_| !is_second_name) else { continue };
        let tensor = Arc::new(ReceivedTensor { layout: pushed.layout(), bytes });
        for part in &pushed.mapping.parts {
            tensors.insert(part.parameter.clone(), tensor.clone(), part.first_row);
        }
    }
    tensors
}

#[cfg(test)]
mod tests;
