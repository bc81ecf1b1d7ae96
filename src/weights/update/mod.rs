//! A push on its way in: declared, received, verified; nothing here touches the weights that serve.

use std::path::Path;
use std::sync::Arc;

use super::lora::Adapter;
use super::parameters::Parameters;
use super::shard::Slice;
use super::tensor::{Dtype, TensorData};
use crate::error::Result;

/// What a push brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateKind {
    Lora,
    Full,
    Delta,
}

/// One tensor as the sender declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    /// XXH3-128, big-endian, of the bytes as transported.
    pub digest: [u8; 16],
    /// `Delta`: elements of the payload, and its bytes.
    pub payload: Option<(u64, u64)>,
    /// Shared memory: where its bytes start.
    pub offset: u64,
}

/// Where the tensors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// [`Receiver::write`].
    Inline,
    /// A file of this name below `/dev/shm`.
    SharedMemory(String),
    /// A directory below `--weights-dir`.
    Directory(String),
}

/// What the header of a push says about its tensors.
#[derive(Clone, Debug)]
pub struct UpdateSpec {
    pub kind: UpdateKind,
    /// LORA: `adapter_config.json` (with `Source::Directory` it is read from there).
    pub adapter_config: String,
    /// LORA: is to stay resident unmerged.
    pub unmerged: bool,
    pub tensors: Vec<TensorEntry>,
    /// Of all tensors, those declared later too.
    pub total_bytes: Option<u64>,
    pub source: Source,
}

/// A verified push.
#[derive(Clone, Debug)]
pub enum WeightUpdate {
    /// The base with this adapter merged.
    Lora(Arc<Adapter>),
    /// Every parameter.
    Full(Arc<Tensors>),
    /// Changed elements.
    Delta(Arc<Delta>),
}

/// New values of whole parameters, by the model's names (unfused, unprefixed).
#[derive(Debug, Default)]
pub struct Tensors {}

impl Tensors {
    /// Names of the parameters, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    /// Values of a slice; None if it has not this parameter.
    pub fn read(&self, _parameter: &str, _slice: &Slice) -> Option<TensorData<'_>> {
        todo!()
    }
}

/// New values of single elements.
#[derive(Debug, Default)]
pub struct Delta {}

/// Of one parameter.
#[derive(Debug)]
pub struct Changes<'a> {
    /// Flat row-major indices into the whole parameter, ascending, no duplicates.
    pub indices: &'a [u64],
    pub values: TensorData<'a>,
}

impl Delta {
    /// Names of the parameters with changes, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    pub fn changes(&self, _parameter: &str) -> Option<Changes<'_>> {
        todo!()
    }
}

/// What has come of a push.
#[derive(Clone, Debug)]
pub struct Received {
    pub update: WeightUpdate,
    /// XXH3-128 over all digests in the order of the tensors' names.
    pub digest: [u8; 16],
    /// Of the tensors as transported.
    pub bytes: u64,
    /// Parameters that it brings.
    pub parameters: usize,
}

/// Receives one push.
pub struct Receiver {}

impl Receiver {
    /// Checks what is declared and opens the source; takes no memory for tensors yet.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or field; `NotFound` for a segment or directory that is not there.
    pub fn open(_spec: UpdateSpec, _parameters: Arc<Parameters>, _weights_dir: Option<&Path>) -> Result<Self> {
        todo!()
    }

    /// Most memory that it and its [`Received`] will hold at any time. `in_place`: with [`Receiver::take_complete`]
    /// after each write.
    pub fn staging_bytes(&self, _in_place: bool) -> u64 {
        todo!()
    }

    /// Declares further tensors.
    ///
    /// # Errors
    /// As for [`Receiver::open`]; also if they pass the announced total.
    pub fn declare(&mut self, _tensors: Vec<TensorEntry>) -> Result<()> {
        todo!()
    }

    /// Takes bytes of a declared tensor. They may come in any order; each byte once.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such tensor, or the bytes are outside it or were sent before; `DataLoss` if
    /// they complete a tensor whose digest is another.
    pub fn write(&mut self, _tensor: u32, _offset: u64, _data: &[u8]) -> Result<()> {
        todo!()
    }

    /// FULL in place: the verified tensors that have become complete since the last call, if any; their memory goes
    /// when they are dropped.
    pub fn take_complete(&mut self) -> Option<Tensors> {
        todo!()
    }

    /// Verifies all that has not been: that every tensor is there whole, its digest and that its values are finite.
    /// Reads the tensors first where the source is no stream. After [`Receiver::take_complete`] what was taken is not in
    /// the result.
    ///
    /// # Errors
    /// `DataLoss` naming the tensor of another digest; `InvalidArgument` naming one that is missing, incomplete or not
    /// finite.
    pub fn finish(self) -> Result<Received> {
        todo!()
    }
}
