//! Finished samples and scored sequences that wait for their scores under other policies: references, the base, and
//! the policy that serves now.
//!
//! A sequence is scored as one more prompt of its request, once for each policy. For divergences, the final hidden
//! states of the request's own policy are kept, and the groups of the references compute its logits from them again,
//! beside their own. That takes the head that the states were made for. Where a push has changed the policy since, the
//! sequence is first scored under the present one; if a push comes in between, all is done again.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::request::{Completion, Event, OtherPolicies, PolicyScore, PolicyScores};
use crate::cache::CacheSalt;
use crate::scheduler::{Group, GroupKind};
use crate::types::{
    GroupKey, PolicyRows, PolicyWeights, Prompt, RequestKey, SamplingParams, TokenId, TokenLogprobs, WeightVersion,
};

/// The log-probabilities of the first tokens of a sample under a policy that has computed them again.
#[derive(Default)]
pub(super) struct Recomputed {
    pub logprobs: Vec<TokenLogprobs>,
    pub version: WeightVersion,
}

/// A sample that has ended, or a sequence that has been scored.
pub(super) struct FinishedSequence {
    /// [`Event::Completion`], or [`Event::PromptDone`] with log-probabilities.
    pub event: Event,
    /// The sampling parameters of its prompt.
    pub params: Arc<SamplingParams>,
    /// Bytes that it holds until it is sent.
    pub held: u64,
    pub recomputed: Recomputed,
    /// The hidden states of the request's own policy at all tokens, and its version.
    pub hidden: Option<(PolicyRows, WeightVersion)>,
}

/// The tokens of a finished sequence that are scored, and their scores.
struct Parts<'a> {
    prompt_index: u32,
    /// Whether the tokens follow the prompt, or are those of the prompt after its first.
    are_sampled: bool,
    tokens: &'a mut Vec<TokenLogprobs>,
    scores: &'a mut PolicyScores,
    /// Versions of the policies that made the log-probabilities, and the tokens that each ends with.
    versions: Vec<(WeightVersion, u32)>,
}

impl FinishedSequence {
    fn parts(&mut self) -> Parts<'_> {
        match &mut self.event {
            Event::Completion(Completion { prompt_index, tokens, weight_versions, scores, .. }) => {
                let versions = weight_versions.iter().map(|(version, _, end)| (*version, *end)).collect();
                Parts { prompt_index: *prompt_index, are_sampled: true, tokens, scores, versions }
            }
            Event::PromptDone { prompt_index, logprobs: Some(tokens), weight_version, scores, .. } => {
                let versions = vec![(*weight_version, tokens.len() as u32)];
                Parts { prompt_index: *prompt_index, are_sampled: false, tokens, scores, versions }
            }
            _ => unreachable!("a finished sequence has tokens"),
        }
    }

    /// Takes the values of all tokens under `version`: of those that it sampled, and of those that it computed again.
    /// `None` if some are missing. Afterwards only the result has hidden states.
    fn take_known(&mut self, version: WeightVersion) -> Option<Known> {
        let recomputed = std::mem::take(&mut self.recomputed);
        let again = if recomputed.version == version { recomputed.logprobs } else { Vec::new() };
        let Parts { tokens, versions, .. } = self.parts();
        let others = versions.iter().filter(|(made_by, _)| *made_by != version).map(|(_, end)| *end as usize).max();
        let first = others.unwrap_or(0);
        let known = (first <= again.len()).then(|| Known::new(again[..first].iter().chain(&tokens[first..]), version));
        tokens.iter_mut().for_each(forget_hidden);
        known
    }
}

/// The values of all tokens of a sequence under one version of the request's own policy.
struct Known {
    score: PolicyScore,
    /// Empty if the hidden states are not kept.
    hidden: Arc<[f32]>,
}

impl Known {
    fn new<'a>(tokens: impl Iterator<Item = &'a TokenLogprobs> + Clone, version: WeightVersion) -> Self {
        let hidden = tokens.clone().filter_map(|token| token.returned.as_ref()).flat_map(|returned| &returned.hidden);
        Self { hidden: hidden.copied().collect(), score: score_of(tokens, version) }
    }
}

/// The other policies of a request, and its sequences that wait for scores under them.
pub(super) struct Rescoring {
    request: RequestKey,
    prompts: Vec<Prompt>,
    /// The weights of the request's own policy.
    weights: PolicyWeights,
    references: Vec<PolicyWeights>,
    policies: OtherPolicies,
    /// The sequences that have finished since the last call of [`Rescoring::start`], or start again.
    finished: Vec<FinishedSequence>,
    /// Index of the next group, as if its sequence were one more prompt of the request.
    next_group: u32,
    /// The sequences whose groups run, by the index of their first group.
    waiting: BTreeMap<u32, Waiting>,
}

struct Waiting {
    sequence: FinishedSequence,
    /// Where the result of each group goes, in the order of the groups.
    targets: Vec<Target>,
    /// Number of groups that have no scores yet.
    left: usize,
    /// Whether a push has come between the hidden states and a group that uses them.
    is_stale: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    /// A reference, by its index.
    Named(usize),
    Base,
    /// The request's own policy, as it serves now: its scores, and its hidden states for divergences.
    Current,
}

/// The next step of a sequence that has finished.
pub(super) enum Start {
    /// Nothing: it can be sent.
    Done(Box<FinishedSequence>),
    /// These groups must run.
    Run(Vec<Group>),
}

impl Rescoring {
    /// `None` if the request asks for no other policy. `references` are the weights of those of `policies`.
    pub fn new(
        request: RequestKey,
        prompts: &[Prompt],
        weights: PolicyWeights,
        references: Vec<PolicyWeights>,
        policies: OtherPolicies,
    ) -> Option<Self> {
        policies.are_some().then(|| Self {
            request,
            prompts: prompts.to_vec(),
            weights,
            references,
            policies,
            finished: Vec::new(),
            next_group: prompts.len() as u32,
            waiting: BTreeMap::new(),
        })
    }

    /// Generations of the adapters that are references.
    pub fn adapters(&self) -> impl Iterator<Item = u64> {
        self.references.iter().filter_map(|reference| reference.adapter())
    }

    /// Number of sequences that have finished and have not been sent.
    pub fn num_waiting(&self) -> usize {
        self.finished.len() + self.waiting.len()
    }

    /// Keeps a sequence that has finished.
    pub fn push(&mut self, sequence: FinishedSequence) {
        self.finished.push(sequence);
    }

    /// Goes through the sequences that have finished since the last call. The policy of this epoch and version serves.
    pub fn start(&mut self, epoch: u64, version: WeightVersion) -> Vec<Start> {
        let finished = std::mem::take(&mut self.finished);
        finished.into_iter().map(|sequence| self.start_one(sequence, epoch, version)).collect()
    }

    fn start_one(&mut self, mut sequence: FinishedSequence, epoch: u64, version: WeightVersion) -> Start {
        let OtherPolicies { base, current, divergences, .. } = self.policies;
        let knows_hidden = sequence.hidden.as_ref().is_some_and(|(_, of)| *of == version);
        let mut lacks_current = current && sequence.parts().scores.current.is_none();
        let mut lacks_hidden = divergences && !knows_hidden;
        if (lacks_current || lacks_hidden)
            && let Some(known) = sequence.take_known(version)
        {
            self.take_current(&mut sequence, known);
            lacks_current = false;
            lacks_hidden &= sequence.hidden.as_ref().is_none_or(|(_, of)| *of != version);
        }
        let scored = Arc::new(at_temperature(&sequence.params));
        let of_current = SamplingParams { keeps_hidden: divergences, ..distribution(&sequence.params) };
        let of_current = (Target::Current, self.weights, Arc::new(of_current));
        let references = self.references.iter().enumerate().map(|(i, weights)| (Target::Named(i), *weights));
        let references = references.chain(base.then_some((Target::Base, PolicyWeights::Base)));
        let mut groups: Vec<_> = references.map(|(target, weights)| (target, weights, scored.clone())).collect();
        if lacks_hidden {
            groups = vec![of_current];
        } else if lacks_current {
            groups.push(of_current);
        }
        let Parts { prompt_index, are_sampled, tokens, scores, .. } = sequence.parts();
        let empty = PolicyScore { weight_version: version, ..PolicyScore::default() };
        scores.references = vec![empty.clone(); if groups.is_empty() { 0 } else { self.references.len() }];
        if groups.is_empty() || tokens.is_empty() {
            scores.base = scores.base.take().or(base.then_some(empty));
            return Start::Done(Box::new(sequence));
        }
        let prompt = &self.prompts[prompt_index as usize];
        let sampled = tokens.iter().map(|token| token.token).filter(|_| are_sampled);
        let scored_tokens: Vec<TokenId> = prompt.tokens.iter().copied().chain(sampled).collect();
        let scored_from = if are_sampled { prompt.tokens.len() - 1 } else { 0 };
        let prompt = Prompt { tokens: scored_tokens.into(), logprob_token_ids: Arc::default(), ..prompt.clone() };
        let policy = sequence.hidden.as_ref().filter(|_| divergences && !lacks_hidden).map(|(rows, _)| rows.clone());
        let first = self.next_group;
        let group =
            |(prompt_index, (target, weights, params)): (u32, (Target, PolicyWeights, Arc<SamplingParams>))| Group {
                key: GroupKey { request: self.request, prompt_index },
                prompt: prompt.clone(),
                params,
                salt: CacheSalt { epoch, weights },
                kind: GroupKind::Score { scored_from },
                grammar: None,
                returns_routing: false,
                current: None,
                policy: policy.clone().filter(|_| target != Target::Current),
            };
        let targets: Vec<Target> = groups.iter().map(|(target, ..)| *target).collect();
        let groups: Vec<Group> = (first..).zip(groups).map(group).collect();
        self.next_group += groups.len() as u32;
        self.waiting.insert(first, Waiting { sequence, left: targets.len(), targets, is_stale: false });
        Start::Run(groups)
    }

    /// Takes the values of a sequence's tokens under the request's own policy as it serves now.
    fn take_current(&self, sequence: &mut FinishedSequence, Known { score, hidden }: Known) {
        if !hidden.is_empty() {
            let width = hidden.len() / score.logprobs.len();
            let rows = PolicyRows { weights: self.weights, hidden, width };
            sequence.hidden = Some((rows, score.weight_version));
        }
        if self.policies.current {
            sequence.parts().scores.current = Some(score);
        }
    }

    /// Takes the scores of a group, which the policy `version` made. Returns the sequence if it waits for no others.
    pub fn scored(
        &mut self,
        group: GroupKey,
        logprobs: &[TokenLogprobs],
        version: WeightVersion,
    ) -> Option<FinishedSequence> {
        let first = *self.waiting.range(..=group.prompt_index).next_back()?.0;
        let mut waiting = self.waiting.remove(&first)?;
        let target = waiting.targets[(group.prompt_index - first) as usize];
        let known = Known::new(logprobs.iter(), version);
        let hidden_of = waiting.sequence.hidden.as_ref().map(|(_, of)| *of);
        match target {
            Target::Named(index) => waiting.sequence.parts().scores.references[index] = known.score,
            Target::Base => waiting.sequence.parts().scores.base = Some(known.score),
            Target::Current => self.take_current(&mut waiting.sequence, known),
        }
        waiting.is_stale |= target != Target::Current && hidden_of.is_some_and(|of| of != version);
        waiting.left -= 1;
        if waiting.left > 0 {
            self.waiting.insert(first, waiting);
            return None;
        }
        let Waiting { sequence, targets, is_stale, .. } = waiting;
        if is_stale || self.policies.divergences && targets == [Target::Current] {
            self.finished.push(sequence);
            return None;
        }
        Some(sequence)
    }

    /// Takes all sequences that have not been sent, without the scores that they wait for.
    pub fn give_up(&mut self) -> Vec<FinishedSequence> {
        let waiting = std::mem::take(&mut self.waiting).into_values().map(|Waiting { mut sequence, .. }| {
            let scores = sequence.parts().scores;
            (scores.references, scores.base) = (Vec::new(), None);
            sequence
        });
        std::mem::take(&mut self.finished).into_iter().chain(waiting).collect()
    }
}

fn score_of<'a>(tokens: impl Iterator<Item = &'a TokenLogprobs> + Clone, weight_version: WeightVersion) -> PolicyScore {
    let logprobs = tokens.clone().map(|token| (token.raw, token.processed)).collect();
    let divergences = tokens.filter_map(|token| token.returned.as_ref()?.divergences).collect();
    PolicyScore { logprobs, divergences, weight_version }
}

/// Drops the hidden state of a token, which no reply has.
pub(super) fn forget_hidden(token: &mut TokenLogprobs) {
    if let Some(returned) = &mut token.returned {
        returned.hidden = Vec::new();
    }
}

/// The distribution of references: the model's own at the temperature in use, or at 1 for a greedy sample.
fn at_temperature(params: &SamplingParams) -> SamplingParams {
    let temperature = if params.temperature > 0.0 { params.temperature } else { 1.0 };
    SamplingParams { temperature, ..SamplingParams::default() }
}

/// The distribution that tokens were sampled from, as a Score with the request's parameters has it.
pub(super) fn distribution(params: &SamplingParams) -> SamplingParams {
    let SamplingParams { temperature, top_k, top_p, min_p, .. } = *params;
    let (logit_bias, allowed_tokens) = (params.logit_bias.clone(), params.allowed_tokens.clone());
    SamplingParams { temperature, top_k, top_p, min_p, logit_bias, allowed_tokens, ..SamplingParams::default() }
}
