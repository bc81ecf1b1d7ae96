//! The tensors that the sender of a push has declared, checked against the model.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::names::{self, EMBEDDING, ParameterMapping};
use super::{TensorEntry, UpdateKind};
use crate::error::{Error, Result};
use crate::weights::Parameters;

/// Most tensors of a push: more than any model has, mixtures of experts with an adapter on each included.
const MAX_TENSORS: usize = 1 << 20;
/// Most bytes of a tensor's name, because errors repeat it.
const MAX_NAME_BYTES: usize = 512;
/// Most dimensions of a tensor, because errors repeat its shape.
const MAX_DIMENSIONS: usize = 8;
/// Most bytes of one buffer that the model does not need.
const MAX_BUFFER_BYTES: usize = 1 << 20;

/// A declared tensor that fits the model.
#[derive(Debug)]
pub(super) struct Declared {
    pub entry: TensorEntry,
    /// The parameters that the tensor brings; empty for LORA, where the adapter's configuration decides.
    pub mapping: ParameterMapping,
    /// Bytes of the tensor as transported.
    pub bytes: usize,
}

/// The tensors of a push that have been declared so far.
#[derive(Debug)]
pub(super) struct Manifest {
    kind: UpdateKind,
    parameters: Arc<Parameters>,
    tensors: Vec<Declared>,
    names: HashSet<String>,
    /// The index of the tensor that brings a parameter, by the parameter's name.
    covered: HashMap<String, usize>,
    /// In a model whose head is the embedding: the index of the tensor that is named as the head.
    head: Option<usize>,
    /// Bytes of the declared tensors.
    declared: u64,
    /// Bytes of all tensors that will be declared, once that is known.
    announced: Option<u64>,
}

fn refuse(message: String) -> Error {
    Error::invalid("tensors", message)
}

impl Manifest {
    /// An empty manifest. `announced` is the bytes of all tensors; `None` if the first [`Manifest::add`] declares them
    /// all.
    pub fn new(kind: UpdateKind, parameters: Arc<Parameters>, announced: Option<u64>) -> Self {
        Self {
            kind,
            parameters,
            tensors: Vec::new(),
            names: HashSet::new(),
            covered: HashMap::new(),
            head: None,
            declared: 0,
            announced,
        }
    }

    pub fn tensors(&self) -> &[Declared] {
        &self.tensors
    }

    pub fn kind(&self) -> UpdateKind {
        self.kind
    }

    pub fn parameters(&self) -> &Arc<Parameters> {
        &self.parameters
    }

    /// Bytes of all tensors of the push, those that will be declared later among them.
    pub fn total(&self) -> u64 {
        self.announced.unwrap_or(self.declared)
    }

    /// Bytes of the tensors that have been declared.
    pub fn declared(&self) -> u64 {
        self.declared
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

    /// Declares further tensors.
    ///
    /// # Errors
    /// `InvalidArgument` naming the first tensor that does not fit the model or the push.
    pub fn add(&mut self, entries: Vec<TensorEntry>) -> Result<()> {
        for entry in entries {
            self.add_one(entry)?;
        }
        let announced = *self.announced.get_or_insert(self.declared);
        if self.declared > announced {
            return Err(Error::invalid(
                "total_bytes",
                format!("the tensors declared have {} bytes, but {announced} were announced", self.declared),
            ));
        }
        Ok(())
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
        self.tensors.push(Declared { entry, mapping, bytes });
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
        let mapping = names::resolve(name, &self.parameters).ok_or_else(|| {
            let hint = match names::nearest(name, &self.parameters) {
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
        if self.kind == UpdateKind::Delta && (mapping.is_fused() || mapping.shape.is_none()) {
            return Err(refuse(format!("tensor {name:?}: a DELTA names single parameters, as ListParameters does")));
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
        let is_there = |name: &str| self.covered.contains_key(name) || name == EMBEDDING && self.head.is_some();
        let missing: Vec<&str> =
            self.parameters.iter().map(|spec| spec.name.as_str()).filter(|name| !is_there(name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let first = missing.iter().take(3).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
        let more = if missing.len() > 3 { ", ..." } else { "" };
        let (count, all) = (missing.len(), self.parameters.len());
        Err(refuse(format!("a FULL push brings every parameter; {count} of {all} are missing: {first}{more}")))
    }

    /// Checks that the embedding and the head are the same, where they are one parameter and both were declared.
    /// `digest` gives the digest of a tensor by its index, where it is known.
    ///
    /// # Errors
    /// `InvalidArgument` naming the head if their digests differ.
    pub fn check_head(&self, digest: impl Fn(usize) -> Option<[u8; 16]>) -> Result<()> {
        let (Some(head), Some(&embedding)) = (self.head, self.covered.get(EMBEDDING)) else {
            return Ok(());
        };
        let dtype = |tensor: usize| self.tensors[tensor].entry.dtype;
        let (Some(one), Some(other)) = (digest(head), digest(embedding)) else { return Ok(()) };
        if one == other && dtype(head) == dtype(embedding) {
            return Ok(());
        }
        Err(refuse(format!(
            "tensor {:?} is the embedding in this model, but its bytes differ from those of {:?}; send one of the two",
            self.tensors[head].entry.name, self.tensors[embedding].entry.name
        )))
    }

    /// The indices of the tensors in the order of their names.
    pub fn by_name(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by_key(|&i| &self.tensors[i].entry.name);
        order
    }
}
