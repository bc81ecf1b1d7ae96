//! The base below a merged adapter, kept in the layout of the serving weights so that steps can run it.

use std::collections::HashMap;

use rollout_kernels::{Matrix, Ops, TensorView};

use super::RankWeights;
use crate::error::Result;
use crate::model::{Build, Model, ParamSlot, Parameterized};
use crate::weights::{Adapter, ParamSpec};

/// This rank's base values of the parameters that the merged adapter changes.
#[derive(Default)]
pub(super) struct KeptBase {
    /// Whole matrices, each by the name of its first parameter.
    matrices: HashMap<String, Matrix>,
    vectors: HashMap<String, Vec<f32>>,
    /// Memory for the matrices that the prepared order is the first to change.
    allocated: HashMap<String, Matrix>,
}

impl KeptBase {
    /// Allocates memory for the matrices that `adapter` changes and whose base is not kept yet.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    pub fn allocate(&mut self, model: &mut Model, adapter: &Adapter) -> Result<()> {
        self.allocated.clear();
        model.visit_matrices(&mut |specs, matrix| {
            if changes(adapter, specs) && !self.matrices.contains_key(&specs[0].name) {
                self.allocated.insert(specs[0].name.clone(), matrix.zeros_like()?);
            }
            Ok(())
        })
    }

    /// Copies what serves now, before `adapter` is merged, of the parameters whose base is not kept yet.
    pub fn take(&mut self, ops: &Ops, model: &mut Model, build: &Build, adapter: &Adapter) -> Result<()> {
        model.visit_matrices(&mut |specs, matrix| {
            if let Some(mut copy) = self.allocated.remove(&specs[0].name) {
                ops.copy_rows(matrix, 0..matrix.n(), &mut copy)?;
                self.matrices.insert(specs[0].name.clone(), copy);
            }
            Ok(())
        })?;
        model.visit_named(adapter.parameters(), &mut |spec, slot| {
            if let ParamSlot::Vector { vector, offset } = slot
                && !self.vectors.contains_key(&spec.name)
            {
                let len = build.partition.slice(spec)?.len();
                self.vectors.insert(spec.name.clone(), vector.read(offset..offset + len)?);
            }
            Ok(())
        })
    }

    /// Forgets the base of what `adapter` does not change.
    pub fn retain(&mut self, model: &mut Model, adapter: &Adapter) -> Result<()> {
        model.visit_matrices(&mut |specs, _| {
            if !changes(adapter, specs) {
                self.matrices.remove(&specs[0].name);
            }
            Ok(())
        })?;
        self.vectors.retain(|name, _| adapter.touches(name));
        Ok(())
    }
}

impl RankWeights {
    /// Keeps the base below adapters that are merged from now on.
    pub fn keep_base(mut self) -> Self {
        self.kept_base = Some(KeptBase::default());
        self
    }

    /// Exchanges the serving weights and the base below the merged adapter. The second call undoes the first.
    ///
    /// # Panics
    /// If the base is not kept.
    pub fn exchange_base(&mut self) -> Result<()> {
        let Self { model, bases, kept_base, .. } = self;
        let kept = kept_base.as_mut().expect("a step runs the base of a server that keeps it");
        if !kept.matrices.is_empty() {
            model.visit_matrices(&mut |specs, matrix| {
                if let Some(other) = kept.matrices.get_mut(&specs[0].name) {
                    std::mem::swap(matrix, other);
                }
                Ok(())
            })?;
        }
        let names: Vec<String> = kept.vectors.keys().cloned().collect();
        model.visit_named(names.iter().map(String::as_str), &mut |spec, slot| {
            let ParamSlot::Vector { vector, offset } = slot else { unreachable!("it has the place of a vector") };
            let kept = kept.vectors.get_mut(&spec.name).expect("it was named");
            let serving = vector.read(offset..offset + kept.len())?;
            vector.write_rounded(offset, TensorView::F32(kept), spec.dtype(bases.build.weights))?;
            *kept = serving;
            Ok(())
        })
    }
}

/// Whether `adapter` changes any of the parameters that a matrix has.
fn changes(adapter: &Adapter, specs: &[&ParamSpec]) -> bool {
    specs.iter().any(|spec| adapter.touches(&spec.name))
}
