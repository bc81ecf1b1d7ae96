//! What a sender has declared, checked against the model.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::names::{self, EMBEDDING, Target};
use super::{TensorEntry, UpdateKind};
use crate::error::{Error, Result};
use crate::weights::Parameters;

/// More than any model has, mixtures of experts with an adapter on each included.
const MAX_TENSORS: usize = 1 << 20;
/// Names and shapes come back in errors.
const MAX_NAME_BYTES: usize = 512;
const MAX_DIMENSIONS: usize = 8;
/// Most bytes of a buffer that the model does not need.
const MAX_BUFFER_BYTES: usize = 1 << 20;

/// A tensor that fits the model.
#[derive(Debug)]
pub(super) struct Declared {
    pub entry: TensorEntry,
    /// The parameters that it brings; nothing for LORA, where the adapter knows.
    pub target: Target,
    /// As transported.
    pub bytes: usize,
}

/// All tensors of a push, as far as they are declared.
#[derive(Debug)]
pub(super) struct Manifest {
    kind: UpdateKind,
    parameters: Arc<Parameters>,
    tensors: Vec<Declared>,
    names: HashSet<String>,
    /// Which tensor brings a parameter.
    covered: HashMap<String, usize>,
    /// Where the head is the embedding: the tensor that is named as the head.
    head: Option<usize>,
    declared: u64,
    announced: Option<u64>,
}

fn refuse(message: String) -> Error {
    Error::invalid("tensors", message)
}

impl Manifest {
    /// `announced`: bytes of all tensors; None: of those of the first [`Manifest::add`].
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

    /// Bytes of all tensors, those to be declared later too.
    pub fn total(&self) -> u64 {
        self.announced.unwrap_or(self.declared)
    }

    /// Bytes of what is declared.
    pub fn declared(&self) -> u64 {
        self.declared
    }

    /// Whether all is declared that was announced.
    pub fn is_final(&self) -> bool {
        self.announced == Some(self.declared)
    }

    /// Nothing more is declared, though more was announced.
    pub fn close(&mut self) {
        self.announced = Some(self.declared);
    }

    /// How many parameters it brings.
    pub fn covered(&self) -> usize {
        self.covered.len() + usize::from(self.head.is_some() && !self.covered.contains_key(EMBEDDING))
    }

    /// Whether tensor `index` brings nothing that another does not: the head of a model whose head is the embedding.
    pub fn is_second_name(&self, index: usize) -> bool {
        self.head == Some(index) && self.covered.contains_key(EMBEDDING)
    }

    /// # Errors
    /// `InvalidArgument` naming the first tensor that is not as it must be.
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
        let target = if self.kind == UpdateKind::Lora { Target::default() } else { self.fit(index, &entry, bytes)? };
        self.tensors.push(Declared { entry, target, bytes });
        Ok(())
    }

    /// Bytes as transported.
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

    /// What tensor `index` of a FULL or DELTA push is to the model.
    fn fit(&mut self, index: usize, entry: &TensorEntry, bytes: usize) -> Result<Target> {
        let (name, shape) = (&entry.name, &entry.shape);
        let target = names::resolve(name, &self.parameters).ok_or_else(|| {
            let hint = match names::nearest(name, &self.parameters) {
                Some(known) => format!("; the nearest that it has is {known:?}"),
                None => "; ListParameters has the names".into(),
            };
            refuse(format!("the model has no tensor {name:?}{hint}"))
        })?;
        match &target.shape {
            Some(expected) if expected != shape => {
                return Err(refuse(format!("tensor {name:?} has shape {shape:?}, expected was {expected:?}")));
            }
            None if bytes > MAX_BUFFER_BYTES => {
                return Err(refuse(format!("tensor {name:?} is not needed and has {bytes} bytes; leave it out")));
            }
            _ => {}
        }
        if self.kind == UpdateKind::Delta && (target.is_fused() || target.shape.is_none()) {
            return Err(refuse(format!("tensor {name:?}: a DELTA names single parameters, as ListParameters does")));
        }
        if target.tied_head {
            if let Some(other) = self.head.replace(index) {
                return Err(self.twice(name, other));
            }
        } else {
            for part in &target.parts {
                if let Some(other) = self.covered.insert(part.parameter.clone(), index) {
                    return Err(self.twice(name, other));
                }
            }
        }
        Ok(target)
    }

    fn twice(&self, name: &str, other: usize) -> Error {
        let other = self.tensors.get(other).map_or(name, |tensor| &tensor.entry.name);
        refuse(format!("tensors {other:?} and {name:?} bring the same parameter"))
    }

    /// Checks what can be seen only of all tensors together.
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

    /// Checks that embedding and head agree where they are one parameter and both were sent.
    ///
    /// # Errors
    /// `InvalidArgument` naming the head if their digests differ.
    pub fn check_head(&self, digest: impl Fn(usize) -> [u8; 16]) -> Result<()> {
        let (Some(head), Some(&embedding)) = (self.head, self.covered.get(EMBEDDING)) else {
            return Ok(());
        };
        let dtype = |tensor: usize| self.tensors[tensor].entry.dtype;
        if digest(head) == digest(embedding) && dtype(head) == dtype(embedding) {
            return Ok(());
        }
        Err(refuse(format!(
            "tensor {:?} is the embedding in this model, but its bytes differ from those of {:?}; send one of the two",
            self.tensors[head].entry.name, self.tensors[embedding].entry.name
        )))
    }

    /// Tensors in the order of their names.
    pub fn by_name(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by_key(|&i| &self.tensors[i].entry.name);
        order
    }
}
