//! A request that has not ended: the state of its samples, and its events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::client::CancelFlag;
use super::request::{
    AdapterReader, Completion, Event, GenerateCommand, PolicyScores, RequestClient, RequestKind, RequestProgress,
    RequestStatus, SampleTimes, Summary, ValidRequest, reference_field, tokens_bytes,
};
use super::rescoring::{FinishedSequence, Recomputed, Rescoring, Start, distribution, forget_hidden};
use super::sample::Sample;
use super::text::{FinishedText, SampleText};
use crate::cache::CacheSalt;
use crate::error::Error;
use crate::grammar::GrammarState;
use crate::observe::{Metrics, SampleEnd};
use crate::scheduler::{Group, GroupKind};
use crate::text::Tokenizer;
use crate::types::{
    FinishReason, GroupKey, Owner, PolicyWeights, RequestKey, SampleKey, SamplingParams, TokenLogprobs, WeightVersion,
    sample_seed,
};

/// State of a request between its arrival and its terminal event. It is held until [`RequestState::accept`] is called.
pub(super) struct RequestState {
    /// Its prompts move to the scheduler when it is accepted.
    request: ValidRequest,
    pub client: RequestClient,
    num_prompts: usize,
    /// Number of samples that it requests; 0 if its prompts are scored.
    num_samples: usize,
    is_accepted: bool,
    /// Generation of the resident adapter that the request has a lease on.
    adapter: Option<u64>,
    /// Whether any of its prompts has been computed.
    begun: bool,
    /// Number of tokens that its samples have.
    tokens: u64,
    /// The samples that have not ended.
    samples: BTreeMap<SampleKey, Sample>,
    /// The sequences that have finished and wait for scores, if the request asks for some.
    rescoring: Option<Rescoring>,
    /// Number of prompts that remain to be scored.
    scores_left: usize,
    summary: Summary,
    /// When the first of its prompts was scheduled.
    begun_at: Option<Instant>,
    metrics: Arc<Metrics>,
    is_suspended: bool,
}

impl RequestState {
    pub fn new(GenerateCommand { request, client }: GenerateCommand, metrics: &Arc<Metrics>) -> Self {
        let prompt_tokens = request.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
        Self {
            num_prompts: request.prompts.len(),
            num_samples: request.num_samples(),
            request,
            client,
            is_accepted: false,
            adapter: None,
            begun: false,
            tokens: 0,
            samples: BTreeMap::new(),
            rescoring: None,
            scores_left: 0,
            summary: Summary { prompt_tokens, ..Summary::default() },
            begun_at: None,
            metrics: metrics.clone(),
            is_suspended: false,
        }
    }

    /// Makes the samples, and returns the groups to give to the scheduler. `references` are the weights of its
    /// references.
    ///
    /// # Panics
    /// If it has stop strings or asks for text and there is no tokenizer. The server rejects such requests.
    pub fn accept(
        &mut self,
        key: RequestKey,
        salt: CacheSalt,
        references: Vec<PolicyWeights>,
        tokenizer: Option<&Arc<Tokenizer>>,
    ) -> Vec<Group> {
        (self.is_accepted, self.adapter) = (true, salt.weights.adapter());
        let prompts = std::mem::take(&mut self.request.prompts);
        let policies = self.request.policies.clone();
        let wants_current = policies.current || policies.divergences;
        self.rescoring = Rescoring::new(key, &prompts, salt.weights, references, policies);
        if self.request.kind == RequestKind::Score {
            self.scores_left = prompts.len();
        }
        let text = self.text_of(&self.request.params, tokenizer);
        let mut groups = Vec::with_capacity(prompts.len());
        for (prompt_index, prompt) in (0..).zip(prompts) {
            let key = GroupKey { request: key, prompt_index };
            let own = self.request.prompt_sampling.get(&prompt_index);
            let (params, grammar) =
                own.map_or((&self.request.params, &self.request.grammar), |own| (&own.params, &own.grammar));
            let (params, grammar) = (params.clone(), grammar.clone());
            let kind = match self.request.kind {
                RequestKind::Score => GroupKind::Score { scored_from: 0 },
                RequestKind::Generate { n, seed, prompt_logprobs, .. } => {
                    // A prompt with its own seed is sampled as if it were the only one.
                    let (seed, index) = own.and_then(|own| own.seed).map_or((seed, prompt_index), |seed| (seed, 0));
                    let seeds: Vec<_> = (0..n).map(|i| sample_seed(seed, index, i)).collect();
                    let text = own.map_or_else(|| text.clone(), |own| self.text_of(&own.params, tokenizer));
                    let samples = (0..).zip(&seeds).map(|(sample_index, &seed)| {
                        let sample = Sample::new(seed, prompt.tokens.len(), text.clone());
                        (SampleKey { group: key, sample_index }, sample)
                    });
                    self.samples.extend(samples);
                    GroupKind::Sample { seeds, prompt_logprobs }
                }
            };
            let returns_routing = self.request.return_routing.is_some();
            let keeps_hidden = params.keeps_hidden;
            let current = || Arc::new(SamplingParams { keeps_hidden, ..distribution(&params) });
            let current = wants_current.then(current);
            groups.push(Group { key, prompt, params, salt, kind, grammar, returns_routing, current, policy: None });
        }
        groups
    }

    /// The text of a sample with these parameters, if it is returned or searched for stop strings.
    fn text_of(&self, params: &SamplingParams, tokenizer: Option<&Arc<Tokenizer>>) -> Option<SampleText> {
        let is_returned = matches!(self.request.kind, RequestKind::Generate { return_text: true, .. });
        (is_returned || !params.stop_strings.is_empty()).then(|| {
            let tokenizer = tokenizer.expect("a request for text or with stop strings is rejected without a tokenizer");
            SampleText::new(tokenizer, params, is_returned)
        })
    }

    pub fn request(&self) -> &ValidRequest {
        &self.request
    }

    pub fn id(&self) -> &str {
        &self.request.request_id
    }

    pub fn owner(&self) -> Option<Owner> {
        self.client.owner
    }

    /// Path of the field that says how to sample this prompt.
    pub fn sampling_field(&self, prompt_index: u32) -> String {
        match self.request.prompt_sampling.contains_key(&prompt_index) {
            true => format!("prompts[{prompt_index}].sampling"),
            false => "sampling".into(),
        }
    }

    pub fn waits_for_resume(&self) -> bool {
        self.client.waits_for_resume
    }

    pub fn cancel(&self) -> &CancelFlag {
        &self.client.cancel
    }

    /// Whether the request asks for exactly one version of the policy, and `version` is another.
    pub fn insists_on_other_than(&self, version: WeightVersion) -> bool {
        self.request.if_weight_version.is_some_and(|wanted| wanted != version)
    }

    /// Reads adapters that it names and that are not resident, if the server can.
    pub fn adapter_reader(&self) -> Option<&AdapterReader> {
        self.client.adapter_reader.as_ref()
    }

    /// The names of its adapter and of those of its references.
    pub fn adapter_names(&self) -> impl Iterator<Item = &str> {
        self.request.adapter.iter().chain(self.request.policies.references.iter().flatten()).map(String::as_str)
    }

    /// The field in which it names this adapter, if it does.
    pub fn field_of(&self, adapter: &str) -> Option<String> {
        let names = |name: &Option<String>| name.as_deref() == Some(adapter);
        if names(&self.request.adapter) {
            return Some("adapter".into());
        }
        self.request.policies.references.iter().position(names).map(reference_field)
    }

    /// Generations of the resident adapters that it has leases on, each once.
    pub fn adapters(&self) -> BTreeSet<u64> {
        self.adapter.into_iter().chain(self.rescoring.iter().flat_map(Rescoring::adapters)).collect()
    }

    /// Whether it has a lease on the resident adapter of this generation.
    pub fn uses(&self, generation: u64) -> bool {
        self.adapter == Some(generation)
            || self.rescoring.as_ref().is_some_and(|own| own.adapters().any(|used| used == generation))
    }

    /// Whether its reader leaves so many events unread that no more steps should run for it now.
    pub fn lags(&self) -> bool {
        self.client.backlog.is_full()
    }

    pub fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    pub fn note_suspended(&mut self, is_suspended: bool) {
        self.is_suspended = is_suspended;
    }

    /// Bytes that it holds, including unread events.
    pub fn bytes(&self) -> u64 {
        self.client.charge.bytes() + self.client.backlog.bytes()
    }

    pub fn status(&self, now: Instant) -> RequestStatus {
        let progress = match (self.is_accepted, self.is_suspended, self.begun_at) {
            (false, ..) => RequestProgress::Held,
            (true, true, _) => RequestProgress::Suspended,
            (true, false, Some(_)) => RequestProgress::Running,
            (true, false, None) => RequestProgress::Queued,
        };
        RequestStatus {
            id: self.id().into(),
            owner: self.owner(),
            progress,
            prompts: self.num_prompts,
            prompt_tokens: self.summary.prompt_tokens,
            samples: self.num_samples,
            open_samples: if self.is_accepted { self.samples.len() + self.num_waiting() } else { self.num_samples },
            tokens: self.tokens,
            age: now.saturating_duration_since(self.client.arrived),
        }
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Notes that the first step of one of its prompts begins.
    pub fn begin(&mut self, now: Instant) {
        if self.begun_at.is_none() {
            self.begun_at = Some(now);
            self.metrics.request_scheduled(now.saturating_duration_since(self.client.arrived));
        }
    }

    /// Notes that the policy `weight_version` computed a whole prompt, and sends its experts and its log-probabilities
    /// if they were requested.
    pub fn prompt_done(
        &mut self,
        group: GroupKey,
        cached_tokens: u32,
        logprobs: Option<Vec<TokenLogprobs>>,
        routing: Vec<u8>,
        weight_version: WeightVersion,
    ) {
        self.begun = true;
        self.summary.cached_tokens += u64::from(cached_tokens);
        self.scores_left = self.scores_left.saturating_sub(1);
        let sample = |sample_index| SampleKey { group, sample_index };
        for (_, sample) in self.samples.range_mut(sample(0)..=sample(u32::MAX)) {
            sample.cached_tokens = cached_tokens;
        }
        let (prompt_index, scores) = (group.prompt_index, PolicyScores::default());
        let held = (logprobs.as_deref().map_or(0, tokens_bytes) + routing.len()) as u64;
        let is_wanted = logprobs.is_some() || !routing.is_empty();
        let event = Event::PromptDone { prompt_index, logprobs, routing, weight_version, scores };
        match &mut self.rescoring {
            Some(rescoring) if self.request.kind == RequestKind::Score => {
                self.client.charge.grow_always(held);
                let (params, recomputed) = (self.request.params.clone(), Recomputed::default());
                rescoring.push(FinishedSequence { event, params, held, recomputed, hidden: None });
            }
            _ if is_wanted => (self.client.responder)(event),
            _ => {}
        }
    }

    /// Takes the log-probabilities of tokens of a sample from the output `start` on, which the policy `version` has
    /// computed again.
    pub fn recomputed(&mut self, key: SampleKey, start: usize, logprobs: Vec<TokenLogprobs>, version: WeightVersion) {
        let Some(sample) = self.samples.get_mut(&key) else { return };
        if start == 0 {
            self.client.charge.shrink(tokens_bytes(&sample.recomputed.logprobs) as u64);
            sample.recomputed = Recomputed { logprobs: Vec::new(), version };
        }
        self.client.charge.grow_always(tokens_bytes(&logprobs) as u64);
        sample.recomputed.logprobs.truncate(start);
        sample.recomputed.logprobs.extend(logprobs);
    }

    /// Takes the scores of a finished sequence under another policy, `version`.
    pub fn rescored(&mut self, group: GroupKey, logprobs: &[TokenLogprobs], version: WeightVersion) {
        let rescoring = self.rescoring.as_mut().expect("the group is of a finished sequence");
        if let Some(sequence) = rescoring.scored(group, logprobs, version) {
            self.send(sequence);
        }
    }

    /// Whether a group scores a finished sequence.
    pub fn is_rescored(&self, group: GroupKey) -> bool {
        group.prompt_index as usize >= self.num_prompts
    }

    /// Sends the sequences that have finished, and returns the groups that others wait for. The policy of this epoch
    /// and version serves.
    pub fn rescore(&mut self, epoch: u64, version: WeightVersion) -> Vec<Group> {
        let mut groups = Vec::new();
        for start in self.rescoring.as_mut().map_or_else(Vec::new, |rescoring| rescoring.start(epoch, version)) {
            match start {
                Start::Done(sequence) => self.send(*sequence),
                Start::Run(scored) => groups.extend(scored),
            }
        }
        groups
    }

    /// Number of sequences that have finished and wait for scores.
    fn num_waiting(&self) -> usize {
        self.rescoring.as_ref().map_or(0, Rescoring::num_waiting)
    }

    /// Whether a sample has not ended.
    pub fn is_running(&self, key: SampleKey) -> bool {
        self.samples.contains_key(&key)
    }

    /// Adds a sample's next token, which the policy `version` made in a step that ended `now`, with the experts of the
    /// token before, and streams it if the request streams tokens. Returns whether the sample has ended, by `finish` or
    /// by a stop string.
    pub fn token(
        &mut self,
        key: SampleKey,
        logprobs: TokenLogprobs,
        finish: Option<FinishReason>,
        (grammar_bytes, routing): (usize, &[u8]),
        (version, now): (WeightVersion, Instant),
    ) -> bool {
        self.note_token(key, now);
        let streams_tokens = self.streams_tokens();
        let sample = self.samples.get_mut(&key).expect("a token is of a sample that runs");
        let text_bytes = sample.text_bytes();
        // The text ends before a token that ends the sample.
        let ends_by_token = matches!(finish, Some(FinishReason::Eos | FinishReason::StopToken));
        let completes_stop_string =
            !ends_by_token && sample.text.as_mut().is_some_and(|text| text.push(logprobs.token));
        let finish = if completes_stop_string { Some(FinishReason::StopString) } else { finish };
        if streams_tokens {
            let (prompt_index, sample_index) = (key.group.prompt_index, key.sample_index);
            let text = sample.text.as_mut().and_then(SampleText::next_piece);
            let (mut logprobs, is_last) = (logprobs.clone(), finish.is_some());
            forget_hidden(&mut logprobs);
            (self.client.responder)(Event::Token { prompt_index, sample_index, logprobs, text, is_last });
        }
        let text_grown = sample.text_bytes() - text_bytes;
        let grown = tokens_bytes(std::slice::from_ref(&logprobs)) + routing.len() + text_grown;
        self.client.charge.grow_always((grown + grammar_bytes) as u64);
        sample.grammar_bytes += grammar_bytes.min(GrammarState::BYTES_PER_TOKEN);
        sample.routing.extend_from_slice(routing);
        sample.push(logprobs, version);
        self.tokens += 1;
        if let Some(reason) = finish {
            let sample = self.samples.remove(&key).expect("it was there");
            self.complete(key, sample, reason, now);
        }
        finish.is_some()
    }

    fn streams_tokens(&self) -> bool {
        matches!(self.request.kind, RequestKind::Generate { stream_tokens: true, .. })
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
                self.metrics.first_token(now.saturating_duration_since(self.client.arrived), since_begin);
            }
        }
    }

    /// Whether only the terminal event is missing.
    pub fn is_done(&self) -> bool {
        self.samples.is_empty() && self.scores_left == 0 && self.num_waiting() == 0
    }

    /// Ends samples that still run as aborted, and sends the terminal event at time `now`.
    pub fn end(&mut self, now: Instant) {
        let is_aborted = !self.is_done();
        for (key, sample) in std::mem::take(&mut self.samples) {
            self.complete(key, sample, FinishReason::Aborted, now);
        }
        for sequence in self.rescoring.take().map_or_else(Vec::new, |mut rescoring| rescoring.give_up()) {
            // A sequence that was to be scored under all policies has no score without them.
            if matches!(sequence.event, Event::Completion(_)) {
                self.send(sequence);
            }
        }
        let took = now.saturating_duration_since(self.client.arrived);
        self.summary.seconds = took.as_secs_f64();
        self.metrics.request_done(is_aborted, self.summary.prompt_tokens, took);
        (self.client.responder)(Event::Done(self.summary.clone()));
    }

    /// Sends the error as the terminal event.
    pub fn fail(&mut self, error: Error) {
        self.metrics.request_failed(&error);
        (self.client.responder)(Event::Failed(error));
    }

    /// Counts a sample that ends `now`.
    fn count(&self, sample: &Sample, reason: FinishReason, now: Instant) {
        let (arrived, begun) = (self.client.arrived, self.begun_at.unwrap_or(now));
        let (first, last) = sample.span.unwrap_or((begun, begun));
        self.metrics.sample_done(&SampleEnd {
            reason,
            prompt_tokens: sample.prompt_tokens,
            tokens: sample.tokens.len(),
            queued: begun.saturating_duration_since(arrived),
            inference: last.saturating_duration_since(begun),
            decoded: last.saturating_duration_since(first),
            total: now.saturating_duration_since(arrived),
        });
    }

    /// Counts a sample that ends `now`, and sends it unless it waits for scores.
    fn complete(&mut self, key: SampleKey, sample: Sample, finish_reason: FinishReason, now: Instant) {
        self.count(&sample, finish_reason, now);
        self.summary.completion_tokens += sample.tokens.len() as u64;
        if let (1, Some((first, last)), Some(begun)) = (self.num_samples, sample.span, self.begun_at) {
            let queued = begun.saturating_duration_since(self.client.arrived);
            let first_token = first.saturating_duration_since(begun);
            self.summary.times = Some(SampleTimes { queued, first_token, decoded: last - first });
        }
        let tokens = tokens_bytes(&sample.tokens) + tokens_bytes(&sample.recomputed.logprobs);
        let held = tokens + sample.routing.len() + sample.text_bytes() + sample.grammar_bytes;
        let (prompt_index, sample_index) = (key.group.prompt_index, key.sample_index);
        let text = sample.text.and_then(|text| text.finish(finish_reason == FinishReason::StopString));
        if self.streams_tokens()
            && let Some(rest) = text.as_ref().map(FinishedText::rest).filter(|rest| !rest.is_empty())
        {
            (self.client.responder)(Event::Text { prompt_index, sample_index, text: rest.to_owned() });
        }
        let completion = Completion {
            prompt_index,
            sample_index,
            tokens: sample.tokens,
            finish_reason,
            text: text.map(|text| text.whole),
            weight_versions: sample.weight_versions,
            seed: sample.seed,
            cached_tokens: sample.cached_tokens,
            routing: sample.routing,
            scores: PolicyScores::default(),
        };
        let own = self.request.prompt_sampling.get(&prompt_index);
        let params = own.map_or(&self.request.params, |own| &own.params).clone();
        let (event, recomputed) = (Event::Completion(completion), sample.recomputed);
        let sequence = FinishedSequence { event, params, held: held as u64, recomputed, hidden: None };
        match &mut self.rescoring {
            Some(rescoring) if finish_reason != FinishReason::Aborted => rescoring.push(sequence),
            _ => self.send(sequence),
        }
    }

    fn send(&mut self, FinishedSequence { mut event, held, .. }: FinishedSequence) {
        if let Event::Completion(Completion { tokens, .. }) = &mut event {
            tokens.iter_mut().for_each(forget_hidden);
        }
        // From here on the backlog counts it.
        self.client.charge.shrink(held);
        (self.client.responder)(event);
    }
}
