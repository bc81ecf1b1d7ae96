//! A request as its client sees it: what was asked, the events so far, and what must be true of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use rollout_server::engine::{CancelFlag, Completion, Event, RequestKind};
use rollout_server::memory::Backlog;
use rollout_server::types::{FinishReason, Prompt, SamplingParams, TokenId, TokenLogprobs, WeightVersion, sample_seed};

use super::book::{Book, Known};
use super::executor::Device;
use super::model::{Alone, Computer, draw, logprob};

/// Events are counted as so many times their bytes, so that a reader lags after a few.
pub const INFLATION: u64 = 200;

/// A request that was given to the engine.
pub struct Request {
    pub id: String,
    pub kind: RequestKind,
    pub prompts: Vec<Prompt>,
    pub params: Arc<SamplingParams>,
    /// The name of its adapter.
    pub adapter: Option<usize>,
    pub if_version: Option<WeightVersion>,
    pub min_version: Option<WeightVersion>,
    pub max_model_len: usize,
    /// The turn before which it was sent.
    pub sent: u64,
    /// How often the policy's version had changed before.
    pub changes: u64,
    pub cancel: CancelFlag,
    pub backlog: Backlog,
    /// Bytes of the events that were not taken.
    pub unread: VecDeque<u64>,
    /// Whether its reader takes no events now.
    pub is_slow: bool,
    pub expires: Option<Instant>,
    /// The number of its event at which its client vanishes.
    pub vanishes_at: Option<u32>,
    pub events: u32,
    streamed: BTreeMap<(u32, u32), Vec<TokenLogprobs>>,
    completed: Vec<(u32, u32)>,
    scored: Vec<u32>,
    pub has_ended: bool,
    /// Whether its client has vanished or its time is up, so that the next turn ends it.
    pub must_end: bool,
    /// Whether the engine may have died before it has looked at it.
    pub is_excused: bool,
    /// Turns in a row, before this one, after which more was unread than may ever be.
    pub full_turns: u32,
}

/// The parts of a request that are known when it is made.
pub struct Asked {
    pub id: String,
    pub kind: RequestKind,
    pub prompts: Vec<Prompt>,
    pub params: Arc<SamplingParams>,
    pub adapter: Option<usize>,
    pub if_version: Option<WeightVersion>,
    pub min_version: Option<WeightVersion>,
}

impl Request {
    pub fn new(
        asked: Asked,
        max_model_len: usize,
        (sent, changes): (u64, u64),
        cancel: CancelFlag,
        backlog: Backlog,
    ) -> Self {
        let Asked { id, kind, prompts, params, adapter, if_version, min_version } = asked;
        Self {
            id,
            kind,
            prompts,
            params,
            adapter,
            if_version,
            min_version,
            max_model_len,
            sent,
            changes,
            cancel,
            backlog,
            unread: VecDeque::new(),
            is_slow: false,
            expires: None,
            vanishes_at: None,
            events: 0,
            streamed: BTreeMap::new(),
            completed: Vec::new(),
            scored: Vec::new(),
            has_ended: false,
            must_end: false,
            is_excused: false,
            full_turns: 0,
        }
    }

    /// Takes the next event.
    pub fn take(&mut self, event: Event, book: &Book, vocabulary: TokenId) {
        assert!(!self.has_ended, "{}: {event:?} follows the terminal event", self.id);
        self.events += 1;
        self.unread.push_back(event.bytes() * INFLATION);
        match event {
            Event::Token { prompt_index, sample_index, logprobs, .. } => {
                assert!(self.full_turns < 3, "{}: a token comes though its reader lags", self.id);
                self.streamed.entry((prompt_index, sample_index)).or_default().push(logprobs);
            }
            Event::Text { .. } => panic!("{}: there is no text", self.id),
            Event::PromptDone { prompt_index, logprobs, weight_version, .. } => {
                let logprobs = logprobs.expect("nothing else is asked for");
                assert!(!self.scored.contains(&prompt_index), "{}: prompt {prompt_index} is scored twice", self.id);
                self.scored.push(prompt_index);
                self.check_scores(prompt_index, &logprobs, weight_version, book);
            }
            Event::Completion(completion) => self.complete(completion, book, vocabulary),
            Event::Done(_) => self.check_done(),
            Event::Failed(_) => self.has_ended = true,
        }
    }

    fn check_done(&mut self) {
        self.has_ended = true;
        let RequestKind::Generate { n, .. } = self.kind else { return };
        self.completed.sort_unstable();
        let all = (0..self.prompts.len() as u32).flat_map(|prompt| (0..n).map(move |sample| (prompt, sample)));
        assert!(all.eq(self.completed.iter().copied()), "{}: one completion for each sample", self.id);
    }

    fn complete(&mut self, completion: Completion, book: &Book, vocabulary: TokenId) {
        let key = (completion.prompt_index, completion.sample_index);
        assert!(!self.completed.contains(&key), "{}: sample {key:?} ends twice", self.id);
        self.completed.push(key);
        let RequestKind::Generate { seed, stream_tokens, .. } = self.kind else {
            panic!("{}: a sample of a score", self.id)
        };
        assert_eq!(completion.seed, sample_seed(seed, key.0, key.1), "{}: the seed of {key:?}", self.id);
        if stream_tokens {
            let streamed = self.streamed.remove(&key).unwrap_or_default();
            assert!(same(&streamed, &completion.tokens), "{}: streamed tokens of {key:?}", self.id);
        }
        let prompt = &self.prompts[key.0 as usize];
        self.check_finish(&completion, prompt.tokens.len());
        self.check_versions(&completion, &book.known);
        check_tokens(&completion, prompt, &self.params, book, vocabulary);
        completion.tokens.iter().for_each(|token| self.check_adapter(token, &book.known));
    }

    fn check_finish(&self, completion: &Completion, prompt_len: usize) {
        let (id, params, len) = (&self.id, &self.params, completion.tokens.len());
        let has =
            |set: &[TokenId], i: usize| i >= params.min_tokens as usize && set.contains(&completion.tokens[i].token);
        let stops = |i: usize| has(&params.eos_token_ids, i) || has(&params.stop_token_ids, i);
        assert!((0..len.saturating_sub(1)).all(|i| !stops(i)), "{id}: tokens follow the one that ends the sample");
        let is_long = len == params.max_tokens as usize || prompt_len + len == self.max_model_len;
        let is_right = match completion.finish_reason {
            FinishReason::Eos => has(&params.eos_token_ids, len - 1),
            FinishReason::StopToken => has(&params.stop_token_ids, len - 1),
            FinishReason::Length => is_long && !stops(len - 1),
            FinishReason::Aborted => len < params.max_tokens as usize && (len == 0 || !stops(len - 1)),
            FinishReason::StopString | FinishReason::Grammar => false,
        };
        assert!(is_right, "{id}: {:?} after {len} tokens", completion.finish_reason);
    }

    /// Spans cover the tokens, no token is of a version that did not serve, and none is older than was asked for.
    fn check_versions(&self, completion: &Completion, known: &Known) {
        let (id, mut end, mut before) = (&self.id, 0, 0);
        for &(version, from, to) in &completion.weight_versions {
            assert!(from == end && to > from, "{id}: spans {:?}", completion.weight_versions);
            for token in &completion.tokens[from as usize..to as usize] {
                let is_known = known.served.contains(&(version, token.rank));
                assert!(is_known, "{id}: policy {} did not serve as version {version}", token.rank);
            }
            if !known.was_lowered {
                assert!(version >= before, "{id}: version {version} follows {before}");
                let least = self.min_version.filter(|_| self.if_version.is_none());
                assert!(least.is_none_or(|least| version >= least), "{id}: version {version} of at least {least:?}");
            }
            if let Some(wanted) = self.if_version.filter(|_| known.changes == self.changes) {
                assert_eq!(version, wanted, "{id}: the version that it insists on");
            }
            (end, before) = (to, version);
        }
        assert_eq!(end as usize, completion.tokens.len(), "{id}: spans cover the tokens");
    }

    /// A token comes from the adapter that the request has named.
    fn check_adapter(&self, token: &TokenLogprobs, known: &Known) {
        let name = known.adapters.get(&(token.processed as u64)).map(|known| known.0);
        assert_eq!(name, self.adapter, "{}: adapter of generation {}", self.id, token.processed);
    }

    /// All log-probabilities of a prompt are of one policy, and those of the prompt alone.
    fn check_scores(&self, prompt_index: u32, logprobs: &[TokenLogprobs], version: WeightVersion, book: &Book) {
        let tokens = &self.prompts[prompt_index as usize].tokens;
        assert_eq!(logprobs.len(), tokens.len() - 1, "{}: scores of prompt {prompt_index}", self.id);
        let Some(first) = logprobs.first() else { return };
        // A policy may be renamed, or wake from a sleep, while it computes a prompt.
        let weights = |number: u32| book.device.history[number as usize].weights;
        let is_same = |served: &(WeightVersion, u32)| served.0 == version && weights(served.1) == weights(first.rank);
        let served = book.known.served.iter().any(is_same);
        assert!(served, "{}: policy {} did not serve as version {version}", self.id, first.rank);
        let mut alone = Alone::new(computer(first, book));
        for (i, scored) in logprobs.iter().enumerate() {
            alone.push(tokens[i]);
            let expected = logprob(alone.logits(), tokens[i + 1]);
            assert!(scored.token == tokens[i + 1] && scored.raw == expected, "{}: score {i}", self.id);
            self.check_adapter(scored, &book.known);
        }
    }
}

/// What has computed a token, as its answer tells.
fn computer(token: &TokenLogprobs, book: &Book) -> Computer {
    let Device { history, .. } = &book.device;
    let adapter = book.known.adapters.get(&(token.processed as u64)).map_or(0, |known| u64::from(known.1));
    Computer { weights: history[token.rank as usize].weights, adapter }
}

/// The tokens of each policy that read no KV of an earlier one are those of the sample alone, under this policy: those
/// of the first one, and of each later one before which all KV was computed again.
fn check_tokens(completion: &Completion, prompt: &Prompt, params: &SamplingParams, book: &Book, vocabulary: TokenId) {
    let tokens = &completion.tokens;
    let mut from = 0;
    while from < tokens.len() {
        let number = tokens[from].rank;
        let served = book.device.history[number as usize];
        assert!(from == 0 || !served.is_drained, "policy {number} did not wait for token {from}'s sample");
        let end = (from..tokens.len()).find(|&i| tokens[i].rank != number).unwrap_or(tokens.len());
        if from == 0 || served.is_fresh {
            let mut alone = Alone::new(computer(&tokens[from], book));
            prompt.tokens.iter().chain(tokens[..from].iter().map(|t| &t.token)).for_each(|&token| alone.push(token));
            for (i, token) in tokens.iter().enumerate().take(end).skip(from) {
                let logits = alone.logits();
                let expected = draw(logits, completion.seed, i as u32, params, vocabulary);
                assert_eq!(token.token, expected, "token {i} is not that of the sample alone");
                assert_eq!(token.raw, logprob(logits, expected), "log-probability {i} is not that of the sample alone");
                alone.push(expected);
            }
        }
        from = end;
    }
}

fn same(a: &[TokenLogprobs], b: &[TokenLogprobs]) -> bool {
    let bits = |t: &TokenLogprobs| (t.token, t.raw.to_bits(), t.processed.to_bits(), t.rank);
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| bits(a) == bits(b))
}
