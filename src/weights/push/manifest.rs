//! The tensors that the sender of a push has declared, checked against the model.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use twox_hash::xxhash3_128::Hasher;

use super::tensor::PushedTensor;
use super::transport::OpenSource;
use super::verify::Digest;
use crate::error::{Error, Result};
use crate::weights::parameters::{
    Dtype, EMBEDDING, ParamSpec, ParameterMapping, Parameters, is_of_tower, nearest, resolve, stored_with,
};
use crate::weights::update::{TensorEntry, UpdateHeader, UpdateKind};

/// Most tensors of a push: more than any model has, mixtures of experts with an adapter on each included.
const MAX_TENSORS: usize = 1 << 20;
/// Most bytes of a tensor's name, because errors repeat it.
const MAX_NAME_BYTES: usize = 512;
/// Most dimensions of a tensor, because errors repeat its shape.
const MAX_DIMENSIONS: usize = 8;
/// Most bytes of one buffer that the model does not need.
const MAX_BUFFER_BYTES: usize = 1 << 20;
/// Most bytes that a FULL push may announce for buffers that the model does not need.
const BUFFER_BYTES: u64 = 64 << 20;

/// The tensors of a push that have been declared so far.
pub(super) struct Manifest {
    pub kind: UpdateKind,
    pub parameters: Arc<Parameters>,
    pub tensors: Vec<PushedTensor>,
    names: HashSet<String>,
    /// The index of the tensor that brings a parameter, by the parameter's name.
    covered: HashMap<String, usize>,
    /// In a model whose head is the embedding: the index of the tensor that is named as the head.
    head: Option<usize>,
    /// Bytes of the declared tensors.
    pub declared: u64,
    /// Whether parameters of the vision tower may be missing.
    keep_missing: bool,
    /// Bytes of all tensors that will be declared, once that is known.
    announced: Option<u64>,
}

/// Most bytes that a FULL push may announce.
pub(crate) fn most_announced(parameters: &Parameters) -> u64 {
    // Twice, because a head that is the embedding can come beside it.
    float32_bytes(parameters).saturating_mul(2).saturating_add(BUFFER_BYTES)
}

/// Bytes of all parameters in float32, ignored ones too.
fn float32_bytes(parameters: &Parameters) -> u64 {
    let elements = parameters.pushable().map(|spec| spec.shape.iter().product::<usize>() as u64);
    elements.sum::<u64>().saturating_mul(size_of::<f32>() as u64)
}

fn refuse(message: String) -> Error {
    Error::invalid("tensors", message)
}

impl Manifest {
    /// An empty manifest for a push with this header. If the header has no number of bytes, the first
    /// [`Manifest::add`] declares all tensors.
    pub fn new(header: &UpdateHeader, parameters: Arc<Parameters>) -> Self {
        Self {
            kind: header.kind,
            parameters,
            tensors: Vec::new(),
            names: HashSet::new(),
            covered: HashMap::new(),
            head: None,
            declared: 0,
            keep_missing: header.keep_missing,
            announced: header.total_bytes,
        }
    }

    /// Bytes of all tensors of the push, those that will be declared later among them.
    pub fn total(&self) -> u64 {
        self.announced.unwrap_or(self.declared)
    }

    /// Whether all tensors that were announced have been declared.
    pub fn is_final(&self) -> bool {
        self.announced == Some(self.declared)
    }

    /// Takes the tensors that have been declared for all, although more bytes were announced.
    pub fn close(&mut self) {
        self.announced = Some(self.declared);
    }

    /// How many parameters of the model the push brings.
    pub fn covered(&self) -> usize {
        self.covered.len() + usize::from(self.head.is_some() && !self.covered.contains_key(EMBEDDING))
    }

    /// Whether tensor `index` brings only what another tensor brings too: it is named as the head in a model whose head
    /// is the embedding, which was declared as well.
    pub fn is_second_name(&self, index: usize) -> bool {
        self.head == Some(index) && self.covered.contains_key(EMBEDDING)
    }

    /// Declares further tensors, which come from `source`.
    ///
    /// # Errors
    /// `InvalidArgument` naming the first tensor that does not fit the model or the push; as for
    /// [`OpenSource::file_of`].
    pub fn add(&mut self, entries: Vec<TensorEntry>, source: &mut OpenSource) -> Result<()> {
        let first = self.tensors.len();
        for entry in entries {
            self.add_one(entry)?;
        }
        let announced = *self.announced.get_or_insert(self.declared);
        if self.declared > announced {
            let declared = self.declared;
            let what = format!("the tensors declared have {declared} bytes, but {announced} were announced");
            return Err(Error::invalid("total_bytes", what));
        }
        for (index, tensor) in self.tensors.iter_mut().enumerate().skip(first) {
            tensor.set_file(source.file_of(index, &tensor.entry)?)?;
        }
        self.check_head(|tensor| tensor.entry.digest)?;
        if self.is_final() { self.check_complete() } else { Ok(()) }
    }

    /// Checks that a FULL push announces no more than the model can have. The memory for it is that of the serving
    /// weights, whatever is announced, so that no other check would refuse nonsense.
    ///
    /// # Errors
    /// `InvalidArgument` if it announces more.
    pub fn check_total(&self) -> Result<()> {
        let total = self.total();
        if self.kind != UpdateKind::Full || total <= most_announced(&self.parameters) {
            return Ok(());
        }
        let float32 = float32_bytes(&self.parameters);
        let what = format!("{total} bytes are announced, but all parameters have {float32} in float32");
        Err(Error::invalid("total_bytes", what))
    }

    fn add_one(&mut self, entry: TensorEntry) -> Result<()> {
        let index = self.tensors.len();
        if index == MAX_TENSORS {
            return Err(refuse(format!("more than {MAX_TENSORS} tensors")));
        }
        let (name, shape) = (&entry.name, &entry.shape);
        if name.len() > MAX_NAME_BYTES {
            let start: String = name.chars().take(64).collect();
            return Err(refuse(format!("the name {start:?}... has more than {MAX_NAME_BYTES} bytes")));
        }
        if shape.len() > MAX_DIMENSIONS {
            return Err(refuse(format!("tensor {name:?} has {} dimensions", shape.len())));
        }
        let bytes = self.bytes_of(&entry)?;
        self.declared = self
            .declared
            .checked_add(bytes as u64)
            .ok_or_else(|| refuse(format!("tensor {name:?}: no machine has that many bytes")))?;
        if !self.names.insert(name.clone()) {
            return Err(refuse(format!("tensor {name:?} is declared twice")));
        }
        let is_lora = self.kind == UpdateKind::Lora;
        let mapping = if is_lora { ParameterMapping::default() } else { self.map(index, &entry, bytes)? };
        self.tensors.push(PushedTensor::new(entry, mapping, bytes));
        Ok(())
    }

    /// Bytes of a tensor as transported.
    fn bytes_of(&self, entry: &TensorEntry) -> Result<usize> {
        let (name, shape) = (&entry.name, &entry.shape);
        let too_large = || refuse(format!("tensor {name:?} of shape {shape:?}: no machine has that many bytes"));
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
        let bytes = elements.checked_mul(entry.dtype.size()).ok_or_else(too_large)?;
        let bytes = match (self.kind, entry.payload) {
            (UpdateKind::Delta, Some((changed, payload))) => {
                if changed > elements as u64 || u32::try_from(elements).is_err() {
                    return Err(refuse(format!(
                        "tensor {name:?}: {changed} of its {elements} elements have changed; they must be at most all, \
                         and all fewer than 2^32"
                    )));
                }
                usize::try_from(payload).map_err(|_| too_large())?
            }
            (UpdateKind::Delta, None) => {
                return Err(refuse(format!("tensor {name:?}: a DELTA gives `changed` and `payload_bytes`")));
            }
            (_, Some(_)) => {
                return Err(refuse(format!("tensor {name:?}: only a DELTA has `changed` and `payload_bytes`")));
            }
            (_, None) => bytes,
        };
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(refuse(format!("tensor {name:?} of shape {shape:?} has {bytes} bytes")));
        }
        Ok(bytes)
    }

    /// The parameters that tensor `index` of a FULL or DELTA push brings, which no other tensor has brought.
    fn map(&mut self, index: usize, entry: &TensorEntry, bytes: usize) -> Result<ParameterMapping> {
        let (name, shape) = (&entry.name, &entry.shape);
        let mapping = resolve(name, &self.parameters).ok_or_else(|| {
            let hint = match nearest(name, &self.parameters) {
                Some(known) => format!("; the nearest that it has is {known:?}"),
                None => "; ListParameters has the names".into(),
            };
            refuse(format!("the model has no tensor {name:?}{hint}"))
        })?;
        match &mapping.shape {
            Some(expected) if expected != shape => {
                return Err(refuse(format!("tensor {name:?} has shape {shape:?}, expected was {expected:?}")));
            }
            None if bytes > MAX_BUFFER_BYTES => {
                return Err(refuse(format!("tensor {name:?} is not needed and has {bytes} bytes; leave it out")));
            }
            _ => {}
        }
        if self.kind == UpdateKind::Delta && mapping.shape.is_none() {
            return Err(refuse(format!("tensor {name:?} is not needed; a DELTA brings parameters only")));
        }
        if mapping.tied_head {
            if let Some(other) = self.head.replace(index) {
                return Err(self.twice(name, other));
            }
        } else {
            for part in &mapping.parts {
                if let Some(other) = self.covered.insert(part.parameter.clone(), index) {
                    return Err(self.twice(name, other));
                }
            }
        }
        Ok(mapping)
    }

    fn twice(&self, name: &str, other: usize) -> Error {
        let other = self.tensors.get(other).map_or(name, |tensor| &tensor.entry.name);
        refuse(format!("tensors {other:?} and {name:?} bring the same parameter"))
    }

    /// Checks that the declared tensors make up a whole push.
    ///
    /// # Errors
    /// `InvalidArgument` if a FULL push lacks parameters.
    pub fn check_complete(&self) -> Result<()> {
        if self.kind != UpdateKind::Full {
            return Ok(());
        }
        let may_miss = |spec: &ParamSpec| spec.is_buffer || self.keep_missing && is_of_tower(&spec.name);
        let missing: Vec<&str> = self.missing().filter(|spec| !may_miss(spec)).map(|spec| &*spec.name).collect();
        if missing.is_empty() {
            return self.check_kept();
        }
        let first = missing.iter().take(3).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
        let more = if missing.len() > 3 { ", ..." } else { "" };
        let (count, all) = (missing.len(), self.parameters.len());
        let whole = if self.keep_missing { "every parameter of the decoder" } else { "every parameter" };
        Err(refuse(format!("a FULL push brings {whole}; {count} of {all} are missing: {first}{more}")))
    }

    /// The parameters that no declared tensor brings.
    pub fn missing(&self) -> impl Iterator<Item = &ParamSpec> {
        let is_there = |name: &str| self.covered.contains_key(name) || name == EMBEDDING && self.head.is_some();
        let missing = self.parameters.iter().filter(move |spec| !is_there(&spec.name));
        // Usually none, which is known without a look at each parameter.
        missing.take(self.parameters.len() - self.covered())
    }

    /// Checks that parameters which are stored together are missing together.
    ///
    /// # Errors
    /// `InvalidArgument` if some of them are missing and others are not.
    fn check_kept(&self) -> Result<()> {
        for ParamSpec { name, .. } in self.missing() {
            if let Some(there) = stored_with(name).into_iter().find(|other| self.covered.contains_key(other)) {
                return Err(refuse(format!(
                    "tensor {name:?} is missing, but {there:?} is not; a push brings both or neither, because they are \
                     stored together"
                )));
            }
        }
        Ok(())
    }

    /// Checks that the embedding and the head are the same, where they are one parameter and both were declared.
    /// `digest` gives the digest of a tensor, where it is known.
    ///
    /// # Errors
    /// `InvalidArgument` naming the head if their digests differ.
    pub fn check_head(&self, digest: impl Fn(&PushedTensor) -> Option<[u8; 16]>) -> Result<()> {
        let (Some(head), Some(&embedding)) = (self.head, self.covered.get(EMBEDDING)) else {
            return Ok(());
        };
        let (head, embedding) = (&self.tensors[head], &self.tensors[embedding]);
        let (Some(one), Some(other)) = (digest(head), digest(embedding)) else { return Ok(()) };
        if one == other && head.entry.dtype == embedding.entry.dtype {
            return Ok(());
        }
        Err(refuse(format!(
            "tensor {:?} is the embedding in this model, but its bytes differ from those of {:?}; send one of the two",
            head.name(),
            embedding.name()
        )))
    }

    /// The digest of a push whose tensors are all verified: XXH3-128, big-endian, over their digests in the order of
    /// their names.
    ///
    /// # Errors
    /// `InvalidArgument` naming a tensor that is not whole.
    pub fn digest(&self) -> Result<Digest> {
        let mut hasher = Hasher::new();
        self.digests()?.iter().for_each(|(_, digest)| hasher.write(digest));
        Ok(hasher.finish_128().to_be_bytes())
    }

    /// The digest of the tensors of the vision tower, which equal values under equal names share; `None` if there are
    /// none.
    ///
    /// # Errors
    /// `InvalidArgument` naming a tensor that is not whole.
    pub fn tower_digest(&self) -> Result<Option<Digest>> {
        if !self.parameters.have_tower() {
            return Ok(None);
        }
        let of_tower = |tensor: &PushedTensor| tensor.mapping.parts.iter().any(|part| is_of_tower(&part.parameter));
        let names: HashMap<&str, Dtype> =
            self.tensors.iter().filter(|t| of_tower(t)).map(|t| (t.name(), t.entry.dtype)).collect();
        let mut hasher = Hasher::new();
        for (name, digest) in self.digests()? {
            if let Some(dtype) = names.get(name) {
                hasher.write(format!("{name}\0{dtype:?}\0").as_bytes());
                hasher.write(&digest);
            }
        }
        Ok((!names.is_empty()).then(|| hasher.finish_128().to_be_bytes()))
    }

    /// Name and digest of each tensor, ordered by the names.
    fn digests(&self) -> Result<Vec<(&str, Digest)>> {
        let digest = |tensor: &PushedTensor| {
            tensor.digest().ok_or_else(|| {
                let (name, received, bytes) = (tensor.name(), tensor.received(), tensor.bytes);
                refuse(format!("tensor {name:?} is not whole: {received} of its {bytes} bytes came"))
            })
        };
        let digests = self.tensors.iter().map(|tensor| Ok((tensor.name(), digest(tensor)?)));
        let mut digests = digests.collect::<Result<Vec<_>>>()?;
        digests.sort_unstable();
        Ok(digests)
    }
}
