//! Finished samples that wait for their scores under other policies: references, the base, and the policy that serves
//! now.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::request::{Completion, PolicyScore};
use crate::cache::CacheSalt;
use crate::scheduler::{Group, GroupKind};
use crate::types::{
    GroupKey, PolicyWeights, Prompt, RequestKey, SamplingParams, TokenId, TokenLogprobs, WeightVersion,
};

/// A sample that has ended.
pub(super) struct FinishedSample {
    pub completion: Completion,
    /// The sampling parameters of its prompt.
    pub params: Arc<SamplingParams>,
    /// Bytes that it holds until it is sent.
    pub held: u64,
}

/// The other policies of a request, and its samples that wait for scores under them.
pub(super) struct Rescoring {
    request: RequestKey,
    prompts: Vec<Prompt>,
    /// The weights that the request samples with.
    weights: PolicyWeights,
    references: Vec<PolicyWeights>,
    /// Whether samples are scored under the base.
    base: bool,
    /// Whether samples are scored under the policy that serves when they end, if another made some of their tokens.
    current: bool,
    /// The samples that have ended since the last call of [`Rescoring::start`].
    finished: Vec<FinishedSample>,
    /// Index of the next group, as if its sequence were one more prompt of the request.
    next_group: u32,
    /// The samples whose groups run, by the index of their first group.
    waiting: BTreeMap<u32, Waiting>,
}

struct Waiting {
    sample: FinishedSample,
    /// Number of its groups that have no scores yet.
    left: usize,
}

/// The next step of a sample that has ended.
pub(super) enum Start {
    /// Nothing: it can be sent.
    Done(FinishedSample),
    /// These groups must run.
    Run(Vec<Group>),
}

impl Rescoring {
    /// `None` if the request asks for no other policy.
    pub fn new(
        request: RequestKey,
        prompts: &[Prompt],
        weights: PolicyWeights,
        references: Vec<PolicyWeights>,
        (base, current): (bool, bool),
    ) -> Option<Self> {
        (base || current || !references.is_empty()).then(|| Self {
            request,
            prompts: prompts.to_vec(),
            weights,
            references,
            base,
            current,
            finished: Vec::new(),
            next_group: prompts.len() as u32,
            waiting: BTreeMap::new(),
        })
    }

    /// Generations of the adapters that are references.
    pub fn adapters(&self) -> impl Iterator<Item = u64> {
        self.references.iter().filter_map(|reference| reference.adapter())
    }

    /// Number of samples that have ended and have not been sent.
    pub fn num_waiting(&self) -> usize {
        self.finished.len() + self.waiting.len()
    }

    /// Keeps a sample that has ended.
    pub fn push(&mut self, sample: FinishedSample) {
        self.finished.push(sample);
    }

    /// Goes through the samples that have ended since the last call. The policy of this epoch and version serves.
    pub fn start(&mut self, epoch: u64, version: WeightVersion) -> Vec<Start> {
        std::mem::take(&mut self.finished).into_iter().map(|sample| self.start_one(sample, epoch, version)).collect()
    }

    fn start_one(&mut self, mut sample: FinishedSample, epoch: u64, version: WeightVersion) -> Start {
        let completion = &mut sample.completion;
        let is_of_current = completion.weight_versions.iter().all(|(made_by, ..)| *made_by == version);
        if self.current && is_of_current {
            let logprobs = completion.tokens.iter().map(|token| (token.raw, token.processed)).collect();
            completion.current = Some(PolicyScore { logprobs, weight_version: version });
        }
        let at_temperature = Arc::new(at_temperature(&sample.params));
        let base = self.base.then_some(PolicyWeights::Base);
        let references = self.references.iter().copied().chain(base);
        let mut policies: Vec<_> = references.map(|weights| (weights, at_temperature.clone())).collect();
        if self.current && !is_of_current {
            policies.push((self.weights, Arc::new(distribution(&sample.params))));
        }
        if policies.is_empty() || completion.tokens.is_empty() {
            return Start::Done(sample);
        }
        completion.references = vec![PolicyScore::default(); self.references.len()];
        let prompt = &self.prompts[completion.prompt_index as usize];
        let sampled = completion.tokens.iter().map(|token| token.token);
        let tokens: Vec<TokenId> = prompt.tokens.iter().copied().chain(sampled).collect();
        let (scored_from, first) = (prompt.tokens.len() - 1, self.next_group);
        let sequence = Prompt { tokens: tokens.into(), logprob_token_ids: Arc::default(), ..prompt.clone() };
        let groups = (first..).zip(policies).map(|(prompt_index, (weights, params))| Group {
            key: GroupKey { request: self.request, prompt_index },
            prompt: sequence.clone(),
            params,
            salt: CacheSalt { epoch, weights },
            kind: GroupKind::Score { scored_from },
            grammar: None,
            returns_routing: false,
        });
        let groups: Vec<Group> = groups.collect();
        self.next_group += groups.len() as u32;
        self.waiting.insert(first, Waiting { sample, left: groups.len() });
        Start::Run(groups)
    }

    /// Takes the scores of a group, which the policy `version` made. Returns the sample if it waits for no others.
    pub fn scored(
        &mut self,
        group: GroupKey,
        logprobs: &[TokenLogprobs],
        version: WeightVersion,
    ) -> Option<FinishedSample> {
        let (&first, waiting) = self.waiting.range_mut(..=group.prompt_index).next_back()?;
        let logprobs = logprobs.iter().map(|token| (token.raw, token.processed)).collect();
        let score = PolicyScore { logprobs, weight_version: version };
        let completion = &mut waiting.sample.completion;
        let index = (group.prompt_index - first) as usize;
        if let Some(reference) = completion.references.get_mut(index) {
            *reference = score;
        } else if self.base && index == self.references.len() {
            completion.base = Some(score);
        } else {
            completion.current = Some(score);
        }
        waiting.left -= 1;
        if waiting.left > 0 { None } else { self.waiting.remove(&first).map(|waiting| waiting.sample) }
    }

    /// Takes all samples that have not been sent, without the scores that they wait for.
    pub fn give_up(&mut self) -> Vec<FinishedSample> {
        let waiting = std::mem::take(&mut self.waiting).into_values().map(|Waiting { mut sample, .. }| {
            sample.completion.references.clear();
            sample.completion.base = None;
            sample
        });
        std::mem::take(&mut self.finished).into_iter().chain(waiting).collect()
    }
}

/// The distribution of references: the model's own at the temperature in use, or at 1 for a greedy sample.
fn at_temperature(params: &SamplingParams) -> SamplingParams {
    let temperature = if params.temperature > 0.0 { params.temperature } else { 1.0 };
    SamplingParams { temperature, ..SamplingParams::default() }
}

/// The distribution that tokens were sampled from, as a Score with the request's parameters has it.
fn distribution(params: &SamplingParams) -> SamplingParams {
    let SamplingParams { temperature, top_k, top_p, min_p, .. } = *params;
    let (logit_bias, allowed_tokens) = (params.logit_bias.clone(), params.allowed_tokens.clone());
    SamplingParams { temperature, top_k, top_p, min_p, logit_bias, allowed_tokens, ..SamplingParams::default() }
}
