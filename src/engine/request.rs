//! One running request: what its samples have so far, and who is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::command::{CancelFlag, Completion, Event, GenerateCommand, Kind, Responder, Summary, tokens_bytes};
use crate::cache::CacheSalt;
use crate::error::Error;
use crate::memory::{Backlog, Charge};
use crate::scheduler::{Group, GroupKind};
use crate::text::{IncrementalDetokenizer, StopMatcher, StopStrings, Tokenizer};
use crate::types::{FinishReason, GroupKey, RequestKey, SampleKey, TokenId, TokenLogprobs, WeightVersion, sample_seed};

/// State of a request between admission and its terminal event.
pub struct Request {
    id: String,
    cancel: CancelFlag,
    responder: Responder,
    stream_tokens: bool,
    /// The policy it insists on.
    if_weight_version: Option<WeightVersion>,
    /// Generation of the resident adapter that it holds a lease of.
    adapter: Option<u64>,
    /// Whether some prompt of it has been computed.
    begun: bool,
    /// Samples that have not ended.
    samples: BTreeMap<SampleKey, Sample>,
    /// Prompts to be scored that have not been.
    scores_left: usize,
    summary: Summary,
    started: Instant,
    /// For prompts and records as long as the request runs, and for the tokens of samples that have not ended.
    charge: Charge,
    backlog: Backlog,
    is_held_back: bool,
}

struct Sample {
    seed: u64,
    cached_tokens: u32,
    tokens: Vec<TokenLogprobs>,
    /// `(version, start, end)` over `tokens`.
    weight_versions: Vec<(WeightVersion, u32, u32)>,
    /// Where the request has stop strings.
    stop: Option<TextWatch>,
}

impl Sample {
    fn new(seed: u64, stop: Option<TextWatch>) -> Self {
        Self { seed, cached_tokens: 0, tokens: Vec::new(), weight_versions: Vec::new(), stop }
    }

    /// Takes a token of the policy `version`.
    fn push(&mut self, logprobs: TokenLogprobs, version: WeightVersion) {
        let start = self.tokens.len() as u32;
        match self.weight_versions.last_mut() {
            Some((last, _, end)) if *last == version => *end = start + 1,
            _ => self.weight_versions.push((version, start, start + 1)),
        }
        self.tokens.push(logprobs);
    }
}

/// A sample's text, watched for stop strings.
#[derive(Clone)]
struct TextWatch {
    detokenizer: IncrementalDetokenizer,
    matcher: StopMatcher,
    delta: String,
}

impl GenerateCommand {
    /// What it counts for in queues: its samples; prompts that are scored count as one each.
    pub(super) fn num_samples(&self) -> usize {
        let each = match self.kind {
            Kind::Generate { n, .. } => n as usize,
            Kind::Score => 1,
        };
        self.prompts.len().saturating_mul(each)
    }
}

impl TextWatch {
    /// Takes the next token. Returns the length in bytes of the text before a stop string that this token completes.
    fn push(&mut self, token: TokenId) -> Option<usize> {
        self.delta.clear();
        self.detokenizer.push(token, &mut self.delta);
        self.matcher.push(&self.delta)
    }
}

impl Request {
    /// The request and the groups to schedule for it.
    ///
    /// # Panics
    /// If it has stop strings and there is no tokenizer: the door refuses that.
    pub fn new(
        key: RequestKey,
        command: GenerateCommand,
        salt: CacheSalt,
        tokenizer: Option<&Arc<Tokenizer>>,
    ) -> (Self, Vec<Group>) {
        let GenerateCommand { request_id, prompts, kind, params, if_weight_version, cancel, responder, .. } = command;
        let GenerateCommand { charge, backlog, .. } = command;
        let stop = (!params.stop_strings.is_empty()).then(|| {
            let tokenizer = tokenizer.expect("stop strings were let in without a tokenizer");
            TextWatch {
                // As the text of a completion is made: special tokens are no part of it.
                detokenizer: IncrementalDetokenizer::new(tokenizer.clone(), true),
                matcher: StopMatcher::new(Arc::new(StopStrings::new(&params.stop_strings))),
                delta: String::new(),
            }
        });
        let (n, seed) = match kind {
            Kind::Generate { n, seed, .. } => (n, seed),
            Kind::Score => (0, 0),
        };
        let (mut samples, mut groups) = (BTreeMap::new(), Vec::new());
        let summary =
            Summary { prompt_tokens: prompts.iter().map(|p| p.tokens.len() as u64).sum(), ..Default::default() };
        for (prompt_index, prompt) in (0..).zip(prompts) {
            let group = GroupKey { request: key, prompt_index };
            let seeds: Vec<u64> = (0..n).map(|i| sample_seed(seed, prompt_index, i)).collect();
            for (sample_index, &seed) in (0..).zip(&seeds) {
                samples.insert(SampleKey { group, sample_index }, Sample::new(seed, stop.clone()));
            }
            let kind = match &kind {
                &Kind::Generate { prompt_logprobs, .. } => GroupKind::Sample { seeds, prompt_logprobs },
                Kind::Score => GroupKind::Score,
            };
            groups.push(Group { key: group, prompt, params: params.clone(), salt, kind });
        }
        let request = Self {
            id: request_id,
            cancel,
            responder,
            stream_tokens: matches!(kind, Kind::Generate { stream_tokens: true, .. }),
            if_weight_version,
            adapter: salt.adapter,
            begun: false,
            samples,
            scores_left: if kind == Kind::Score { groups.len() } else { 0 },
            summary,
            started: Instant::now(),
            charge,
            backlog,
            is_held_back: false,
        };
        (request, groups)
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Whether it must not run under the policy `version`.
    pub fn insists_on_other_than(&self, version: WeightVersion) -> bool {
        self.if_weight_version.is_some_and(|wanted| wanted != version)
    }

    pub fn adapter(&self) -> Option<u64> {
        self.adapter
    }

    /// Whether its reader leaves so much unread that nothing more should be made for it now.
    pub fn lags(&self) -> bool {
        self.backlog.is_full()
    }

    pub fn is_held_back(&self) -> bool {
        self.is_held_back
    }

    pub fn note_held_back(&mut self, is_held_back: bool) {
        self.is_held_back = is_held_back;
    }

    /// Bytes that it holds, those included that wait for its reader.
    pub fn bytes(&self) -> u64 {
        self.charge.bytes() + self.backlog.bytes()
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// A prompt has been computed, all of it by the policy `weight_version`.
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

    /// Takes a sample's next token, one of the policy `version`. Returns whether the sample has ended, by `finish` or
    /// by a stop string.
    pub fn token(
        &mut self,
        key: SampleKey,
        logprobs: TokenLogprobs,
        finish: Option<FinishReason>,
        version: WeightVersion,
    ) -> bool {
        let sample = self.samples.get_mut(&key).expect("a token is of a sample that runs");
        let text_len = sample.stop.as_mut().and_then(|stop| stop.push(logprobs.token));
        // A token that ends the sample by itself is no text.
        let by_token = matches!(finish, Some(FinishReason::Eos | FinishReason::StopToken));
        let (finish, text_len) = match text_len {
            Some(len) if !by_token => (Some(FinishReason::StopString), Some(len)),
            _ => (finish, None),
        };
        if self.stream_tokens {
            let (prompt_index, sample_index) = (key.group.prompt_index, key.sample_index);
            (self.responder)(Event::Token { prompt_index, sample_index, logprobs: logprobs.clone() });
        }
        self.charge.grow_always(tokens_bytes(std::slice::from_ref(&logprobs)) as u64);
        sample.push(logprobs, version);
        if let Some(reason) = finish {
            let sample = self.samples.remove(&key).expect("it was there");
            self.complete(key, sample, reason, text_len);
        }
        finish.is_some()
    }

    /// Whether nothing is left to come but the terminal event.
    pub fn is_done(&self) -> bool {
        self.samples.is_empty() && self.scores_left == 0
    }

    /// Ends samples that still run as aborted, and sends the terminal event.
    pub fn end(mut self) {
        for (key, sample) in std::mem::take(&mut self.samples) {
            self.complete(key, sample, FinishReason::Aborted, None);
        }
        self.summary.seconds = self.started.elapsed().as_secs_f64();
        (self.responder)(Event::Done(self.summary.clone()));
    }

    /// Refuses the request.
    pub fn fail(mut self, error: Error) {
        (self.responder)(Event::Failed(error));
    }

    fn complete(&mut self, key: SampleKey, sample: Sample, finish_reason: FinishReason, text_len: Option<usize>) {
        let len = sample.tokens.len() as u32;
        self.summary.completion_tokens += u64::from(len);
        // From here on they are in the backlog.
        self.charge.shrink(tokens_bytes(&sample.tokens) as u64);
        (self.responder)(Event::Completion(Completion {
            prompt_index: key.group.prompt_index,
            sample_index: key.sample_index,
            tokens: sample.tokens,
            finish_reason,
            text_len,
            weight_versions: sample.weight_versions,
            seed: sample.seed,
            cached_tokens: sample.cached_tokens,
        }));
    }
}
