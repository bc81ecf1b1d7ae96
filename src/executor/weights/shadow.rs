//! Shadow weights: storage beside the serving weights for a FULL push, and the exchange of the two.

use std::collections::HashSet;

use rollout_kernels::{Matrix, TensorView};

use super::RankWeights;
use crate::error::Result;
use crate::model::{ParamSlot, Parameterized};
use crate::weights::{ParamSpec, Partition, ShadowShard, Slice};

impl RankWeights {
    /// This rank's part of new shadow weights: a shard for each matrix of the model, in its order, and a last one for
    /// all vectors.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system cannot map as much.
    pub fn shadow_shards(&mut self) -> Result<Vec<ShadowShard>> {
        let partition = self.bases.build.partition;
        let mut shards = Vec::new();
        self.model.visit_matrices(&mut |specs, matrix| {
            shards.push(beside(specs, matrix, partition)?);
            Ok(())
        })?;
        let mut vectors = Vec::new();
        self.model.visit(&mut |spec, slot| {
            if let ParamSlot::Vector { .. } = slot {
                vectors.push((spec.name.clone(), partition.slice(spec)?));
            }
            Ok(())
        })?;
        shards.push(ShadowShard::vectors(vectors.into_iter()));
        Ok(shards)
    }

    /// Serves from `shards`, which are from [`RankWeights::shadow_shards`] and have a value for every parameter but
    /// those that are `kept`: all parameters of a matrix, or none. These stay as they are. Returns the storage that
    /// served before, for the next push. The values of `shards` become the base.
    ///
    /// # Errors
    /// `ResourceExhausted` if there is not enough memory for weights that were released.
    pub fn exchange(&mut self, mut shards: Vec<ShadowShard>, kept: &HashSet<String>) -> Result<Vec<ShadowShard>> {
        self.forget_kept_base();
        let mut matrices = shards.iter_mut().filter_map(ShadowShard::as_matrix_mut);
        self.model.visit_matrices(&mut |specs, matrix| {
            let other = matrices.next().expect("the shadow weights have every matrix");
            if specs.iter().any(|spec| kept.contains(&spec.name)) {
                return Ok(());
            }
            std::mem::swap(matrix, other);
            Ok(other.restore()?)
        })?;
        let vectors = shards.last().expect("the shadow weights have the vectors");
        let Self { model, bases, missing, .. } = self;
        let new = vectors.parameters().filter(|name| !kept.contains(*name));
        model.visit_named(new, &mut |spec, slot| {
            let ParamSlot::Vector { vector, offset } = slot else { unreachable!("it has the place of a vector") };
            let new = vectors.vector(&spec.name).expect("it was named");
            Ok(vector.write_rounded(offset, TensorView::F32(new), spec.dtype(bases.build.weights))?)
        })?;
        bases.replaced.insert_all_but(kept);
        bases.note_kept_buffers();
        bases.copies.retain(|name, _| kept.contains(name));
        missing.retain(|name| kept.contains(name));
        Ok(shards)
    }
}

/// A shadow of `matrix`: a matrix of zeros with the same shape for the same parameters.
fn beside(specs: &[&ParamSpec], matrix: &Matrix, partition: Partition) -> Result<ShadowShard> {
    let slices = specs.iter().map(|spec| Ok((spec.name.clone(), partition.slice(spec)?)));
    Ok(ShadowShard::matrix(matrix.zeros_like()?, slices.collect::<Result<Vec<(String, Slice)>>>()?.into_iter()))
}
