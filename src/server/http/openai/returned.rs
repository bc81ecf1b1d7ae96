//! `returns`: the further values that a request asks for, and the member `returned` of a choice that has them.

use serde::Serialize;
use utoipa::ToSchema;

use crate::engine::{Completion, PolicyScore};
use crate::server::http::members;
use crate::server::pb;
use crate::types::{TokenId, TokenLogprobs, WeightVersion};

members! {
    /// Further values to report beside the log-probabilities of each token.
    #[derive(Clone)]
    pub(in crate::server::http) struct ReturnOptions {
        /// The entropies of both distributions (default: false).
        pub(super) entropy: bool,
        /// The tokens that have a probability in the processed distribution (default: false).
        pub(super) support: bool,
        /// The most ids of one token's support (default: 4096).
        pub(super) max_support_ids: u32,
        /// The names of policies under which finished samples are scored: resident adapters, and "" for the policy
        /// without one.
        pub(super) references: Vec<String>,
        /// Score finished samples under the base below the merged adapter (default: false; needs `--keep-base`).
        pub(super) base: bool,
        /// Score finished samples under the policy that serves when they end (default: false).
        pub(super) current: bool,
        /// The divergences over the whole vocabulary from each reference, and from the base (default: false).
        pub(super) divergences: bool,
    }
}

impl ReturnOptions {
    pub(super) fn message(&self) -> pb::Returns {
        pb::Returns {
            entropy: self.entropy == Some(true),
            support: self.support == Some(true),
            max_support_ids: self.max_support_ids,
            references: self.references.clone().unwrap_or_default(),
            base: self.base == Some(true),
            current: self.current == Some(true),
            divergences: self.divergences == Some(true),
            ..Default::default()
        }
    }

    /// Bytes that [`Returned`] and its JSON take for a sample, at most.
    pub(super) fn bytes(&self, completion: &Completion) -> usize {
        /// A number with its comma, and its value before it is written.
        const NUMBER: usize = 24;
        let supports = completion.tokens.iter().filter_map(|token| token.returned.as_ref());
        let ids: usize = supports.map(|returned| returned.support.ids.len()).sum();
        let arrays = if self.divergences == Some(true) { 4 } else { 2 };
        let policies = arrays * completion.scores.all().count();
        (ids + (4 + policies) * completion.tokens.len()) * NUMBER
    }
}

/// The values that `returns` asked for, for each token of a sample. NaN and infinities are null.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct Returned {
    /// In nats, of the model's own distribution.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_entropies: Option<Vec<f32>>,
    /// In nats, of the distribution that tokens are sampled from.
    #[serde(skip_serializing_if = "Option::is_none")]
    entropies: Option<Vec<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    support_sizes: Option<Vec<u32>>,
    /// Logarithms of the probability that the supports have in the model's own distribution at the temperature in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    support_log_masses: Option<Vec<f32>>,
    /// Ascending; empty for a support of more than `max_support_ids` tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    support_ids: Option<Vec<Vec<TokenId>>>,
    /// In the order of the request's `references`; empty if the sample was aborted.
    #[serde(skip_serializing_if = "Option::is_none")]
    references: Option<Vec<Policy>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<Policy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    current: Option<Policy>,
}

/// Log-probabilities of a sample's tokens under one policy.
#[derive(Serialize, ToSchema)]
struct Policy {
    weight_version: WeightVersion,
    raw_logprobs: Vec<f32>,
    /// For a reference and the base: at the request's temperature, without filters and penalties.
    logprobs: Vec<f32>,
    /// KL(policy || this policy) where each token was predicted, in nats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kl: Vec<f32>,
    /// KL(this policy || policy).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reverse_kl: Vec<f32>,
}

impl Policy {
    fn new(score: &PolicyScore) -> Self {
        let (raw_logprobs, logprobs) = score.logprobs.iter().copied().unzip();
        let (kl, reverse_kl) =
            score.divergences.iter().map(|divergence| (divergence.kl, divergence.reverse_kl)).unzip();
        Self { weight_version: score.weight_version, raw_logprobs, logprobs, kl, reverse_kl }
    }
}

impl Returned {
    pub(super) fn new(returns: &ReturnOptions, completion: &Completion) -> Self {
        let each = |token: &TokenLogprobs| token.returned.as_deref().cloned().unwrap_or_default();
        let tokens: Vec<_> = completion.tokens.iter().map(each).collect();
        let mut returned = Self::default();
        if returns.entropy == Some(true) {
            returned.raw_entropies = Some(tokens.iter().map(|token| token.raw_entropy).collect());
            returned.entropies = Some(tokens.iter().map(|token| token.entropy).collect());
        }
        if returns.references.is_some() {
            returned.references = Some(completion.scores.references.iter().map(Policy::new).collect());
        }
        returned.base = completion.scores.base.as_ref().map(Policy::new);
        returned.current = completion.scores.current.as_ref().map(Policy::new);
        if returns.support == Some(true) {
            returned.support_sizes = Some(tokens.iter().map(|token| token.support.size).collect());
            returned.support_log_masses = Some(tokens.iter().map(|token| token.support.log_mass).collect());
            returned.support_ids = Some(tokens.into_iter().map(|token| token.support.ids).collect());
        }
        returned
    }
}
