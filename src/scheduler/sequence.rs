//! One sequence of tokens, and how far its KV has been computed.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::tenants::TenantId;
use super::thinking::Thinking;
use super::{Group, GroupKind};
use crate::cache::{BlockHash, BlockTable, CacheSalt, HashChain, KvCacheManager};
use crate::grammar::GrammarState;
use crate::types::{
    Distribution, FinishReason, History, LogitsRow, LogitsTask, PlanSequence, PolicyRow, PolicyRows, Prompt, SampleKey,
    SamplingParams, TokenId, TokenLogprobs, TokenMask,
};

/// Name of a sequence inside the scheduler. Ascending ids of a tenant are the order of age, the oldest sequence first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SeqId {
    pub tenant: TenantId,
    /// Number of groups that left the queue before this one.
    pub admission: u64,
    pub sample_index: u32,
}

impl SeqId {
    /// All ids of a tenant.
    pub fn of(tenant: TenantId) -> RangeInclusive<Self> {
        Self { tenant, admission: 0, sample_index: 0 }..=Self { tenant, admission: u64::MAX, sample_index: u32::MAX }
    }

    /// Orders sequences of all tenants by age.
    pub fn age(self) -> (u64, u32) {
        (self.admission, self.sample_index)
    }
}

/// The tokens of one sample. The sequence of sample 0 first computes the prompt, on behalf of all samples of its group.
///
/// KV of the tokens `[0, num_computed)` is present, that of `[num_computed, num_tokens)` is to be computed.
#[derive(Debug)]
pub(super) struct Sequence {
    pub key: SampleKey,
    pub prompt: Prompt,
    pub params: Arc<SamplingParams>,
    pub seed: u64,
    /// Seeds of the other samples of the group, from sample 1 on, until the prompt is computed and they fork.
    pub unforked: Vec<u64>,
    pub score_only: bool,
    /// Whether its outcomes have the experts that its tokens took.
    pub returns_routing: bool,
    /// The policy and the adapter of all KV that is computed from now on.
    pub salt: CacheSalt,
    pub outputs: Vec<TokenId>,
    /// The state of its grammar, if it has one: a function of `outputs`, which preemption keeps.
    pub grammar: Option<Box<GrammarState>>,
    /// How much of its budget its reasoning has used, if there is one: a function of all tokens.
    pub thinking: Option<Thinking>,
    /// The last output, while the mask after it is being computed elsewhere; `grammar` is there too.
    pub pending: Option<PendingToken>,
    pub num_computed: usize,
    /// Blocks of the tokens `[0, num_computed)` and, while a step is under way, of the tokens that it computes.
    pub table: BlockTable,
    /// Hashes of the full blocks of all tokens, whether their KV is computed or not.
    pub hashes: HashChain,
    /// Number of blocks of the table that are registered in the prefix cache, or came from there.
    pub num_registered: usize,
    /// Whether some KV of the table was computed under an earlier policy. No further block is registered then.
    pub mixed: bool,
    /// Log-probabilities of the prompt's tokens that follow those from `scored_from` on, if they are asked for and not
    /// reported yet. They are kept through a preemption, since computing again gives the same bits, but not through a
    /// change of the policy.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Index of the first token that predicts one of `prompt_logprobs`.
    pub scored_from: usize,
    /// See [`Group::policy`].
    pub policy: Option<PolicyRows>,
    /// See [`Group::current`].
    pub current: Option<Arc<SamplingParams>>,
    /// Number of outputs, from the first on, whose log-probabilities under the present policy are known: it sampled
    /// them, or scored them when it computed them again. `None` if they are not wanted, or if the policy has changed
    /// and the KV of the one before was kept.
    pub rescored: Option<usize>,
    /// Number of tokens found in the prefix cache at the first admission; `None` before it.
    pub cached_tokens: Option<u32>,
    /// Number of the prompt's tokens that the tenant has been charged for, or that were found in the prefix cache.
    pub charged: usize,
    /// Number of context tokens that matched where the drafts of the step under way were found.
    pub matched: usize,
}

/// A token whose outcome is not known before the mask after it.
#[derive(Debug)]
pub(super) struct PendingToken {
    pub logprobs: TokenLogprobs,
    pub finish: Option<FinishReason>,
    /// The experts of the token before it, if they are returned.
    pub routing: Vec<u8>,
    /// Dropped with the sequence, so that the mask of a sample that has ended is not computed.
    pub _wanted: Arc<()>,
}

impl Sequence {
    /// Makes the sequence of a group's sample 0.
    pub fn new(group: Group, block_size: usize) -> Self {
        let has_rows = !group.prompt.logprob_token_ids.is_empty();
        let (mut seeds, score_only, scored_from) = match group.kind {
            GroupKind::Sample { seeds, prompt_logprobs: true } => (seeds, false, Some(0)),
            GroupKind::Sample { seeds, .. } => (seeds, false, has_rows.then(|| group.prompt.first_with_row())),
            GroupKind::Score { scored_from } => (vec![0], true, Some(scored_from)),
        };
        assert!(!seeds.is_empty(), "{:?} has no samples", group.key);
        let unforked = seeds.split_off(1);
        let hashes = HashChain::of(group.salt, &group.prompt.tokens, &group.prompt, block_size);
        let thinking = group
            .params
            .thinking
            .map(|budget| Thinking::new(budget, &group.prompt.tokens, &group.params.eos_token_ids));
        Self {
            key: SampleKey { group: group.key, sample_index: 0 },
            prompt: group.prompt,
            params: group.params,
            seed: seeds[0],
            unforked,
            score_only,
            returns_routing: group.returns_routing,
            salt: group.salt,
            outputs: Vec::new(),
            grammar: group.grammar.map(|grammar| Box::new(grammar.start())),
            thinking,
            pending: None,
            num_computed: 0,
            table: BlockTable::default(),
            hashes,
            num_registered: 0,
            mixed: false,
            prompt_logprobs: scored_from.map(|_| Vec::new()),
            scored_from: scored_from.unwrap_or(0),
            policy: group.policy,
            rescored: group.current.is_some().then_some(0),
            current: group.current,
            cached_tokens: None,
            charged: 0,
            matched: 0,
        }
    }

    /// Makes the sequence of another sample of the group, with a forked `table`.
    pub fn fork(&self, sample_index: u32, seed: u64, table: BlockTable) -> Self {
        Self {
            key: SampleKey { sample_index, ..self.key },
            prompt: self.prompt.clone(),
            params: Arc::clone(&self.params),
            seed,
            unforked: Vec::new(),
            score_only: false,
            returns_routing: self.returns_routing,
            salt: self.salt,
            outputs: self.outputs.clone(),
            grammar: self.grammar.clone(),
            thinking: self.thinking,
            pending: None,
            num_computed: self.num_computed,
            table,
            hashes: self.hashes.clone(),
            num_registered: self.num_registered,
            mixed: false,
            prompt_logprobs: None,
            scored_from: 0,
            policy: None,
            current: self.current.clone(),
            rescored: self.rescored,
            cached_tokens: self.cached_tokens,
            charged: self.charged,
            matched: 0,
        }
    }

    /// Number of tokens whose KV is wanted. The last token of a scored prompt is left out, since its logits are not
    /// asked for; but a prompt of one token runs nevertheless, so that every group takes part in a step.
    pub fn num_tokens(&self) -> usize {
        if self.score_only {
            (self.prompt.tokens.len() - 1).max(1)
        } else {
            self.prompt.tokens.len() + self.outputs.len()
        }
    }

    /// Most tokens that may come from the prefix cache. The last token must run for its logits, and so must every
    /// prompt token whose log-probabilities are still wanted.
    pub fn max_cached_tokens(&self) -> usize {
        let last = self.num_tokens() - 1;
        self.next_scored().map_or(last, |next| next.min(last))
    }

    /// Hash of the full block at `index`, if the prefix cache may provide it.
    pub fn cacheable_block(&self, index: usize, block_size: usize) -> Option<&BlockHash> {
        let is_allowed = (index + 1) * block_size <= self.max_cached_tokens();
        self.hashes.as_slice().get(index).filter(|_| is_allowed)
    }

    /// Hashes of the first `end` full blocks, without those that are registered, as far as their tokens are known.
    /// None for a sequence that registers no further block.
    pub fn known_blocks(&self, end: usize) -> &[BlockHash] {
        let end = if self.mixed { 0 } else { end.min(self.hashes.len()) };
        &self.hashes.as_slice()[self.num_registered.min(end)..end]
    }

    /// Index of the token that predicts the next token to be scored, if there is one: of the prompt, or of the outputs
    /// that are computed again.
    fn next_scored(&self) -> Option<usize> {
        if let Some(collected) = &self.prompt_logprobs {
            return Some(self.scored_from + collected.len());
        }
        let done = self.rescored.filter(|done| *done < self.outputs.len())?;
        Some(self.prompt.tokens.len() - 1 + done)
    }

    /// Whether the prompt is computed, and every sample of the group has a sequence of its own.
    pub fn is_forked(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Number of samples that this sequence stands for; a scored prompt counts as one.
    pub fn num_samples(&self) -> usize {
        1 + self.unforked.len()
    }

    /// Keys of the samples that this sequence stands for; none for a scored prompt.
    pub fn samples(&self) -> impl Iterator<Item = SampleKey> {
        let SampleKey { group, sample_index: first } = self.key;
        let n = if self.score_only { 0 } else { self.num_samples() as u32 };
        (first..first + n).map(move |sample_index| SampleKey { group, sample_index })
    }

    /// Whether KV of all tokens but the last sampled one is computed.
    pub fn is_decoding(&self) -> bool {
        self.is_forked() && self.num_computed + 1 == self.num_tokens()
    }

    /// Most tokens that the sample may still be given.
    pub fn num_tokens_left(&self, max_model_len: usize) -> usize {
        let of_output = self.params.max_tokens as usize - self.outputs.len();
        of_output.min(max_model_len - self.prompt.tokens.len() - self.outputs.len())
    }

    /// The last tokens of the sequence, at most `len`.
    pub fn context(&self, len: usize) -> Vec<TokenId> {
        let end = self.prompt.tokens.len() + self.outputs.len();
        self.copy_tokens(end.saturating_sub(len), end)
    }

    fn copy_tokens(&self, start: usize, end: usize) -> Vec<TokenId> {
        let split = self.prompt.tokens.len();
        let mut tokens = Vec::with_capacity(end - start);
        tokens.extend_from_slice(&self.prompt.tokens[start.min(split)..end.min(split)]);
        tokens.extend_from_slice(&self.outputs[start.max(split) - split..end.max(split) - split]);
        tokens
    }

    /// Makes the plan's entry for computing the tokens `[num_computed, end)`. The table must have their blocks.
    pub fn plan(&self, end: usize) -> PlanSequence {
        let start = self.num_computed;
        let mut logits = Vec::new();
        if let Some(next) = self.next_scored() {
            // The token after the last one is not known.
            let known = if self.is_forked() { self.num_tokens() } else { self.prompt.tokens.len() };
            let wanted = start.max(next)..end.min(known - 1);
            logits.extend(
                wanted.map(|position| LogitsRow { offset: position - start, tasks: vec![self.scoring_task(position)] }),
            );
        }
        if end == self.num_tokens() && !self.score_only {
            let seeds = std::iter::once(&self.seed).chain(&self.unforked);
            let tasks = seeds.zip(0..).map(|(&seed, i)| self.task(seed, i, None)).collect();
            logits.push(LogitsRow { offset: end - 1 - start, tasks });
        }
        let tokens = self.copy_tokens(start, end);
        let block_table = self.table.as_slice().to_vec();
        let prompt = self.prompt.clone();
        let weights = self.salt.weights;
        PlanSequence { start, tokens, prompt, embeddings: Vec::new(), block_table, weights, logits }
    }

    /// Scores the token behind `position`.
    fn scoring_task(&self, position: usize) -> LogitsTask {
        let target = self.copy_tokens(position + 1, position + 2)[0];
        let task = self.task(self.seed, 0, Some(target));
        match &self.current {
            Some(params) if self.is_forked() => {
                LogitsTask { params: params.clone(), keeps_hidden: params.keeps_hidden, ..task }
            }
            _ => {
                let row = |rows: &PolicyRows| PolicyRow { rows: rows.clone(), index: position - self.scored_from };
                LogitsTask { policy: self.policy.as_ref().map(row), ..task }
            }
        }
    }

    fn task(&self, seed: u64, offset: u32, target: Option<TokenId>) -> LogitsTask {
        let with_history = target.is_none() && self.params.needs_history();
        let history = || History { prompt: Arc::clone(&self.prompt.tokens), output: self.outputs.clone() };
        LogitsTask {
            sample: SampleKey { sample_index: self.key.sample_index + offset, ..self.key },
            params: Arc::clone(&self.params),
            seed,
            output_index: self.outputs.len() as u32,
            target,
            forced: self.thinking.filter(|_| target.is_none()).and_then(|thinking| self.forced(&thinking)),
            history: with_history.then(history),
            mask: self.grammar.as_ref().filter(|_| target.is_none()).and_then(|grammar| grammar.mask().cloned()),
            bad: if target.is_none() { self.params.bad_after(&self.outputs, &[]) } else { Vec::new() },
            top_of: if target.is_none() || self.score_only { self.params.top_logprobs_of } else { Distribution::Raw },
            keeps_hidden: self.params.keeps_hidden && (target.is_none() || self.score_only),
            policy: None,
        }
    }

    /// The next token, if it is not to be drawn. A grammar whose text has the marks of reasoning is not broken for it.
    fn forced(&self, thinking: &Thinking) -> Option<TokenId> {
        thinking.forced().filter(|token| self.allows(*token))
    }

    /// Whether its grammar lets `token` follow.
    pub fn allows(&self, token: TokenId) -> bool {
        self.grammar.as_ref().is_none_or(|grammar| grammar.allows(token))
    }

    /// Adds drafts to the plan's entry. Each is one more row, from whose logits the token after it is sampled. `masks`
    /// has the mask after each, if there is one.
    pub fn add_draft(&self, draft: &[TokenId], masks: Vec<Option<TokenMask>>, planned: &mut PlanSequence) {
        for ((place, &token), mask) in draft.iter().enumerate().zip(masks) {
            let last = planned.logits.last().expect("a sequence that decodes asks for its next token");
            let [task] = &last.tasks[..] else { unreachable!("a sequence that decodes is one sample") };
            let mut task = task.clone();
            task.output_index += 1;
            task.mask = mask;
            task.bad = self.params.bad_after(&self.outputs, &draft[..=place]);
            if let Some(history) = &mut task.history {
                history.output.push(token);
            }
            planned.logits.push(LogitsRow { offset: planned.tokens.len(), tasks: vec![task] });
            planned.tokens.push(token);
        }
        planned.block_table = self.table.as_slice().to_vec();
    }

    /// Notes that KV of the tokens `[num_computed, end)` has been computed, and registers the blocks that are full now.
    pub fn advance(&mut self, end: usize, cache: &mut KvCacheManager) {
        let block_size = cache.block_size();
        self.num_computed = end;
        if self.mixed {
            return;
        }
        for index in self.num_registered..end / block_size {
            if index == self.hashes.len() {
                let tokens = self.copy_tokens(index * block_size, (index + 1) * block_size);
                self.hashes.push(&tokens, &self.prompt);
            }
            cache.register(&self.table, index, self.hashes.as_slice()[index]);
        }
        self.num_registered = end / block_size;
    }

    /// Gives all blocks back, so that all tokens are to be computed again.
    pub fn release(&mut self, cache: &mut KvCacheManager) {
        cache.release(std::mem::take(&mut self.table));
        self.num_computed = 0;
        self.num_registered = 0;
        self.mixed = false;
    }

    /// Changes the policy that computes the sequence to that of `epoch`. Until the prompt is computed all KV and all
    /// prompt log-probabilities must be of one policy, so they are dropped; after that, KV stays if `keep`.
    pub fn change_policy(&mut self, epoch: u64, keep: bool, cache: &mut KvCacheManager) {
        self.salt.epoch = epoch;
        let known = self.copy_tokens(0, self.prompt.tokens.len() + self.outputs.len());
        self.hashes = HashChain::of(self.salt, &known, &self.prompt, cache.block_size());
        if keep && self.is_forked() && !self.table.is_empty() {
            (self.mixed, self.rescored) = (true, None);
            return;
        }
        self.rescored = self.current.is_some().then_some(0);
        self.release(cache);
        if let Some(collected) = &mut self.prompt_logprobs {
            collected.clear();
        }
    }

    pub fn check_integrity(&self, cache: &KvCacheManager, in_flight: bool) {
        let (key, computed) = (self.key, self.num_computed);
        assert!(computed < self.num_tokens(), "{key:?} has nothing to compute");
        assert!(self.pending.is_none() || self.grammar.is_none(), "{key:?} has a mask and waits for it");
        let covered = cache.blocks_for(computed);
        assert!(self.table.len() == covered || in_flight && self.table.len() > covered, "{key:?}: its table");
        let full = computed / cache.block_size();
        assert!(self.num_registered == full || self.mixed && self.num_registered < full, "{key:?}: registered blocks");
        assert!(!self.mixed || self.is_forked() && !self.table.is_empty(), "{key:?}: KV of several policies");
        assert!(self.unforked.is_empty() || !self.is_forked(), "{key:?} has tokens and unforked samples");
        if let Some(next) = self.next_scored() {
            let known = if self.is_forked() { self.num_tokens() } else { self.prompt.tokens.len() };
            assert!(next >= computed.min(known - 1), "{key:?}: log-probabilities");
        }
    }
}
