//! Adapters of experts and of the routers that choose among them, as PEFT makes them of parameters.

use super::super::spec::{DeltaSpec, ExpertFactors, FactorKind, LowRankSpec};
use super::Checker;
use crate::error::Result;
use crate::weights::parameters::{Dtype, expert_tensors, is_of_experts, resolve};

impl Checker<'_> {
    /// Notes what the factors of all experts of a layer change; false if the module is not that of experts.
    ///
    /// PEFT wraps the module once for each of its tensors that is adapted, so that the name does not tell which one the
    /// factors are of. Their shapes do: experts have other rows and columns in the two tensors.
    pub(super) fn adapt_experts(&mut self, name: &str, a: usize, b: usize) -> Result<bool> {
        let Some(tensors) = expert_tensors(name) else { return Ok(false) };
        let mut expected = Vec::new();
        for tensor in &tensors {
            let Some(mapping) = resolve(tensor, self.parameters) else { return Ok(false) };
            let Some([experts, rows, cols]) = mapping.shape.as_deref() else { return Ok(false) };
            let rank = self.config.rank(tensor) as usize;
            let shapes = [[experts * rank, *cols], [*rows, rank * experts]];
            if [a, b].map(|factor| self.tensors[factor].shape) != [&shapes[0], &shapes[1]] {
                expected.push(format!("{:?} and {:?} for {tensor}", shapes[0], shapes[1]));
                continue;
            }
            self.check_is_plain(a)?;
            let dtype = self.same_dtype(a, b)?;
            let (scaling, (product, roundings)) = (self.config.scaling(tensor)?, self.roundings(tensor, dtype));
            let each = mapping.parts.len() / experts;
            for (i, part) in mapping.parts.iter().enumerate() {
                let index = i / each;
                let delta = LowRankSpec {
                    a,
                    b,
                    magnitude: None,
                    rank,
                    first_row: part.first_row - index * rows,
                    rows: rows / each,
                    cols: *cols,
                    dtype,
                    product,
                    scaling,
                    roundings: roundings.clone(),
                    kind: FactorKind::Linear,
                    expert: Some(ExpertFactors { index, experts: *experts }),
                };
                self.set_delta(&part.parameter, a, DeltaSpec::LowRank(delta))?;
            }
            return Ok(true);
        }
        let shapes = [a, b].map(|factor| self.tensors[factor].shape);
        let message = format!(
            "and lora_B have shapes {:?} and {:?}; the model and adapter_config make them {}",
            shapes[0],
            shapes[1],
            expected.join(", or ")
        );
        Err(self.wrong(a, message))
    }

    /// The precision that the product of factors of `dtype` is rounded to before it is scaled, and those that it is
    /// rounded to afterwards, before it is added to a linear layer, to experts or to a router.
    ///
    /// PEFT multiplies factors of experts in their own precision, and all others in float32 on the CPU. It rounds the
    /// delta of a parameter (experts, routers) to the parameter's precision, and that of a module only to the
    /// adapter's.
    pub(super) fn roundings(&self, parameter: &str, dtype: Dtype) -> (Dtype, Vec<Dtype>) {
        let mut roundings = vec![dtype];
        if is_of_experts(parameter) {
            roundings.push(self.parameters.dtype());
            roundings.dedup();
        }
        roundings.retain(|dtype| *dtype != Dtype::F32);
        (if is_expert(parameter) { dtype } else { Dtype::F32 }, roundings)
    }

    /// Checks the factors of one expert's linear layer, as PEFT saved them with transformers 4.
    pub(super) fn check_expert(&self, parameter: &str, a: usize) -> Result<()> {
        if is_expert(parameter) { self.check_is_plain(a) } else { Ok(()) }
    }

    /// Checks that the adapter is one that experts can have.
    fn check_is_plain(&self, a: usize) -> Result<()> {
        if self.config.dora || self.config.lora_bias {
            return Err(self.wrong(a, "is of experts, which cannot have DoRA or a bias of lora_B".into()));
        }
        Ok(())
    }
}

/// Whether a parameter is of an expert, and not of a router.
fn is_expert(parameter: &str) -> bool {
    is_of_experts(parameter) && !parameter.ends_with(".mlp.gate.weight")
}
