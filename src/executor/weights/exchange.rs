//! Storage beside the weights, and its exchange with what serves.

use std::collections::HashMap;

use rollout_kernels::{PackedMatrix, with_f32_mut};

use super::RankWeights;
use crate::error::{Error, Result};
use crate::model::{ParamSlot, Parameterized};
use crate::weights::{ParamSpec, Partition, ShadowShard, Slice};

impl RankWeights {
    /// Storage of the shapes of this rank's weights: a shard for each matrix, and one for all vectors.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system cannot map as much.
    pub fn shadow_shards(&mut self) -> Result<Vec<ShadowShard>> {
        let (partition, dtype) = (self.bases.build.partition, self.bases.build.weights);
        let mut shards = Vec::new();
        self.decoder.visit_matrices(&mut |specs, matrix| shards.push(beside(specs, matrix, partition)));
        let mut shards = shards.into_iter().collect::<Result<Vec<_>>>()?;
        let mut vectors = Vec::new();
        self.decoder.visit(&mut |spec, slot| {
            if let ParamSlot::Vector { .. } = slot {
                vectors.push((spec.name.clone(), partition.slice(spec)?));
            }
            Ok(())
        })?;
        shards.push(ShadowShard::vectors(dtype, vectors.into_iter()));
        Ok(shards)
    }

    /// Serves from `shards`, which [`RankWeights::shadow_shards`] gave and which hold every parameter, and gives back the
    /// matrices that served; what they hold now is the base.
    pub fn exchange(&mut self, mut shards: Vec<ShadowShard>) -> Result<Vec<ShadowShard>> {
        let mut matrices = shards.iter_mut().filter_map(ShadowShard::as_matrix_mut);
        self.decoder.visit_matrices(&mut |_, matrix| {
            let other = matrices.next().expect("the shadow weights have every matrix");
            std::mem::swap(matrix, other);
        });
        let vectors = shards.last().expect("the shadow weights have the vectors");
        let Self { decoder, bases, missing } = self;
        decoder.visit(&mut |spec, slot| {
            if let ParamSlot::Vector { vector, offset } = slot {
                let new = vectors.vector(&spec.name).expect("the shadow weights have every vector");
                with_f32_mut(vector, |values| values[offset..offset + new.len()].copy_from_slice(new))?;
            }
            bases.replaced.insert(spec.name.clone());
            Ok(())
        })?;
        bases.copies = HashMap::new();
        missing.clear();
        Ok(shards)
    }
}

/// A matrix of the same shape for the same parameters.
fn beside(specs: &[&ParamSpec], matrix: &PackedMatrix, partition: Partition) -> Result<ShadowShard> {
    let spare = matrix
        .spare()
        .map_err(|e| Error::ResourceExhausted(format!("cannot map {} bytes to stage a matrix: {e}", matrix.bytes())))?;
    let slices = specs.iter().map(|spec| Ok((spec.name.clone(), partition.slice(spec)?)));
    Ok(ShadowShard::matrix(spare, slices.collect::<Result<Vec<(String, Slice)>>>()?.into_iter()))
}
