//! An executor without a model, which asserts that its methods are called in the right order.

use std::ops::Range;
use std::sync::mpsc::Receiver;

use super::rig::{BLOCK_SIZE, BLOCKS};
use crate::engine::*;
use crate::executor::{MemoryKind, Released, WeightOrder};
use crate::types::{RequestKey, StepOutput, StepPlan, TokenId, TokenLogprobs};
use crate::weights::{Adapter, ParamSpec, ShadowWeights};

/// An order that the executor received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Did {
    Load,
    Merge,
    Replace,
    /// Shadow weights were made.
    Shadow,
    Discard,
    Exchange,
    Patch,
    Add(u64),
    Remove(u64),
    Release(MemoryKind),
    Restore(MemoryKind),
}

/// An executor whose policy is a number: the count of writes to its weights. Every token that it samples is this
/// number, and so is the negative log-probability of every token that it scores.
pub struct Fake {
    plan: Option<Arc<StepPlan>>,
    pub policy: TokenId,
    /// The policy that wrote each slot of the KV cache; `None` if none has since the cache was restored.
    slots: Vec<Option<TokenId>>,
    merged: Option<Arc<Adapter>>,
    whole: bool,
    awake: Vec<MemoryKind>,
    adapters: Vec<u64>,
    pub did: Vec<Did>,
    /// Bytes of weights that stay at level 1.
    pub kept: u64,
    /// Bytes of host memory that the weights need instead, on a device that can move them there.
    pub moved: u64,
    /// Whether the device lacks memory for the values of weights that wake.
    pub no_room: bool,
    /// Whether the model has no place for the factors of an adapter.
    pub no_place: bool,
    offloaded: u64,
    /// The oldest policy in the context of each sequence of the last step.
    pub oldest_kv: Vec<TokenId>,
    /// Requests whose answers panic in the next step, with the panics' messages.
    pub failing: Vec<(RequestKey, String)>,
    /// The next step ends only when this channel does.
    pub gate: Option<Receiver<()>>,
    /// When an order that reads the checkpoint finds it changed; `None` for never.
    pub damage: Option<Damage>,
}

/// When an order finds the checkpoint changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Before the order is carried out.
    Check,
    /// While the order is carried out.
    Write,
}

impl Fake {
    pub fn new() -> Self {
        Self {
            plan: None,
            policy: 0,
            slots: vec![None; BLOCKS * BLOCK_SIZE],
            merged: None,
            whole: true,
            awake: vec![MemoryKind::KvCache, MemoryKind::Workspace, MemoryKind::Weights],
            adapters: Vec::new(),
            did: Vec::new(),
            kept: 0,
            moved: 0,
            no_room: false,
            no_place: false,
            offloaded: 0,
            oldest_kv: Vec::new(),
            failing: Vec::new(),
            gate: None,
            damage: None,
        }
    }

    fn is_awake(&self, memory: MemoryKind) -> bool {
        self.awake.contains(&memory)
    }

    fn fall_asleep(&mut self, memory: MemoryKind) {
        assert!(self.is_awake(memory), "{memory:?} is released twice");
        self.awake.retain(|&m| m != memory);
    }

    /// Asserts that the merged adapter is the one that the engine names.
    fn check_merged(&self, said: &Arc<Adapter>) {
        assert!(self.merged.as_ref().is_none_or(|merged| Arc::ptr_eq(merged, said)), "another adapter is merged");
    }
}

impl Executor for Fake {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        assert!(self.plan.is_none() && self.awake.len() == 3 && self.whole, "a step without all memory or a policy");
        for copy in &plan.copies {
            let [src, dst] = [copy.src, copy.dst].map(|id| id as usize * BLOCK_SIZE);
            self.slots.copy_within(src..src + copy.tokens, dst);
        }
        self.oldest_kv.clear();
        for sequence in &plan.sequences {
            assert!(
                sequence.weights.adapter().is_none_or(|generation| self.adapters.contains(&generation)),
                "no such adapter"
            );
            let slot = |p: usize| sequence.block_table[p / BLOCK_SIZE] as usize * BLOCK_SIZE + p % BLOCK_SIZE;
            let end = sequence.start + sequence.tokens.len();
            (sequence.start..end).for_each(|p| self.slots[slot(p)] = Some(self.policy));
            let context = (0..end).map(|p| self.slots[slot(p)].expect("the context was computed since the cache woke"));
            self.oldest_kv.extend(context.min());
        }
        self.plan = Some(plan);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        let plan = self.plan.take().expect("collect follows launch");
        self.gate.take().into_iter().for_each(|gate| assert!(gate.recv().is_err(), "nothing is sent"));
        let answer = |target: Option<TokenId>| TokenLogprobs {
            token: target.unwrap_or(self.policy),
            raw: -(self.policy as f32),
            processed: 0.0,
            top: Vec::new(),
            rank: 0,
            returned: None,
        };
        Ok(StepOutput {
            tokens: plan.tasks().map(|task| answer(task.target.or(task.forced))).collect(),
            failed: std::mem::take(&mut self.failing),
            routing: Vec::new(),
        })
    }

    fn check(&mut self, order: &WeightOrder) -> Result<()> {
        assert!(self.plan.is_none(), "{order:?} is checked while a step is under way");
        match self.damage {
            _ if self.no_place && matches!(order, WeightOrder::AddAdapter { .. }) => {
                Err(Error::invalid("lm_head.weight", "no resident adapter can change this parameter"))
            }
            Some(Damage::Check) if !matches!(order, WeightOrder::AddAdapter { .. }) => {
                Err(Error::DataLoss("model.safetensors was cut short".into()))
            }
            _ => Ok(()),
        }
    }

    fn write(&mut self, order: WeightOrder) -> Result<()> {
        assert!(self.plan.is_none(), "{order:?} while a step is under way");
        if self.no_room {
            return Err(Error::ResourceExhausted("a neighbour has the memory".into()));
        }
        let reads = matches!(order, WeightOrder::Load { .. } | WeightOrder::Merge { .. });
        if reads && self.damage == Some(Damage::Write) {
            self.whole = false;
            return Err(Error::DataLoss("model.safetensors has other bytes".into()));
        }
        let is_policy = !matches!(order, WeightOrder::AddAdapter { .. } | WeightOrder::RemoveAdapter { .. });
        assert!(!is_policy || self.is_awake(MemoryKind::Weights), "{order:?} while the weights are asleep");
        self.policy += TokenId::from(is_policy);
        self.did.push(match order {
            WeightOrder::Load { adapter } => {
                (self.merged, self.whole) = (Some(adapter), true);
                Did::Load
            }
            WeightOrder::Merge { before, after } => {
                assert!(self.whole, "a merge into weights that are missing");
                self.check_merged(&before);
                self.merged = Some(after);
                Did::Merge
            }
            WeightOrder::Replace { .. } => {
                (self.merged, self.whole) = (None, true);
                Did::Replace
            }
            WeightOrder::Patch { merged, .. } => {
                assert!(self.whole, "a patch of weights that are missing");
                self.check_merged(&merged);
                self.merged = None;
                Did::Patch
            }
            WeightOrder::AddAdapter { generation, .. } => {
                self.adapters.push(generation);
                Did::Add(generation)
            }
            WeightOrder::RemoveAdapter { generation } => {
                assert!(self.adapters.contains(&generation), "adapter {generation} is removed twice");
                self.adapters.retain(|&g| g != generation);
                Did::Remove(generation)
            }
        });
        Ok(())
    }

    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        self.did.push(Did::Shadow);
        Ok(ShadowWeights::default())
    }

    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights> {
        assert!(
            self.plan.is_none() && self.is_awake(MemoryKind::Weights),
            "an exchange of weights that are in use or asleep"
        );
        self.policy += 1;
        (self.merged, self.whole) = (None, true);
        self.did.push(Did::Exchange);
        Ok(shadow)
    }

    /// Each byte of a row is the row's number xor the policy.
    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        assert!(self.is_awake(MemoryKind::Weights) && self.whole, "weights that are not there are read");
        let row_bytes = spec.shape[1] * 4;
        Ok(rows.flat_map(|row| vec![row as u8 ^ self.policy as u8; row_bytes]).collect())
    }

    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        match memory {
            MemoryKind::WeightsAndBase => {
                self.awake.retain(|&m| m != MemoryKind::Weights);
                (self.merged, self.whole) = (None, false);
            }
            MemoryKind::Weights => {
                self.fall_asleep(memory);
                self.whole = false;
            }
            MemoryKind::KvCache => {
                self.fall_asleep(memory);
                self.slots.fill(None);
            }
            MemoryKind::Workspace => self.fall_asleep(memory),
        }
        self.did.push(Did::Release(memory));
        let fits = self.moved <= host_bytes;
        match memory {
            MemoryKind::Weights | MemoryKind::WeightsAndBase => self.offloaded = if fits { self.moved } else { 0 },
            MemoryKind::KvCache | MemoryKind::Workspace => {}
        }
        let kept = match memory {
            MemoryKind::Weights if fits => self.kept,
            MemoryKind::Weights => self.kept + self.moved,
            _ => 0,
        };
        Ok(Released { freed: 0, kept, offloaded: self.offloaded })
    }

    fn discard(&mut self, _: ShadowWeights) -> Result<u64> {
        self.did.push(Did::Discard);
        Ok(0)
    }

    fn used_bytes(&self) -> u64 {
        1
    }

    fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        assert!(!self.is_awake(memory) && memory != MemoryKind::WeightsAndBase, "{memory:?} is restored twice");
        self.awake.push(memory);
        if memory == MemoryKind::Weights {
            self.offloaded = 0;
        }
        self.did.push(Did::Restore(memory));
        Ok(())
    }
}
