//! Decides which tokens run next. Pure: state in, [`StepPlan`](crate::types::StepPlan) out; no device, clock, channel
//! or randomness.
//!
//! # How a sequence travels
//!
//! 1. [`Scheduler::add`] puts the groups of a request (one prompt each, with `n` samples) into the admission queue, or
//!    refuses all of them. The queue gives one group of each request of a tenant in turn.
//! 2. When there is a free place (`max_num_seqs`) and its prompt fits into free blocks, [`Scheduler::schedule`] admits
//!    a group as one sequence, that of sample 0, with the other samples as `unforked`. Blocks of the prompt's prefix
//!    that are cached become the beginning of its block table. A prompt whose next block is computed by the same step
//!    waits for it: requests of one prompt compute it once.
//! 3. A sequence has one progress number: `num_computed` catches up with the tokens it has. A step computes as many of
//!    the missing ones as the token budget (`max_batch_tokens`) allows: a chunk of the prompt, the last sampled token,
//!    or prompt and output again after a preemption. There are no phases.
//!    A chunk ends before an image whose embeddings are not there yet. The oldest sequence that needs a picture has the
//!    vision tower encode it, some blocks a step, beside the tokens of others. Embeddings are kept for later prompts
//!    with the same picture until others need their rows.
//! 4. [`Scheduler::update`] takes the step's answers. When the last token of a prompt has been computed, its one row of
//!    logits gives a token to each of the `n` samples, and the sequence forks: every sample gets its own block table of
//!    the same blocks, and waits for a place while it holds them. A partial last block is copied by each sample that
//!    writes into it while others still hold it.
//! 5. When blocks run out, the youngest sequence gives all of its own back and waits. Later it computes prompt and
//!    output again, and finds most of them in the prefix cache.
//! 6. Where a step has few rows, a sample that decodes may get drafts of its next tokens (`speculation`). They save it
//!    steps if they turn out right, and change nothing else.
//! 7. A sample with a grammar that takes long is left out of the steps until the mask after its last token has been
//!    computed elsewhere ([`Scheduler::take_mask_jobs`], [`Scheduler::advance_grammar`]).
//! 8. A sample ends by a rule ([`stop_reason`]), by [`Scheduler::finish`] (a stop string) or by [`Scheduler::abort`].
//! 9. Between two steps a request whose reader lags may be suspended ([`Scheduler::suspend`]) until it is resumed.
//! 10. Between two steps the policy may change ([`Scheduler::change_policy`]), or all blocks may be given back
//!     ([`Scheduler::release_all`]). The sequences then recompute their KV and continue.
//!
//! # Order and progress
//!
//! Sequences of a tenant are ordered by admission of their group, then by sample index, and this order never changes.
//! Running sequences are served in the order of service: the oldest of each tenant, then the second oldest of each,
//! and so on; with one tenant, oldest first. A sequence that needs a block may take the blocks of running sequences
//! later in this order and of waiting ones, but never those of an earlier running one; if that is not enough, it is
//! left out of the step. So the first running sequence advances in every step, since its own blocks fit into the cache,
//! as `add` has checked. If none runs, a waiting one may take every block. Preempted and forked sequences of a tenant
//! are admitted before its new groups, oldest first, without overtaking, and without taking blocks from others of the
//! same tenant: work under way is not thrown away for work that has not begun.
//!
//! # Tenants
//!
//! A virtual token counter counts the service that each tenant has had: its prompt tokens that were computed, and twice
//! its sampled tokens. A free place goes to the tenant with the least service. A tenant that was idle is lifted to the
//! least counter of the others when it comes back, so it has no credit for the time in which it asked for nothing.
//!
//! That alone would let a tenant wait behind another's thousand samples until some of them end. So a tenant that waits,
//! and that has had no more service than another with at least two places more, takes a place from that one's youngest
//! sequence. This sequence waits with its blocks, so that nothing is computed again, unless blocks are short: then it
//! may lose them too. Two places more, because with one the two tenants would take one place from each other forever.
//! Places are taken and given before all but the first running sequence are planned, within what these leave of the
//! token budget.
//!
//! With one tenant, all of this has no effect.

mod admission;
mod fairness;
mod group;
mod images;
mod masks;
mod policy;
mod queue;
mod quotas;
mod schedule;
mod sequence;
mod speculation;
mod stop;
mod suspend;
mod tenant_stats;
mod tenants;
mod thinking;
mod update;

use std::collections::{BTreeMap, HashMap};

pub use group::{Group, GroupKind, Outcome};
pub use images::ImageScheduling;
pub use policy::RunningKv;
pub use quotas::TenantQuotas;
pub use speculation::Speculation;
pub use stop::stop_reason;

use crate::cache::{KvCacheManager, RoutingCache};
use crate::error::{Error, Result};
use crate::grammar::{MaskBudget, MaskJob};
use crate::types::{EngineStats, GroupKey, RequestKey, SampleKey, Tenant, TokenId};
use images::Images;
use queue::AdmissionQueue;
use sequence::{SeqId, Sequence};
use speculation::{Acceptance, NgramIndex};
use tenant_stats::TenantTable;
use tenants::{TenantId, Tenants};

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Most sequences that run at the same time; bounds the work per sequence and the sampler's rows.
    pub max_num_seqs: usize,
    /// Most tokens in one step; bounds the workspace of the model. Less than `max_num_seqs` would let some sequences
    /// wait in every step.
    pub max_batch_tokens: usize,
    /// Most tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Maximum number of waiting samples, which bounds the memory of requests before they run.
    pub max_queued_samples: usize,
    pub speculation: Speculation,
    pub images: ImageScheduling,
    /// Bytes of the experts that a token takes, if they are kept beside its KV; 0 if they are not.
    pub routing_row_bytes: usize,
}

/// Continuous batching over one KV cache. The module's page says how it works.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    cache: KvCacheManager,
    images: Images,
    /// `None` if experts are not kept.
    routing: Option<RoutingCache>,
    tenants: Tenants,
    tenant_table: TenantTable,
    quotas: TenantQuotas,
    queue: AdmissionQueue,
    /// Sequences with a place in the batch.
    running: BTreeMap<SeqId, Sequence>,
    /// Sequences without a place in the batch: preempted ones, which have no blocks, forked ones, which share blocks,
    /// those that gave their place to another tenant's and have their blocks, those whose mask is being computed, and
    /// at most one new group of each tenant.
    waiting: BTreeMap<SeqId, Sequence>,
    /// Sequences of suspended requests. They have no blocks.
    suspended: BTreeMap<SeqId, Sequence>,
    /// Groups that have left the queue and have samples that have not ended.
    groups: HashMap<GroupKey, GroupState>,
    /// The sequences of the last plan, in its order; empty once the plan is answered.
    in_flight: Vec<SeqId>,
    /// Groups whose first tokens are in the last plan.
    begun: Vec<GroupKey>,
    /// The time left for masks in the current step, and the masks that it has no time for.
    mask_budget: MaskBudget,
    mask_jobs: Vec<MaskJob>,
    /// Number of samples that have not ended, queued ones included; a scored prompt counts as one.
    live_samples: usize,
    /// Number of groups that have left the queue.
    next_admission: u64,
    /// Counts of tokens and preemptions.
    stats: EngineStats,
}

/// The scheduler's state of a group, beside its sequences.
#[derive(Debug)]
struct GroupState {
    tenant: TenantId,
    /// Number of groups that were admitted before.
    admission: u64,
    /// Number of samples that have not ended.
    live_samples: usize,
    /// Sample index and output of each sample that has ended, as far as they are kept to find drafts in.
    ended: Vec<(u32, Vec<TokenId>)>,
    /// Index in which drafts are looked for. Only groups that are decoding in the current step have one.
    index: Option<NgramIndex>,
    acceptance: Acceptance,
}

impl Scheduler {
    /// # Panics
    /// If a limit of `config` is 0.
    pub fn new(config: SchedulerConfig, cache: KvCacheManager) -> Self {
        assert!(config.max_num_seqs > 0, "max_num_seqs must be at least 1");
        assert!(config.max_batch_tokens > 0, "max_batch_tokens must be at least 1");
        assert!(config.max_model_len > 0, "max_model_len must be at least 1");
        assert!(config.max_queued_samples > 0, "max_queued_samples must be at least 1");
        let (blocks, row_bytes) = (cache.counts().total, config.routing_row_bytes);
        let routing = (row_bytes > 0).then(|| RoutingCache::new(row_bytes, blocks, cache.block_size()));
        Self {
            images: Images::new(config.images),
            routing,
            config,
            cache,
            tenants: Tenants::default(),
            tenant_table: TenantTable::default(),
            quotas: TenantQuotas::default(),
            queue: AdmissionQueue::default(),
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            suspended: BTreeMap::new(),
            groups: HashMap::new(),
            in_flight: Vec::new(),
            begun: Vec::new(),
            mask_budget: MaskBudget::default(),
            mask_jobs: Vec::new(),
            live_samples: 0,
            next_admission: 0,
            stats: EngineStats::default(),
        }
    }

    /// Queues groups of a tenant, usually all of one request. If there is an error none is queued.
    ///
    /// # Errors
    /// `InvalidArgument` if a prompt is empty or longer than the context allows; `ResourceExhausted` if too many
    /// samples wait already, or if one sample of a group could not fit into the whole cache.
    pub fn add(&mut self, tenant: &Tenant, groups: Vec<Group>) -> Result<()> {
        groups.iter().try_for_each(|group| self.check_fits(group))?;
        let asked = groups.iter().map(Group::num_samples).sum::<usize>();
        self.check_room(asked, 0)?;
        let tenant = self.enter(tenant, &groups);
        groups.into_iter().for_each(|group| self.queue.push(tenant, group));
        Ok(())
    }

    /// Queues groups that follow from others of the same request, which may be suspended. They come before its other
    /// groups, because a finished sequence holds memory until they have run. The queue has no limit for them: their
    /// request was accepted with them. Each must fit into the context and the cache.
    pub fn add_following(&mut self, tenant: &Tenant, groups: Vec<Group>, is_suspended: bool) {
        let Some(request) = groups.first().map(|group| group.key.request) else { return };
        debug_assert!(groups.iter().all(|group| self.check_fits(group).is_ok()), "{request:?} does not fit");
        let tenant = self.enter(tenant, &groups);
        groups.into_iter().rev().for_each(|group| self.queue.push_front(tenant, group));
        if is_suspended {
            self.queue.suspend(request);
        }
    }

    /// Counts groups that are about to be queued, and returns the id of their tenant.
    fn enter(&mut self, tenant: &Tenant, groups: &[Group]) -> TenantId {
        let samples = groups.iter().map(Group::num_samples).sum();
        self.live_samples += samples;
        let tenant = self.tenants.enter(tenant, samples, &mut self.tenant_table);
        if !self.is_active(tenant) {
            self.tenants.lift(tenant);
        }
        tenant
    }

    /// Checks that `asked` more samples may wait, where `held` samples already wait outside of the scheduler.
    ///
    /// # Errors
    /// `ResourceExhausted` if the queue would be too long.
    pub fn check_room(&self, asked: usize, held: usize) -> Result<()> {
        let (waiting, most) = (self.num_waiting() + held, self.config.max_queued_samples);
        if asked > most.saturating_sub(waiting) {
            return Err(Error::ResourceExhausted(format!(
                "the queue is full: {waiting} samples wait, {asked} more were asked for and {most} may wait; try again \
                 later, or ask for fewer at once"
            )));
        }
        Ok(())
    }

    fn check_fits(&self, group: &Group) -> Result<()> {
        let (key, len, max_len) = (group.key, group.prompt.tokens.len(), self.config.max_model_len);
        let field = || format!("prompts[{}]", key.prompt_index);
        if len == 0 {
            return Err(Error::invalid(field(), "is empty; give at least one token"));
        }
        let room = usize::from(!matches!(group.kind, GroupKind::Score { .. }));
        if len + room > max_len {
            let most = max_len - room;
            return Err(Error::invalid(field(), format!("has {len} tokens; at most {most} fit into the context")));
        }
        let most_of_image = self.images.most_tokens();
        for (index, image) in group.prompt.images.iter().enumerate() {
            let tokens = image.placeholders.len();
            if tokens > most_of_image {
                let message = format!("has {tokens} tokens; an image may have at most {most_of_image}");
                return Err(Error::invalid(format!("{}.images[{index}]", field()), message));
            }
        }
        let most_tokens = match group.kind {
            GroupKind::Score { .. } => len,
            GroupKind::Sample { .. } => (len + group.params.max_tokens as usize).min(max_len),
        };
        let (needed, total) = (self.cache.blocks_for(most_tokens), self.cache.counts().total);
        if needed > total {
            return Err(Error::ResourceExhausted(format!(
                "{}: {most_tokens} tokens (a prompt of {len} and its completion) need {needed} KV blocks of {} \
                 tokens, and the cache has {total}; lower max_tokens, or give the server more memory",
                field(),
                self.cache.block_size()
            )));
        }
        Ok(())
    }

    /// Ends a sample after the last token it was given, because a stop string was found. Nothing happens if the sample
    /// has ended already.
    pub fn finish(&mut self, sample: SampleKey) {
        let Some(group) = self.groups.get(&sample.group) else { return };
        let id = group.id(sample.sample_index);
        let maps = [&mut self.running, &mut self.waiting, &mut self.suspended];
        let Some(sequence) = maps.into_iter().find_map(|map| map.remove(&id)) else { return };
        assert!(sequence.is_forked(), "{sample:?} is finished before its first token");
        self.end_sample(sequence);
    }

    /// Drops everything of a request and frees its blocks. Returns its samples that had not ended, ascending, for which
    /// there will be no further outcome. A scored prompt has no samples.
    pub fn abort(&mut self, request: RequestKey) -> Vec<SampleKey> {
        let mut aborted = Vec::new();
        if let Some(tenant) = self.queue.tenant_of(request) {
            for group in self.queue.remove(request) {
                self.live_samples -= group.num_samples();
                self.tenants.leave(tenant, group.num_samples());
                aborted.extend(group.samples());
            }
        }
        for map in [&mut self.running, &mut self.waiting, &mut self.suspended] {
            for (id, mut sequence) in map.extract_if(.., |_, sequence| sequence.key.group.request == request) {
                self.live_samples -= sequence.num_samples();
                self.tenants.leave(id.tenant, sequence.num_samples());
                aborted.extend(sequence.samples());
                self.cache.release(std::mem::take(&mut sequence.table));
            }
        }
        self.groups.retain(|key, _| key.request != request);
        aborted.sort_unstable();
        aborted
    }

    /// Whether anything can run: it is not suspended, and its mask is there. The next plan is empty exactly if not.
    pub fn has_work(&self) -> bool {
        !(self.running.is_empty() && self.queue.is_empty()) || self.waiting.values().any(|s| s.pending.is_none())
    }

    /// Groups whose first tokens are in the last plan.
    pub fn begun(&self) -> &[GroupKey] {
        &self.begun
    }

    /// Forgets every cached prefix that no sequence holds, and returns the number of its blocks.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.cache.reset_prefix_cache()
    }

    /// Forgets the embeddings of all pictures, and returns the number of the pictures. Sequences that need them encode
    /// theirs again.
    pub fn reset_encoder_cache(&mut self) -> usize {
        let held = self.images.held();
        self.images.clear();
        held
    }

    /// The scheduler's part of the engine's numbers.
    pub fn stats(&self) -> EngineStats {
        let blocks = self.cache.counts();
        EngineStats {
            running_samples: self.running.len() as u64,
            waiting_samples: self.num_waiting() as u64,
            total_blocks: blocks.total as u64,
            free_blocks: blocks.free as u64,
            cached_blocks: blocks.cached as u64,
            encoded_images: self.images.encoded,
            held_images: self.images.held() as u64,
            held_embeddings: self.images.held_tokens() as u64,
            embedding_capacity: self.images.most_tokens() as u64,
            queried_images: self.images.queried,
            reused_images: self.images.reused,
            ..self.stats
        }
    }

    /// Asserts every invariant of the scheduler and its cache. This walks all sequences and blocks, so it is for tests
    /// and for an idle engine.
    pub fn check_integrity(&self) {
        let sequences = || self.running.iter().chain(&self.waiting).chain(&self.suspended);
        self.images.check_integrity();
        self.cache.check_integrity(sequences().map(|(_, sequence)| &sequence.table));
        assert!(self.running.len() <= self.config.max_num_seqs, "{} sequences are running", self.running.len());
        let mut live: HashMap<GroupKey, usize> = HashMap::new();
        let mut live_of: HashMap<TenantId, usize> = HashMap::new();
        for (id, sequence) in sequences() {
            sequence.check_integrity(&self.cache, self.in_flight.contains(id));
            assert_eq!(self.groups[&sequence.key.group].id(sequence.key.sample_index), *id, "{:?}", sequence.key);
            *live.entry(sequence.key.group).or_default() += sequence.num_samples();
            *live_of.entry(id.tenant).or_default() += sequence.num_samples();
        }
        for (tenant, samples) in self.queue.samples_by_tenant() {
            *live_of.entry(tenant).or_default() += samples;
        }
        self.tenants.check_integrity(&live_of);
        for (key, group) in &self.groups {
            assert_eq!(live.get(key), Some(&group.live_samples), "live samples of {key:?}");
        }
        let live = live.values().sum::<usize>() + self.queue.num_samples();
        assert_eq!(self.live_samples, live, "live samples");
        for id in self.waiting.keys() {
            assert!(!self.running.contains_key(id), "{id:?} waits and runs");
        }
        for (id, sequence) in &self.running {
            assert!(sequence.pending.is_none(), "{id:?} runs without its mask");
        }
        for (id, sequence) in &self.suspended {
            assert!(!self.running.contains_key(id) && !self.waiting.contains_key(id), "{id:?} is suspended and not");
            assert!(sequence.table.is_empty(), "{id:?} is suspended with blocks");
        }
    }

    fn num_waiting(&self) -> usize {
        self.live_samples - self.running.len()
    }

    /// Ends a sample and gives its blocks back. Its group ends with the last of its samples.
    fn end_sample(&mut self, mut sequence: Sequence) {
        self.cache.release(std::mem::take(&mut sequence.table));
        self.live_samples -= 1;
        let key = sequence.key;
        let group = self.groups.get_mut(&key.group).expect("a live sample has a group");
        group.live_samples -= 1;
        self.tenants.leave(group.tenant, 1);
        if group.live_samples == 0 {
            self.groups.remove(&key.group);
        } else if self.config.speculation != Speculation::OFF {
            group.keep(key.sample_index, sequence.outputs);
        }
    }
}

#[cfg(test)]
mod tests;
