//! One rank's weights: loaded, changed by pushes, read back, given back to the system.
//!
//! The base of a parameter is the checkpoint's value, or the value by which a FULL or DELTA push has replaced it. The
//! serving weights are made from the base each time, never from earlier serving weights, so that a thousand adapters
//! leave no trace.
//!
//! `merge` writes parameters, with an adapter or without; `patch` writes single elements; `shadow` has the storage of a
//! FULL push; `kept_base` has the base beside what serves, for steps that run it; `integrity` checks that the
//! checkpoint is still the one that was loaded.

mod integrity;
mod kept_base;
mod merge;
mod patch;
mod shadow;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use rollout_kernels::{DeviceError, Matrix, Ops, StorageDtype, TensorData};

use integrity::CheckpointBase;
use kept_base::KeptBase;
use merge::{LocalParameter, RowGather, tensor_rows};

use super::{Released, WeightOrder};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::model::{Build, Model, ParamSlot, Parameterized};
use crate::weights::{Adapter, Checkpoint, Delta, ParamSpec, Replaced, Slice, Tensors};

/// This rank's model, and where the base of each of its parameters is.
pub struct RankWeights {
    model: Model,
    bases: Bases,
    /// Parameters that were released and have no value since.
    missing: HashSet<String>,
    /// `None` unless the server keeps the base below a merged adapter.
    kept_base: Option<KeptBase>,
}

/// Where the base of each parameter is.
struct Bases {
    build: Build,
    base: CheckpointBase,
    /// Names of the parameters whose base is no longer the checkpoint's.
    replaced: Replaced,
    /// Copies of the base of replaced parameters, for as long as an adapter is merged into them: then nothing else has
    /// their base. A replaced parameter without a copy serves its base. A vector is stored as one column.
    copies: HashMap<String, Matrix>,
    /// Names of the buffers, whose values a FULL push may lack.
    buffers: Vec<String>,
    /// Gathers the base's rows for a merge; set by [`RankWeights::prepare`] and cleared once the merge has run.
    gathering: Option<RowGather>,
}

impl RankWeights {
    /// Fills `model` with this rank's part of `checkpoint`. Calls `progress` after each parameter with the bytes that
    /// it has in the checkpoint.
    ///
    /// # Errors
    /// `Config` naming the parameter that is missing or has another shape; `DataLoss` if the checkpoint was written to
    /// while it was read.
    pub fn load(
        ops: &Ops,
        model: Model,
        build: Build,
        checkpoint: Arc<Checkpoint>,
        progress: &dyn Fn(u64),
    ) -> Result<Self> {
        let bases = Bases {
            build,
            base: CheckpointBase::new(checkpoint),
            replaced: Replaced::default(),
            copies: HashMap::new(),
            buffers: Vec::new(),
            gathering: None,
        };
        let mut this = Self { model, bases, missing: HashSet::new(), kept_base: None };
        this.restore()?;
        let base = Adapter::none();
        let Self { model, bases, .. } = &mut this;
        model.visit(&mut |spec, slot| {
            bases.fill_from_checkpoint(ops, spec, slot, &base)?;
            if spec.is_buffer {
                bases.buffers.push(spec.name.clone());
            }
            progress(bases.base.checkpoint.stored_bytes(&spec.name)? as u64);
            Ok(())
        })?;
        bases.base.settle()?;
        bases.base.verify(ops)?;
        Ok(this)
    }

    /// The model, whose parameters must all have values.
    ///
    /// # Panics
    /// If a parameter has none.
    pub fn model(&self) -> &Model {
        let missing = self.missing.iter().next();
        assert!(missing.is_none(), "a step without weights: {} were released, {missing:?} is one", self.missing.len());
        &self.model
    }

    /// The model, for uses that do not need its values: they may be released.
    pub fn shapes(&self) -> &Model {
        &self.model
    }

    /// Allocates the memory that this rank needs for an order, without changing weights. Ranks wait for each other
    /// while they execute an order, so all of them must have prepared it before one begins.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    pub fn prepare(&mut self, ops: &Ops, comm: &dyn Communicator, order: &WeightOrder) -> Result<()> {
        let (WeightOrder::Load { adapter } | WeightOrder::Merge { after: adapter, .. }) = order else {
            return Ok(());
        };
        self.take_copies(ops, adapter)?;
        let Self { model, bases, kept_base, .. } = self;
        if let Some(kept) = kept_base {
            kept.allocate(model, adapter)?;
        }
        let mut most = 0;
        model.visit_named(bases.copies.keys().map(String::as_str), &mut |spec, slot| {
            most = most.max(LocalParameter::new(&bases.build, spec, slot)?.gathered_elements(adapter));
            Ok(())
        })?;
        if most > bases.gathering.as_ref().map_or(0, RowGather::elements) {
            bases.gathering = Some(RowGather::new(&bases.build, most)?);
            comm.restore()?;
        }
        Ok(())
    }

    /// Executes a prepared change of the weights. Resident adapters are the
    /// [`ModelRunner`](super::ModelRunner)'s own.
    ///
    /// # Errors
    /// `DataLoss` if the checkpoint has changed since it was loaded: the weights then belong to no policy.
    pub fn write(&mut self, ops: &Ops, comm: &dyn Communicator, order: &WeightOrder) -> Result<()> {
        match order {
            WeightOrder::Load { adapter } if self.kept_base.is_some() => {
                self.load_base(ops, comm)?;
                self.merge_beside_base(ops, comm, adapter, &mut adapter.parameters())
            }
            WeightOrder::Load { adapter } => self.merge(ops, comm, adapter, None),
            WeightOrder::Merge { before, after } => {
                self.merge_beside_base(ops, comm, after, &mut before.parameters().chain(after.parameters()))
            }
            WeightOrder::Replace { tensors } => self.replace(ops, tensors),
            WeightOrder::Patch { delta, merged } => self.patch(ops, delta, merged),
            WeightOrder::AddAdapter { .. } | WeightOrder::RemoveAdapter { .. } => {
                unreachable!("resident adapters are not merged")
            }
        }
    }

    /// Sets all parameters to their base.
    fn load_base(&mut self, ops: &Ops, comm: &dyn Communicator) -> Result<()> {
        let Self { model, bases, missing, .. } = self;
        model.visit(&mut |spec, slot| {
            missing.remove(&spec.name);
            bases.fill_base(ops, comm, spec, slot)
        })?;
        bases.base.settle()
    }

    /// Sets the parameters of these names to their base with `adapter` merged. Where the base is to be kept, it is
    /// kept of what `adapter` changes; what serves now must be the base, or have its base kept.
    fn merge_beside_base(
        &mut self,
        ops: &Ops,
        comm: &dyn Communicator,
        adapter: &Adapter,
        names: &mut dyn Iterator<Item = &str>,
    ) -> Result<()> {
        if let Some(kept) = &mut self.kept_base {
            kept.take(ops, &mut self.model, &self.bases.build, adapter)?;
        }
        self.merge(ops, comm, adapter, Some(names))?;
        if let Some(kept) = &mut self.kept_base {
            kept.retain(&mut self.model, adapter)?;
        }
        Ok(())
    }

    /// Forgets the base that is kept, because what serves is the base from now on, or is missing.
    fn forget_kept_base(&mut self) {
        self.kept_base.iter_mut().for_each(|kept| *kept = KeptBase::default());
    }

    /// Sets the parameters of these names, or all of them, to their base with `adapter` merged.
    fn merge(
        &mut self,
        ops: &Ops,
        comm: &dyn Communicator,
        adapter: &Adapter,
        names: Option<&mut dyn Iterator<Item = &str>>,
    ) -> Result<()> {
        let Self { model, bases, missing, .. } = self;
        let mut fill = |spec: &ParamSpec, slot: ParamSlot<'_>| {
            bases.fill(ops, comm, spec, slot, adapter)?;
            missing.remove(&spec.name);
            Ok(())
        };
        let filled = match names {
            Some(names) => model.visit_named(names, &mut fill),
            None => model.visit(&mut fill),
        };
        if bases.gathering.take().is_some() {
            filled.unwrap_or_else(|e| panic!("a merge for which other ranks wait: {e}"));
        } else {
            filled?;
        }
        bases.base.settle()
    }

    /// Copies the base of replaced parameters that `adapter` touches and that serve it: all of them or none.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has not as much memory.
    fn take_copies(&mut self, ops: &Ops, adapter: &Adapter) -> Result<()> {
        let Self { model, bases, .. } = self;
        let mut copies = HashMap::new();
        let serves_base = |name: &&str| bases.replaced.contains(name) && !bases.copies.contains_key(*name);
        model.visit_named(adapter.parameters().filter(serves_base), &mut |spec, slot| {
            let local = LocalParameter::new(&bases.build, spec, slot)?;
            if !local.slice.is_empty() {
                copies.insert(spec.name.clone(), local.copy(ops)?);
            }
            Ok(())
        })?;
        bases.copies.extend(copies);
        Ok(())
    }

    fn replace(&mut self, ops: &Ops, tensors: &Tensors) -> Result<()> {
        self.forget_kept_base();
        let Self { model, bases, missing, .. } = self;
        model.visit_named(tensors.names(), &mut |spec, slot| {
            LocalParameter::new(&bases.build, spec, slot)?.store(ops, &tensor_rows(tensors, &spec.name))?;
            bases.copies.remove(&spec.name);
            bases.replaced.insert(&spec.name);
            missing.remove(&spec.name);
            Ok(())
        })?;
        bases.note_kept_buffers();
        Ok(())
    }

    fn patch(&mut self, ops: &Ops, delta: &Delta, merged: &Adapter) -> Result<()> {
        self.forget_kept_base();
        let bases = &mut self.bases;
        self.model.visit_named(delta.names().chain(merged.parameters()), &mut |spec, slot| {
            bases.copies.remove(&spec.name);
            bases.replaced.insert(&spec.name);
            let changes = delta.changes(&spec.name);
            changes.map_or(Ok(()), |changes| LocalParameter::new(&bases.build, spec, slot)?.patch(ops, changes))
        })
    }

    /// This rank's part of some rows of a parameter, as it serves: row-major, little-endian. Empty if the rank has none
    /// of the rows, or a rank before it has the same part.
    pub fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        let (partition, dtype) = (self.bases.build.partition, spec.dtype(self.bases.build.weights));
        let part = partition.slice(spec)?;
        let rows = rows.start.max(part.rows.start)..rows.end.min(part.rows.end);
        if rows.is_empty() || !partition.is_first_with(spec)? {
            return Ok(Vec::new());
        }
        let mut bytes = None;
        self.model.visit_named([spec.name.as_str()], &mut |_, slot| {
            let local = rows.start - part.rows.start..rows.end - part.rows.start;
            bytes = Some(read_rows(&slot, local, dtype)?);
            Ok(())
        })?;
        bytes.ok_or_else(|| Error::Internal(format!("the model has no parameter {}", spec.name)))
    }

    /// Allocates the memory of released matrices again. Their values are missing until an order writes them.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    pub fn restore(&mut self) -> Result<()> {
        self.bases.build.device.bring_back()?;
        self.model.visit_matrices(&mut |_, matrix| Ok(matrix.restore()?))
    }

    /// Gives the memory of matrices back to the system. With `keep_replaced` a matrix stays if it has the only values
    /// of a parameter that a push has replaced; without, all matrices and the copies of replaced bases are freed. A
    /// device with memory of its own moves the matrices that stay to the host, if they take at most `host_bytes` there.
    /// Buffers keep their values, because the FULL push that follows may lack them. The bytes that this frees are
    /// measured elsewhere.
    pub fn release(&mut self, keep_replaced: bool, host_bytes: u64) -> Result<Released> {
        self.forget_kept_base();
        let Self { model, bases, missing, .. } = self;
        if !keep_replaced {
            bases.replaced.clear();
            bases.copies.clear();
            model.visit(&mut |spec, _| {
                if !spec.is_buffer {
                    missing.insert(spec.name.clone());
                }
                Ok(())
            })?;
        }
        let mut kept = 0;
        model.visit_matrices(&mut |specs, matrix| {
            let is_here = |s: &&&ParamSpec| bases.build.partition.slice(s).is_ok_and(|part| !part.is_empty());
            let is_only_base = |s: &&ParamSpec| bases.replaced.contains(&s.name) && !bases.copies.contains_key(&s.name);
            if specs.iter().filter(is_here).any(is_only_base) {
                kept += matrix.bytes() as u64;
            } else {
                missing.extend(specs.iter().map(|spec| spec.name.clone()));
                matrix.release();
            }
            Ok(())
        })?;
        let device = &bases.build.device;
        match device.offload(host_bytes) {
            Ok(()) if device.has_own_memory() => kept = 0,
            Ok(()) => {}
            Err(DeviceError::OutOfMemory(why)) => tracing::warn!("weights stay on the device while it sleeps: {why}"),
            Err(error) => return Err(error.into()),
        }
        Ok(Released { freed: 0, kept, offloaded: device.offloaded_bytes() })
    }
}

impl Bases {
    /// Notes that a FULL push may have kept buffers: what serves is the base from then on.
    fn note_kept_buffers(&mut self) {
        self.buffers.iter().for_each(|buffer| self.replaced.insert(buffer));
    }

    /// Sets a parameter to its base with `adapter` merged.
    fn fill(
        &mut self,
        ops: &Ops,
        comm: &dyn Communicator,
        spec: &ParamSpec,
        slot: ParamSlot<'_>,
        adapter: &Adapter,
    ) -> Result<()> {
        if !self.replaced.contains(&spec.name) {
            return self.fill_from_checkpoint(ops, spec, slot, adapter);
        }
        let local = LocalParameter::new(&self.build, spec, slot)?;
        let Some(copy) = self.copies.get(&spec.name) else { return Ok(()) };
        local.merge_from_copy(ops, comm, adapter, copy, self.gathering.as_ref())?;
        if !adapter.touches(&spec.name) {
            self.copies.remove(&spec.name);
        }
        Ok(())
    }

    /// Sets a parameter to its base.
    fn fill_base(&mut self, ops: &Ops, comm: &dyn Communicator, spec: &ParamSpec, slot: ParamSlot<'_>) -> Result<()> {
        let none = Adapter::none();
        match self.copies.get(&spec.name) {
            Some(copy) => LocalParameter::new(&self.build, spec, slot)?.merge_from_copy(ops, comm, &none, copy, None),
            None if self.replaced.contains(&spec.name) => Ok(()),
            None => self.fill_from_checkpoint(ops, spec, slot, &none),
        }
    }

    fn fill_from_checkpoint(
        &mut self,
        ops: &Ops,
        spec: &ParamSpec,
        slot: ParamSlot<'_>,
        adapter: &Adapter,
    ) -> Result<()> {
        // Checks here everything that a read could refuse: an error in a thread of the pool would end the rank.
        let slice = self.base.checkpoint.slice(spec, self.build.partition)?;
        let (local, dtype) = (LocalParameter::new(&self.build, spec, slot)?, spec.dtype(self.build.weights));
        self.base.read(&spec.name, slice.rows, |base| {
            if adapter.touches(&spec.name) {
                local.merge(ops, adapter, &|rows, cols, values| base.values(&Slice { rows, cols }, dtype, values))
            } else {
                local.store(ops, &|part, store| base.rows(part, store))
            }
        })
    }
}

/// Bytes of some rows of a parameter's part on this rank, row-major, little-endian. `rows` count from the part's first.
fn read_rows(slot: &ParamSlot<'_>, rows: Range<usize>, dtype: StorageDtype) -> Result<Vec<u8>> {
    Ok(match slot {
        ParamSlot::Matrix { matrix, first_row } => {
            matrix.read_rows(first_row + rows.start..first_row + rows.end).to_le_bytes()
        }
        ParamSlot::Vector { vector, offset } => {
            let values = TensorData::F32(vector.read(offset + rows.start..offset + rows.end)?.into());
            match dtype {
                StorageDtype::Bf16 => TensorData::Bf16(values.into_bf16()).to_le_bytes(),
                StorageDtype::F32 => values.to_le_bytes(),
            }
        }
    })
}
