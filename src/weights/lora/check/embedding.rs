//! Adapters of the token embedding.

use super::super::spec::{DeltaSpec, FactorKind, LowRankSpec};
use super::{Checker, EMBEDDING};
use crate::error::Result;
use crate::weights::parameters::Dtype;

impl Checker<'_> {
    /// Notes what the factors `a` and `b` of the embedding change.
    pub(super) fn adapt_embedding(&mut self, name: &str, a: usize, b: usize) -> Result<()> {
        if name != EMBEDDING {
            return Err(self.wrong(a, format!("is not of {EMBEDDING}, the only embedding; linear layers have lora_A")));
        }
        if self.config.dora {
            return Err(self.wrong(a, "with adapter_config.use_dora: DoRA of an embedding is not supported".into()));
        }
        let parameter = format!("{EMBEDDING}.weight");
        let (rows, cols) = self.matrix(&parameter, a)?;
        let rank = self.config.rank(self.own_name(name)) as usize;
        self.expect_shape(a, &[rank, rows])?;
        self.expect_shape(b, &[cols, rank])?;
        let scaling = self.config.scaling(self.own_name(name))?;
        // PEFT rounds the delta weight of an embedding to the base's dtype too before it adds it.
        let dtype = self.same_dtype(a, b)?;
        let mut roundings = vec![dtype, self.parameters.dtype()];
        roundings.dedup();
        roundings.retain(|dtype| *dtype != Dtype::F32);
        let delta = LowRankSpec {
            a,
            b,
            magnitude: None,
            rank,
            first_row: 0,
            rows,
            cols,
            dtype,
            product: Dtype::F32,
            scaling,
            roundings,
            kind: FactorKind::Embedding,
            expert: None,
        };
        self.set_delta(&parameter, a, DeltaSpec::LowRank(delta))
    }
}
