//! Builds the requests that tests send to an engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use rollout_server::engine::{OtherPolicies, PromptSampling, RequestKind};
use rollout_server::grammar::Grammar;
use rollout_server::types::{ForcedRouting, SamplingParams, TokenId};

use super::PlacedPicture;

/// Builder of a request.
#[derive(Clone)]
pub struct Request {
    pub id: String,
    pub prompts: Vec<Vec<TokenId>>,
    /// `logprob_token_ids` of the first prompts.
    pub rows: Vec<Vec<Vec<TokenId>>>,
    /// Images of the first prompts.
    pub images: Vec<Vec<PlacedPicture>>,
    /// Experts of the first prompts.
    pub routing: Vec<Option<ForcedRouting>>,
    /// Whether to return the experts of tokens.
    pub return_routing: bool,
    pub kind: RequestKind,
    pub params: SamplingParams,
    pub grammar: Option<Arc<Grammar>>,
    pub own: BTreeMap<u32, PromptSampling>,
    pub adapter: Option<String>,
    pub policies: OtherPolicies,
    pub if_weight_version: Option<u64>,
    pub min_weight_version: Option<u64>,
}

impl Request {
    /// `n` samples of each prompt with `max_tokens` tokens at temperature 1.
    pub fn generate(prompts: Vec<Vec<TokenId>>, n: u32, seed: u64, max_tokens: u32) -> Self {
        let kind = RequestKind::Generate { n, seed, prompt_logprobs: false, stream_tokens: false, return_text: false };
        Self::new(prompts, kind, SamplingParams { max_tokens, ..Default::default() })
    }

    pub fn score(prompts: Vec<Vec<TokenId>>) -> Self {
        Self::new(prompts, RequestKind::Score, SamplingParams::default())
    }

    fn new(prompts: Vec<Vec<TokenId>>, kind: RequestKind, params: SamplingParams) -> Self {
        let id = String::new();
        Self {
            id,
            prompts,
            rows: Vec::new(),
            images: Vec::new(),
            routing: Vec::new(),
            return_routing: false,
            kind,
            params,
            grammar: None,
            own: BTreeMap::new(),
            adapter: None,
            policies: OtherPolicies::default(),
            if_weight_version: None,
            min_weight_version: None,
        }
    }

    /// Gives the request an id. Requests without an id must run one after the other.
    pub fn named(mut self, id: impl Into<String>) -> Self {
        self.id = id.into();
        self
    }

    /// Asks for the completions' text, and for a stream of tokens.
    pub fn with_text(mut self) -> Self {
        if let RequestKind::Generate { stream_tokens, return_text, .. } = &mut self.kind {
            (*stream_tokens, *return_text) = (true, true);
        }
        self
    }

    pub fn params(mut self, params: SamplingParams) -> Self {
        self.params = params;
        self
    }
}
