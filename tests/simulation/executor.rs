//! The executor of the simulation: no model and no device, but every rule of [`Executor`] is asserted, and what it
//! samples depends on all that it reads.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollout_server::clock::VirtualClock;
use rollout_server::error::{Error, Result};
use rollout_server::executor::{Executor, MemoryKind, Released, WeightOrder};
use rollout_server::types::{PlanSequence, RequestKey, StepOutput, StepPlan, TokenId, TokenLogprobs};
use rollout_server::weights::{ParamSpec, ShadowWeights};

use super::book::Book;
use super::catalog::{BROKEN, Catalog, ContentId, PARAMETER_BYTES, PARAMETERS};
use super::faults::{Fault, PLANNED_PANIC};
use super::model::{Computer, draw, extend, logprob};
use super::policy::{Policy, fingerprint, row_bytes};

/// KV of one token.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// 0 if nothing was written since the cache was restored.
    value: u64,
    weights: u64,
    /// Generation of the adapter, 0 for none.
    generation: u64,
}

/// A policy that has served.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    pub weights: u64,
    /// Whether it reads no KV of an earlier policy.
    pub is_fresh: bool,
    /// Whether no request was accepted when it came.
    pub is_drained: bool,
}

/// What the executor has, and is told to spoil.
pub struct Device {
    catalog: Arc<Catalog>,
    clock: VirtualClock,
    block_size: usize,
    slots: Vec<Slot>,
    vocabulary: TokenId,
    pub policy: Policy,
    /// What serves; of no policy while `whole` is false.
    values: [u64; PARAMETERS],
    whole: bool,
    awake: [bool; 3],
    /// Generation and content of each resident adapter.
    adapters: Vec<(u64, ContentId)>,
    /// The content that the sender of the open push has written into the shadow weights.
    pub shadow: ContentId,
    /// A merge that has failed, which must be undone next.
    failed_merge: Option<ContentId>,
    /// Whether pushed bases are moved to the host's memory in a sleep; else they are kept.
    pub moves: bool,
    offloaded: u64,
    /// The policies by their numbers.
    pub history: Vec<Served>,
    /// Whether the checkpoint has changed while an order read it.
    pub was_damaged: bool,
    /// What to spoil next.
    pub armed: Option<Fault>,
}

impl Device {
    pub fn new(
        catalog: Arc<Catalog>,
        clock: VirtualClock,
        (blocks, block_size): (usize, usize),
        vocabulary: TokenId,
    ) -> Self {
        Self {
            values: Policy::CHECKPOINT.values(&catalog),
            catalog,
            clock,
            block_size,
            slots: vec![Slot::default(); blocks * block_size],
            vocabulary,
            policy: Policy::CHECKPOINT,
            whole: true,
            awake: [true; 3],
            adapters: Vec::new(),
            shadow: BROKEN,
            failed_merge: None,
            moves: false,
            offloaded: 0,
            history: vec![Served { weights: fingerprint(Policy::CHECKPOINT.base), is_fresh: true, is_drained: true }],
            was_damaged: false,
            armed: None,
        }
    }

    fn awake(&mut self, memory: MemoryKind) -> &mut bool {
        &mut self.awake[match memory {
            MemoryKind::KvCache => 0,
            MemoryKind::Workspace => 1,
            MemoryKind::Weights | MemoryKind::WeightsAndBase => 2,
        }]
    }

    /// Number of parameters whose base is nowhere but here.
    fn replaced(&self) -> u64 {
        self.policy.base.iter().filter(|base| **base != 0).count() as u64
    }

    fn load(&mut self, policy: Policy) {
        self.policy = policy;
        self.values = policy.values(&self.catalog);
        self.whole = true;
        self.history.push(Served { weights: fingerprint(self.values), is_fresh: false, is_drained: false });
    }

    /// Number of the policy, of which tokens tell. It grows with every order that changes weights.
    pub fn number(&self) -> u32 {
        self.history.len() as u32 - 1
    }

    /// All KV that this policy reads is its own: what was computed before is computed again.
    pub fn note_fresh(&mut self) {
        self.history.last_mut().expect("a policy serves").is_fresh = true;
    }

    /// It came when all accepted requests had ended.
    pub fn note_drained(&mut self) {
        self.history.last_mut().expect("a policy serves").is_drained = true;
    }

    pub fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// One number for what serves.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(self.values)
    }

    fn computer(&self, generation: Option<u64>) -> Computer {
        let adapter = generation.map_or(0, |generation| {
            let known = self.adapters.iter().find(|known| known.0 == generation);
            u64::from(known.unwrap_or_else(|| panic!("adapter {generation} is not resident")).1)
        });
        Computer { weights: fingerprint(self.values), adapter }
    }

    /// Runs the tokens of one sequence, and answers its tasks.
    fn run(&mut self, sequence: &PlanSequence, answers: &mut Vec<TokenLogprobs>) {
        let computer = self.computer(sequence.weights.adapter());
        let generation = sequence.weights.adapter().unwrap_or(0);
        let place =
            |p: usize| sequence.block_table[p / self.block_size] as usize * self.block_size + p % self.block_size;
        // Samples that have tokens may keep KV of an earlier policy.
        let mut tasks = sequence.logits.iter().flat_map(|row| &row.tasks);
        let is_first = tasks.any(|task| task.output_index == 0);
        let mut context = 0;
        for position in 0..sequence.start {
            let slot = self.slots[place(position)];
            assert!(slot.value != 0, "position {position} is read and was not computed since the cache woke");
            assert_eq!(slot.generation, generation, "KV of another adapter is read at {position}");
            assert!(!is_first || slot.weights == computer.weights, "a first token is drawn on KV of another policy");
            context = extend(context, slot.value);
        }
        let mut rows = sequence.logits.iter().peekable();
        for (offset, &token) in sequence.tokens.iter().enumerate() {
            let position = sequence.start + offset;
            let value = computer.slot(token, position, context);
            self.slots[place(position)] = Slot { value, weights: computer.weights, generation };
            context = extend(context, value);
            let Some(row) = rows.next_if(|row| row.offset == offset) else { continue };
            let logits = computer.logits(context);
            for task in &row.tasks {
                let drawn = || draw(logits, task.seed, task.output_index, &task.params, self.vocabulary);
                let token = task.target.unwrap_or_else(drawn);
                let (raw, processed) = (logprob(logits, token), generation as f32);
                answers.push(TokenLogprobs {
                    token,
                    raw,
                    processed,
                    top: Vec::new(),
                    rank: self.number(),
                    returned: None,
                });
            }
        }
    }

    fn write(&mut self, order: WeightOrder) {
        let catalog = self.catalog.clone();
        match order {
            WeightOrder::Load { adapter } => {
                let merged = catalog.adapter_id(&adapter);
                self.load(Policy { merged, ..self.policy });
                // A sleep has released the cache, or the loss of the policy has ended the requests.
                self.note_fresh();
            }
            WeightOrder::Merge { before, after } => {
                assert!(self.whole, "a merge into weights that are missing");
                let (before, merged) = (catalog.adapter_id(&before), catalog.adapter_id(&after));
                let expected = self.failed_merge.take().unwrap_or(self.policy.merged);
                assert_eq!(before, expected, "another adapter is merged than the order says");
                self.load(Policy { merged, ..self.policy });
            }
            WeightOrder::Replace { tensors } => {
                let ids = catalog.tensor_ids(&tensors);
                for (base, id) in self.policy.base.iter_mut().zip(ids) {
                    *base = id.map_or(*base, u64::from);
                }
                self.load(Policy { merged: 0, ..self.policy });
            }
            WeightOrder::Patch { delta, merged } => {
                assert!(self.whole, "a patch of weights that are missing");
                assert_eq!(catalog.adapter_id(&merged), self.policy.merged, "another adapter is merged");
                let mut policy = self.policy;
                policy.patch(catalog.delta(&delta), &catalog);
                self.load(policy);
            }
            WeightOrder::AddAdapter { generation, adapter } => {
                self.adapters.push((generation, catalog.adapter_id(&adapter)));
            }
            WeightOrder::RemoveAdapter { generation } => self.remove(generation),
        }
    }

    /// Carries an order out on some ranks, before another has not the memory for it.
    fn write_half(&mut self, order: WeightOrder) {
        match order {
            WeightOrder::Merge { after, .. } => {
                self.failed_merge = Some(self.catalog.adapter_id(&after));
                self.values = [u64::from(BROKEN); PARAMETERS];
            }
            WeightOrder::AddAdapter { generation, .. } => self.adapters.push((generation, BROKEN)),
            WeightOrder::RemoveAdapter { .. } => unreachable!("it takes no memory"),
            WeightOrder::Load { .. } | WeightOrder::Replace { .. } | WeightOrder::Patch { .. } => self.whole = false,
        }
    }

    fn remove(&mut self, generation: u64) {
        let before = self.adapters.len();
        self.adapters.retain(|known| known.0 != generation);
        assert_eq!(self.adapters.len() + 1, before, "adapter {generation} is removed and not resident");
    }

    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Released {
        let is_awake = std::mem::replace(self.awake(memory), false);
        let replaced = self.replaced() * PARAMETER_BYTES;
        let mut kept = 0;
        match memory {
            MemoryKind::KvCache => self.slots.fill(Slot::default()),
            MemoryKind::Workspace => {}
            MemoryKind::Weights => {
                self.whole = false;
                match self.moves && replaced <= host_bytes {
                    true => self.offloaded = replaced,
                    false => kept = replaced,
                }
            }
            MemoryKind::WeightsAndBase => {
                (self.policy, self.whole, self.offloaded) = (Policy::CHECKPOINT, false, 0);
            }
        }
        assert!(self.offloaded <= host_bytes, "{} bytes are offloaded, of {host_bytes}", self.offloaded);
        Released { freed: u64::from(is_awake), kept, offloaded: self.offloaded }
    }
}

/// The executor. Its device is in the run's book, which clients' closures write into as well.
pub struct Simulated {
    book: Arc<Mutex<Book>>,
    plan: Option<Arc<StepPlan>>,
}

impl Simulated {
    pub fn new(book: Arc<Mutex<Book>>) -> Self {
        Self { book, plan: None }
    }

    /// Whether this fault was to happen next. It has happened then.
    fn strikes(&self, fault: Fault) -> bool {
        let book = &mut *self.book.lock().unwrap();
        let strikes = book.device.armed == Some(fault);
        if strikes {
            book.device.armed = None;
            book.faults.count(fault);
        }
        strikes
    }

    fn live(&self) -> Result<()> {
        if self.strikes(Fault::RankDies) { Err(Error::Internal("a rank has died".into())) } else { Ok(()) }
    }

    fn refuse(&self, fault: Fault) -> Result<()> {
        match self.strikes(fault) {
            true => Err(Error::ResourceExhausted("a neighbour has the memory".into())),
            false => Ok(()),
        }
    }
}

impl Executor for Simulated {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        self.live()?;
        let book = &mut *self.book.lock().unwrap();
        assert!(self.plan.is_none() && book.device.awake == [true; 3], "a step without all memory");
        assert!(book.device.whole, "a step without a policy");
        book.note_launch();
        self.plan = Some(plan);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        self.live()?;
        let plan = self.plan.take().expect("collect follows launch");
        let slow = self.strikes(Fault::SlowStep);
        let panics = self.strikes(Fault::RowPanics);
        let book = &mut *self.book.lock().unwrap();
        let device = &mut book.device;
        device.clock.advance(if slow { Duration::from_secs(40) } else { Duration::from_micros(700) });
        for copy in &plan.copies {
            let [src, dst] = [copy.src, copy.dst].map(|id| id as usize * device.block_size);
            device.slots.copy_within(src..src + copy.tokens, dst);
        }
        let mut output = StepOutput::default();
        plan.sequences.iter().for_each(|sequence| device.run(sequence, &mut output.tokens));
        let failing: Option<RequestKey> = plan.tasks().next().filter(|_| panics).map(|task| task.sample.group.request);
        output.failed.extend(failing.map(|request| (request, PLANNED_PANIC.into())));
        Ok(output)
    }

    fn check(&mut self, order: &WeightOrder) -> Result<()> {
        assert!(self.plan.is_none(), "{order:?} is checked while a step is under way");
        self.live()?;
        if !matches!(order, WeightOrder::AddAdapter { .. }) && self.strikes(Fault::DamageFound) {
            return Err(Error::DataLoss("model.safetensors was cut short".into()));
        }
        self.refuse(Fault::CheckRefused)
    }

    fn write(&mut self, order: WeightOrder) -> Result<()> {
        assert!(self.plan.is_none(), "{order:?} while a step is under way");
        self.live()?;
        let is_policy = !matches!(order, WeightOrder::AddAdapter { .. } | WeightOrder::RemoveAdapter { .. });
        let reads = matches!(order, WeightOrder::Load { .. } | WeightOrder::Merge { .. });
        if reads && self.strikes(Fault::DamageMet) {
            let device = &mut self.book.lock().unwrap().device;
            (device.whole, device.was_damaged) = (false, true);
            return Err(Error::DataLoss("model.safetensors has other bytes".into()));
        }
        if !matches!(order, WeightOrder::RemoveAdapter { .. }) {
            let refused = self.refuse(Fault::WriteRefused);
            if refused.is_err() {
                self.book.lock().unwrap().device.write_half(order);
                return refused;
            }
        }
        let book = &mut *self.book.lock().unwrap();
        if let WeightOrder::AddAdapter { generation, adapter } = &order {
            book.note_added(*generation, adapter);
        }
        let device = &mut book.device;
        assert!(!is_policy || *device.awake(MemoryKind::Weights), "{order:?} while the weights are asleep");
        device.write(order);
        Ok(())
    }

    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        self.live()?;
        self.refuse(Fault::ShadowRefused)?;
        Ok(ShadowWeights::default())
    }

    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights> {
        self.live()?;
        let device = &mut self.book.lock().unwrap().device;
        assert!(self.plan.is_none() && *device.awake(MemoryKind::Weights), "an exchange of weights in use or asleep");
        let mut policy = device.policy;
        policy.replace(device.shadow);
        device.load(policy);
        Ok(shadow)
    }

    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        self.live()?;
        let device = &mut self.book.lock().unwrap().device;
        assert!(*device.awake(MemoryKind::Weights) && device.whole, "weights that are not there are read");
        let value = device.values[device.catalog.parameter(&spec.name)];
        Ok(rows.flat_map(|row| row_bytes(value, row)).collect())
    }

    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        self.live()?;
        assert!(self.plan.is_none(), "{memory:?} is released while a step is under way");
        Ok(self.book.lock().unwrap().device.release(memory, host_bytes))
    }

    fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        self.live()?;
        self.refuse(Fault::RestoreRefused)?;
        let device = &mut self.book.lock().unwrap().device;
        assert!(!*device.awake(memory) && memory != MemoryKind::WeightsAndBase, "{memory:?} is restored twice");
        *device.awake(memory) = true;
        if memory == MemoryKind::Weights {
            device.offloaded = 0;
        }
        Ok(())
    }

    fn discard(&mut self, _: ShadowWeights) -> Result<u64> {
        self.live()?;
        Ok(0)
    }

    fn used_bytes(&self) -> u64 {
        1
    }
}
