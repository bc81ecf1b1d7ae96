//! The experts of a decoder, as Qwen, Mixtral and GLM configure them.

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
    /// The factor of all weights.
    pub scale: f32,
    /// Whether a router scores by sigmoids, and chooses by these with a correction bias added. The others score by a
    /// softmax.
    pub has_correction_bias: bool,
    /// The expert that all tokens take, if there is one.
    pub shared: Option<SharedExpertConfig>,
    /// Per layer: whether it has experts. The others have a dense feed-forward block.
    pub layers: Vec<bool>,
}

/// The expert that all tokens take.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpertConfig {
    pub intermediate_size: usize,
    /// Whether its output is multiplied by a sigmoid of the token's own.
    pub is_gated: bool,
}

/// The fields of `config.json`, with the defaults of transformers where a family has one.
#[derive(Deserialize)]
struct RawExperts {
    #[serde(alias = "num_local_experts", alias = "n_routed_experts")]
    num_experts: usize,
    num_experts_per_tok: usize,
    intermediate_size: usize,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    first_k_dense_replace: Option<usize>,
    n_shared_experts: Option<usize>,
    routed_scaling_factor: Option<f32>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
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
        let (is_mixtral, is_glm) = (architecture == Architecture::Mixtral, architecture == Architecture::Glm4Moe);
        if !matches!(architecture, Architecture::Qwen2Moe | Architecture::Qwen3Moe) && !is_mixtral && !is_glm {
            let is_set = |field: &&str| !(config[*field].is_null() || config[*field] == false);
            return match ["num_experts", "num_local_experts", "n_routed_experts"].into_iter().find(is_set) {
                None => Ok(None),
                Some(field) => Err(bad(format!("config.json: {field} is set; it is not supported for {name}"))),
            };
        }
        let raw: RawExperts = serde_json::from_value(config.clone()).map_err(|e| bad(format!("config.json: {e}")))?;
        raw.refuse_groups(name)?;
        let width = raw.moe_intermediate_size.filter(|_| !is_mixtral).unwrap_or(raw.intermediate_size);
        let this = Self {
            count: raw.num_experts,
            top_k: raw.num_experts_per_tok,
            intermediate_size: width,
            normalised: is_mixtral || raw.norm_topk_prob.unwrap_or(is_glm),
            scale: raw.routed_scaling_factor.filter(|_| is_glm).unwrap_or(1.0),
            has_correction_bias: is_glm,
            shared: match architecture {
                Architecture::Qwen2Moe => {
                    let intermediate_size = raw.shared_expert_intermediate_size.unwrap_or(5632);
                    Some(SharedExpertConfig { intermediate_size, is_gated: true })
                }
                Architecture::Glm4Moe => {
                    let intermediate_size = width.saturating_mul(raw.n_shared_experts.unwrap_or(1));
                    Some(SharedExpertConfig { intermediate_size, is_gated: false })
                }
                _ => None,
            },
            layers: (0..layers).map(|layer| raw.has_experts(architecture, layer)).collect(),
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
        if self.intermediate_size == 0 || self.shared.as_ref().is_some_and(|shared| shared.intermediate_size == 0) {
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
    /// Refuses to choose among the experts of some groups only.
    fn refuse_groups(&self, name: &str) -> Result<()> {
        let fields = [("n_group", self.n_group), ("topk_group", self.topk_group)];
        match fields.into_iter().find_map(|(field, value)| Some((field, value.filter(|value| *value > 1)?))) {
            None => Ok(()),
            Some((field, value)) => {
                Err(bad(format!("config.json: {field} is {value}; {name} is supported with 1 group of experts only")))
            }
        }
    }

    fn has_experts(&self, architecture: Architecture, layer: usize) -> bool {
        match architecture {
            Architecture::Mixtral => return true,
            Architecture::Glm4Moe => return layer >= self.first_k_dense_replace.unwrap_or(1),
            _ => {}
        }
        let is_dense = self.mlp_only_layers.as_ref().is_some_and(|dense| dense.contains(&layer));
        let step = self.decoder_sparse_step.unwrap_or(1);
        !is_dense && step > 0 && (layer + 1).is_multiple_of(step)
    }
}
