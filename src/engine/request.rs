//! One accepted request: the state of its samples, and the events it sends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::command::{CancelFlag, GenerateCommand, OwnSampling, RequestKind, Responder};
use super::event::{Completion, Event, Summary, tokens_bytes};
use super::listing::{Progress, RequestStatus};
use super::text::{FinishedText, SampleText};
use crate::cache::CacheSalt;
use crate::error::Error;
use crate::grammar::GrammarState;
use crate::memory::{Backlog, Charge};
use crate::observe::Metrics;
use crate::scheduler::{Group, GroupKind};
use crate::text::Tokenizer;
use crate::types::{
    FinishReason, GroupKey, Owner, RequestKey, SampleKey, SamplingParams, TokenLogprobs, WeightVersion, sample_seed,
};

/// State of a request between admission and its terminal event.
pub struct Request {
    id: String,
    owner: Option<Owner>,
    cancel: CancelFlag,
    responder: Responder,
    stream_tokens: bool,
    /// The only version of the policy under which it may start.
    if_weight_version: Option<WeightVersion>,
    /// Generation of the resident adapter that the request holds a lease of.
    adapter: Option<u64>,
    /// Whether any of its prompts has been computed.
    begun: bool,
    prompts: usize,
    /// Indices of the prompts that have sampling of their own.
    own: BTreeSet<u32>,
    /// Number of samples that it asks for; 0 if its prompts are scored.
    asked: usize,
    /// Number of tokens that its samples have been given.
    tokens: u64,
    /// The samples that have not ended.
    samples: BTreeMap<SampleKey, Sample>,
    /// Number of prompts that are still to be scored.
    scores_left: usize,
    summary: Summary,
    arrived: Instant,
    /// When the first of its prompts was scheduled.
    begun_at: Option<Instant>,
    metrics: Arc<Metrics>,
    /// Counts the records of its samples while it runs, and the tokens and texts of samples until they end.
    charge: Charge,
    /// Counts the events that its reader has not taken.
    backlog: Backlog,
    is_suspended: bool,
}

/// A sample that has not ended.
struct Sample {
    seed: u64,
    cached_tokens: u32,
    tokens: Vec<TokenLogprobs>,
    /// Versions of the policies that made the tokens, as `(version, start, end)` over `tokens`.
    weight_versions: Vec<(WeightVersion, u32, u32)>,
    /// The sample's text, if the request has stop strings or wants text.
    text: Option<SampleText>,
    /// Times of its first and last token.
    span: Option<(Instant, Instant)>,
    /// Bytes that its state in the grammar takes.
    grammar_bytes: usize,
}

impl Sample {
    fn new(seed: u64, text: Option<SampleText>) -> Self {
        let (tokens, weight_versions) = (Vec::new(), Vec::new());
        Self { seed, cached_tokens: 0, tokens, weight_versions, text, span: None, grammar_bytes: 0 }
    }

    /// Bytes of text that are kept.
    fn text_bytes(&self) -> usize {
        self.text.as_ref().map_or(0, SampleText::bytes)
    }

    /// Adds a token that the policy `version` made.
    fn push(&mut self, logprobs: TokenLogprobs, version: WeightVersion) {
        let start = self.tokens.len() as u32;
        match self.weight_versions.last_mut() {
            Some((last, _, end)) if *last == version => *end = start + 1,
            _ => self.weight_versions.push((version, start, start + 1)),
        }
        self.tokens.push(logprobs);
    }
}

impl GenerateCommand {
    /// Number of samples that the request counts for in queues; each prompt that is scored counts as one.
    pub(super) fn num_samples(&self) -> usize {
        let each = match self.kind {
            RequestKind::Generate { n, .. } => n as usize,
            RequestKind::Score => 1,
        };
        self.prompts.len().saturating_mul(each)
    }

    /// What is known of a request that is held.
    pub(super) fn status(&self, now: Instant) -> RequestStatus {
        let samples = if self.kind == RequestKind::Score { 0 } else { self.num_samples() };
        RequestStatus {
            id: self.request_id.clone(),
            owner: self.owner,
            progress: Progress::Held,
            prompts: self.prompts.len(),
            prompt_tokens: self.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum(),
            samples,
            open_samples: samples,
            tokens: 0,
            age: now.saturating_duration_since(self.arrived),
        }
    }
}

impl Request {
    /// Makes the request, and the groups to give to the scheduler.
    ///
    /// # Panics
    /// If it has stop strings or wants text and there is no tokenizer, which the server refuses at the door.
    pub fn new(
        key: RequestKey,
        command: GenerateCommand,
        salt: CacheSalt,
        tokenizer: Option<&Arc<Tokenizer>>,
        metrics: &Arc<Metrics>,
    ) -> (Self, Vec<Group>) {
        let GenerateCommand { request_id, prompts, kind, params, if_weight_version, cancel, responder, .. } = command;
        let GenerateCommand { charge, backlog, owner, arrived, grammar, mut own, .. } = command;
        let return_text = matches!(kind, RequestKind::Generate { return_text: true, .. });
        let text_of = |params: &SamplingParams| {
            (return_text || !params.stop_strings.is_empty()).then(|| {
                let why = "a request for text or with stop strings was let in without a tokenizer";
                SampleText::new(tokenizer.expect(why), &params.stop_strings, return_text)
            })
        };
        let text = text_of(&params);
        let own_indices = own.keys().copied().collect();
        let (n, seed) = match kind {
            RequestKind::Generate { n, seed, .. } => (n, seed),
            RequestKind::Score => (0, 0),
        };
        let (mut samples, mut groups) = (BTreeMap::new(), Vec::new());
        let summary =
            Summary { prompt_tokens: prompts.iter().map(|p| p.tokens.len() as u64).sum(), ..Default::default() };
        for (prompt_index, prompt) in (0..).zip(prompts) {
            let group = GroupKey { request: key, prompt_index };
            let (text, params, grammar, seed) = match own.remove(&prompt_index) {
                None => (text.clone(), params.clone(), grammar.clone(), (seed, prompt_index)),
                Some(OwnSampling { params, grammar, seed: own }) => {
                    (text_of(&params), params, grammar, own.map_or((seed, prompt_index), |own| (own, 0)))
                }
            };
            let seeds: Vec<u64> = (0..n).map(|i| sample_seed(seed.0, seed.1, i)).collect();
            for (sample_index, &seed) in (0..).zip(&seeds) {
                samples.insert(SampleKey { group, sample_index }, Sample::new(seed, text.clone()));
            }
            let kind = match &kind {
                &RequestKind::Generate { prompt_logprobs, .. } => GroupKind::Sample { seeds, prompt_logprobs },
                RequestKind::Score => GroupKind::Score,
            };
            groups.push(Group { key: group, prompt, params, salt, kind, grammar });
        }
        let request = Self {
            id: request_id,
            owner,
            cancel,
            responder,
            stream_tokens: matches!(kind, RequestKind::Generate { stream_tokens: true, .. }),
            if_weight_version,
            adapter: salt.adapter,
            begun: false,
            prompts: groups.len(),
            own: own_indices,
            asked: samples.len(),
            tokens: 0,
            samples,
            scores_left: if kind == RequestKind::Score { groups.len() } else { 0 },
            summary,
            arrived,
            begun_at: None,
            metrics: metrics.clone(),
            charge,
            backlog,
            is_suspended: false,
        };
        (request, groups)
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn owner(&self) -> Option<Owner> {
        self.owner
    }

    /// Path of the field that says how to sample this prompt.
    pub fn sampling_field(&self, prompt_index: u32) -> String {
        match self.own.contains(&prompt_index) {
            true => format!("prompts[{prompt_index}].sampling"),
            false => "sampling".into(),
        }
    }

    /// Whether its client is gone, or wants what there is now.
    pub fn is_given_up(&self) -> bool {
        self.cancel.is_cancelled() || self.cancel.is_expired()
    }

    /// Whether the request asks for exactly one version of the policy, and `version` is another.
    pub fn insists_on_other_than(&self, version: WeightVersion) -> bool {
        self.if_weight_version.is_some_and(|wanted| wanted != version)
    }

    pub fn adapter(&self) -> Option<u64> {
        self.adapter
    }

    /// Whether its reader leaves so many events unread that nothing more should be computed for it now.
    pub fn lags(&self) -> bool {
        self.backlog.is_full()
    }

    pub fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    pub fn note_suspended(&mut self, is_suspended: bool) {
        self.is_suspended = is_suspended;
    }

    /// Bytes that it holds, unread events included.
    pub fn bytes(&self) -> u64 {
        self.charge.bytes() + self.backlog.bytes()
    }

    /// What those who look at the server are told of it.
    pub fn status(&self, now: Instant) -> RequestStatus {
        let progress = match (self.is_suspended, self.begun_at) {
            (true, _) => Progress::Suspended,
            (false, Some(_)) => Progress::Running,
            (false, None) => Progress::Queued,
        };
        RequestStatus {
            id: self.id.clone(),
            owner: self.owner,
            progress,
            prompts: self.prompts,
            prompt_tokens: self.summary.prompt_tokens,
            samples: self.asked,
            open_samples: self.samples.len(),
            tokens: self.tokens,
            age: now.saturating_duration_since(self.arrived),
        }
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Notes that the first step of one of its prompts begins.
    pub fn begin(&mut self, now: Instant) {
        if self.begun_at.is_none() {
            self.begun_at = Some(now);
            self.metrics.request_scheduled(now.saturating_duration_since(self.arrived));
        }
    }

    /// Notes that a prompt has been computed, all of it by the policy `weight_version`, and tells the client its
    /// log-probabilities if they were asked for.
    pub fn prompt_done(
        &mut self,
        group: GroupKey,
        cached_tokens: u32,
        logprobs: Option<Vec<TokenLogprobs>>,
        weight_version: WeightVersion,
    ) {
        self.begun = true;
        self.summary.cached_tokens += u64::from(cached_tokens);
        self.scores_left = self.scores_left.saturating_sub(1);
        let sample = |sample_index| SampleKey { group, sample_index };
        for (_, sample) in self.samples.range_mut(sample(0)..=sample(u32::MAX)) {
            sample.cached_tokens = cached_tokens;
        }
        if let Some(logprobs) = logprobs {
            let prompt_index = group.prompt_index;
            (self.responder)(Event::PromptLogprobs { prompt_index, logprobs, weight_version });
        }
    }

    /// Whether a sample has not ended.
    pub fn is_running(&self, key: SampleKey) -> bool {
        self.samples.contains_key(&key)
    }

    /// Adds a sample's next token, which the policy `version` made in a step that has ended `now`, and tells the client
    /// of it. Returns whether the sample has ended, by `finish` or by a stop string.
    pub fn token(
        &mut self,
        key: SampleKey,
        logprobs: TokenLogprobs,
        finish: Option<FinishReason>,
        grammar_bytes: usize,
        (version, now): (WeightVersion, Instant),
    ) -> bool {
        self.note_token(key, now);
        let sample = self.samples.get_mut(&key).expect("a token is of a sample that runs");
        let text_bytes = sample.text_bytes();
        let completes_stop_string = sample.text.as_mut().is_some_and(|text| text.push(logprobs.token));
        let finish = match finish {
            // The token ends the sample by itself, even if it completes a stop string as well.
            Some(FinishReason::Eos | FinishReason::StopToken) => finish,
            _ if completes_stop_string => Some(FinishReason::StopString),
            _ => finish,
        };
        if self.stream_tokens {
            let (prompt_index, sample_index) = (key.group.prompt_index, key.sample_index);
            let text = sample.text.as_mut().and_then(SampleText::next_piece);
            (self.responder)(Event::Token { prompt_index, sample_index, logprobs: logprobs.clone(), text });
        }
        let grown = tokens_bytes(std::slice::from_ref(&logprobs)) + sample.text_bytes() - text_bytes;
        self.charge.grow_always((grown + grammar_bytes) as u64);
        sample.grammar_bytes += grammar_bytes.min(GrammarState::BYTES_PER_TOKEN);
        sample.push(logprobs, version);
        self.tokens += 1;
        if let Some(reason) = finish {
            let sample = self.samples.remove(&key).expect("it was there");
            self.complete(key, sample, reason);
        }
        finish.is_some()
    }

    fn note_token(&mut self, key: SampleKey, now: Instant) {
        let sample = self.samples.get_mut(&key).expect("a token is of a sample that runs");
        match &mut sample.span {
            Some((_, last)) => {
                self.metrics.next_token(now - *last);
                *last = now;
            }
            None => {
                sample.span = Some((now, now));
                let since_begin = now - self.begun_at.unwrap_or(now);
                self.metrics.first_token(now.saturating_duration_since(self.arrived), since_begin);
            }
        }
    }

    /// Whether nothing is left to come but the terminal event.
    pub fn is_done(&self) -> bool {
        self.samples.is_empty() && self.scores_left == 0
    }

    /// Ends samples that still run as aborted, and sends the terminal event. The time is `now`.
    pub fn end(&mut self, now: Instant) {
        let is_aborted = !self.is_done();
        for (key, sample) in std::mem::take(&mut self.samples) {
            self.complete(key, sample, FinishReason::Aborted);
        }
        let took = now.saturating_duration_since(self.arrived);
        self.summary.seconds = took.as_secs_f64();
        self.metrics.request_done(is_aborted, self.summary.prompt_tokens, took);
        (self.responder)(Event::Done(self.summary.clone()));
    }

    /// Sends the error as the terminal event.
    pub fn fail(&mut self, error: Error) {
        self.metrics.request_failed(&error);
        (self.responder)(Event::Failed(error));
    }

    fn complete(&mut self, key: SampleKey, sample: Sample, finish_reason: FinishReason) {
        let len = sample.tokens.len() as u32;
        let decoded = sample.span.map_or(Duration::ZERO, |(first, last)| last - first);
        self.metrics.sample_done(finish_reason, sample.tokens.len(), decoded);
        self.summary.completion_tokens += u64::from(len);
        // The backlog counts them from here on.
        self.charge.shrink((tokens_bytes(&sample.tokens) + sample.text_bytes() + sample.grammar_bytes) as u64);
        let (prompt_index, sample_index) = (key.group.prompt_index, key.sample_index);
        let text = sample.text.and_then(|text| text.finish(finish_reason == FinishReason::StopString));
        if self.stream_tokens
            && let Some(rest) = text.as_ref().map(FinishedText::rest).filter(|rest| !rest.is_empty())
        {
            (self.responder)(Event::Text { prompt_index, sample_index, text: rest.to_owned() });
        }
        (self.responder)(Event::Completion(Completion {
            prompt_index,
            sample_index,
            tokens: sample.tokens,
            finish_reason,
            text: text.map(|text| text.whole),
            weight_versions: sample.weight_versions,
            seed: sample.seed,
            cached_tokens: sample.cached_tokens,
        }));
    }
}
