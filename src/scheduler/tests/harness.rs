//! A scheduler, and an executor without a model that knows what every KV slot must hold.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

pub use super::fake_model::*;
use crate::cache::{CacheSalt, KvCacheManager};
use crate::scheduler::*;
use crate::types::*;

/// The experts of a token are the state after it, so that they depend on all that its KV depends on.
pub const ROUTING_ROW_BYTES: usize = size_of::<u64>();

/// The content of a slot after position `position` was computed: like real KV, a function of all tokens up to it, and
/// of the policies that computed them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Slot {
    salt: CacheSalt,
    position: usize,
    token: TokenId,
    state: u64,
}

/// An executor whose "model" is a hash of the salt and of all tokens so far. It reads the state that a sequence
/// continues from out of its KV slots, and after all writes of a step verifies every slot that a sequence can read.
pub struct FakeExecutor {
    block_size: usize,
    slots: Vec<Option<Slot>>,
    images: ImageScheduling,
    /// The picture and token index that each row of the embedding buffer holds; `None` if it was never written.
    embeddings: Vec<Option<(PictureHash, usize)>>,
    /// The picture whose first blocks have run, and how many.
    encoding: Option<(PictureHash, usize)>,
    /// Epoch of the policy under which each sequence's block table was begun.
    begun: HashMap<SeqId, u64>,
    /// Number of contexts seen whose KV was of several policies.
    pub mixed: u64,
    /// Makes the next token mostly follow from the last one, so that drafts are often right.
    pub repeats: bool,
}

impl FakeExecutor {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        groups: &HashMap<GroupKey, Group>,
        plan: &StepPlan,
        verifies: bool,
    ) -> StepOutput {
        for copy in &plan.copies {
            assert!(0 < copy.tokens && copy.tokens < self.block_size, "{copy:?}");
            let [src, dst] = [copy.src, copy.dst].map(|id| id as usize * self.block_size);
            self.slots.copy_within(src..src + copy.tokens, dst);
        }
        if let Some(encode) = &plan.encode {
            self.encode(encode);
        }
        let mut written = Vec::new();
        let (mut tokens, mut routing) = (Vec::new(), Vec::new());
        for (id, planned) in scheduler.in_flight.iter().zip(&plan.sequences) {
            let salt = groups[&scheduler.running[id].key.group].salt;
            assert_eq!(planned.weights, salt.weights);
            let states = self.write(salt, planned, &mut written);
            routing.extend(states.iter().flat_map(|state| state.to_le_bytes()));
            for row in &planned.logits {
                let last = self.repeats.then_some(planned.tokens[row.offset]);
                tokens.extend(row.tasks.iter().map(|task| answer(states[row.offset], last, task)));
            }
        }
        let num_written = written.len();
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), num_written, "two sequences write one slot");
        for (id, planned) in scheduler.in_flight.iter().zip(&plan.sequences).filter(|_| verifies) {
            let sequence = &scheduler.running[id];
            let all: Vec<TokenId> = sequence.prompt.tokens.iter().chain(&sequence.outputs).copied().collect();
            let oldest = if sequence.is_forked() { self.begun[id] } else { groups[&sequence.key.group].salt.epoch };
            self.verify(oldest, groups[&sequence.key.group].salt, planned, &all);
        }
        StepOutput { tokens, failed: Vec::new(), routing }
    }

    /// Notes that all embeddings are gone.
    fn forget_images(&mut self) {
        self.embeddings.fill(None);
        self.encoding = None;
    }

    /// Runs blocks of the tower, which must be the next ones of the picture.
    fn encode(&mut self, encode: &PictureEncode) {
        let (picture, PictureEncode { blocks, rows, .. }) = (encode.picture.hash(), encode);
        let run = self.encoding.filter(|(current, _)| *current == picture).map_or(0, |(_, blocks)| blocks);
        assert!(blocks.start == run || blocks.start == 0, "{blocks:?} after {run} blocks");
        assert!(blocks.start < blocks.end && blocks.end <= self.images.tower_blocks, "{blocks:?}");
        let most = (self.images.token_blocks / rows.len()).max(1);
        assert!(blocks.len() <= most, "{blocks:?} of a picture of {} tokens, at most {most}", rows.len());
        self.embeddings[rows.clone()].fill(None);
        self.encoding = Some((picture, blocks.end));
        if blocks.end == self.images.tower_blocks {
            let tokens = (0..rows.len()).map(|token| Some((picture, token)));
            self.embeddings[rows.clone()].iter_mut().zip(tokens).for_each(|(row, token)| *row = token);
        }
    }

    /// The value of the image and of the forced experts at a token of the plan. The buffer must have the image's
    /// embedding.
    fn beside(&self, planned: &PlanSequence, offset: usize) -> u64 {
        let is_inside = |images: &&EmbeddingRows| (images.offset..images.offset + images.rows.len()).contains(&offset);
        let found = planned.embeddings.iter().find(is_inside);
        let row = found.map(|images| self.embeddings[images.rows.start + offset - images.offset]);
        let index = planned.start + offset;
        let image = planned.prompt.images.iter().find(|image| image.placeholders.contains(&index));
        let expected = image.map(|image| Some((image.picture.hash(), index - image.placeholders.start)));
        assert_eq!(row, expected, "the embedding of token {index}");
        beside(&planned.prompt, index)
    }

    fn slot(&self, planned: &PlanSequence, position: usize) -> usize {
        planned.block_table[position / self.block_size] as usize * self.block_size + position % self.block_size
    }

    fn write(&mut self, salt: CacheSalt, planned: &PlanSequence, written: &mut Vec<usize>) -> Vec<u64> {
        let mut state = match planned.start {
            0 => 0,
            start => self.slots[self.slot(planned, start - 1)].expect("a readable slot was written").state,
        };
        let mut states = Vec::new();
        for (position, &token) in (planned.start..).zip(&planned.tokens) {
            state = next_state(state, salt, token, self.beside(planned, position - planned.start));
            states.push(state);
            let slot = self.slot(planned, position);
            self.slots[slot] = Some(Slot { salt, position, token, state });
            written.push(slot);
        }
        states
    }

    /// Asserts that every position was computed from those before it, under policies from `oldest` to that of `salt`,
    /// in order.
    fn verify(&mut self, oldest: u64, salt: CacheSalt, planned: &PlanSequence, all: &[TokenId]) {
        let end = planned.start + planned.tokens.len();
        assert_eq!(planned.block_table.len(), end.div_ceil(self.block_size));
        // Drafts follow the sequence's own tokens. Wrong ones are never read.
        let end = end.min(all.len());
        assert_eq!(planned.tokens[..end - planned.start], all[planned.start..end]);
        let (mut state, mut epoch) = (0, oldest);
        let first = self.slots[self.slot(planned, 0)].map(|slot| slot.salt.epoch);
        self.mixed += u64::from(first != Some(salt.epoch));
        for (position, &token) in all[..end].iter().enumerate() {
            let held = self.slots[self.slot(planned, position)].expect("a readable slot was written");
            assert!((epoch..=salt.epoch).contains(&held.salt.epoch), "KV of position {position} is of {:?}", held.salt);
            epoch = held.salt.epoch;
            let salt = CacheSalt { epoch, ..salt };
            state = next_state(state, salt, token, beside(&planned.prompt, position));
            assert_eq!(held, Slot { salt, position, token, state }, "KV of position {position}");
        }
    }
}

/// The outcomes of one sample so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleResult {
    pub tokens: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
}

/// The outcomes of one group so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupResult {
    pub cached_tokens: Option<u32>,
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    pub samples: Vec<SampleResult>,
    pub done: bool,
    pub aborted: bool,
}

/// Scheduler, executor, and the bookkeeping of an engine, which asserts that each outcome comes once.
pub struct Harness {
    pub scheduler: Scheduler,
    pub executor: FakeExecutor,
    pub groups: HashMap<GroupKey, Group>,
    pub results: HashMap<GroupKey, GroupResult>,
    /// Stands for stop strings: a sample ends with a token for which this is true.
    pub stop_string: fn(&TokenLogprobs) -> bool,
    /// Number of tokens that were scored again.
    pub rescored: u64,
    /// Whether the content of slots and the invariants are not checked, which takes most of the time.
    pub is_unchecked: bool,
}

impl Harness {
    pub fn new(config: SchedulerConfig, num_blocks: usize, block_size: usize) -> Self {
        Self {
            scheduler: Scheduler::new(config, KvCacheManager::new(num_blocks, block_size)),
            executor: FakeExecutor {
                block_size,
                slots: vec![None; num_blocks * block_size],
                images: config.images,
                embeddings: vec![None; config.images.embedding_rows],
                encoding: None,
                begun: HashMap::new(),
                mixed: 0,
                repeats: false,
            },
            groups: HashMap::new(),
            results: HashMap::new(),
            stop_string: |_| false,
            rescored: 0,
            is_unchecked: false,
        }
    }

    pub fn add(&mut self, groups: Vec<Group>) -> crate::error::Result<()> {
        self.add_for(&Tenant::default(), groups)
    }

    pub fn add_for(&mut self, tenant: &Tenant, groups: Vec<Group>) -> crate::error::Result<()> {
        self.scheduler.add(tenant, groups.clone())?;
        self.note_groups(groups);
        Ok(())
    }

    /// See [`Scheduler::add_following`].
    pub fn add_following(&mut self, groups: Vec<Group>) {
        self.scheduler.add_following(&Tenant::default(), groups.clone(), false);
        self.note_groups(groups);
    }

    fn note_groups(&mut self, groups: Vec<Group>) {
        for group in groups {
            let samples = vec![SampleResult::default(); group.samples().count()];
            self.results.insert(group.key, GroupResult { samples, ..GroupResult::default() });
            self.groups.insert(group.key, group);
        }
        self.check();
    }

    /// Runs one step and returns its plan. `meanwhile` is called between the step's plan and its answers.
    pub fn step_with(&mut self, meanwhile: impl FnOnce(&mut Self)) -> StepPlan {
        let plan = self.scheduler.schedule();
        self.check();
        self.check_plan(&plan);
        let output = self.executor.run(&self.scheduler, &self.groups, &plan, !self.is_unchecked);
        meanwhile(self);
        self.check();
        if !plan.is_empty() {
            let outcomes = self.scheduler.update(&plan, output);
            outcomes.into_iter().for_each(|outcome| self.apply(outcome));
        }
        self.check();
        plan
    }

    fn check(&mut self) {
        if !self.is_unchecked {
            self.note_tables();
            self.scheduler.check_integrity();
        }
    }

    /// Changes the policy of all groups.
    pub fn change_policy(&mut self, epoch: u64, running: RunningKv) {
        self.change_policy_and_tower(epoch, running, true);
    }

    /// Changes the policy of all groups, and the vision tower if it `is_tower_new`.
    pub fn change_policy_and_tower(&mut self, epoch: u64, running: RunningKv, is_tower_new: bool) {
        self.scheduler.change_policy(epoch, running, is_tower_new);
        if is_tower_new {
            self.executor.forget_images();
        }
        self.groups.values_mut().for_each(|group| group.salt.epoch = epoch);
        self.note_tables();
        self.scheduler.check_integrity();
    }

    pub fn reset_encoder_cache(&mut self) {
        self.scheduler.reset_encoder_cache();
        self.executor.forget_images();
        self.scheduler.check_integrity();
    }

    pub fn release_all(&mut self) {
        self.scheduler.release_all();
        self.note_tables();
        self.scheduler.check_integrity();
        let blocks = self.scheduler.cache.counts();
        assert_eq!((blocks.free, blocks.cached), (blocks.total, 0));
        // The memory is released, and has no content when it is there again.
        self.executor.slots.fill(None);
        self.executor.forget_images();
    }

    fn note_tables(&mut self) {
        for (id, sequence) in self.scheduler.running.iter().chain(&self.scheduler.waiting) {
            if sequence.table.is_empty() {
                self.executor.begun.remove(id);
            } else {
                self.executor.begun.entry(*id).or_insert(sequence.salt.epoch);
            }
        }
    }

    pub fn step(&mut self) -> StepPlan {
        self.step_with(|_| ())
    }

    /// Steps until nothing is left to do, and returns the plans.
    pub fn run(&mut self) -> Vec<StepPlan> {
        let mut plans = Vec::new();
        while self.scheduler.has_work() {
            plans.push(self.step());
            assert!(plans.len() < 100_000, "no end in sight");
        }
        plans
    }

    /// The tenants with sequences that wait for a place, and their counters.
    pub fn backlogged(&mut self) -> Vec<(TenantId, i128)> {
        let backlogged = self.scheduler.backlogged(&BTreeSet::new());
        backlogged.into_iter().map(|tenant| (tenant, self.scheduler.tenants.counter(tenant).into())).collect()
    }

    pub fn abort(&mut self, request: RequestKey) -> Vec<SampleKey> {
        let aborted = self.scheduler.abort(request);
        let mut expected = Vec::new();
        let live = |key: &GroupKey, result: &GroupResult| key.request == request && !result.done && !result.aborted;
        for (&group, result) in self.results.iter_mut().filter(|(key, result)| live(key, result)) {
            result.aborted = true;
            let live = result.samples.iter().enumerate().filter(|(_, sample)| sample.finish.is_none());
            expected.extend(live.map(|(i, _)| SampleKey { group, sample_index: i as u32 }));
        }
        expected.sort_unstable();
        assert_eq!(aborted, expected, "samples that the abort of {request:?} ends");
        self.scheduler.check_integrity();
        aborted
    }

    fn check_plan(&self, plan: &StepPlan) {
        assert!(plan.num_tokens() <= self.scheduler.config.max_batch_tokens);
        assert!(plan.sequences.len() <= self.scheduler.config.max_num_seqs);
        for planned in &plan.sequences {
            assert!(!planned.tokens.is_empty());
            assert!(planned.logits.windows(2).all(|rows| rows[0].offset < rows[1].offset));
            assert!(planned.logits.iter().all(|row| row.offset < planned.tokens.len() && !row.tasks.is_empty()));
        }
    }

    fn apply(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::PromptDone { group, cached_tokens, logprobs, routing } => {
                let Group { kind, prompt, returns_routing, .. } = &self.groups[&group];
                let is_score = matches!(kind, GroupKind::Score { .. });
                let wants_all = is_score || matches!(kind, GroupKind::Sample { prompt_logprobs: true, .. });
                let first = match kind {
                    GroupKind::Score { scored_from } => *scored_from,
                    _ if wants_all => 0,
                    _ => prompt.first_with_row(),
                };
                let computed = if is_score { (prompt.tokens.len() - 1).max(1) } else { prompt.tokens.len() };
                let states = prompt_states(&self.groups[&group]).take(if *returns_routing { computed } else { 0 });
                assert_eq!(routing, states.flat_map(u64::to_le_bytes).collect::<Vec<_>>(), "{group:?}: its experts");
                let result = self.results.get_mut(&group).expect("a known group");
                assert!(result.cached_tokens.is_none() && !result.aborted, "{group:?}: its prompt is done once");
                assert!(result.samples.iter().all(|sample| sample.tokens.is_empty()));
                result.cached_tokens = Some(cached_tokens);
                assert_eq!(logprobs.is_some(), wants_all || !prompt.logprob_token_ids.is_empty(), "{group:?}");
                if let Some(logprobs) = &logprobs {
                    assert_eq!(raw_logprobs(logprobs), prompt_logprobs(&self.groups[&group])[first..], "{group:?}");
                }
                result.prompt_logprobs = logprobs;
                result.done = is_score;
            }
            Outcome::Rescored { sample, start, logprobs } => {
                let group = &self.groups[&sample.group];
                assert!(group.current.is_some() && !logprobs.is_empty(), "{sample:?}");
                let outputs = &self.results[&sample.group].samples[sample.sample_index as usize].tokens;
                assert!(start + logprobs.len() <= outputs.len(), "{sample:?}: tokens that it has");
                let outputs: Vec<TokenId> = outputs.iter().map(|token| token.token).collect();
                let expected = output_logprobs(group, &outputs);
                assert_eq!(raw_logprobs(&logprobs), expected[start..start + logprobs.len()], "{sample:?}");
                self.rescored += logprobs.len() as u64;
            }
            Outcome::GrammarFailed { sample, error } => panic!("{sample:?}: {error:?}"),
            Outcome::Token { sample, logprobs, finish, routing, .. } => {
                let returns_routing = self.groups[&sample.group].returns_routing;
                let result = self.results.get_mut(&sample.group).expect("a known group");
                assert!(result.cached_tokens.is_some() && !result.aborted, "{sample:?}");
                let state = &mut result.samples[sample.sample_index as usize];
                if state.finish == Some(FinishReason::StopString) {
                    return; // of the run in which the stop string was
                }
                assert!(state.finish.is_none(), "{sample:?} has ended");
                match routing[..].try_into().map(u64::from_le_bytes) {
                    // The answer was made from the state after the token before.
                    Ok(before) => assert_eq!(raw_logprob(before, logprobs.token), logprobs.raw, "{sample:?}: experts"),
                    Err(_) => assert!(routing.is_empty() && (state.tokens.is_empty() || !returns_routing)),
                }
                let stop = (self.stop_string)(&logprobs);
                state.tokens.push(logprobs);
                state.finish = if stop { Some(FinishReason::StopString) } else { finish };
                result.done = result.samples.iter().all(|sample| sample.finish.is_some());
                if stop {
                    self.scheduler.finish(sample);
                }
            }
        }
    }
}

pub fn key(request: u64, prompt_index: u32) -> GroupKey {
    GroupKey { request: RequestKey(request), prompt_index }
}

/// A group of `n` samples with `max_tokens` each and otherwise default parameters.
pub fn group(key: GroupKey, prompt: &[TokenId], n: u32, max_tokens: u32) -> Group {
    Group {
        key,
        prompt: Prompt::from_tokens(prompt),
        params: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        salt: CacheSalt::default(),
        grammar: None,
        returns_routing: false,
        current: None,
        policy: None,
        kind: GroupKind::Sample { seeds: (0..n).map(|i| sample_seed(7, 0, i)).collect(), prompt_logprobs: false },
    }
}
