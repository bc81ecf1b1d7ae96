//! The experts of a decoder, as Qwen and Mixtral configure them.

use rollout_kernels::expert_groups;
use serde::Deserialize;

use super::{Architecture, bad};
use crate::error::Result;
use crate::types::RoutingFormat;

/// The mixture of experts that takes the place of the feed-forward block in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that each token takes.
    pub top_k: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// Width of the expert that all tokens take, if there is one. Its output is multiplied by a sigmoid of the token's
    /// own.
    pub shared_intermediate_size: Option<usize>,
    /// Per layer: whether it has experts. The others have a dense feed-forward block.
    pub layers: Vec<bool>,
}

/// The fields of `config.json`, with the defaults of transformers where a family has one.
#[derive(Deserialize)]
struct RawExperts {
    #[serde(alias = "num_local_experts")]
    num_experts: usize,
    num_experts_per_tok: usize,
    intermediate_size: usize,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

impl ExpertsConfig {
    /// The experts of a decoder with `layers` layers; `None` if the architecture is dense.
    ///
    /// # Errors
    /// `Config` naming the field that is missing, out of range or not supported.
    pub(super) fn parse(
        (name, architecture): (&str, Architecture),
        config: &serde_json::Value,
        layers: usize,
    ) -> Result<Option<Self>> {
        if !matches!(architecture, Architecture::Qwen2Moe | Architecture::Qwen3Moe | Architecture::Mixtral) {
            let is_set = |field: &&str| !(config[*field].is_null() || config[*field] == false);
            return match ["num_experts", "num_local_experts"].into_iter().find(is_set) {
                None => Ok(None),
                Some(field) => Err(bad(format!("config.json: {field} is set; it is not supported for {name}"))),
            };
        }
        let raw: RawExperts = serde_json::from_value(config.clone()).map_err(|e| bad(format!("config.json: {e}")))?;
        let is_mixtral = architecture == Architecture::Mixtral;
        let this = Self {
            count: raw.num_experts,
            top_k: raw.num_experts_per_tok,
            intermediate_size: raw.moe_intermediate_size.filter(|_| !is_mixtral).unwrap_or(raw.intermediate_size),
            normalised: is_mixtral || raw.norm_topk_prob.unwrap_or(false),
            shared_intermediate_size: match architecture {
                Architecture::Qwen2Moe => Some(raw.shared_expert_intermediate_size.unwrap_or(5632)),
                _ => None,
            },
            layers: (0..layers).map(|layer| is_mixtral || raw.has_experts(layer)).collect(),
        };
        this.check()?;
        Ok(this.layers.contains(&true).then_some(this))
    }

    fn check(&self) -> Result<()> {
        let (count, top_k) = (self.count, self.top_k);
        if count == 0 || count >= usize::from(u16::MAX) {
            return Err(bad(format!("config.json: {count} experts are not supported; a layer may have 1 to 65534")));
        }
        if top_k == 0 || top_k > count {
            return Err(bad(format!("config.json: num_experts_per_tok is {top_k}; a layer has {count} experts")));
        }
        if self.intermediate_size == 0 || self.shared_intermediate_size == Some(0) {
            return Err(bad("config.json: the width of an expert is 0".into()));
        }
        Ok(())
    }

    /// How the experts of a token are written.
    pub fn routing_format(&self) -> RoutingFormat {
        let layers = self.layers.iter().filter(|has_experts| **has_experts).count();
        RoutingFormat { layers, top_k: self.top_k, experts: self.count }
    }

    /// Groups of neighbouring experts whose outputs are added apart. Each rank has whole groups, so that any number of
    /// ranks adds in the same order.
    pub fn groups(&self) -> usize {
        expert_groups(self.count)
    }
}

impl RawExperts {
    /// Whether a layer of Qwen's has experts.
    fn has_experts(&self, layer: usize) -> bool {
        let is_dense = self.mlp_only_layers.as_ref().is_some_and(|dense| dense.contains(&layer));
        let step = self.decoder_sparse_step.unwrap_or(1);
        !is_dense && step > 0 && (layer + 1).is_multiple_of(step)
    }
}
